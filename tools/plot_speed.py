#!/usr/bin/env python3
"""Draws README's picture, TFLOP/s of this package and its peers, from the tables of the run beside them.

tools/plot_speed.py        reads docs/results/h200_peers.md, writes docs/speed_h200.png
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "results" / "h200_peers.md"
PICTURE = DOCS / "speed_h200.png"
# The columns of each contestant. cuDNN is called in two ways, of which the faster one counts.
COLUMNS = {
    "flashattn_ext": ("ours",),
    "FlashAttention-3": ("FA-3",),
    "FlashAttention-4": ("FA-4",),
    "cuDNN": ("cuDNN", "cuDNN's frontend"),
}
COLORS = {"flashattn_ext": "#d1495b", "FlashAttention-3": "#30638e", "FlashAttention-4": "#edae49", "cuDNN": "#66a182"}
LENGTHS, TOKENS = (512, 1024, 2048, 4096, 8192, 16384), 16384
HEAD_DIMS, OTHER_HEAD_DIMS, PASSES = (64, 128), (80, 96, 160, 256), ("forward", "backward")

OURS_IN_OTHER_RUN = "ours, FA-3's run"  # FlashAttention-3 was measured in a run of its own, with ours in turns

# (head_dim, sequence length, mask, pass) -> contestant -> TFLOP/s in bursts; NaN: it could not be called
Rates = dict[tuple[int, int, str, str], dict[str, float]]


def read_rates(text: str) -> Rates:
    """The rows with as many KV heads as query heads, in bf16 and without an option; the columns before the first `/best` are bursts."""
    return {
        key: {name: max(_number(bursts[column]) for column in columns) for name, columns in COLUMNS.items()}
        for key, bursts in _read_rows(text)
    }


def lowest_of_other_run(text: str, mask: str) -> float:
    """The least quotient of ours in the run of FlashAttention-3 and ours in the run of the others."""
    return min(
        _number(bursts[OURS_IN_OTHER_RUN]) / _number(bursts["ours"]) for key, bursts in _read_rows(text) if mask in key
    )


def _read_rows(text: str) -> Iterator[tuple[tuple[int, int, str, str], dict[str, str]]]:
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("| B x H x S x D "):
            header = cells
        shape = re.fullmatch(r"\d+x\d+x(\d+)x(\d+)", cells[0])
        if "/best" not in header or not shape or cells[1] not in ("causal", "full"):
            continue
        bursts = dict(zip(header[: header.index("/best")], cells, strict=False))
        S, D = map(int, shape.groups())
        yield (D, S, bursts["mask"], bursts["pass"]), bursts


def _number(cell: str) -> float:
    return float(cell.replace("-", "nan"))


def draw(rates: Rates, mask: str, path: Path, remark: str = "no bar: could not be called") -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(15, 7), sharey="row")
    for axes_of_pass, direction in zip(grid, PASSES, strict=True):
        for axes, D in zip(axes_of_pass[:2], HEAD_DIMS, strict=True):
            lengths = {f"{S // 1024}k" if S >= 1024 else str(S): rates[D, S, mask, direction] for S in LENGTHS}
            _draw_bars(axes, lengths)
            axes.set_title(f"{direction}, head dim {D}")
        _draw_bars(axes_of_pass[2], {str(D): rates[D, TOKENS, mask, direction] for D in OTHER_HEAD_DIMS})
        axes_of_pass[2].set_title(f"{direction}, other head dims")
        axes_of_pass[0].set_ylabel("TFLOP/s")
    for axes in grid[-1][:2]:
        axes.set_xlabel(f"sequence length ({TOKENS} tokens in total)")
    grid[-1][2].set_xlabel(f"head dim (one sequence of {TOKENS} tokens)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(COLUMNS), frameon=False)
    figure.suptitle(f"{mask} attention, bf16, one H200, bursts of 5 ms ({remark})", y=0.94, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=80)


def _draw_bars(axes: Any, groups: Mapping[str, Mapping[str, float]]) -> None:
    width = 0.8 / len(COLUMNS)
    for number, name in enumerate(COLUMNS):
        left = (number - (len(COLUMNS) - 1) / 2) * width
        at = [index + left for index in range(len(groups))]
        bars = axes.bar(at, [rates[name] for rates in groups.values()], width, label=name, color=COLORS[name])
        labels = ["" if math.isnan(rates[name]) else f"{rates[name]:.0f}" for rates in groups.values()]
        axes.bar_label(bars, labels, fontsize=6, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    tables = TABLE.read_text(encoding="utf-8")
    lower = 1 - lowest_of_other_run(tables, "causal")
    draw(
        read_rates(tables), "causal", PICTURE,
        remark=f"FlashAttention-3 in a later run, where flashattn_ext had up to {lower:.0%} less than here",
    )  # fmt: skip
    print(PICTURE)
