"""What every command shares: the error that ends it in one line, and the optional packages it shows
things with.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Container, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 140
INSTALL_EXTRAS = 'pip install "flashattn_ext[cli]" (in a checkout: pip install ".[cli]")'


class CommandError(Exception):
    """A problem that the user can fix.

    The command line prints the text alone, without a traceback, and exits with 2.
    """


def require(module: str) -> ModuleType:
    """Imports a module of the optional group `cli`, or says how to install the group."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CommandError(f"this command needs the package {package} ({error}); {INSTALL_EXTRAS}") from None


def make_console(width: int = PIPE_WIDTH) -> Console:
    """A rich console.

    Piped output has no terminal to fit, so its tables get the `width` that they need.
    """
    console = require("rich.console").Console()
    if not console.is_terminal:
        console.width = width
    return console


def markdown_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = (header, ["---"] * len(header), *lines)
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in table), ""])


def print_table(
    title: str,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    left: Container[int],
    marked: Sequence[bool] | None = None,
    width: int = PIPE_WIDTH,
) -> None:
    """Columns in `left` are flush left, and `marked` lines stand out; `width`: where no terminal has one."""
    table = require("rich.table").Table(title=title)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column in left else "right")
    for line, is_marked in zip(lines, marked or [False] * len(lines), strict=True):
        table.add_row(*line, style="yellow" if is_marked else None)
    make_console(width).print(table)


def make_directory(name: str) -> Path:
    """The directory of `--out name`, made if need be, into which files can be written."""
    directory = Path(name)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CommandError(f"--out {name}: cannot write there ({error.strerror}); choose another directory") from None
    return directory


def positive(text: str) -> int:
    """The type of an option that takes a whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted are whole numbers from 1")
    return value
