"""Tiles of the CPU kernels: chosen by cache sizes, the same for all calls of one kind, and every tile is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import Case, assert_same_bits, call, check, make_inputs

import flashattn_ext
from flashattn_ext import _C

KIB = 1 << 10
FASTEST, *OTHERS = _C.cpu_isas()
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
KERNELS = [
    *((FASTEST, shape, dtype) for shape in [(64, 64), (64, 192), (256, 64), (512, 512)] for dtype in DTYPES),
    *((isa, (64, 192), dtype) for isa in OTHERS for dtype in DTYPES[:2]),
]
CASES = {
    "causal": Case(B=2, Sq=200, Sk=330, Hq=4, D=40, Dv=24, causal=True, smooth_softmax=True, use_lse=True),
    "dropout": Case(Sq=300, Sk=290, D=33, window_size=(70, 20), dropout_p=0.2, rng_seed=7),
    "mask": Case(Sq=150, Sk=280, Hq=4, D=40, Dv=40, mask="intervals", mask_heads="q", dropout_p=0.1, rng_seed=3),
    "biases": Case(Sq=180, Sk=270, Hq=4, alibi="batch", relative=30, bias="hq", bias_hides=0.1, softcap=8.0),
    "shared bias": Case(Sq=200, Sk=200, Hq=4, bias="b", causal=True),
    "sink and slopes": Case(Sq=190, Sk=190, alibi="heads", sink_dtype=torch.float32, causal=True),
    "packed": Case(lengths_q=(130, 0, 65, 200), lengths_k=(64, 33, 257, 200), causal=True, D=64, Dv=64),
}


@pytest.fixture
def set_tile() -> Iterator[Callable[[int, int], None]]:
    yield _C.set_cpu_tile
    _C.set_cpu_tile(0, 0)


@pytest.fixture
def restore_isa() -> Iterator[None]:
    before = _C.cpu_isa()
    yield
    _C.set_cpu_isa(before)


def tile_of(l2_bytes: int, D: int, element_bytes: int = 4, score_bytes: int = 4) -> tuple[int, int]:
    """The tile for heads of D columns in q, k and v."""
    return _C.cpu_tile_that_fits(l2_bytes, 2 * D * element_bytes, score_bytes)


# How it is chosen


@pytest.mark.parametrize(
    ("l2_kib", "head_dims"),  # the largest head dims of fp32 that have a tile of 192 x 192
    [(0, None), (256, 74), (512, 245), (1024, 586), (2048, None)],
)
def test_the_tile_is_the_largest_that_fits(l2_kib: int, head_dims: int | None) -> None:
    for D in (1, 8, 64, 128, 256, 512):
        length = 192 if head_dims is None or head_dims >= D else 128
        assert tile_of(l2_kib * KIB, D) == (length, length)
    if head_dims:
        assert tile_of(l2_kib * KIB, head_dims) == (192, 192) and tile_of(l2_kib * KIB, head_dims + 1) == (128, 128)


def test_smaller_elements_and_larger_caches_never_give_a_smaller_tile() -> None:
    for D in range(8, 520, 8):
        tiles = [tile_of(kib * KIB, D) for kib in (128, 256, 512, 768, 1024, 2048, 4096)]
        assert tiles == sorted(tiles)
        for kib in (256, 512, 1024):
            assert tile_of(kib * KIB, D, 2) >= tile_of(kib * KIB, D, 4) >= tile_of(kib * KIB, D, 8, 8)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_the_tile_in_use_is_that_of_this_machine(dtype: str) -> None:
    l2_bytes = dict(_C.cpu_caches()).get(2, 0)
    packs = dtype == "bf16" and _C.cpu_isa().endswith("_bf16")  # others widen 16 bits to fp32
    element_bytes = {"fp64": 8}.get(dtype, 2 if packs else 4)
    for D in (1, 33, 64, 128, 256, 512):
        tile = _C.cpu_tile(dtype, D)
        assert tile == tile_of(l2_bytes, D, element_bytes, 8 if dtype == "fp64" else 4)
        assert all(length % 64 == 0 and 64 <= length <= 512 for length in tile)


def test_build_info_tells() -> None:
    info = flashattn_ext.build_info()
    assert info["cpu_tile"] == {D: _C.cpu_tile("fp32", D) for D in (64, 128, 256, 512)}
    assert all(f"L{level} {size // KIB}K" in info["cpu"] for level, size in _C.cpu_caches())


def test_every_level_of_cache_has_a_size() -> None:
    levels = [level for level, _ in _C.cpu_caches()]
    assert levels == sorted(set(levels)) and all(size > 0 for _, size in _C.cpu_caches())


# Its results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("isa", "shape", "dtype"), KERNELS, ids=str)
def test_every_tile_is_within_the_rule(
    isa: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    name: str,
    set_tile: Callable[[int, int], None],
    restore_isa: None,
) -> None:
    _C.set_cpu_isa(isa)
    set_tile(*shape)
    check(Case(**{**vars(CASES[name]), "dtype": dtype}), "cpu")


def test_another_tile_is_used_and_the_own_one_again_afterwards(set_tile: Callable[[int, int], None]) -> None:
    case = Case(Sq=64, Sk=700, D=64, needs_grad=())
    inputs = make_inputs(case, "cpu")
    before, _ = call(case, inputs)
    set_tile(64, 64)
    assert _C.cpu_tile("fp32", 64) == (64, 64)
    other, _ = call(case, inputs)
    set_tile(0, 0)
    after, _ = call(case, inputs)
    assert not torch.equal(before, other)  # another order of sums
    assert_same_bits(before, after)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (32, 64), (96, 64), (64, 576), (-64, 64)])
def test_a_size_that_the_kernels_cannot_have_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"got {shape[0]} x {shape[1]}; give two multiples of 64 up to 512"):
        _C.set_cpu_tile(*shape)
    assert _C.cpu_tile("fp32", 64) == flashattn_ext.build_info()["cpu_tile"][64]
