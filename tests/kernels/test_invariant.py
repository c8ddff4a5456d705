"""invariant=True: a row has the same bits in training, in a prefill in chunks, in a batch, packed, and with a KV cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import VIEWS, cu_seqlens, strided_view
from torch import Tensor

import flashattn_ext
from flashattn_ext import _C, Mask
from flashattn_ext.integrations import transformers as fax

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
every_device = pytest.mark.every_isa
named_dtypes = pytest.mark.dtypes("bfloat16", "float16", "float32")
refused_by_the_emulator = pytest.mark.no_emulator
# The last two have views that exist for tensors of one entry only, or that would not show a difference.
STRIDES = [view for view in VIEWS if view not in ("expanded", "strided_last")]


@pytest.fixture
def on(device: str) -> Iterator[str]:
    """The device, on which new tensors are made."""
    with torch.device(device):
        yield device


@dataclass
class Sequence:
    """A sequence with the result of one training forward, and the calls that must repeat rows of it bit for bit."""

    q: Tensor  # [S, Hq, D]
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    out: Tensor = field(init=False)
    lse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        out, lse = flashattn_ext.forward(*(t[None] for t in (self.q, self.k, self.v)), **self.call())
        self.out, self.lse = out[0], lse[0]

    @classmethod
    def random(cls, S: int, Hq: int, Hk: int, D: int, Dv: int, dtype: torch.dtype, **options: Any) -> Sequence:
        q, k, v = torch.randn(S, Hq, D) * 2, torch.randn(S, Hk, D), torch.randn(S, Hk, Dv)
        return cls(*(t.to(dtype) for t in (q, k, v)), options)

    def call(self) -> dict[str, Any]:
        return {"return_lse": True, "invariant": True, **self.options}

    def keys(self, end: int) -> int:
        """The number of keys of a call with the rows up to `end`."""
        return end if self.options.get("causal") else self.k.shape[0]

    def view(self, t: Tensor) -> Tensor:
        return strided_view(t, self.draw.choice(STRIDES))

    def check(self, what: str, out: Tensor, lse: Tensor, rows: slice) -> None:
        assert torch.equal(out, self.out[rows]), f"out of {what}, rows {rows}"
        assert torch.equal(lse, self.lse[:, rows]), f"lse of {what}, rows {rows}"

    # --- one way to compute rows [begin, end) each ---

    def in_a_chunk(self, begin: int, end: int) -> None:
        given = (self.q[begin:end], self.k[: self.keys(end)], self.v[: self.keys(end)])
        out, lse = flashattn_ext.forward(*(self.view(t[None]) for t in given), **self.call())
        self.check("a chunk", out[0], lse[0], slice(begin, end))

    def in_a_batch(self, begin: int, end: int) -> None:
        B, at = 3, self.draw.randrange(3)
        given = []
        for t in (self.q[begin:end], self.k[: self.keys(end)], self.v[: self.keys(end)]):
            entries = torch.randn(B, *t.shape).to(t.dtype)
            entries[at] = t
            given.append(self.view(entries))
        out, lse = flashattn_ext.forward(*given, **self.call())
        self.check(f"batch entry {at}", out[at], lse[at], slice(begin, end))

    def with_padding(self, begin: int, end: int) -> None:
        """More keys and, if causal, more rows follow; a Mask hides the keys, which hold NaN."""
        keys, more = self.keys(end), self.draw.randint(1, 300)
        q, k, v = self.q[begin:end], self.k[:keys], self.v[:keys]
        if self.options.get("causal"):
            q = torch.cat([q, torch.randn(more, *q.shape[1:]).to(q.dtype)])
        elif "window_size" in self.options or "alibi_slopes" in self.options:
            return  # aligned at the last key
        k, v = (torch.cat([t, torch.full((more, *t.shape[1:]), math.nan).to(t.dtype)]) for t in (k, v))
        mask = hidden_after(keys, keys + more)
        out, lse = flashattn_ext.forward(q[None], k[None], v[None], mask=mask, **self.call())
        self.check("padding", out[0, : end - begin], lse[0, :, : end - begin], slice(begin, end))

    def packed(self, begin: int, end: int) -> None:
        before, after = self.draw.randint(0, 300), self.draw.randint(1, 9)
        keys = self.keys(end)
        q, k, v = (
            torch.cat([torch.randn(before, *t.shape[1:]).to(t.dtype), t, torch.full((after, *t.shape[1:]), math.nan).to(t.dtype)])
            for t in (self.q[begin:end], self.k[:keys], self.v[:keys])
        )  # fmt: skip
        starts = (cu_seqlens([before, length, after], q.device.type) for length in (end - begin, keys))
        out, lse = flashattn_ext.varlen_forward(
            self.view(q), self.view(k), self.view(v), *starts, 4000, 4000, **self.call()
        )
        own = slice(before, before + end - begin)
        self.check("a packed call", out[own], lse[:, own], slice(begin, end))

    def from_cache(self, begin: int, end: int) -> None:
        self.from_entries(begin, end, leftpad=0, new=0)

    def after_padding_in_a_cache(self, begin: int, end: int) -> None:
        self.from_entries(begin, end, leftpad=self.draw.randint(1, 90), new=0)

    def with_new_keys(self, begin: int, end: int) -> None:
        self.from_entries(begin, end, leftpad=0, new=self.draw.randint(1, self.keys(end)))

    def from_entries(self, begin: int, end: int, leftpad: int, new: int) -> None:
        B, at, entry = 2, self.draw.randrange(2), self.draw.randrange(3)
        keys = self.keys(end)
        cached, capacity = keys - new, keys + leftpad + self.draw.randint(0, 70)
        caches = []
        for t in (self.k, self.v):
            cache = torch.randn(3, capacity, *t.shape[1:]).to(t.dtype)
            cache[entry] = math.nan
            cache[entry, leftpad : leftpad + cached] = t[:cached]
            caches.append(self.view(cache))
        entries = torch.full((B,), (entry + 1) % 3, dtype=torch.int32)
        entries[at] = entry
        lengths = torch.tensor([min(capacity - new, 40)] * B, dtype=torch.int32)
        lengths[at] = leftpad + cached
        padding = torch.zeros(B, dtype=torch.int32)
        padding[at] = leftpad
        added = {}
        for name, t in (("k", self.k), ("v", self.v)):
            if new:
                added[name] = torch.randn(B, new, *t.shape[1:]).to(t.dtype)
                added[name][at] = t[cached:keys]
        self.decode(
            "a cache",
            begin,
            end,
            at,
            *caches,
            cache_seqlens=lengths,
            cache_batch_idx=entries,
            cache_leftpad=padding,
            **added,
        )

    def from_pages(self, begin: int, end: int) -> None:
        B, at, page = 2, self.draw.randrange(2), self.draw.choice([16, 32, 48, 112, 256])
        keys = self.keys(end)
        per_sequence = -(-keys // page)
        pages = B * per_sequence + 2
        table = torch.tensor(self.draw.sample(range(pages), B * per_sequence), dtype=torch.int32).view(B, per_sequence)
        caches = []
        for t in (self.k, self.v):
            cache = torch.randn(pages, page, *t.shape[1:]).to(t.dtype)
            padded = torch.full((per_sequence * page, *t.shape[1:]), math.nan).to(t.dtype)
            padded[:keys] = t[:keys]
            cache[table[at].long()] = padded.view(per_sequence, page, *t.shape[1:])
            caches.append(self.view(cache))
        lengths = torch.tensor([self.draw.randint(0, keys)] * B, dtype=torch.int32)
        lengths[at] = keys
        self.decode(f"pages of {page}", begin, end, at, *caches, cache_seqlens=lengths, block_table=table)

    def decode(self, what: str, begin: int, end: int, at: int, k_cache: Tensor, v_cache: Tensor, **others: Any) -> None:
        q = torch.randn(2, *self.q[begin:end].shape).to(self.q.dtype)
        q[at] = self.q[begin:end]
        options = {name: value for name, value in self.call().items() if name != "return_lse"}
        out, lse = flashattn_ext.flash_attn_with_kvcache(
            self.view(q), k_cache, v_cache, num_splits=self.draw.choice([0, 1, 3, 7]), return_softmax_lse=True, **others, **options
        )  # fmt: skip
        self.check(what, out[at], lse[at], slice(begin, end))

    def rows(self) -> tuple[int, int]:
        """Some rows; in calls that are aligned at the last key without being causal, the last ones."""
        S = self.q.shape[0]
        begin = self.draw.randint(0, S - 1)
        end = min(S, begin + self.draw.choice([1, 1, 2, 17, S]))
        aligned = "window_size" in self.options or "alibi_slopes" in self.options
        return (begin, S) if aligned and not self.options.get("causal") else (begin, end)


def hidden_after(keys: int, length: int) -> Mask:
    return Mask(torch.tensor([[0, 2**30]] * keys + [[0, 0]] * (length - keys), dtype=torch.int32).view(1, 1, length, 2))


WAYS: list[Callable[[Sequence, int, int], None]] = [
    Sequence.in_a_chunk, Sequence.in_a_batch, Sequence.with_padding, Sequence.packed, Sequence.from_cache,
    Sequence.after_padding_in_a_cache, Sequence.with_new_keys, Sequence.from_pages,
]  # fmt: skip
# Lists become tensors.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "full": dict(),
    "window": dict(causal=True, window_size=(70, 0)),
    "window to both sides": dict(window_size=(200, 3)),
    "sink": dict(causal=True, sink=[-1.0, 0.0, 2.0, 5.0]),
    "smooth softmax": dict(causal=True, smooth_softmax=True),
    "softcap": dict(causal=True, softcap=5.0),
    "slopes": dict(causal=True, alibi_slopes=[0.5, 0.25, 0.1, 0.0]),
    "negative scale": dict(causal=True, softmax_scale=-0.3),
}


def options_of(name: str) -> dict[str, Any]:
    return {key: torch.tensor(value) if isinstance(value, list) else value for key, value in OPTIONS[name].items()}


@every_device
@refused_by_the_emulator
@named_dtypes
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_has_the_bits_of_training(on: str, way: Callable[..., None], D: int, dtype: torch.dtype) -> None:
    sequence = Sequence.random(330, 4, 2, D, D, dtype, causal=True)
    for begin, end in ((329, 330), (192, 193), (3, 4), (190, 206), (120, 330 if D == 64 else 150)):
        way(sequence, begin, end)


@every_device
@refused_by_the_emulator
@named_dtypes
@pytest.mark.parametrize("name", OPTIONS)
def test_options(on: str, name: str, dtype: torch.dtype) -> None:
    sequence = Sequence.random(330, 4, 2, 64, 64, dtype, **options_of(name))
    for way in WAYS:
        way(sequence, *sequence.rows())


@pytest.mark.parametrize("seed", range(40))
def test_fuzz(on: str, seed: int, restore_threads: None) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    before = _C.cpu_isa()
    _C.set_cpu_isa(draw.choice(_C.cpu_isas()))
    torch.set_num_threads(draw.choice([1, 2, 3]))
    D, Hk = draw.choice([64, 128, 256, 33, 40, 96]), draw.choice([1, 2])
    options = options_of(draw.choice(list(OPTIONS)))
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(2 * Hk)
    options |= draw.choice([{}, {"softcap": draw.choice([1.0, 30.0, 2000.0])}])
    S = draw.choice([draw.randint(1, 80), draw.randint(180, 450), draw.randint(400, 900)])
    sequence = Sequence.random(S, 2 * Hk, Hk, D, draw.choice([D, D, 24]), draw.choice(DTYPES), **options)
    sequence.draw = draw
    for way in draw.sample(WAYS, 5):
        way(sequence, *sequence.rows())
    _C.set_cpu_isa(before)


@refused_by_the_emulator
@pytest.mark.dtypes("bfloat16", "float16")
@pytest.mark.parametrize("D", [64, 128, 256])
def test_more_keys_than_a_chunk_has(on: str, D: int, dtype: torch.dtype) -> None:
    """Accelerators add up chunks of about 4096 keys."""
    S, rows, group = 9000, 130, 3
    q, k, v = (torch.randn(n, heads, D).to(dtype) for n, heads in ((rows, group), (S, 1), (S, 1)))
    options: dict[str, Any] = dict(causal=True, invariant=True, sink=torch.tensor([-1.0, 0.0, 3.0]))
    out, lse = flashattn_ext.forward(q[None], k[None], v[None], return_lse=True, **options)
    ways: list[tuple[Any, dict[str, Tensor]]] = [((k[None], v[None]), {})]
    for size in (64, 80):
        table = torch.randperm(-(-S // size), dtype=torch.int32)[None]
        pages = torch.zeros(2, table.numel(), size, 1, D, dtype=dtype)
        for at, t in zip(pages, (k, v), strict=True):
            at[table[0].long()] = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, -S % size)).view(-1, size, 1, D)
        ways.append((pages, {"block_table": table}))
    for begin, end in ((rows - 1, rows), (0, 1), (7, 11), (0, rows)):
        keys = S - rows + end
        for caches, of_pages in ways:
            step, its = flashattn_ext.flash_attn_with_kvcache(
                q[None, begin:end], *caches, cache_seqlens=keys, return_softmax_lse=True, **of_pages, **options
            )
            assert torch.equal(step[0], out[0, begin:end]) and torch.equal(its[0], lse[0, :, begin:end])


@every_device
def test_one_query_head_for_each_kv_head_and_many(on: str) -> None:
    for Hq, Hk in ((1, 1), (3, 3), (8, 1), (20, 2)):
        sequence = Sequence.random(210, Hq, Hk, 64, 64, torch.bfloat16, causal=True)
        for way in WAYS:
            way(sequence, *sequence.rows())


def test_values_that_are_not_finite_reach_only_rows_that_see_them(isa: str) -> None:
    """Values of later keys in the same tile must not change a row: in training they exist, in generation they do not yet."""
    for dtype in DTYPES:
        q, k, v = (torch.randn(1, 220, 2, 64).to(dtype) for _ in range(3))
        v[0, 100, 0, 7], v[0, 101, 1, 3], k[0, 150, 0, 0] = math.nan, math.inf, math.nan
        out, lse = flashattn_ext.forward(q, k, v, causal=True, return_lse=True, invariant=True)
        for row in (95, 99, 100, 101, 108, 149):
            keys = row + 1
            one, its = flashattn_ext.flash_attn_with_kvcache(
                q[:, row:keys], k[:, :keys], v[:, :keys], causal=True, return_softmax_lse=True, invariant=True
            )
            assert torch.equal(one.isnan(), out[:, row:keys].isnan()) and torch.equal(its[..., 0], lse[..., row])
            assert torch.equal(one.nan_to_num(), out[:, row:keys].nan_to_num())
        assert out[0, :100].isfinite().all()


@every_device
@refused_by_the_emulator
def test_it_is_the_same_attention(on: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 300, 4, 64).to(dtype) for _ in range(3))
    expected = flashattn_ext.attention_reference(q.double(), k.double(), v.double(), causal=True)
    out = flashattn_ext.forward(q, k, v, causal=True, invariant=True)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert (out.double() - expected).abs().max() < tolerance


@every_device
def test_dropout_of_a_placed_call_drops_the_same_weights(on: str) -> None:
    q, k, v = (torch.randn(1, 300, 2, 64).bfloat16() for _ in range(3))
    options: dict[str, Any] = dict(causal=True, dropout_p=0.3, rng_seed=5, return_lse=True, invariant=True)
    out, lse = flashattn_ext.forward(q, k, v, **options)
    chunk, its = flashattn_ext.forward(q[:, 77:130], k[:, :130], v[:, :130], origin=(0, 0, 77, 0), **options)
    assert torch.equal(chunk, out[:, 77:130]) and torch.equal(its, lse[..., 77:130])


def test_the_gradient_is_that_of_the_ordinary_call(on: str) -> None:
    wide = torch.float64 if on == "cpu" else torch.float32
    leaves = [torch.randn(1, 200, 2, 32, dtype=wide, requires_grad=True) for _ in range(3)]
    gradients = [
        torch.autograd.grad(flashattn_ext.forward(*leaves, causal=True, invariant=invariant).square().sum(), leaves)
        for invariant in (False, True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12 if on == "cpu" else 1e-4, atol=1e-12 if on == "cpu" else 1e-4)


@every_device
def test_masks_of_a_cache(on: str) -> None:
    """The last rows of a sequence with hidden keys, in training and with a Mask of the cache."""
    q, k, v = (torch.randn(1, 400, heads, 64).bfloat16() for heads in (4, 2, 2))
    ids = torch.tensor([[0] * 50 + [1] * 190 + [2] * 160])
    options: dict[str, Any] = dict(causal=True, invariant=True)
    out = flashattn_ext.forward(q, k, v, mask=Mask.documents(ids), **options)
    for begin, end in ((399, 400), (390, 400), (250, 400)):
        intervals = Mask.documents(ids).intervals - begin
        step = flashattn_ext.flash_attn_with_kvcache(q[:, begin:end], k, v, mask=Mask(intervals), **options)
        assert torch.equal(step, out[:, begin:end])


@every_device
def test_largest_logits(on: str) -> None:
    q, k, v = (torch.randn(1, 210, heads, 64).bfloat16() for heads in (4, 2, 2))
    options: dict[str, Any] = dict(causal=True, invariant=True, return_max_logits=True, smooth_softmax=True)
    steps = [
        flashattn_ext.flash_attn_with_kvcache(q[:, n : n + 1], k, v, cache_seqlens=n + 1, **options)[1]
        for n in range(210)
    ]
    assert torch.equal(torch.stack(steps).amax(0), flashattn_ext.forward(q, k, v, **options)[1])


@every_device
def test_fp8_caches(on: str) -> None:
    q = torch.randn(2, 300, 4, 64).bfloat16()
    k, v = (torch.randn(2, 300, 2, 64).to(torch.float8_e4m3fn) for _ in range(2))
    options: dict[str, Any] = dict(
        causal=True, invariant=True, descale_k=torch.rand(2, 2) + 0.5, descale_v=torch.rand(2, 2) + 0.5
    )
    out = flashattn_ext.flash_attn_with_kvcache(q, k, v, **options)
    for row in (5, 191, 192, 299):
        step = flashattn_ext.flash_attn_with_kvcache(q[:, row : row + 1], k, v, cache_seqlens=row + 1, **options)
        assert torch.equal(step, out[:, row : row + 1])


def test_the_function_of_transformers(on: str) -> None:
    """A step of generation goes to another function of the library than a training forward."""
    q, k, v = (torch.randn(1, heads, 300, 64).bfloat16() for heads in (4, 2, 2))
    layer = torch.nn.Module()
    out, _ = fax.attention(layer, q, k, v, None, is_causal=True, invariant=True)
    with torch.no_grad():
        step, _ = fax.attention(
            layer, q[:, :, 210:211], k[:, :, :211], v[:, :, :211], None, is_causal=True, invariant=True
        )
    assert torch.equal(step, out[:, 210:211])


def test_the_module(on: str) -> None:
    q, k, v = (torch.randn(1, 200, 2, 64) for _ in range(3))
    module = flashattn_ext.FlashAttention(causal=True, invariant=True)
    assert module.invariant and "invariant=True" in repr(module)
    step = flashattn_ext.flash_attn_with_kvcache(q[:, 150:151], k[:, :151], v[:, :151], causal=True, invariant=True)
    assert torch.equal(module(q, k, v)[:, 150:151], step)
    with pytest.raises(TypeError, match="invariant"):
        flashattn_ext.FlashAttention(invariant=1)  # type: ignore[arg-type]


def test_refused() -> None:
    q = torch.randn(1, 20, 2, 64)
    with flashattn_ext.use_backend("cpu"), pytest.raises(NotImplementedError, match="origin whose key is not 0"):
        flashattn_ext.forward(q, q, q, origin=(0, 0, 8, 8), invariant=True)
    with pytest.raises(NotImplementedError, match="invariant"):
        fax.register("fax-invariant-and-shared", cp_group=object(), invariant=True)


@pytest.mark.dtypes("bfloat16")
def test_backends_without_it_refuse_it_in_words(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, 20, 2, 64, device=device).to(dtype)
    if device == "cuda" or (device == "cpu" and not _C.forced_backend()):
        assert flashattn_ext.forward(q, q, q, invariant=True).isfinite().all()
        return
    with pytest.raises(NotImplementedError, match=r"invariant=True is not implemented by the .* kernels"):
        flashattn_ext.forward(q, q, q, invariant=True)


def test_what_the_cuda_kernels_lack(on: str) -> None:
    """The CPU computes these calls."""

    def check(what: str, call: Callable[[], Any]) -> None:
        if on == "cpu":
            call()
            return
        with pytest.raises(NotImplementedError, match=f"invariant=True with {what}.* is not implemented by the"):
            call()

    q = torch.randn(1, 20, 2, 64).bfloat16()
    check("relative_bias", lambda: flashattn_ext.forward(q, q, q, relative_bias=torch.randn(2, 9), invariant=True))
    check("an origin that places rows", lambda: flashattn_ext.forward(q, q, q, origin=(0, 0, 3, 0), invariant=True))
    wide, mask = torch.randn(1, 20, 2, 320).bfloat16(), hidden_after(12, 20)
    check("a Mask and head dims", lambda: flashattn_ext.forward(wide, wide, wide, mask=mask, invariant=True))
    narrow = q.to(torch.float8_e4m3fn)
    check("q of", lambda: flashattn_ext.flash_attn_with_kvcache(narrow, narrow, narrow, invariant=True))
