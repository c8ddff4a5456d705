"""One call with a key-value cache as data, its inputs, and the comparison with the reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask


@dataclass(frozen=True)
class CacheCase:
    """Sizes and options of one call. `lengths` are the keys of each sequence before anything is appended."""

    lengths: tuple[int, ...] = (100, 37)
    Sq: int = 1
    new: int = 0
    Hq: int = 4
    Hk: int = 2
    D: int = 32
    Dv: int = 32
    room: int = 128  # rows of a sequence in the cache; a multiple of page_size where there are pages
    page_size: int = 0  # 0: no pages
    extra_entries: int = 0  # cache entries that belong to no sequence
    batch_idx: bool = False
    leftpad: tuple[int, ...] | None = None
    int_length: bool = False  # lengths given as one int
    rotary_dim: int = 0
    interleaved: bool = True
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "heads" or "batch"
    sink: bool = False
    smooth_softmax: bool = False
    tree: bool = False  # a Mask of the last Sq keys
    mask_heads: int = 1
    num_splits: int = 0
    seed: int = 0

    @property
    def B(self) -> int:
        return len(self.lengths)


@dataclass
class CacheInputs:
    """Positional tensors and options of a call, in one dtype. Cache rows that belong to no sequence are NaN."""

    tensors: list[Tensor | None]  # q, k_cache, v_cache, k, v
    options: dict[str, Any] = field(default_factory=dict)
    num_splits: int = 0

    def to(self, dtype: torch.dtype, device: str = "cpu") -> CacheInputs:
        """A copy, the caches included; floating-point tensors, except slopes and sinks, have that dtype."""

        def converted(name: str, value: Any) -> Any:
            if isinstance(value, Mask):
                return Mask(value.intervals.to(device))
            if not isinstance(value, Tensor):
                return value
            keeps = not value.is_floating_point() or name in ("alibi_slopes", "sink")
            return value.to(
                device,
                torch.float64
                if name in ("alibi_slopes", "sink") and dtype == torch.float64
                else value.dtype
                if keeps
                else dtype,
                copy=True,
            )

        return CacheInputs(
            [converted("", t) for t in self.tensors],
            {n: converted(n, v) for n, v in self.options.items()},
            self.num_splits,
        )

    def call(self) -> tuple[Tensor, Tensor]:
        out, lse = flashattn_ext.flash_attn_with_kvcache(
            *self.tensors, num_splits=self.num_splits, return_softmax_lse=True, **self.options
        )
        return out, lse

    def call_with_max_logits(self) -> tuple[Tensor, Tensor, Tensor]:
        results: tuple[Tensor, Tensor, Tensor] = flashattn_ext.flash_attn_with_kvcache(
            *self.tensors, num_splits=self.num_splits, return_softmax_lse=True, return_max_logits=True, **self.options
        )
        return results

    def reference(self) -> tuple[Tensor, ...]:
        """(out, lse, max_logits)"""
        return flashattn_ext.kvcache_reference(*self.tensors, **self.options, return_max_logits=True)


def depth_first_parents(nodes: int, rng: random.Random) -> list[int]:
    """Parents of a random tree whose nodes are in depth-first order."""
    path, parents = [-1], []
    for node in range(nodes):
        path = path[: rng.randint(1, len(path))]
        parents.append(path[-1])
        path.append(node)
    return parents


def make_inputs(case: CacheCase, dtype: torch.dtype) -> CacheInputs:
    generator = torch.Generator().manual_seed(case.seed)
    rng = random.Random(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    B = case.B
    pages = case.room // case.page_size if case.page_size else 1
    rows = case.page_size or case.room
    entries = B * pages + case.extra_entries
    order = torch.randperm(entries, generator=generator).to(torch.int32)
    table = order[: B * pages].view(B, pages)
    k_cache = torch.full((entries, rows, case.Hk, case.D), math.nan, dtype=dtype)
    v_cache = torch.full((entries, rows, case.Hk, case.Dv), math.nan, dtype=dtype)
    for b, length in enumerate(case.lengths):
        entry_of = table[b] if case.page_size else order[b : b + 1] if case.batch_idx else torch.tensor([b])
        for row in range((case.leftpad or (0,) * B)[b], length):
            place = int(entry_of[row // rows]), row % rows
            k_cache[place], v_cache[place] = normal(case.Hk, case.D), normal(case.Hk, case.Dv)
    has_new = case.new > 0
    tensors: list[Tensor | None] = [
        normal(B, case.Sq, case.Hq, case.D), k_cache, v_cache,
        normal(B, case.new, case.Hk, case.D) if has_new else None,
        normal(B, case.new, case.Hk, case.Dv) if has_new else None,
    ]  # fmt: skip
    angles = torch.rand(case.room + 3, case.rotary_dim // 2, generator=generator, dtype=torch.float64) * 2 * math.pi
    mask = None
    if case.tree:
        heads = [
            Mask.tree(torch.tensor([depth_first_parents(case.Sq, rng) for _ in range(B)]))
            for _ in range(case.mask_heads)
        ]
        mask = Mask(torch.cat([head.intervals for head in heads], 1))
    slopes_shape = {"heads": (case.Hq,), "batch": (B, case.Hq)}
    options = {
        "rotary_cos": angles.cos().to(dtype) if case.rotary_dim else None,
        "rotary_sin": angles.sin().to(dtype) if case.rotary_dim else None,
        "cache_seqlens": case.lengths[0] if case.int_length else torch.tensor(case.lengths, dtype=torch.int32),
        "cache_batch_idx": order[:B] if case.batch_idx else None,
        "cache_leftpad": None if case.leftpad is None else torch.tensor(case.leftpad, dtype=torch.int32),
        "block_table": table if case.page_size else None,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": case.window_size,
        "softcap": case.softcap,
        "rotary_interleaved": case.interleaved,
        "alibi_slopes": torch.rand(slopes_shape[case.alibi], generator=generator) * 0.3 if case.alibi else None,
        "sink": normal(case.Hq).float() if case.sink else None,
        "smooth_softmax": case.smooth_softmax,
        "mask": mask,
    }
    return CacheInputs(tensors, options, case.num_splits)


def check(case: CacheCase, device: str, dtype: torch.dtype) -> None:
    """Compares out, lse and caches with the fp64 reference; the bound is the error of plain PyTorch in the same dtype."""
    inputs = make_inputs(case, dtype)
    exact, plain, ours = inputs.to(torch.float64), inputs.to(dtype), inputs.to(dtype, device)
    (ref, ref_lse, ref_max), (pt, pt_lse, pt_max), (out, lse, max_logits) = (
        exact.reference(), plain.reference(), ours.call_with_max_logits()
    )  # fmt: skip
    assert out.dtype == dtype and out.shape == ref.shape and lse.shape == ref_lse.shape
    error, allowed = (
        (out.cpu().double() - ref).abs(),
        2 * (pt.double() - ref).abs().amax(dim=None) + 1e-5 if ref.numel() else 0,
    )
    assert not ref.numel() or error.max() <= allowed, f"out is off by {error.max():.3g}, allowed {allowed:.3g}"
    _check_lse(lse.cpu().double(), ref_lse, pt_lse.double(), dtype)
    assert max_logits.dtype == torch.float32 and max_logits.shape == ref_max.shape
    _check_lse(max_logits.cpu().double(), ref_max.double(), pt_max.double(), dtype)
    for name, before, after, expected in zip(
        ("k_cache", "v_cache"), inputs.tensors[1:3], ours.tensors[1:3], plain.tensors[1:3], strict=True
    ):
        after = after.cpu()
        written = ~((expected == before) | (expected.isnan() & before.isnan()))
        assert torch.equal(after[~written].nan_to_num(7.5), before[~written].nan_to_num(7.5)), (
            f"{name}: wrote elsewhere"
        )
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(after[written], expected[written], rtol=tolerance, atol=tolerance)


def _check_lse(lse: Tensor, ref: Tensor, pt: Tensor, dtype: torch.dtype) -> None:
    infinite = ref.isinf()
    assert torch.equal(lse[infinite], ref[infinite])
    if infinite.all():
        return
    error = (lse - ref)[~infinite].abs()
    allowed = 2 * (pt - ref)[~infinite].abs().max() + (
        1e-3 if dtype.itemsize == 2 else 1e-5 * (1 + ref[~infinite].abs().max())
    )
    assert error.max() <= allowed, f"lse is off by {error.max():.3g}, allowed {allowed:.3g}"


def random_case(seed: int) -> CacheCase:
    rng = random.Random(seed)
    page_size = rng.choice([0, 0, 16, 48, 64, 256])
    room = page_size * rng.randint(1, 6) if page_size else rng.randint(20, 400)
    B, Sq = rng.randint(1, 3), rng.choice([1, 1, 2, 5, 16, 17, 40])
    new = min(rng.choice([0, Sq, Sq, 3]), room)
    lengths = tuple(rng.choice([0, room - new, rng.randint(0, room - new)]) for _ in range(B))
    Hk = rng.choice([1, 2, 3])
    tree = rng.random() < 0.3
    rotary = new > 0 and rng.random() < 0.6
    D = rng.choice([16, 32, 48, 64, 80, 128, 7, 33])
    smooth = rng.random() < 0.2
    int_length = rng.random() < 0.2
    return CacheCase(
        lengths=lengths[:1] * B if int_length else lengths,
        Sq=Sq,
        new=new,
        Hk=Hk,
        Hq=Hk * rng.choice([1, 2, 4, 8]),
        D=D,
        Dv=rng.choice([D, D, 24, 9]),
        room=room,
        page_size=page_size,
        extra_entries=rng.randint(0, 3),
        batch_idx=not page_size and rng.random() < 0.4,
        leftpad=tuple(rng.randint(0, n) for n in lengths) if not int_length and rng.random() < 0.3 else None,
        int_length=int_length,
        rotary_dim=rng.choice([2, 16, D // 2 * 2]) // 2 * 2 if rotary and D >= 16 else 0,
        interleaved=rng.random() < 0.5,
        causal=rng.random() < 0.6,
        window_size=rng.choice([(-1, -1), (-1, -1), (rng.randint(0, 60), -1), (rng.randint(0, 60), rng.randint(0, 5))]),
        softmax_scale=rng.choice([None, None, 0.3, -0.2]),
        softcap=rng.choice([0.0, 0.0, 4.0]),
        alibi=rng.choice([None, None, "heads", "batch"]),
        sink=not smooth and rng.random() < 0.3,
        smooth_softmax=smooth,
        tree=tree,
        mask_heads=rng.choice([1, Hk]) if tree else 1,
        num_splits=rng.choice([0, 0, 1, 2, 3, 7]),
        seed=seed,
    )
