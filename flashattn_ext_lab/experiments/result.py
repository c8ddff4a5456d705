"""The result of an experiment: a table, notes, the article's figures and ours, and a plot, as plain data that survives JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Cell = str | int | float | None
FORMAT = "flashattn_ext experiment 1"


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


@dataclass(frozen=True)
class Comparison:
    """An article's figure, and the one measured here."""

    what: str
    article: str
    ours: str


@dataclass(frozen=True)
class Plot:
    """Curves over numbers ("line"), groups of bars over words ("bar"): label -> [(x, y), ...]; or a timeline ("timeline"):
    label -> [(start, duration), ...].

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

    `found` is one sentence about the table. In the methods, `where`
    selects rows by the values of columns; an underscore at the end of a name is not part of it (`pass_`).
    """

    name: str
    title: str
    columns: list[Column] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    plot: Plot | None = None
    found: str = ""
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

    def compare(self, what: str, article: str, ours: str) -> None:
        self.comparisons.append(Comparison(what, article, ours))

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """The inverse of to_json(). Raises ValueError, TypeError, KeyError or AttributeError for other data."""
        fields = dict(data)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}")
        fields.pop("pictures", None)  # of earlier versions
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
        texts = [self.name, self.title, self.command, self.error, self.found, *self.notes]
        texts += [text for pair in self.machine.items() for text in pair]
        texts += [text for part in (*self.columns, *self.comparisons) for text in asdict(part).values()]
        cells = [cell for row in self.rows for cell in row]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(cell, Cell) for cell in cells):
            raise TypeError("expected texts, and cells that are texts or numbers")
