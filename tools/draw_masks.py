#!/usr/bin/env python3
"""Draws the pictures of docs/masks.md: the visible scores of the Mask of each code block.

tools/draw_masks.py        runs the blocks of docs/masks.md, makes docs/masks/*.svg

A block that binds `mask` is followed by its picture. If the block's call is causal, cells that the Mask shows but the causal mask hides are light.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DOCS = Path(__file__).resolve().parents[1] / "docs"
sys.path.insert(0, str(DOCS.parent))  # this checkout, not an installed package
PAGE = DOCS / "masks.md"
SECTION = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n!\[[^\]]*\]\((?P<picture>[^)]+)\))?", re.S)

CELL = 12  # pixels
VISIBLE, CAUSALLY_HIDDEN, HIDDEN = "#1f7a8c", "#bfdbe1", "#eeeeee"


def rectangles(cells: Tensor) -> str:
    """SVG path of the cells [rows, columns] that are True: one rectangle for each run in a row."""
    path = ""
    for row, line in enumerate(cells.tolist()):
        for run in re.finditer("1+", "".join("1" if cell else "0" for cell in line)):
            width = run.end() - run.start()
            path += f"M{run.start()} {row}h{width}v1h-{width}z"
    return path


def svg(visible: Tensor, causal: bool) -> str:
    """A picture of bool [Sq, Sk], with a thin white grid."""
    rows, columns = visible.shape
    above = torch.arange(columns) > torch.arange(rows)[:, None] + columns - rows
    light = visible & above if causal else torch.zeros_like(visible)
    grid = "".join(f"M0 {row}h{columns}" for row in range(1, rows)) + "".join(
        f"M{c} 0v{rows}" for c in range(1, columns)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{CELL * columns}" height="{CELL * rows}" viewBox="0 0 {columns} {rows}">',
            f'<path fill="{HIDDEN}" d="M0 0h{columns}v{rows}h-{columns}z"/>',
            f'<path fill="{CAUSALLY_HIDDEN}" d="{rectangles(light)}"/>',
            f'<path fill="{VISIBLE}" d="{rectangles(visible & ~light)}"/>',
            f'<path stroke="#ffffff" stroke-width="0.08" d="{grid}"/>',
            "</svg>\n",
        ]
    )


def pictures() -> dict[str, str]:
    """The SVG of each picture, by its path in docs/."""
    names: dict[str, Any] = {}
    drawn = {}
    for section in SECTION.finditer(PAGE.read_text(encoding="utf-8")):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(section["code"], names)
        if section["picture"]:
            drawn[section["picture"]] = svg(
                names["mask"].dense(names["q"].shape[1])[0, 0], "causal=True" in section["code"].split("forward")[1]
            )
    return drawn


def main() -> None:
    for path, text in pictures().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
        print(DOCS / path)


if __name__ == "__main__":
    main()
