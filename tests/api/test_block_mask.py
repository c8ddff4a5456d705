"""BlockMask: its constructors and what it can tell, against dense matrices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils import _pytree

import flashattn_ext
from flashattn_ext import BlockMask, Mask
from flashattn_ext.block_strips import Part

pytestmark = pytest.mark.no_emulator  # it would get the same masks


def some(*shape: int, share: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def spread(visible: Tensor, Sq: int, Sk: int, rows: int, keys: int) -> Tensor:
    return visible.repeat_interleave(rows, 2).repeat_interleave(keys, 3)[:, :, :Sq, :Sk]


SIZES = [(1, 1), (128, 128), (129, 300), (500, 130), (640, 641), (0, 5), (5, 0)]


@pytest.mark.parametrize("block_size", [128, 64, (64, 128), (192, 320), (256, 384), (128, 64)], ids=str)
@pytest.mark.parametrize("Sq,Sk", SIZES)
def test_blocks(device: str, Sq: int, Sk: int, block_size: Any) -> None:
    rows, keys = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    visible = some(2, 3, -(-Sq // rows), -(-Sk // keys)).to(device)
    mask = BlockMask.from_blocks(visible, Sq, Sk, block_size)
    dense = spread(visible, Sq, Sk, rows, keys)
    assert torch.equal(mask.dense(), dense) and mask.shape == dense.shape and mask.device == visible.device
    assert float(mask.density()) == pytest.approx(float(dense.double().mean()) if dense.numel() else 0, abs=1e-12)


@pytest.mark.parametrize("Sq,Sk", SIZES)
def test_dense(device: str, Sq: int, Sk: int) -> None:
    tiles = spread(some(2, 2, 5, 6, share=0.6), Sq, Sk, 128, 128)
    dense = (tiles & (some(2, 2, Sq, Sk, share=0.3, seed=1) | spread(some(2, 2, 5, 6, seed=2), Sq, Sk, 128, 128))).to(
        device
    )
    mask = BlockMask.from_dense(dense)
    assert torch.equal(mask.dense(), dense)
    if Sq:
        rows = torch.tensor([Sq - 1, 0, Sq // 2], device=device)
        assert torch.equal(mask.dense(rows), dense[:, :, rows])
    assert float(mask.density()) == pytest.approx(float(dense.double().mean()) if dense.numel() else 0, abs=1e-12)
    assert torch.equal(BlockMask.from_dense(dense, max_partial=70).dense(), dense)


def test_memory_follows_the_visible_blocks(device: str) -> None:
    S = 40 * 128
    dense = torch.zeros(1, 1, S, S, dtype=torch.bool, device=device)
    empty = BlockMask.from_dense(dense).nbytes
    dense[0, 0, :256, 128:384] = True
    whole = BlockMask.from_dense(dense).nbytes
    dense[0, 0, 1000, 1000] = True
    assert (whole - empty, BlockMask.from_dense(dense).nbytes - whole) == (4 * 16, 16 + 2048)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, i, j: j <= i,
    "all": lambda b, h, i, j: ((i // 3 + b) % 4 < 2) & (j % 7 != h) | (i == j),
    "rows alone": lambda b, h, i, j: i % 2 == 0,
    "everything": lambda b, h, i, j: (i >= 0) | (j >= 0),
    "a choice of heads": lambda b, h, i, j: torch.where(h == 0, i - j < 90, j - i < 90),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("B,H", [(None, None), (2, 3), (None, 2), (2, None)])
def test_functions(device: str, name: str, B: int | None, H: int | None) -> None:
    f = FUNCTIONS[name]
    mask = BlockMask.from_function(f, B, H, 200, 301, device=device)
    b, h, i, j = (torch.arange(n, device=device) for n in (B or 1, H or 1, 200, 301))
    dense = f(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j).expand(B or 1, H or 1, 200, 301)
    assert torch.equal(mask.dense(), dense)


def test_functions_with_tables(device: str) -> None:
    """mask_mods index one number after the other or all at once; a function that reads values has to get tensors."""
    ids = torch.randint(0, 4, (2, 150), generator=torch.Generator().manual_seed(0)).to(device)
    expected = (ids[:, :, None] == ids[:, None])[:, None]

    def by_value(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ids[b, i] == ids[b, j] if bool((j >= 0).all()) else j < 0

    for f in (lambda b, h, i, j: ids[b][i] == ids[b][j], lambda b, h, i, j: ids[b, i] == ids[b, j], by_value):
        assert torch.equal(BlockMask.from_function(f, 2, None, 150, 150, device=device).dense(), expected)


def test_a_strip_is_evaluated_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many heads and rows a few at once, of a long row a strip of one head; a mask that is too large to keep is evaluated twice."""
    visible, parts = some(2, 3, 600, 260).to(device), []

    def strip_of_dense(dense: Tensor) -> Callable[[Part], Tensor]:
        return lambda part: parts.append(part) or dense[part]

    monkeypatch.setattr(flashattn_ext.block_strips, "strip_of_dense", strip_of_dense)
    for most, kept, count in ((1 << 21, 1 << 24, 1), (1, 1 << 24, 30), (1 << 17, 0, 36), (250_000, 0, 12)):
        for name in ("_MOST_PAIRS", "_MOST_DENSE_PAIRS"):
            monkeypatch.setattr(flashattn_ext.block_strips, name, most)
        monkeypatch.setattr(flashattn_ext.block_strips, "_MOST_KEPT", kept)
        parts.clear()
        assert torch.equal(BlockMask.from_dense(visible).dense(), visible)
        assert len(parts) == count
        assert all(len(visible[part].flatten()) <= max(most, 128 * 260) for part in parts)


@pytest.mark.parametrize("block_size", [128, 64, (64, 256)], ids=str)
@pytest.mark.parametrize("sizes", [(300, 300), (200, 520)], ids=str)
def test_flex_attentions_masks(device: str, sizes: tuple[int, int], block_size: Any) -> None:
    ids = (torch.arange(600) // 70).to(device)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] == ids[j]) & (j <= i + h) | (j < 130)

    given = flex_attention.create_block_mask(mask_mod, 2, 3, *sizes, device=device, BLOCK_SIZE=block_size)
    b, h, i, j = (torch.arange(n, device=device) for n in (2, 3, *sizes))
    expected = mask_mod(b.view(-1, 1, 1, 1), h.view(-1, 1, 1), i.view(-1, 1), j).expand(2, 3, *sizes)
    assert torch.equal(BlockMask.from_flex(given).dense(), expected)


def test_flex_attentions_lists_count(device: str) -> None:
    """Its partial blocks are seen where the function says so, full ones as a whole, and others not at all."""
    numbers, blocks = torch.tensor([[[1, 1]]], device=device), torch.tensor([[[[0, 1], [1, 0]]]], device=device)
    given = flex_attention.BlockMask.from_kv_blocks(
        numbers.int(), blocks.int(), numbers.int(), blocks.flip(3).int(), BLOCK_SIZE=128,
        mask_mod=lambda b, h, i, j: i % 2 == 0,
    )  # fmt: skip
    dense = BlockMask.from_flex(given).dense()[0, 0]
    even = torch.arange(256, device=device)[:, None] % 2 == 0
    assert torch.equal(dense[:128, :128], even[:128].expand(128, 128)) and dense[:128, 128:].all()
    assert dense[128:, :128].all() and torch.equal(dense[128:, 128:], even[128:].expand(128, 128))


MASKS: dict[str, Callable[[str], BlockMask | Mask]] = {
    "blocks": lambda device: BlockMask.from_blocks(some(1, 2, 3, 2).to(device), 300, 256),
    "blocks of entries": lambda device: BlockMask.from_blocks(some(2, 1, 2, 2).to(device), 300, 256, (192, 128)),
    "halves": lambda device: BlockMask.from_blocks(some(1, 1, 5, 4).to(device), 300, 256, 64),
    "pairs": lambda device: BlockMask.from_dense(some(1, 4, 300, 256).to(device)),
    "intervals": lambda device: Mask.window(100, 0, 300, 256, device=device),
}


@pytest.mark.parametrize("one", MASKS)
@pytest.mark.parametrize("other", MASKS)
def test_intersection(device: str, one: str, other: str) -> None:
    a, b = MASKS[one](device), MASKS[other](device)
    if one == other == "intervals":
        a = BlockMask.from_mask(a, 300)

    def dense(mask: BlockMask | Mask, heads: int) -> Tensor:
        visible = mask.dense(300) if isinstance(mask, Mask) else mask.dense()
        return visible.repeat_interleave(heads // visible.shape[1], 1)

    both = a & b
    heads = both.shape[1]
    assert isinstance(both, BlockMask) and torch.equal(both.dense(), dense(a, heads) & dense(b, heads))


def test_intersection_of_other_sizes(device: str) -> None:
    a = BlockMask.from_blocks(some(2, 3, 2, 2).to(device), 200, 200)
    for other, words in (
        (BlockMask.from_blocks(some(2, 3, 2, 2).to(device), 200, 190), r"\[2, 3, 200, 200\] and \[2, 3, 200, 190\]"),
        (BlockMask.from_blocks(some(3, 3, 2, 2).to(device), 200, 200), "batch size or 1"),
        (BlockMask.from_blocks(some(1, 2, 2, 2).to(device), 200, 200), "3 and 2 heads"),
    ):
        with pytest.raises(ValueError, match=words):
            a & other
    with pytest.raises(TypeError):
        a & 3  # type: ignore[operator]


def test_pictures(device: str) -> None:
    visible = torch.zeros(1, 2, 256, 256, dtype=torch.bool, device=device)
    visible[0, 1, :128, :192] = True
    mask = BlockMask.from_dense(visible)
    assert mask.show(head=1, columns=4) == "###.\n...."
    assert mask.show(head=0, columns=2) == ".."
    with pytest.raises(ValueError, match="head: expected an index from -2 to 1"):
        mask.show(head=2)
    assert repr(mask) == f"BlockMask(of shape [1, 2, 256, 256] on {mask.device})"


def test_copies(device: str) -> None:
    mask = BlockMask.from_dense(some(2, 2, 150, 200).to(device))
    leaves, structure = _pytree.tree_flatten(mask)
    for other in (
        copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu"),
        _pytree.tree_unflatten(leaves, structure), _pytree.treespec_loads(_pytree.treespec_dumps(structure)).unflatten(leaves),
    ):  # fmt: skip
        assert torch.equal(other.dense().to(device), mask.dense()) and other.shape == mask.shape
    assert len(leaves) == 2 and mask.to("meta").shape == mask.shape


@pytest.mark.parametrize(
    "make,error,words",
    [
        (lambda: BlockMask.from_blocks(torch.ones(1, 1, 2, 2), 200, 200), TypeError, "visible: expected dtype bool, got torch.float32"),
        (lambda: BlockMask.from_blocks(some(1, 1, 2, 3), 200, 200), ValueError, r"\[batch or 1, heads, 2, 2\].*got \[1, 1, 2, 3\]"),
        (lambda: BlockMask.from_blocks(some(1, 2, 2), 200, 200), ValueError, r"got \[1, 2, 2\]"),
        (lambda: BlockMask.from_blocks(some(1, 1, 2, 2), 200, 200, 96), ValueError, "block_size: expected multiples of 64, got 96"),
        (lambda: BlockMask.from_blocks(some(1, 1, 2, 2), 200, 200, (64, 0)), ValueError, r"block_size: .* got \(64, 0\)"),
        (lambda: BlockMask.from_blocks(some(1, 1, 2, 2), 200, 200, (64,)), ValueError, r"one number or \(rows, keys\)"),
        (lambda: BlockMask.from_blocks(some(1, 1, 2, 2), -1, 200), ValueError, "Sq: expected at least 0, got -1"),
        (lambda: BlockMask.from_dense(some(3, 3)), ValueError, "visible: expected shape .* got .3, 3."),
        (lambda: BlockMask.from_dense(some(1, 1, 3, 3), max_partial=-2), ValueError, "max_partial: expected at least 0, got -2"),
        (lambda: BlockMask.from_dense([[True]]), TypeError, "visible: expected a torch.Tensor, got list"),
        (lambda: BlockMask.from_function(3, 1, 1, 9, 9), TypeError, "f: expected a function of .b, h, i, j., got int"),
        (lambda: BlockMask.from_function(lambda *n: n[2] + 1, 1, 1, 9, 9), TypeError, "f: expected .* bool tensor, got torch.int64"),
        (lambda: BlockMask.from_function(lambda *n: True, 1, 1, 9, 9), TypeError, "f: expected .* bool tensor, got bool"),
        (lambda: BlockMask.from_function(lambda *n: some(4), 1, 1, 9, 9), ValueError, r"f: expected .*broadcasts to .*got shape"),
        (lambda: BlockMask.from_flex(some(1, 1, 3, 3)), TypeError, "block_mask: expected a torch.nn.*BlockMask, got Tensor"),
        (
            lambda: BlockMask.from_flex(
                flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, 96, 96, "cpu", BLOCK_SIZE=32)
            ),
            ValueError,
            "block_size: expected multiples of 64",
        ),
        (lambda: BlockMask(3, torch.zeros(0, 128, 4).int(), 9, 9), TypeError, "lists: expected a torch.Tensor, got int"),
        (lambda: BlockMask(torch.zeros(1, 1, 8).int(), torch.zeros(0, 128, 4), 9, 9), TypeError, "bits: expected dtype int32"),
        (lambda: BlockMask(torch.zeros(8).int(), torch.zeros(0, 128, 4).int(), 9, 9), ValueError, "lists: expected shape"),
        (lambda: BlockMask(torch.zeros(1, 1, 8).int(), torch.zeros(0, 128).int(), 9, 9), ValueError, "bits: expected shape"),
        (lambda: BlockMask.from_mask(some(1, 1, 3, 3), 3), TypeError, "mask: expected a flashattn_ext.Mask, got Tensor"),
        (lambda: BlockMask.from_mask(Mask(torch.zeros(2, 9, 2).int()), 9), ValueError, "a Mask for packed calls"),
    ],
)  # fmt: skip
def test_bad_input(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
