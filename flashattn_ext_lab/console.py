"""Common parts of all commands: the error that ends a command in one line, tables and progress bars, types of options, files."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Case = TypeVar("Case")
Columns = dict[str, Callable[[Any], object]]  # heading -> the cell of a row
PIPE_WIDTH = 140
# The packages of the extra `cli` of pyproject.toml. Their names, because no index has this package.
INSTALL_EXTRAS = 'pip install rich matplotlib jinja2 numpy (in a checkout: pip install ".[cli]")'


class CommandError(Exception):
    """A problem that the user can fix. The command line prints only the text, without a traceback, and exits with 2."""


def one_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def require(module: str) -> ModuleType:
    """Imports a module of the optional group `cli`, or says how to install the group."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CommandError(f"this command needs the package {package} ({error}); {INSTALL_EXTRAS}") from None


def make_console(width: int = PIPE_WIDTH) -> Console:
    """A rich console. Piped output has no terminal to fit, so its tables get the `width` that they need."""
    console = require("rich.console").Console()
    if not console.is_terminal:
        console.width = width
    return console


def markdown_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = (header, ["---"] * len(header), *lines)
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in table), ""])


def are_numbers(column: Iterable[str]) -> bool:
    return all(cell[:1] in "+-0123456789" for cell in column)


def rich_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], marked: Iterable[bool] = ()) -> Table:
    """Columns of numbers are flush right; `marked` lines stand out."""
    text = require("rich.text").Text
    table = require("rich.table").Table(title=text(title))
    for index, name in enumerate(header):
        table.add_column(text(name), justify="right" if are_numbers(line[index] for line in lines) else "left")
    for line, is_marked in itertools.zip_longest(lines, marked, fillvalue=False):
        table.add_row(*map(text, line), style="yellow" if is_marked else None)
    return table


def print_rows(
    title: str,
    columns: Columns,
    rows: Sequence[Any],
    *,
    markdown: bool,
    marked: Iterable[bool] = (),
    width: int = PIPE_WIDTH,
) -> None:
    """A table of results: each column has a heading and a function of a row. `width` is that of output that is piped."""
    header, lines = list(columns), [[str(cell(row)) for cell in columns.values()] for row in rows]
    if markdown:
        print(markdown_table(title, header, lines))
    else:
        make_console(width).print(rich_table(title, header, lines, marked))


def text_of(value: float | None, form: str, unit: str = "") -> str:
    """A cell; "-" for what was not measured."""
    return "-" if value is None else format(value, form) + unit


def fields(names: dict[str, str], form: str = "", unit: str = "") -> Columns:
    """Columns of fields of the rows: heading -> name of the field."""
    return {heading: lambda row, name=name: text_of(row[name], form, unit) for heading, name in names.items()}


def parts(field: str, names: Iterable[str], form: str, unit: str = "", scale: float = 1) -> Columns:
    """A column for each of several values of a field, which is a dictionary."""

    def text(row: Any, name: str) -> str:
        value = row[field].get(name)
        return text_of(value if value is None else value * scale, form, unit)

    return {name: lambda row, name=name: text(row, name) for name in names}


def track(cases: Sequence[Case]) -> Iterable[Case]:
    """A progress bar around the cases of a benchmark."""
    return require("rich.progress").track(cases, "measuring", console=make_console(), transient=True)


def chosen(option: str, names: Iterable[str], accepted: Collection[str]) -> list[str]:
    """The accepted names that an option gives, in the order of `accepted`."""
    given = [name.strip() for name in names if name.strip()]
    for name in given:
        if name not in accepted:
            raise CommandError(f"{option} got {name!r}; accepted are {', '.join(accepted)}")
    return [name for name in accepted if name in given]


def _number(kind: Callable[[str], Any], holds: Callable[[Any], bool], accepted: str) -> Callable[[str], Any]:
    """The type of an option that takes these numbers."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}; accepted are {accepted}")

    return convert


positive = _number(int, lambda n: 0 < n < 2**31, "whole numbers from 1 to 2**31 - 1")  # C++ keeps sizes as int
seed = _number(int, lambda n: 0 <= n < 2**64, "whole numbers from 0 to 2**64 - 1")  # the seeds of PyTorch's generators
fraction = _number(float, lambda x: 0 <= x < 1, "numbers from 0 up to, not including, 1")
above_zero = _number(float, lambda x: 0 < x < math.inf, "positive numbers")
zero_or_more = _number(float, lambda x: 0 <= x < math.inf, "numbers from 0 on")


# Files are replaced atomically, and text is UTF-8 in every locale


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` and moves it there when the block succeeds.

    A reader of `path` sees the old file or the new one, even if the process is killed in between. An OSError from the block names
    `path` where it names no file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def picture(path: Path, height: float) -> Iterator[Any]:
    """Axes of matplotlib, 8 inches wide, that become the picture `path`."""
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, height))
    axes.grid(alpha=0.3)
    yield axes
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def write_text(path: Path, text: str) -> None:
    """Replaces the file at once. A character that UTF-8 cannot encode (for example a lone surrogate of a file name) is written as an escape."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode(errors="backslashreplace"))


def make_directory(name: str) -> Path:
    """The directory of `--out name`, created if necessary, in which files can be written."""
    with writing(f"--out {name}", "; choose another directory"):
        Path(name).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=name).close()
    return Path(name)


def writable_file(option: str, name: str) -> Path:
    """The path of `option name`, where a file can be written: checked before the work whose result goes there."""
    with writing(f"{option} {name}"):
        if Path(name).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=Path(name).parent).close()
    return Path(name)


@contextlib.contextmanager
def writing(place: str, fix: str = "") -> Iterator[None]:
    """Says where a file could not be written."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{place}: cannot write there ({error.strerror}){fix}") from None
