"""README's picture of the speed is drawn from the table that docs/results has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_speed", ROOT / "tools" / "plot_speed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rates_are_those_of_the_table(tool: ModuleType) -> None:
    header = "| set | BxHxSxD | dtype | mask | pass | ours | fa2 | cudnn | fa4 |\n|" + " --- |" * 9 + "\n"
    rows = (
        "| fa_paper | 4x16x4096x128 | bf16 | causal | forward | 0.417 / 659.1 | 0.902 / 304.8 | - | 0.425 / 646.4 |\n"
    )
    others = "| gqa | 2x32:8x8192x128 | bf16 | causal | forward | 1 / 2 | 3 / 4 | 5 / 6 | 7 / 8 |\n\n| set | another table |\n"
    rates = tool.read_rates("# Title\n\n" + header + rows + others)
    assert rates == {(128, "causal", "forward"): {4096: {"ours": 659.1, "fa4": 646.4, "fa2": 304.8}}}


def test_every_bar_of_the_picture_has_a_row(tool: ModuleType, tmp_path: Path) -> None:
    rates = tool.read_rates(tool.TABLE.read_text(encoding="utf-8"))
    for D in tool.HEAD_DIMS:
        for direction in tool.PASSES:
            by_length = rates[D, "causal", direction]
            assert list(by_length) == [512, 1024, 2048, 4096, 8192, 16384]
            assert all(of_length.keys() == tool.NAMES.keys() for of_length in by_length.values())
    tool.draw(rates, "causal", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
