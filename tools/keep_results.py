#!/usr/bin/env python3
"""Copies the results of `flashattn-ext experiments` to docs/results, with smaller pictures.

tools/keep_results.py RUN_DIRECTORY NAME [NOTE]     writes docs/results/experiments_NAME/{README.md,*.png}

RUN_DIRECTORY contains the output of `flashattn-ext report`. NOTE goes below the title.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from PIL import Image

COLORS = 64


def main(run: str, name: str, note: str = "") -> None:
    target = Path(__file__).parents[1] / "docs" / "results" / f"experiments_{name}"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.png"):
        old.unlink()
    report = (Path(run) / "report.md").read_text(encoding="utf-8")
    title, rest = report.split("\n", 1)
    (target / "README.md").write_text("\n".join([title, *(["", note] if note else []), rest]), encoding="utf-8")
    for picture in re.findall(r"^!\[.*\]\((.*)\)$", report, re.MULTILINE):
        Image.open(Path(run) / picture).convert("RGB").quantize(COLORS).save(target / picture, optimize=True)
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {len(list(target.iterdir()))} files, {size / 1024:.0f} KiB")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
