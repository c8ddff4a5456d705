"""A result on the screen, as JSON, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import require
from ..files import atomic_path, write_text
from .findings import finding
from .result import Plot, Result

if TYPE_CHECKING:
    from rich.console import Console

MARKED_POINTS = 12  # curves of more are drawn without markers
DASHES = ("-", "--", ":", "-.")
UPRIGHT_GROUPS = 6  # names of more groups of bars are slanted


def print_result(result: Result, console: Console) -> None:
    """The table, the article's figures, what was found, the notes; an empty column is left out."""
    text = require("rich.text").Text
    if result.rows:
        columns = shown_columns(result)
        table = require("rich.table").Table(title=text(f"{result.name}: {result.title}"))
        for index in columns:
            justify = "right" if is_numeric(result, index) else "left"
            table.add_column(text(result.columns[index].heading), justify=justify)
        for line in result.texts():
            table.add_row(*(text(line[index]) for index in columns))
        console.print(table)
    if result.pictures:
        console.print(require("rich.columns").Columns(_panel(*item) for item in result.pictures.items()))
    for comparison in result.comparisons:
        console.print(text(f"{comparison.what}: article {comparison.article}; here {comparison.ours}"))
    console.print(text(f"found: {finding(result)}", style="bold"))
    for note in result.notes:
        console.print(text(f"note: {note}"))
    if result.error:
        console.print(text(f"{result.name} failed: {result.error}", style="red"))
    console.print()


def _panel(name: str, picture: str) -> Any:
    return require("rich.panel").Panel.fit(require("rich.text").Text(picture), title=require("rich.text").Text(name))


def is_numeric(result: Result, index: int) -> bool:
    return any(isinstance(row[index], (int, float)) for row in result.rows)


def shown_columns(result: Result) -> list[int]:
    """The columns with something in them."""
    texts = result.texts()
    return [index for index in range(len(result.columns)) if any(line[index] not in ("", "-") for line in texts)]


def write_json(result: Result, path: Path) -> None:
    write_text(path, json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")


def write_plot(result: Result, path: Path) -> None:
    """Draws the plot; without one, takes away that of an earlier run."""
    if result.plot is None or not any(result.plot.series.values()):
        path.unlink(missing_ok=True)
        return
    require("matplotlib").use("Agg")
    pyplot = require("matplotlib.pyplot")
    pictures = list(result.pictures.items())
    figure = pyplot.figure(figsize=(8, 6.5 if pictures else 4.5))
    grid = figure.add_gridspec(2, max(len(pictures), 1), height_ratios=(1, 3) if pictures else (0, 1))
    axes = figure.add_subplot(grid[1, :])
    for column, picture in enumerate(pictures):
        _draw_picture(figure.add_subplot(grid[0, column]), *picture)
    {"line": _draw_lines, "bar": _draw_bars, "timeline": _draw_timeline}[result.plot.kind](axes, result.plot)
    device = result.machine.get("device", "")
    axes.set(xlabel=result.plot.x, ylabel=result.plot.y)
    title = f"{result.title}\n{device}"
    figure.suptitle(title) if pictures else axes.set_title(title)
    axes.grid(alpha=0.3)
    if result.plot.kind != "timeline":
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _draw_picture(axes: Any, name: str, picture: str) -> None:
    """A cell that is visible in part is as light as the share that Mask.show() cannot tell: one half."""
    cells = [[{"#": 1.0, "+": 0.5}.get(cell, 0.0) for cell in line] for line in picture.splitlines()]
    axes.imshow(cells, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(name, fontsize=8)


def _draw_lines(axes: Any, plot: Plot) -> None:
    styles = _line_styles(plot)
    for label, points in plot.series.items():
        if points:
            marker = "o" if len(points) <= MARKED_POINTS else None
            [curve] = axes.plot(*zip(*points, strict=True), marker=marker, label=label, **styles.get(label, {}))
            if plot.bands.get(label):
                axes.fill_between(
                    *zip(*plot.bands[label], strict=True), color=curve.get_color(), alpha=0.2, linewidth=0
                )
    if "y" in plot.log:
        axes.set_yscale("log")
    elif not plot.bands:  # losses have no use for a zero
        axes.set_ylim(bottom=0)
    if "x" in plot.log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in plot.series.values() for x, _ in points})
        axes.set_xticks(ticks, [str(x) for x in ticks])


def _line_styles(plot: Plot) -> dict[str, dict[str, str]]:
    """Curves labelled "who, what": each who has a colour, each what a way to dash. Other curves have a colour each."""
    parts = {label: label.split(", ") for label in plot.series}
    if plot.bands or any(len(part) != 2 for part in parts.values()):
        return {}
    who, what = (list(dict.fromkeys(part[index] for part in parts.values())) for index in (0, 1))
    return {
        label: {"color": f"C{who.index(a)}", "linestyle": DASHES[what.index(b) % len(DASHES)]}
        for label, (a, b) in parts.items()
    }


def _draw_bars(axes: Any, plot: Plot) -> None:
    """Groups in the order in which they first appear."""
    groups = list(dict.fromkeys(x for points in plot.series.values() for x, _ in points))
    width = 0.8 / len(plot.series)
    for number, (label, points) in enumerate(plot.series.items()):
        offset = (number - (len(plot.series) - 1) / 2) * width
        axes.bar([groups.index(x) + offset for x, _ in points], [y for _, y in points], width, label=label)
    slanted = {"rotation": 30, "ha": "right"} if len(groups) > UPRIGHT_GROUPS else {}
    axes.set_xticks(range(len(groups)), groups, **slanted)


def _draw_timeline(axes: Any, plot: Plot) -> None:
    """A row for each label, the first on top; an edge between neighbours that touch."""
    for row, points in enumerate(plot.series.values()):
        axes.broken_barh(points, (row - 0.35, 0.7), facecolors=f"C{row}", edgecolor="white", linewidth=1)
    axes.set_yticks(range(len(plot.series)), list(plot.series))
    axes.invert_yaxis()
