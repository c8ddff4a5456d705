"""Entry point of the console script: chooses the command and reports expected failures in one line.

A command's module is imported only when that command runs, so that `doctor` runs where `train` cannot.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import flashattn_ext

from .console import CommandError, one_line

COMMANDS = {
    "train": "train a small GPT on text, through the attention of this package",
    "bench": "compare the kernels with PyTorch's own attention",
    "experiments": "repeat the experiments of articles about fused attention on this machine",
    "report": "make one page of the results of experiments",
    "doctor": "report what works here, what is missing, and the command that fixes it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status: 0 done, 1 failed, 2 bad usage, 128 + n stopped by signal n."""
    parser = _Parser(
        prog="flashattn-ext",
        description="Attention kernels for PyTorch: training example, benchmarks, experiments, diagnosis.",
        epilog="\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"flashattn_ext {flashattn_ext.__version__}")
    parser.add_argument("command", choices=COMMANDS, help="followed by its own options; COMMAND --help lists them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    name = given.command
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal or the locale cannot encode: escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _run(name, given.arguments)
        sys.stdout.flush()  # at the end of the process a closed pipe would print a traceback
        return status
    except (CommandError, NotImplementedError) as error:  # NotImplementedError: a feature that a backend lacks
        return _fail(name, error, 2)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 130)
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the exit status of a process killed by SIGPIPE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(name, f"{place}{error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        # PyTorch has an exception type for accelerators; on the CPU only the message identifies it.
        if type(error).__name__ not in ("MemoryError", "OutOfMemoryError") and "allocate memory" not in str(error):
            raise
        return _fail(name, f"not enough memory ({one_line(error)}); smaller sizes need less", 1)


def _run(name: str, arguments: list[str]) -> int:
    if flashattn_ext._import_error and name != "doctor":
        return _fail(name, flashattn_ext._import_error, 1)
    module = importlib.import_module(f".{name}", __package__)
    command = _Parser(prog=f"flashattn-ext {name}", description=module.__doc__, formatter_class=_Formatter)
    module.add_arguments(command)
    return module.run(command.parse_args(arguments))


def _fail(name: str, message: object, status: int) -> int:
    print(f"flashattn-ext {name}: {' '.join(str(message).split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Reports bad usage in one line, before which argparse would print every option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists every option\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the paragraphs of a module's docstring, and shows every option's default."""
