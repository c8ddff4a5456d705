"""Forced tile sizes of the CPU's forward change its rounding at most."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, check

from flashattn_ext import _C

CASES = {
    "causal": Case(B=2, Sq=200, Sk=330, Hq=4, D=40, Dv=24, causal=True, smooth_softmax=True),
    "dropout": Case(Sq=300, Sk=290, D=33, window_size=(70, 20), dropout_p=0.2, rng_seed=7),
}


@pytest.fixture(autouse=True)
def default_afterwards():
    yield
    _C.force_cpu_tile(0, 0)


@pytest.mark.every_isa
@pytest.mark.parametrize("tile", [(64, 64), (128, 512), (1024, 64)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_stay_within_the_rule(device: str, dtype: torch.dtype, name: str, tile: tuple[int, int]) -> None:
    _C.force_cpu_tile(*tile)  # other devices do not care
    check(Case(**{**CASES[name].__dict__, "dtype": dtype}), device)


def test_default_and_forced() -> None:
    default, scratch = _C.cpu_tile(), _C.cpu_scratch_bytes(64)
    _C.force_cpu_tile(512, 64)
    assert _C.cpu_tile() == (512, 64)
    _C.force_cpu_tile(512, 512)
    assert _C.cpu_scratch_bytes(64) > scratch
    _C.force_cpu_tile(0, 0)
    assert (_C.cpu_tile(), _C.cpu_scratch_bytes(64)) == (default, scratch)


@pytest.mark.parametrize("tile", [(64, 0), (0, 64), (100, 64), (64, 2048), (-64, 64)], ids=str)
def test_sizes_that_do_not_fit_are_refused(tile: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 64 up to 1024"):
        _C.force_cpu_tile(*tile)
    assert _C.cpu_tile() != tile
