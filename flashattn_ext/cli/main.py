"""Entry point of the console script: chooses the command and turns expected failures into one line.

A command's module is imported only when it is asked for, so that `doctor` still runs where `train`
could not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from .console import CommandError

COMMANDS = {
    "train": "train a small GPT on text, through the attention of this package",
    "bench": "measure the kernels beside PyTorch's own attention",
    "experiments": "repeat the experiments of articles about fused attention on this machine",
    "report": "make one page of the results of experiments",
    "doctor": "say what works here, what is missing, and the command that fixes it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns its exit status: 0 done, 1 failed, 2 bad usage, 128 + n stopped by signal n.
    """
    name, arguments = _parse(argv)
    try:
        module = importlib.import_module(f".{name}", __package__)
        command = argparse.ArgumentParser(
            prog=f"flashattn-ext {name}", description=module.__doc__, formatter_class=_Formatter
        )
        module.add_arguments(command)
        return module.run(command.parse_args(arguments))
    except CommandError as error:
        print(f"flashattn-ext {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"flashattn-ext {name}: interrupted", file=sys.stderr)
        return 130


def take_over_failed_import(error: Exception) -> None:
    """Called when the package cannot be imported because its compiled module cannot be loaded.

    If the command line is what is being started, this runs `doctor`, or prints the error in one
    line for any other command, and exits. Otherwise it returns and the import fails as usual.
    """
    if not _is_command_line():
        return
    name, _ = _parse(None)
    if name == "doctor":
        from .doctor import report

        sys.exit(report(error))
    print(f"flashattn-ext {name}: {error}", file=sys.stderr)
    sys.exit(1)


def _parse(argv: Sequence[str] | None) -> tuple[str, list[str]]:
    """Splits the command from its own arguments."""
    parser = argparse.ArgumentParser(
        prog="flashattn-ext",
        description="Attention kernels for PyTorch: training example, benchmarks, experiments, diagnosis.",
        epilog="\n".join(f"  {name:11} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help="followed by its own options; COMMAND --help lists them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    return chosen.command, chosen.arguments


def _is_command_line() -> bool:
    """Whether this process is the console script or `python -m flashattn_ext`."""
    if sys.argv[0] == "-m":  # the interpreter is still looking for the module to run
        return sys.orig_argv[-len(sys.argv)] == "flashattn_ext"
    return Path(sys.argv[0]).stem == "flashattn-ext"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the paragraphs of a module's docstring, and shows every option's default."""
