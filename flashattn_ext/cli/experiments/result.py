"""What every experiment yields: a table, notes, the article's figures beside ours, and a plot, as plain
data that survives JSON.
"""

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


@dataclass(frozen=True)
class Comparison:
    """What an article says, and what was measured here."""

    what: str
    article: str
    ours: str


@dataclass(frozen=True)
class Plot:
    """Curves over numbers ("line"), groups of bars over words ("bar"): label -> [(x, y), ...]; or what runs
    when ("timeline"): label -> [(start, duration), ...].

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

    `pictures` are masks as Mask.show() prints them, by name.
    """

    name: str
    title: str
    columns: list[Column] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    plot: Plot | None = None
    pictures: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    command: str = ""
    error: str = ""

    def texts(self) -> list[list[str]]:
        """The rows as they are printed."""
        return [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]

    def column(self, name: str) -> list[Cell]:
        index = [column.name for column in self.columns].index(name)
        return [row[index] for row in self.rows]

    def value(self, column: str, **where: Cell) -> Cell:
        """The cell of the first row whose columns have the values of `where`; None without such a row."""
        for number, cell in enumerate(self.column(column)):
            if all(self.column(name)[number] == value for name, value in where.items()):
                return cell
        return None

    def points(self, x: str, y: str, **where: Cell) -> list[tuple[Any, float]]:
        """(x, y) of the rows that have a number there and the values of `where`."""
        chosen = [
            all(self.column(name)[number] == value for name, value in where.items()) for number in range(len(self.rows))
        ]
        pairs = zip(chosen, self.column(x), self.column(y), strict=True)
        return [(at, value) for wanted, at, value in pairs if wanted and isinstance(value, (int, float))]

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
        if fields["plot"]:
            plot = fields["plot"]
            points = {
                name: {label: [tuple(point) for point in curve] for label, curve in plot[name].items()}
                for name in ("series", "bands")
            }
            fields["plot"] = Plot(**{**plot, **points})
        result = cls(**fields)
        result._check()
        return result

    def _check(self) -> None:
        """Raises where the fields are not what their types say: a report takes files that anyone may have written."""
        self.texts()
        texts = [self.name, self.title, self.command, self.error, *self.notes, *self.machine, *self.machine.values()]
        texts += [*self.pictures, *self.pictures.values()]
        texts += [text for column in self.columns for text in asdict(column).values()]
        texts += [text for comparison in self.comparisons for text in asdict(comparison).values()]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("expected texts")
        if not all(isinstance(cell, Cell) for row in self.rows for cell in row):
            raise TypeError("expected cells that are texts or numbers")
