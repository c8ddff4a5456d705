"""README's picture of the speed is drawn from the tables that docs/results has."""

from __future__ import annotations

import importlib.util
import math
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
    names = ["ours", "cuDNN", "cuDNN's frontend", "FA-3", "FA-4", "/best"]
    header = "| " + " | ".join(["B x H x S x D", "mask", "pass", *names, "ours, sustained", *names[1:]]) + " |\n"
    rows = (
        "| 4x16x4096x128 | causal | forward | 675 | 571 | 580 | - | 636 | 1.03 | 6 | 7 | 8 | - | 9 | 0.5 |\n"
        "| 2x64:8x4096x128 | causal | forward | 1 | 2 | 3 | - | 4 | 0.5 | 1 | 2 | 3 | - | 4 | 0.5 |\n"
        "| 1x16x16384x128 | causal window 1024 | forward | 1 | - | - | - | 4 | 0.5 | 1 | - | - | - | 4 | 0.5 |\n"
        "| 12x64x256x64 | full, fp16 | forward | 1 | 2 | 3 | - | 4 | 0.5 | 1 | 2 | 3 | - | 4 | 0.5 |\n"
    )
    rates = tool.read_rates("# Title\n\n| 128 | causal | 1.0 |\n\n" + header + rows)
    assert [*rates] == [(128, 4096, "causal", "forward")]
    (bars,) = rates.values()
    assert math.isnan(bars.pop("FlashAttention-3")), "it could not be called"
    assert bars == {"flashattn_ext": 675, "FlashAttention-4": 636, "cuDNN": 580}


def test_every_bar_of_the_picture_has_a_row(tool: ModuleType, tmp_path: Path) -> None:
    rates = tool.read_rates(tool.TABLE.read_text(encoding="utf-8"))
    assert tool.LENGTHS == (512, 1024, 2048, 4096, 8192, 16384)
    shapes = [(D, S) for D in tool.HEAD_DIMS for S in tool.LENGTHS] + [(D, tool.TOKENS) for D in tool.OTHER_HEAD_DIMS]
    for D, S in shapes:
        for direction in tool.PASSES:
            assert rates[D, S, "causal", direction].keys() == tool.COLUMNS.keys()
    tool.draw(rates, "causal", tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
