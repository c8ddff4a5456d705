#!/usr/bin/env python3
"""Draws the pictures of docs/masks.md and docs/block_masks.md: the visible scores of the mask of each code block.

tools/draw_masks.py        runs the blocks of both pages, makes docs/masks/*.svg and docs/block_masks/*.svg

A block that binds `mask` is followed by its picture. If the block's call is causal, cells that a Mask shows but the causal mask hides are light.
A cell of a BlockMask is a block; cells that the mask and the call show in part are light.
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

from flashattn_ext import Mask  # noqa: E402

PAGES = ("masks.md", "block_masks.md")
BLOCK = 128
SECTION = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n!\[[^\]]*\]\((?P<picture>[^)]+)\))?", re.S)

CELL = 12  # pixels
VISIBLE, PARTLY, HIDDEN = "#1f7a8c", "#bfdbe1", "#eeeeee"


def rectangles(cells: Tensor) -> str:
    """SVG path of the cells [rows, columns] that are True: one rectangle for each run in a row."""
    path = ""
    for row, line in enumerate(cells.tolist()):
        for run in re.finditer("1+", "".join("1" if cell else "0" for cell in line)):
            width = run.end() - run.start()
            path += f"M{run.start()} {row}h{width}v1h-{width}z"
    return path


def cells_of(mask: Any, Sq: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The dark and the light cells of a picture, bool [rows, columns] each."""
    visible = mask.dense(Sq)[0, 0] if isinstance(mask, Mask) else mask.dense()[0, 0]
    rows, columns = visible.shape
    shown = visible & (torch.arange(columns) <= torch.arange(rows)[:, None] + columns - rows) if causal else visible
    if isinstance(mask, Mask):
        return shown, visible & ~shown
    blocks = shown.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)
    return blocks.all(2), blocks.any(2) & ~blocks.all(2)


def svg(dark: Tensor, light: Tensor) -> str:
    """A picture of these cells, with a thin white grid."""
    rows, columns = dark.shape
    grid = "".join(f"M0 {row}h{columns}" for row in range(1, rows)) + "".join(
        f"M{c} 0v{rows}" for c in range(1, columns)
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{CELL * columns}" height="{CELL * rows}" viewBox="0 0 {columns} {rows}">',
            f'<path fill="{HIDDEN}" d="M0 0h{columns}v{rows}h-{columns}z"/>',
            f'<path fill="{PARTLY}" d="{rectangles(light)}"/>',
            f'<path fill="{VISIBLE}" d="{rectangles(dark)}"/>',
            f'<path stroke="#ffffff" stroke-width="0.08" d="{grid}"/>',
            "</svg>\n",
        ]
    )


def pictures() -> dict[str, str]:
    """The SVG of each picture, by its path in docs/."""
    drawn = {}
    for page in PAGES:
        names: dict[str, Any] = {}
        for section in SECTION.finditer((DOCS / page).read_text(encoding="utf-8")):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(section["code"], names)
            if section["picture"]:
                causal = "causal=True" in section["code"].split("forward")[1]
                drawn[section["picture"]] = svg(*cells_of(names["mask"], names["q"].shape[1], causal))
    return drawn


def main() -> None:
    for path, text in pictures().items():
        (DOCS / path).parent.mkdir(exist_ok=True)
        (DOCS / path).write_text(text, encoding="utf-8")
        print(DOCS / path)


if __name__ == "__main__":
    main()
