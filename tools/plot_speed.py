#!/usr/bin/env python3
"""Draws README's picture, TFLOP/s of this package and its peers over sequence length, from the table of `bench cuda` in docs/results.

tools/plot_speed.py        reads docs/results/h200_cuda.md, writes docs/speed_h200.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
TABLE = DOCS / "results" / "h200_cuda.md"
PICTURE = DOCS / "speed_h200.png"
NAMES = {
    "ours": "flashattn_ext",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "fa2": "PyTorch's flash backend (FlashAttention-2)",
}
COLORS = {"ours": "#d1495b", "fa4": "#edae49", "cudnn": "#66a182", "fa2": "#9aa5b1"}
HEAD_DIMS, PASSES = (64, 128, 256), ("forward", "backward")

# (head_dim, mask, pass) -> sequence length -> contestant -> TFLOP/s
Rates = dict[tuple[int, str, str], dict[int, dict[str, float]]]


def read_rates(text: str) -> Rates:
    """The rows of the set `fa_paper` in the first table, whose cells are milliseconds / TFLOP/s."""
    lines = iter(text.splitlines())
    header = next(_cells(line) for line in lines if line.startswith("| set "))
    rates: Rates = {}
    for line in lines:
        if not line.startswith("| "):
            break
        row = dict(zip(header, _cells(line), strict=True))
        if row["set"] == "fa_paper":
            _, _, S, D = map(int, row["BxHxSxD"].split("x"))
            tflops = {name: float(row[name].split("/")[1]) for name in NAMES if "/" in row[name]}
            rates.setdefault((D, row["mask"], row["pass"]), {})[S] = tflops
    return rates


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


def draw(rates: Rates, mask: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(15, 7), sharey="row")
    for axes_of_pass, direction in zip(grid, PASSES, strict=True):
        for axes, D in zip(axes_of_pass, HEAD_DIMS, strict=True):
            _draw_bars(axes, rates[D, mask, direction])
            axes.set_title(f"{direction}, head dim {D}")
        axes_of_pass[0].set_ylabel("TFLOP/s")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length (16384 tokens in total)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(NAMES), frameon=False)
    figure.suptitle(f"{mask} attention, bf16, one H200", y=0.94, fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=80)


def _draw_bars(axes: Any, by_length: dict[int, dict[str, float]]) -> None:
    width = 0.8 / len(NAMES)
    for number, (name, label) in enumerate(NAMES.items()):
        left = (number - (len(NAMES) - 1) / 2) * width
        at = [index + left for index, rates in enumerate(by_length.values()) if name in rates]
        heights = [rates[name] for rates in by_length.values() if name in rates]
        bars = axes.bar(at, heights, width, label=label, color=COLORS[name])
        axes.bar_label(bars, fmt="%.0f", fontsize=6, rotation=90, padding=2)
    axes.set_xticks(range(len(by_length)), [f"{S // 1024}k" if S >= 1024 else str(S) for S in by_length])
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(read_rates(TABLE.read_text(encoding="utf-8")), "causal", PICTURE)
    print(PICTURE)
