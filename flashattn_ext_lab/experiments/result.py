"""The result of an experiment: a table, notes, our figures and the article's, and a plot, as plain data that survives JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

Cell = str | int | float | None
FORMAT = "flashattn_ext experiment 1"
PASSES = FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True)
class Column:
    """A column's name, the unit of its numbers, and how they are printed."""

    name: str
    unit: str = ""
    form: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name

    def text(self, cell: Cell) -> str:
        if cell is None:
            return "-"
        return format(cell, self.form) if isinstance(cell, float) else str(cell)


def cell(name: str, value: Cell = None, unit: str = "", form: str = "", scale: float = 1) -> tuple[Column, Cell]:
    """A cell and its column; `scale` multiplies a number."""
    return Column(name, unit, form), value if value is None or isinstance(value, str) or scale == 1 else value * scale


def labels(**values: Cell) -> list[tuple[Column, Cell]]:
    """Cells that say what a row is about; an underscore at the end of a name is not part of it (`pass_`)."""
    return [cell(name.removesuffix("_"), value) for name, value in values.items()]


@dataclass(frozen=True)
class Comparison:
    """A figure measured here, with its spread where it has one, and an article's, or ""."""

    what: str
    article: str
    ours: str

    def __str__(self) -> str:
        return f"{self.what}: {self.ours}" + (f" (article: {self.article})" if self.article else "")


@dataclass(frozen=True)
class Plot:
    """Curves ("line"): label -> [(x, y), ...]; or a timeline ("timeline"): label -> [(start, duration), ...].

    `bands` are areas around curves of the same label: [(x, low, high), ...].
    """

    kind: str
    x: str
    y: str
    series: dict[str, list[tuple[Any, float]]]
    log: str = ""  # the axes with a logarithmic scale: "", "x", "y" or "xy"
    bands: dict[str, list[tuple[Any, float, float]]] = field(default_factory=dict)


@dataclass
class Result:
    """One experiment; `error` says why it has no table, or not all of it.

    In the methods, `where` selects rows by the values of columns; an underscore at the end of a name is not part of it (`pass_`).
    """

    name: str
    title: str
    columns: list[Column] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    plot: Plot | None = None
    machine: dict[str, str] = field(default_factory=dict)
    command: str = ""
    error: str = ""

    def add(self, *cells: tuple[Column, Cell]) -> None:
        """Appends a row; the first one makes the columns."""
        columns = [column for column, _ in cells]
        self.columns = self.columns or columns
        if columns != self.columns:
            raise ValueError(f"a row of {self.name} has other columns: {columns}")
        self.rows.append([value for _, value in cells])

    def texts(self) -> list[list[str]]:
        """The rows as they are printed."""
        return [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def column(self, name: str, **where: Cell) -> list[Cell]:
        """The cells of a column; none before the first row."""
        if not self.columns:
            return []
        at = [column.name for column in self.columns].index
        chosen = {at(key.removesuffix("_")): value for key, value in where.items()}
        return [row[at(name)] for row in self.rows if all(row[index] == value for index, value in chosen.items())]

    def value(self, column: str, **where: Cell) -> Cell:
        """The cell of the first row that `where` selects; None without such a row."""
        return next(iter(self.column(column, **where)), None)

    def points(self, x: str, y: str, **where: Cell) -> list[tuple[Any, float]]:
        """(x, y) of the rows that `where` selects and that have a number as y."""
        pairs = zip(self.column(x, **where), self.column(y, **where), strict=True)
        return [(at, value) for at, value in pairs if isinstance(value, (int, float))]

    def compare(self, what: str, ours: str, article: str = "") -> None:
        self.comparisons.append(Comparison(what, article, ours))

    @property
    def found(self) -> str:
        """One sentence: the figures of the table."""
        return f"It failed: {self.error}." if self.error else "; ".join(map(str, self.comparisons)) + "."

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """The inverse of to_json(). Raises ValueError, TypeError, KeyError or AttributeError for other data."""
        fields = dict(data)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}")
        fields["columns"] = [Column(**column) for column in fields["columns"]]
        fields["comparisons"] = [Comparison(**comparison) for comparison in fields["comparisons"]]
        if plot := fields["plot"]:
            for name in ("series", "bands"):
                plot = {**plot, name: {of: [tuple(point) for point in curve] for of, curve in plot[name].items()}}
            fields["plot"] = Plot(**plot)
        result = cls(**fields)
        result._check()
        return result

    def _check(self) -> None:
        """Raises where the fields do not have the types that the class declares: anything may have written the file."""
        self.texts()
        texts = [self.name, self.title, self.command, self.error, *self.notes]
        texts += [text for pair in self.machine.items() for text in pair]
        texts += [text for part in (*self.columns, *self.comparisons) for text in asdict(part).values()]
        cells = [cell for row in self.rows for cell in row]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(cell, Cell) for cell in cells):
            raise TypeError("expected texts, and cells that are texts or numbers")


# The figures that are compared: each with its spread; differences within the spread are called so.

NOT_MEASURED = "not measured here"


@dataclass(frozen=True)
class Figure:
    """A measured value, and half the distance between the smallest and the largest of its calls or seeds."""

    value: float
    half: float


def measured(result: Result, column: str, time: str = "", **where: Cell) -> Figure | None:
    """A cell of a column that has a spread, or of rates that come from the column `time`; None where it is empty."""
    value, percent = result.value(column, **where), result.value(f"{time or column} spread", **where)
    if not isinstance(value, (int, float)) or not isinstance(percent, (int, float)):
        return None
    return Figure(value, value * percent / 200)


def quotient(one: Figure | None, other: Figure | None) -> str:
    """`one` divided by `other`: "2.73x ± 4 %", or "within the spread (± 4 %)"."""
    if one is None or other is None:
        return NOT_MEASURED
    ratio, relative = one.value / other.value, one.half / one.value + other.half / other.value
    spread = f"± {math.ceil(100 * relative)} %"
    differs = 1 - min(ratio, 1 / ratio) > relative  # in either direction
    return f"{ratio:.3g}x {spread}" if differs else f"within the spread ({spread})"


def difference(one: Figure | None, other: Figure | None, form: str) -> str:
    """`one` minus `other`: "-0.031 ± 0.012", or "within the spread (± 0.012)"."""
    if one is None or other is None:
        return NOT_MEASURED
    by, half = one.value - other.value, one.half + other.half
    spread = f"± {half:{form}}"
    return f"{by:+{form}} {spread}" if abs(by) > half else f"within the spread ({spread})"


def alone(figure: Figure | None, unit: str) -> str:
    """A figure without a comparison; only its spread where that is as large as the figure."""
    if figure is None:
        return NOT_MEASURED
    spread = f"± {math.ceil(100 * figure.half / figure.value)} %"
    return f"{float(f'{figure.value:.3g}'):g} {unit} {spread}" if figure.half < figure.value else f"unknown ({spread})"


def of_passes(text: Callable[[str], str]) -> str:
    """What `text` says of each pass."""
    texts = {direction: text(direction) for direction in PASSES}
    if set(texts.values()) == {NOT_MEASURED}:
        return NOT_MEASURED
    return ", ".join(f"{of} {direction}" for direction, of in texts.items())


def column_quotient(result: Result, one: str, other: str, **where: Cell) -> str:
    """The quotient of two columns of times; without a pass in `where`, of each pass."""
    if "pass_" not in where:
        return of_passes(lambda direction: column_quotient(result, one, other, pass_=direction, **where))
    return quotient(*(measured(result, column, **where) for column in (one, other)))


def number(value: Cell, form: str, unit: str = "") -> str:
    """A figure that has no spread."""
    return format(value, form) + unit if isinstance(value, (int, float)) else NOT_MEASURED
