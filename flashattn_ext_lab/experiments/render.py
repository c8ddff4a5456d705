"""A result on the screen, as JSON, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import picture, require, rich_table, write_text
from .result import Plot, Result

if TYPE_CHECKING:
    from rich.console import Console

MARKED_POINTS = 12  # curves with more points are drawn without markers


def print_result(result: Result, console: Console) -> None:
    """The table, the figures, the notes; empty columns are omitted."""
    text = require("rich.text").Text
    if result.rows:
        console.print(rich_table(f"{result.name}: {result.title}", *shown_table(result)))
    for each in result.comparisons:
        console.print(text(f"found: {each}", style="bold"))
    console.print(text("\n".join(f"note: {note}" for note in result.notes)))
    if result.error:
        console.print(text(f"{result.name} failed: {result.error}", style="red"))
    console.print()


def shown_table(result: Result) -> tuple[list[str], list[list[str]]]:
    """The headings and lines of the table without its empty columns."""
    texts = result.texts()
    shown = [at for at in range(len(result.columns)) if any(line[at] not in ("", "-") for line in texts)]
    return [result.columns[at].heading for at in shown], [[line[at] for at in shown] for line in texts]


def write_json(result: Result, path: Path) -> None:
    write_text(path, json.dumps(result.to_json(), indent=1, allow_nan=False) + "\n")


def write_plot(result: Result, path: Path) -> None:
    """Draws the plot; a result without a plot removes the picture of an earlier run."""
    if result.plot is None or not any(result.plot.series.values()):
        path.unlink(missing_ok=True)
        return
    with picture(path, height=4.5) as axes:
        draw = _draw_timeline if result.plot.kind == "timeline" else _draw_lines
        draw(axes, result.plot)
        title = f"{result.title}\n{result.machine.get('machine', '')}"
        axes.set(xlabel=result.plot.x, ylabel=result.plot.y, title=title)


def _draw_lines(axes: Any, plot: Plot) -> None:
    for label, points in plot.series.items():
        if points:
            marker = "o" if len(points) <= MARKED_POINTS else None
            [curve] = axes.plot(*zip(*points, strict=True), marker=marker, label=label)
            if plot.bands.get(label):
                area = zip(*plot.bands[label], strict=True)
                axes.fill_between(*area, color=curve.get_color(), alpha=0.2, linewidth=0)
    if "y" in plot.log:
        axes.set_yscale("log")
    elif not plot.bands:  # the axis of losses need not start at zero
        axes.set_ylim(bottom=0)
    if "x" in plot.log:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in plot.series.values() for x, _ in points})
        axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _draw_timeline(axes: Any, plot: Plot) -> None:
    """A row for each label, the first on top; an edge between neighbours that touch."""
    for row, points in enumerate(plot.series.values()):
        axes.broken_barh(points, (row - 0.35, 0.7), facecolors=f"C{row}", edgecolor="white", linewidth=1)
    axes.set_yticks(range(len(plot.series)), list(plot.series))
    axes.invert_yaxis()
