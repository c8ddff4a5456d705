"""What the experiment `tiles` says of other tilings of the Ascend C forward without compiling them: what they take of a core's
memories, and which do not fit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")

from flashattn_ext.cli import private_build
from flashattn_ext.cli.bench_ascend import LIBRARY, MEMORIES, load_library, model
from flashattn_ext.cli.bench_ascend import Case as ModelledCase
from flashattn_ext.cli.experiments import ascend, tiles
from flashattn_ext.cli.experiments.context import Context
from flashattn_ext.cli.experiments.result import Result

TOO_LARGE = [(128, 1024), (256, 256), (512, 512)]
SIZES = tiles.Sizes(1, 3, 512, 64, "fp16", (64,))


@pytest.mark.parametrize("D", [16, 64, 129, 256])
def test_memories_hold_what_is_said(D: int) -> None:
    """The emulator counts what the kernel takes."""
    said = ascend.tiling(D)
    counted = model(load_library(LIBRARY), ModelledCase(300, D))
    assert tuple(map(int, counted["core_bytes"].values())) == said.taken and not said.overflows


def test_the_makefile_builds_what_fits() -> None:
    names = re.search(r"^TILINGS := (.*)$", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE)[1]
    default = ascend.tiling(64)
    fitting = [shape for shape in ascend.TILINGS if not ascend.tiling(64, *shape).overflows]
    assert {tuple(map(int, name.split("x"))) for name in names.split()} == {*fitting} - {(default.rows, default.keys)}
    assert [shape for shape in ascend.TILINGS if shape not in fitting] == TOO_LARGE


def measured() -> Result:
    """The rows of the emulator."""
    result = tiles.measure(Context(torch.device("cpu"), quick=True), SIZES)
    return replace(result, rows=[row for row in result.rows if row[0].startswith(tiles.ASCEND)])


def test_rows_of_the_experiment() -> None:
    result = measured()
    default, *others = result.rows
    assert default[0] == "Ascend 128 x 512 (default)" and default[3] == 1 and default[-1] == ""
    assert [row[0] for row in others] == [
        f"Ascend {rows} x {keys}" for rows, keys in ascend.TILINGS if (rows, keys) != (128, 512)
    ]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((128, 1024), "too large for L1 by 229632 bytes"),
        ((256, 256), "too large for L1 by 98560 bytes, L0A by 65536 bytes, L0C by 131072 bytes"),
    ],
)
def test_what_does_not_fit(shape: tuple[int, int], why: str) -> None:
    row = next(row for row in measured().rows if row[0] == f"Ascend {shape[0]} x {shape[1]}")
    assert row[-1] == why and row[3] is None and len(row[-2].split(", ")) == len(MEMORIES)
    assert any(int(share) > 100 for share in row[-2].split(", "))


def test_libraries_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A quick run compiles none, another one says why it could not."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "sources.py").touch()
    monkeypatch.setattr(private_build, "checkout", lambda: tmp_path)
    row = next(row for row in measured().rows if row[0] == "Ascend 128 x 256")
    assert row[-1] == "not compiled: make emulator-tilings" and row[3] is None
    assert row[4] == 3 * 4 * 2 and row[-2]  # tiles and occupancy are known all the same
    assert ascend.why_no_tilings(compiles=True).startswith("make emulator-tilings failed: make")


@pytest.mark.parametrize(("B", "S", "cores"), [(1, 512, 3), (8, 512, 24), (1, 4096, 24), (1, 1, 3)])
def test_every_core_gets_the_same(B: int, S: int, cores: int) -> None:
    assert tiles.even_cores(replace(SIZES, B=B, S=S)) == cores
