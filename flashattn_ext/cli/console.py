"""What every command shares: the error that ends it in one line, and the optional packages it shows
things with.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Container, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 140
LARGEST = 2**31 - 1  # of sizes and counts, which C++ keeps as int
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


def positive(text: str) -> int:
    """The type of an option that takes a whole number from 1."""
    return _whole_number(text, 1, LARGEST, "whole numbers from 1 to 2**31 - 1")


def seed(text: str) -> int:
    """The type of an option that seeds PyTorch's generators."""
    return _whole_number(text, 0, 2**64 - 1, "whole numbers from 0 to 2**64 - 1")


def _whole_number(text: str, least: int, most: int, accepted: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted are {accepted}")
    return value
