"""A KV cache in float8_e4m3fn: decoding, prefill and appending, with q in bfloat16 or fp8, in pages or not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_cases import CacheCase, CacheInputs, make_inputs, random_case
from helpers import assert_same_bits, own_seeds
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask, fp8, quantize_fp8
from flashattn_ext.decode import paged_varlen_forward

FP8 = torch.float8_e4m3fn
DESCALES = ("descale_q", "descale_k", "descale_v")


def elements_of(t: Tensor, descale: Tensor, group: int = 1) -> Tensor:
    """t [batch, rows, heads, D] in fp8 with descales [batch or 1, heads or 1] of groups of heads."""
    of_heads = descale.expand(-1, t.shape[2] // group).repeat_interleave(group, 1)
    return fp8.quantised(t, of_heads[:, None, :, None])


def values_of(t: Tensor, descale: Tensor, group: int = 1) -> Tensor:
    of_heads = descale.double().expand(-1, t.shape[2] // group).repeat_interleave(group, 1)
    return t.double() * of_heads[:, None, :, None]


def make(case: CacheCase, q_is_fp8: bool, new_is_fp8: bool, out_dtype: torch.dtype | None) -> CacheInputs:
    """The case with caches in fp8. Descales differ by head only, because entries of the cache belong to no one sequence."""
    inputs, rng = make_inputs(case, torch.bfloat16), random.Random(case.seed)
    q, k_cache, v_cache, k, v = inputs.tensors
    assert q is not None and k_cache is not None and v_cache is not None
    heads = 1 if rng.random() < 0.3 else case.Hk
    descale_q, descale_k, descale_v = (torch.rand(1, heads) * 0.02 + 0.01 for _ in DESCALES)
    new = [k, v]
    if k is not None and v is not None and new_is_fp8:
        new = [elements_of(k, descale_k), elements_of(v, descale_v)]
    options = {**inputs.options, "out_dtype": out_dtype}
    for name, descale in zip(DESCALES, (descale_q, descale_k, descale_v), strict=True):
        if name != "descale_q" or q_is_fp8:
            options[name] = descale.expand(case.B, case.Hk) if rng.random() < 0.5 else descale
    q = elements_of(q, descale_q, case.Hq // case.Hk) if q_is_fp8 else q
    return CacheInputs(
        [q, elements_of(k_cache, descale_k), elements_of(v_cache, descale_v), *new], options, case.num_splits
    )


def on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, (Tensor, Mask)) else value


def clone(inputs: CacheInputs, device: str = "cpu") -> CacheInputs:
    return CacheInputs(
        [None if t is None else t.clone().to(device) for t in inputs.tensors],
        {name: on(device, value) for name, value in inputs.options.items()},
        inputs.num_splits,
    )


def check(
    case: CacheCase, q_is_fp8: bool, new_is_fp8: bool, out_dtype: torch.dtype | None = None, device: str = "cpu"
) -> None:
    """out, lse and the caches against the reference, whose caches after the call are the ones of the exact result."""
    call = make(case, q_is_fp8, new_is_fp8, out_dtype)
    reference, before = clone(call), clone(call)
    ref_out, ref_lse, ref_max = reference.reference()
    there = clone(call, device)
    out, lse, max_logits = (t.cpu() for t in there.call_with_max_logits())
    call.tensors[1:3] = [t.cpu() for t in there.tensors[1:3]]  # type: ignore[union-attr]
    wanted = out_dtype or torch.bfloat16
    assert out.dtype == ref_out.dtype == wanted and lse.dtype == torch.float32
    for name, place in (("k_cache", 1), ("v_cache", 2)):
        got, expected, old = (c.tensors[place].view(torch.uint8) for c in (call, reference, before))  # type: ignore[union-attr]
        untouched = expected == old
        assert torch.equal(got[untouched], old[untouched]), f"{name}: wrote elsewhere"
        if (
            case.rotary_dim
        ):  # the rotation of the two may differ in the last bit of float32, and so an element by one step
            difference = (got.int() - expected.int()).abs()
            assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-2, name
        else:
            assert torch.equal(got, expected), name
    tolerance = 2**-7 if case.rotary_dim else 2**-8
    ref = exact_result(case, call)
    if ref.numel():
        error = (out.double() - ref).square().mean().sqrt() / ref.square().mean().sqrt().clamp(min=1e-30)
        assert error <= tolerance, f"error {error:.3g}"
        torch.testing.assert_close(out.float(), ref_out.float(), rtol=0.05, atol=0.02 * float(ref.abs().max()))
    infinite = ref_lse.isinf()
    assert torch.equal(lse.isinf(), infinite)
    # The tanh of GPUs has an error of 2^-11.
    of_tanh = 0.0 if device == "cpu" else case.softcap * 2**-10
    atol = 0.05 if case.rotary_dim else max(1e-3, of_tanh)
    torch.testing.assert_close(lse[~infinite], ref_lse[~infinite], rtol=1e-4, atol=atol)
    torch.testing.assert_close(max_logits, ref_max, rtol=1e-3, atol=atol)


def exact_result(case: CacheCase, call: CacheInputs) -> Tensor:
    """out in fp64 from the caches as the call left them."""
    q, k_cache, v_cache, k, _ = call.tensors
    assert q is not None and k_cache is not None and v_cache is not None
    options = {name: value for name, value in call.options.items() if name not in (*DESCALES, "out_dtype")}
    descales = [call.options.get(name) for name in DESCALES]
    of_q, of_k, of_v = (torch.ones(1, 1) if d is None else d[:1] for d in descales)
    new = 0 if k is None else k.shape[1]
    q = values_of(q, of_q, case.Hq // case.Hk)
    cos, sin = options.pop("rotary_cos"), options.pop("rotary_sin")
    lengths = torch.tensor(case.lengths)
    if cos is not None:  # bfloat16: the rotated q is rounded to it
        each = case.causal or max(case.window_size) >= 0
        rotated = [
            flashattn_ext.reference._rotated(
                call.tensors[0][b],
                cos,
                sin,
                lengths[b] + torch.arange(case.Sq) * each,
                case.interleaved,  # type: ignore[index]
            )
            for b in range(case.B)
        ]
        q = torch.stack(rotated).double()
    if options["sink"] is not None:
        options["sink"] = options["sink"].double()
    options["cache_seqlens"] = (lengths + new).int()
    out, *_ = flashattn_ext.kvcache_reference(q, values_of(k_cache, of_k), values_of(v_cache, of_v), **options)
    return out


@pytest.mark.every_isa
@pytest.mark.parametrize("seed", range(20))
def test_random_calls(device: str, seed: int) -> None:
    for own in own_seeds(device, seed):
        check_random_call(own, device)


def check_random_call(seed: int, device: str) -> None:
    rng, case = random.Random(seed), replace(random_case(seed), alibi=None)
    q_is_fp8 = not case.rotary_dim and rng.random() < 0.5
    new_is_fp8 = not case.rotary_dim and rng.random() < 0.3
    check(case, q_is_fp8, new_is_fp8, rng.choice([None, None, torch.float32, torch.float16]), device)


@pytest.mark.every_isa
@pytest.mark.parametrize(("q_is_fp8", "Sq"), [(False, 1), (False, 40), (True, 40), (True, 1)])
def test_without_descales_it_is_a_cache_in_bfloat16(device: str, q_is_fp8: bool, Sq: int) -> None:
    """On the CPU decoding and prefill compute with the same operands as for a cache in bfloat16."""
    q, k_cache, v_cache = (torch.randn(2, S, H, 64).to(FP8).to(device) for S, H in ((Sq, 4), (300, 2), (300, 2)))
    options: dict[str, Any] = dict(
        cache_seqlens=torch.tensor([300, 77], dtype=torch.int32, device=device), causal=True, return_softmax_lse=True
    )
    wide = flashattn_ext.flash_attn_with_kvcache(q.bfloat16(), k_cache.bfloat16(), v_cache.bfloat16(), **options)
    got = flashattn_ext.flash_attn_with_kvcache(q if q_is_fp8 else q.bfloat16(), k_cache, v_cache, **options)
    for one, other in zip(got, wide, strict=True):
        if device == "cpu":
            assert_same_bits(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8)


def test_descales_of_each_sequence(device: str) -> None:
    """Sequences with descales of their own, appended to in one call."""
    B, Hk, D = 3, 2, 64
    caches = [torch.zeros(B, 40, Hk, D).to(FP8).to(device) for _ in range(2)]
    k, v = (torch.randn(B, 5, Hk, D).bfloat16() for _ in range(2))
    descale_k, descale_v = (torch.rand(B, Hk) * 0.02 + 0.005 for _ in range(2))
    q = torch.randn(B, 1, 4, D).bfloat16()
    out = flashattn_ext.flash_attn_with_kvcache(
        q.to(device), *caches, k.to(device), v.to(device), cache_seqlens=0,
        descale_k=descale_k.to(device), descale_v=descale_v.to(device),
    ).cpu()  # fmt: skip
    caches = [cache.cpu() for cache in caches]
    for cache, given, descale in zip(caches, (k, v), (descale_k, descale_v), strict=True):
        expected = fp8.quantised(given, descale[:, None, :, None])
        assert torch.equal(cache[:, :5].view(torch.uint8), expected.view(torch.uint8))
        assert not cache[:, 5:].view(torch.uint8).any()
    values = [
        c[:, :5].double() * d.double()[:, None, :, None] for c, d in zip(caches, (descale_k, descale_v), strict=True)
    ]
    ref = flashattn_ext.attention_reference(q.double(), *values)
    assert (out.double() - ref).norm() <= 2**-8 * ref.norm()


ADJACENT = {
    "queries": dict(Hq=8, Hk=4, Sq=4, causal=True, lengths=(100, 37, 0, 128)),
    "pages": dict(Hq=4, Hk=2, Sq=3, new=3, page_size=48, room=144, causal=True, sink=True),
    "splits": dict(Hq=12, Hk=4, Sq=2, num_splits=3, leftpad=(3, 20), window_size=(50, 0)),
    "tree": dict(Hq=2, Hk=2, Sq=8, new=8, tree=True, smooth_softmax=True),
    "mask of heads": dict(Hq=4, Hk=4, Sq=5, new=5, tree=True, mask_heads=4, softcap=5.0),
    "odd": dict(Hq=6, Hk=3, sink=True),
    "narrower": dict(Hq=4, Hk=2, D=48),
    "long": dict(Hq=16, Hk=4, lengths=(3000, 2000), room=3008, page_size=16),
}


@pytest.mark.parametrize("name", ADJACENT)
@pytest.mark.parametrize("q_is_fp8", [False, True])
def test_few_rows_of_adjacent_heads(device: str, name: str, q_is_fp8: bool) -> None:
    """At D = 64 a thread block on a GPU reads two KV heads together, if both have up to 8 rows."""
    options: dict[str, Any] = {"D": 64, "Dv": 64, "room": 160, **ADJACENT[name]}
    check(CacheCase(**options), q_is_fp8, q_is_fp8, device=device)


@pytest.mark.parametrize("page_size", [0, 16])
def test_prefill_with_many_rows(device: str, page_size: int) -> None:
    """Enough query tiles to fill a GPU, which then runs its forward kernels."""
    case = CacheCase(
        lengths=(37, 100, 0, 150, 64, 111, 20, 99), Sq=130, new=130, Hq=16, Hk=2, D=64, Dv=64, room=288,
        page_size=page_size, causal=True, rotary_dim=32,
    )  # fmt: skip
    check(case, False, False, device=device)


def test_a_sink_far_above_the_logits(device: str) -> None:
    """The weights of the keys are tiny, and as precise as others."""
    q, k_cache, v_cache = (torch.randn(2, S, H, 64).to(FP8) for S, H in ((1, 4), (90, 2), (90, 2)))
    sink = torch.tensor([25.0, 0.0, 40.0, -3.0])
    out = flashattn_ext.flash_attn_with_kvcache(
        *(t.to(device) for t in (q, k_cache, v_cache)), sink=sink.to(device), out_dtype=torch.float32
    ).cpu()
    ref = flashattn_ext.attention_reference(*(t.double() for t in (q, k_cache, v_cache)), sink=sink.double())
    for head in range(4):
        assert (out[:, :, head].double() - ref[:, :, head]).norm() <= 2**-8 * ref[:, :, head].norm()


@pytest.mark.parametrize("q_is_fp8", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"softmax_scale": -0.2}, {"softcap": 3.0}, {"softcap": 3.0, "softmax_scale": -0.2}]
)
def test_queries_of_any_magnitude(device: str, q_is_fp8: bool, options: dict[str, Any]) -> None:
    """Far outside the range of float16, in one tile of rows of a KV head; the descales make the logits ordinary again."""
    magnitudes = torch.tensor([2.0**-9, 448.0] if q_is_fp8 else [2.0**60, 2.0**-110])
    q = torch.randn(2, 3, 4, 64) * torch.logspace(0, -30, 64, 2.0)  # in each row as well
    q = (q.clamp(-1, 1) * magnitudes.repeat_interleave(2)[:, None]).to(FP8 if q_is_fp8 else torch.bfloat16)
    q.view(torch.uint8)[0, 2, 1] = 0
    k_cache, v_cache = (torch.randn(2, 90, 2, 64).to(FP8) for _ in range(2))
    descale_k = torch.stack([4 / magnitudes, torch.tensor([0.0, -4 / magnitudes[1]])])
    out, lse = flashattn_ext.flash_attn_with_kvcache(
        *(t.to(device) for t in (q, k_cache, v_cache)), causal=True, descale_k=descale_k.to(device),
        out_dtype=torch.float32, return_softmax_lse=True, **options,
    )  # fmt: skip
    k = k_cache.double() * descale_k.double()[:, None, :, None]
    ref, ref_lse = flashattn_ext.attention_reference(
        q.double(), k, v_cache.double(), causal=True, return_lse=True, **options
    )
    assert (out.cpu().double() - ref).norm() <= 2**-8 * ref.norm()
    of_tanh = 0.0 if device == "cpu" else options.get("softcap", 0.0) * 2**-10
    torch.testing.assert_close(lse.cpu().double(), ref_lse.double(), rtol=1e-5, atol=max(1e-5, of_tanh))


def test_a_query_or_key_that_is_not_finite(device: str) -> None:
    """It reaches the rows that read it, and no other one."""
    q = torch.randn(2, 1, 4, 64).bfloat16()
    k_cache, v_cache = (torch.randn(2, 40, 2, 64).to(FP8) for _ in range(2))
    q[0, 0, 1, 5] = float("nan")
    q[1, 0, 0, 7] = float("inf")
    k_cache.view(torch.uint8)[1, 3, 1, 9] = 0xFF  # NaN
    v_cache.view(torch.uint8)[0, 39, 1, 63] = 0x7F  # NaN
    out = flashattn_ext.flash_attn_with_kvcache(*(t.to(device) for t in (q, k_cache, v_cache))).cpu()
    ref = flashattn_ext.attention_reference(*(t.double() for t in (q, k_cache, v_cache)))
    assert torch.equal(out.isnan(), ref.isnan())
    finite = ~ref.isnan()
    torch.testing.assert_close(out[finite].double(), ref[finite], rtol=2e-2, atol=2e-2)


def test_appended_values_saturate_and_keep_nan(device: str) -> None:
    cache = torch.zeros(1, 4, 1, 16).to(FP8).to(device)
    k = torch.tensor(
        [1e30, -1e30, float("inf"), float("-inf"), float("nan"), 464.0, 447.0, 0.0, 2**-9, 2**-10, 3 * 2**-11, -(2**-8)]
    )
    k = torch.cat([k, torch.zeros(4)]).view(1, 1, 1, 16).bfloat16().to(device)
    flashattn_ext.flash_attn_with_kvcache(k, cache, cache.clone(), k, k, cache_seqlens=0)
    expected = [448, -448, 448, -448, float("nan"), 448, 448, 0, 2**-9, 0, 2**-9, -(2**-8), 0, 0, 0, 0]
    torch.testing.assert_close(cache[0, 0, 0].float().cpu(), torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


def test_packed_calls_with_pages(device: str) -> None:
    """flash_attn_varlen_func's way into decoding takes the descales as the cache function does."""
    lengths_q, lengths_k = torch.tensor([0, 3, 24], dtype=torch.int32), torch.tensor([0, 40, 100], dtype=torch.int32)
    k_cache, v_cache = (torch.randn(8, 16, 2, 32).to(FP8) for _ in range(2))
    table = torch.randperm(8, dtype=torch.int32).view(2, 4)
    q = torch.randn(24, 4, 32).bfloat16()
    descales = {"descale_k": torch.rand(2, 2) + 0.5, "descale_v": torch.rand(2, 1) + 0.5}
    given = [t.to(device) for t in (q, k_cache, v_cache, lengths_q, lengths_k)]
    out, lse = paged_varlen_forward(
        *given, 21, 60, table.to(device), causal=True, **{name: t.to(device) for name, t in descales.items()}
    )
    out, lse = out.cpu(), lse.cpu()
    for b, (rows, length) in enumerate(((slice(0, 3), 40), (slice(3, 24), 60))):
        k, v = (c.view(torch.uint8)[table[b].long()].view(FP8).flatten(0, 1)[None, :length] for c in (k_cache, v_cache))
        ref, ref_lse = flashattn_ext.attention_reference(
            q[rows][None], k, v, causal=True, return_lse=True, out_dtype=torch.float32,
            **{name: t[b : b + 1] for name, t in descales.items()},
        )  # fmt: skip
        torch.testing.assert_close(out[rows].float(), ref[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:, rows], ref_lse[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("Sq", [33, 64])
@pytest.mark.parametrize("packed", [True, False])
def test_room_for_many_more_keys(device: str, Sq: int, packed: bool) -> None:
    """A table with room for 128 MB of a sequence's keys, of which it has few. Where queries of all heads fill a GPU the prefill
    widens the keys, and kernels must not take its copy for fp8."""
    page, pages, Hk, group, D, length = 16, 1 << 14, 4, 32, 64, 100
    # All pages but the first ones are the same memory.
    k_cache, v_cache = (torch.randn(page, Hk, D).to(FP8).to(device).expand(pages, page, Hk, D) for _ in range(2))
    q = torch.randn(Sq, Hk * group, D).bfloat16()
    lengths = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (Sq, length)]
    table = torch.arange(pages, dtype=torch.int32, device=device)[None]
    descale_k, descale_v = torch.full((1, 1), 0.5), torch.full((1, Hk), 1.5)
    options = {"causal": True, "descale_k": descale_k.to(device), "descale_v": descale_v.to(device)}
    if packed:
        out, lse = paged_varlen_forward(q.to(device), k_cache, v_cache, *lengths, Sq, length, table, **options)
        out, lse = out[None], lse[None]
    else:
        out, lse = flashattn_ext.flash_attn_with_kvcache(
            q[None].to(device), k_cache, v_cache, cache_seqlens=lengths[1][1:], block_table=table,
            return_softmax_lse=True, **options,
        )  # fmt: skip
    k, v = (c[:8].cpu().view(torch.uint8).reshape(1, -1, Hk, D)[:, :length].view(FP8) for c in (k_cache, v_cache))
    ref, ref_lse = flashattn_ext.attention_reference(
        q[None], k, v, causal=True, return_lse=True, out_dtype=torch.float32, descale_k=descale_k, descale_v=descale_v
    )
    torch.testing.assert_close(out.cpu().float(), ref, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), ref_lse, rtol=1e-4, atol=1e-4)


def small(**options: Any) -> tuple[list[Tensor | None], dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 1, H, 32, generator=generator).bfloat16() for H in (4, 2, 2))
    caches = [torch.randn(2, 20, 2, 32, generator=generator).to(FP8) for _ in range(2)]
    tensors: dict[str, Any] = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v, **options}
    return [tensors.pop(name) for name in ("q", "k_cache", "v_cache", "k", "v")], {"cache_seqlens": 7, **tensors}


ROTARY = {name: torch.ones(20, 4).bfloat16() for name in ("rotary_cos", "rotary_sin")}
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slopes": ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes: .*bfloat16"),
    "q in float16": ({"q": torch.zeros(2, 1, 4, 32).half()}, TypeError, "q: expected dtype bfloat16 or float8_e4m3fn"),
    "q in e5m2": ({"q": torch.zeros(2, 1, 4, 32).to(torch.float8_e5m2)}, TypeError, "q: expected dtype float8_e4m3fn"),
    "v_cache in bfloat16": (
        {"v_cache": torch.zeros(2, 20, 2, 32).bfloat16()}, TypeError, "v_cache: expected the dtype of k_cache",
    ),
    "k in float32": ({"k": torch.zeros(2, 1, 2, 32)}, TypeError, "k: expected dtype bfloat16, which is quantised, or float8"),
    "v alone in fp8": ({"v": torch.zeros(2, 1, 2, 32).to(FP8)}, TypeError, "v: expected the dtype of k"),
    "rotary of q in fp8": ({"q": torch.zeros(2, 1, 4, 32).to(FP8), **ROTARY}, NotImplementedError, "rotary_cos: .*quantised"),
    "descale_q for bfloat16": ({"descale_q": torch.ones(1, 1)}, ValueError, "descale_q: expected None for q of dtype"),
    "shape": ({"descale_k": torch.ones(3, 2)}, ValueError, r"descale_k: expected shape \[2 or 1, 2 or 1\]"),
    "dtype": ({"descale_v": torch.ones(2, 2).bfloat16()}, TypeError, "descale_v: expected dtype float32, got bfloat16"),
    "out_dtype": ({"out_dtype": torch.float64}, TypeError, "out_dtype: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, error, message = REFUSED[name]
    tensors, options = small(**given)
    before = tensors[1].clone()  # type: ignore[union-attr]
    with pytest.raises(error, match=message):
        flashattn_ext.flash_attn_with_kvcache(*tensors, **options)
    assert torch.equal(tensors[1].view(torch.uint8), before.view(torch.uint8))  # type: ignore[union-attr]


def test_descales_of_a_cache_in_bfloat16_are_refused() -> None:
    q = torch.zeros(1, 1, 2, 16).bfloat16()
    with pytest.raises(ValueError, match="descale_k: expected None"):
        flashattn_ext.flash_attn_with_kvcache(q, q, q, descale_k=torch.ones(1, 1))
    with pytest.raises(ValueError, match="out_dtype: expected None"):
        flashattn_ext.flash_attn_with_kvcache(q, q, q, out_dtype=torch.float32)


def test_a_backward_through_it_raises() -> None:
    tensors, options = small(k=None, v=None)
    tensors[0].requires_grad_()  # type: ignore[union-attr]
    out = flashattn_ext.flash_attn_with_kvcache(*tensors, **options)
    with pytest.raises(RuntimeError, match="no gradients"):
        out.sum().backward()


def test_compiled_and_checked_by_torch() -> None:
    torch._dynamo.reset()
    tensors, options = small(descale_k=torch.full((1, 2), 0.5))
    others, _ = small()

    def function(*given: Tensor) -> Tensor:
        out: Tensor = flashattn_ext.flash_attn_with_kvcache(*given, **options)
        return out

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(*tensors), function(*others))
    assert torch.equal(tensors[1].view(torch.uint8), others[1].view(torch.uint8))  # type: ignore[union-attr]


def test_autocast_keeps_the_cache() -> None:
    tensors, options = small(descale_v=torch.full((1, 2), 0.5))
    others, _ = small()
    with torch.autocast("cpu", torch.bfloat16):
        out = flashattn_ext.flash_attn_with_kvcache(
            *(t.float() if t.dtype == torch.bfloat16 else t for t in tensors), **options  # type: ignore[union-attr]
        )  # fmt: skip
    assert_same_bits(out, flashattn_ext.flash_attn_with_kvcache(*others, **options))
    assert torch.equal(tensors[1].view(torch.uint8), others[1].view(torch.uint8))  # type: ignore[union-attr]


def test_a_step_with_quantised_keys() -> None:
    """quantize_fp8 fills a cache, and a step reads it with the same descales."""
    k, v = torch.randn(2, 50, 2, 64), torch.randn(2, 50, 2, 64)
    (k8, descale_k), (v8, descale_v) = quantize_fp8(k, 2), quantize_fp8(v, 2)
    q = torch.randn(2, 1, 4, 64).bfloat16()
    out = flashattn_ext.flash_attn_with_kvcache(q, k8, v8, descale_k=descale_k, descale_v=descale_v)
    ref = flashattn_ext.attention_reference(q.double(), k.double(), v.double())
    assert (out.double() - ref).norm() <= 0.1 * ref.norm()
