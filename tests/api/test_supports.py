"""supports(): whether a call can run, and why few queries run the kernels of long sequences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cu_seqlens
from torch.profiler import ProfilerActivity, profile

import flashattn_ext
from flashattn_ext import Mask

KEYS, LONG = 2000, 160  # keys of a sequence, and queries of a call that runs the kernels of long sequences
NEEDS_EMULATOR = pytest.mark.skipif(
    not Path(flashattn_ext.__file__).with_name("_ascend_emulator.so").exists(),
    reason="the emulator is not built (make emulator)",
)
# The options that may keep few queries from their own kernels, by the names that the reason gives them.
NAMES = {
    "mask": "mask",
    "dropout and mask": "mask and dropout_p",
    "dropout": "dropout_p",
    "relative bias": "relative_bias",
    "bias": "bias",
    "slopes with a gradient": "the gradient of alibi_slopes or relative_bias",
}
OPTIONS = ["plain", "causal", "window", "softcap", "sink", "smooth", "slopes", *NAMES]


def options_of(name: str, rows: int, heads: int, device: str, packed: bool = False) -> dict[str, Any]:
    """The options of the last `rows` of LONG queries. The origin gives them their places in the larger call."""
    generator = torch.Generator().manual_seed(5)
    ids = (torch.arange(KEYS) < 300).long().expand(2, KEYS).to(device)
    documents = Mask.documents(ids)
    if packed:
        documents = Mask(documents.intervals.transpose(0, 1).flatten(1, 2).contiguous())
    slopes = torch.rand(heads, generator=generator).to(device)
    bias = torch.randn(1, 1, LONG, KEYS, generator=generator).to(device)[:, :, LONG - rows :]
    dropout, mask = {"dropout_p": 0.3, "rng_seed": 3}, {"mask": documents}
    named: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window_size": (1500, 7)},
        "softcap": {"softcap": 3.0},
        "sink": {"sink": torch.randn(heads, generator=generator).to(device)},
        "smooth": {"smooth_softmax": True},
        "slopes": {"alibi_slopes": slopes * 0.01},
        "slopes with a gradient": {"alibi_slopes": (slopes * 0.01).requires_grad_()},
        "relative bias": {"relative_bias": torch.randn(heads, 19, generator=generator).to(device)},
        "bias": {"bias": bias},
        "dropout": dropout,
        "mask": mask,
        "dropout and mask": dropout | mask,
    }
    return {**named[name], "origin": (0, 0, KEYS - rows, 0)}


def inputs(rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, device: str) -> Any:
    """q of `rows` queries, the last of a longer call's, and k and v."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(2, length, H, D, generator=generator).to(dtype).to(device)
        for length, H, D in ((LONG, heads[0], dims[0]), (KEYS, heads[1], dims[0]), (KEYS, heads[1], dims[1]))
    )
    return q[:, LONG - rows :].contiguous(), k, v


def packed_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors and lengths of packed sequences for varlen_forward, and for supports."""
    rows, device = q.shape[1], str(q.device)
    lengths = {
        "cu_seqlens_q": cu_seqlens([rows] * len(q), device),
        "cu_seqlens_k": cu_seqlens([KEYS] * len(q), device),
        "max_seqlen_q": rows,
        "max_seqlen_k": KEYS,
    }
    return tuple(t.flatten(0, 1) for t in (q, k, v)), lengths


def results(tensors: Any, options: dict[str, Any], packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out [2, rows, Hq, Dv] and lse [2, Hq, rows]."""
    if not packed:
        return flashattn_ext.forward(*tensors, **options, return_lse=True)
    flat, lengths = packed_call(*tensors)
    out, lse = flashattn_ext.varlen_forward(*flat, *lengths.values(), **options, return_lse=True)
    return out.unflatten(0, (2, -1)), lse.unflatten(1, (2, -1)).transpose(0, 1)


def runs_few_queries(tensors: Any, longer: Any, name: str, packed: bool) -> bool:
    """Whether a call ran the kernels for few queries: on a GPU by their names, on the CPU by bits other than those of a longer call."""
    q, device = tensors[0], str(tensors[0].device)
    options = options_of(name, q.shape[1], q.shape[2], device, packed)
    if device != "cpu":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            results(tensors, options, packed)
            torch.cuda.synchronize()
        return any(re.search(r"decode::|PackGqaForward", event.key) for event in recorded.key_averages())
    out, lse = results(tensors, options, packed)
    out_of_long, lse_of_long = results(longer, options_of(name, LONG, q.shape[2], device, packed), packed)
    is_same = torch.equal(out, out_of_long[:, -q.shape[1] :]) and torch.equal(lse, lse_of_long[..., -q.shape[1] :])
    return not is_same


def support_of(tensors: Any, options: dict[str, Any], packed: bool) -> Any:
    if not packed:
        return flashattn_ext.supports(*tensors, **options)
    flat, lengths = packed_call(*tensors)
    return flashattn_ext.supports(*flat, **lengths, **options)


@pytest.mark.no_emulator
@pytest.mark.parametrize("heads,dims", [((8, 2), (64, 64)), ((3, 3), (33, 70))], ids=["grouped", "odd"])
@pytest.mark.parametrize(
    "name,packed", [*((name, False) for name in OPTIONS), *((name, True) for name in OPTIONS if name != "bias")]
)
def test_a_reason_is_given_exactly_where_few_queries_run_other_kernels(
    device: str, dtype: torch.dtype, name: str, packed: bool, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    longer = inputs(LONG, heads, dims, dtype, device)
    for rows in (1, 3):
        tensors = inputs(rows, heads, dims, dtype, device)
        support = support_of(tensors, options_of(name, rows, heads[0], device, packed), packed)
        assert support and support.refusal == ""
        assert (support.slow == "") == runs_few_queries(tensors, longer, name, packed)
        is_lacking = name in NAMES and not (name == "bias" and device == "cpu")
        expected = [NAMES[name]] if is_lacking else []
        assert re.findall(r"because of (.*?)\. ", support.slow) == expected
        queries = f"{rows} quer{'y' if rows == 1 else 'ies'}"
        assert not support.slow or queries in support.slow.split(" run")[0]


@pytest.mark.parametrize("rows", [1, 3, 7, 12, 16])
@pytest.mark.parametrize("name", ["plain", "slopes", "causal", "dropout"])
def test_the_reason_follows_the_width_of_vectors(isa: str, rows: int, name: str) -> None:
    """How many queries are few depends on the instruction set; the call without options tells."""
    longer, tensors = (inputs(count, (4, 2), (32, 32), torch.float32, "cpu") for count in (LONG, rows))
    slow = support_of(tensors, options_of(name, rows, 4, "cpu"), False).slow
    is_few = runs_few_queries(tensors, longer, "plain", False)
    assert (slow != "") == (is_few and not runs_few_queries(tensors, longer, name, False))


@pytest.mark.no_emulator
@pytest.mark.parametrize("name", OPTIONS)
def test_no_reason_for_many_queries_or_few_keys(device: str, name: str) -> None:
    q, k, v = inputs(LONG, (2, 2), (32, 32), torch.float32, device)
    options = options_of(name, LONG, 2, device)
    assert flashattn_ext.supports(q, k, v, **options).slow == ""
    del options["origin"]
    few = options | {name: options[name][:, :, -2:, :3] for name in ("bias",) if name in options}
    few |= {"mask": Mask(options["mask"].intervals[:, :, :3].contiguous())} if "mask" in options else {}
    assert flashattn_ext.supports(q[:, -2:], k[:, :3], v[:, :3], **few).slow == ""


def test_invariant_calls_of_the_cpu(restore_threads: None) -> None:
    """Few KV heads run the kernels that divide rows among threads."""
    q, k, v = inputs(1, (4, 2), (32, 32), torch.float32, "cpu")
    torch.set_num_threads(4)
    assert flashattn_ext.supports(q, k, v, invariant=True).slow == ""
    assert "because of invariant." in flashattn_ext.supports(q[:1], k[:1], v[:1], invariant=True).slow
    # Either alone runs the kernels for few queries.
    slopes = torch.rand(4)
    assert flashattn_ext.supports(q, k, v, alibi_slopes=slopes).slow == ""
    slow = flashattn_ext.supports(q, k, v, alibi_slopes=slopes, invariant=True).slow
    assert "because of alibi_slopes and invariant." in slow


def test_a_gradient_of_slopes_that_is_not_taken(device: str) -> None:
    q, k, v = inputs(1, (4, 2), (32, 32), torch.float16, device)
    slopes = torch.rand(4, device=device, requires_grad=True)
    assert "the gradient of alibi_slopes" in flashattn_ext.supports(q, k, v, alibi_slopes=slopes).slow
    assert flashattn_ext.supports(q, k, v, alibi_slopes=slopes.detach()).slow == ""
    with torch.no_grad():
        assert flashattn_ext.supports(q, k, v, alibi_slopes=slopes).slow == ""


def outcome(call: Any) -> tuple[str, str] | None:
    """Type and text of the error that a call raises, None if it runs."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def of_supports(*tensors: Any, **options: Any) -> tuple[str, str] | None:
    try:
        refusal = flashattn_ext.supports(*tensors, **options).refusal
    except Exception as error:
        return type(error).__name__, str(error)
    return ("NotImplementedError", refusal) if refusal else None


def fp8(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(torch.float8_e4m3fn) for t in tensors]


def dual(t: torch.Tensor) -> torch.Tensor:
    return torch.autograd.forward_ad.make_dual(t, torch.ones_like(t))


LEARNED_SINK: dict[str, Any] = {"sink": torch.zeros(2, requires_grad=True)}
SAME_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "runs": ("plain", {}),
    "fp8 runs": ("fp8", {}),
    "fp8, a gradient": ("fp8", LEARNED_SINK),
    "fp8, a gradient and dropout": ("fp8", LEARNED_SINK | {"dropout_p": 0.1, "rng_seed": 3}),
    "fp8, a gradient and a wrong shape": ("fp8", {"sink": torch.zeros(3, requires_grad=True)}),
    "fp8, dropout": ("fp8", {"dropout_p": 0.1}),
    "fp8, slopes": ("fp8", {"alibi_slopes": torch.zeros(2)}),
    "fp8, a bias": ("fp8", {"bias": torch.zeros(1, 1, 1, 3)}),
    "invariant with an origin": ("plain", {"invariant": True, "origin": (0, 0, 3, 3)}),
    "invariant with an origin, gradients": ("learned", {"invariant": True, "origin": (0, 0, 3, 3)}),
    "a sink of other heads": ("plain", {"sink": torch.zeros(3)}),
    "a dtype": ("plain", {"alibi_slopes": torch.zeros(2).half()}),
    "a seed": ("plain", {"rng_seed": 1 << 70}),
    "a flag": ("plain", {"return_lse": 1}),
    "a layout": ("plain", {"layout": "sbhd"}),
    "no tensor": ("none", {}),
}


@pytest.mark.parametrize("name", SAME_TEXT)
def test_texts_are_those_of_the_call(name: str) -> None:
    kind, options = SAME_TEXT[name]
    q = torch.randn(1, 3, 2, 16, requires_grad=kind == "learned")
    tensors = {"fp8": fp8(q, q, q), "none": [None, q, q]}.get(kind, [q, q, q])
    assert of_supports(*tensors, **options) == outcome(lambda: flashattn_ext.forward(*tensors, **options))


def test_tangents_of_fp8_calls() -> None:
    q = fp8(torch.randn(1, 3, 2, 16))[0]
    with torch.autograd.forward_ad.dual_level():
        sink = dual(torch.zeros(2))
        expected = outcome(lambda: flashattn_ext.forward(q, q, q, sink=sink))
        assert expected is not None and of_supports(q, q, q, sink=sink) == expected
        wide = torch.randn(1, 3, 2, 16)
        assert flashattn_ext.supports(dual(wide), wide, wide)


def test_lengths_beside_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=torch.jagged)
    starts = cu_seqlens([3, 5], "cpu")
    with pytest.raises(ValueError, match="cu_seqlens_q: expected None with nested tensors"):
        flashattn_ext.supports(nested, nested, nested, cu_seqlens_q=starts, cu_seqlens_k=starts)
    for function in (flashattn_ext.forward, flashattn_ext.supports):
        with pytest.raises(ValueError, match="layout: expected one of"):
            function(nested, nested, nested, layout="sbhd")


def test_refusals_are_the_errors_of_the_call() -> None:
    q = torch.randn(1, 3, 2, 16)
    fp8 = q.to(torch.float8_e4m3fn)
    for tensors, options in (((fp8,) * 3, {"dropout_p": 0.1}), ((q,) * 3, {"invariant": True, "origin": (0, 0, 3, 3)})):
        support = flashattn_ext.supports(*tensors, **options)
        assert not support and support.backend == "" and support.slow == ""
        with pytest.raises(NotImplementedError, match=re.escape(support.refusal)):
            flashattn_ext.forward(*tensors, **options)
    with pytest.raises(ValueError, match="sink"):
        flashattn_ext.supports(q, q, q, sink=torch.zeros(3))
    with pytest.raises(TypeError, match="is_causal"):
        flashattn_ext.supports(q, q, q, is_causal=True)  # type: ignore[call-arg]


def test_a_backward_that_cannot_run_is_a_refusal() -> None:
    q = torch.randn(1, 3, 2, 16).to(torch.float8_e4m3fn)
    sink = torch.zeros(2, requires_grad=True)
    assert flashattn_ext.supports(q, q, q, sink=sink.detach())
    assert "no backward" in flashattn_ext.supports(q, q, q, sink=sink).refusal
    with torch.no_grad():
        assert flashattn_ext.supports(q, q, q, sink=sink)


def test_arguments_are_those_of_a_call() -> None:
    """Arguments without influence, nested tensors, the meta device, autocast."""
    q = torch.randn(1, 3, 2, 16)
    support = flashattn_ext.supports(q, q, q, layout="bshd", rng_seed=3, dropout_p=0.2, return_lse=True)
    assert support == (support.backend, "", "") and support.backend == "cpu"
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 16) for n in (3, 5)], layout=torch.jagged)
    assert flashattn_ext.supports(nested, nested, nested).backend == "cpu"
    assert flashattn_ext.supports(q.to("meta"), q.to("meta"), q.to("meta")) == ("", "", "")
    q, k, v = inputs(1, (2, 2), (32, 32), torch.float32, "cpu")
    with pytest.raises(TypeError, match="k"):
        flashattn_ext.supports(q, k.bfloat16(), v)
    with torch.autocast("cpu", torch.bfloat16):
        assert flashattn_ext.supports(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="rng_seed"):
        flashattn_ext.supports(q, k, v, rng_seed=1 << 70)


@NEEDS_EMULATOR
def test_the_kernels_of_ascend_divide_no_keys() -> None:
    q, k, v = inputs(3, (8, 2), (32, 32), torch.float16, "cpu")
    with flashattn_ext.use_backend("ascend-emulator"):
        support = flashattn_ext.supports(q, k, v)
        assert support.backend == "ascend-emulator"
        assert support.slow.startswith("the 3 queries of this call run") and "has no others" in support.slow
        assert flashattn_ext.supports(q[:, :, :2], k, v).slow == support.slow
        assert flashattn_ext.supports(q, k[:, :300], v[:, :300]).slow == ""  # few keys
        assert flashattn_ext.supports(*inputs(LONG, (8, 2), (32, 32), torch.float16, "cpu")).slow == ""
        refused = flashattn_ext.supports(q.double(), k.double(), v.double())
        assert not refused and "ascend-emulator" in refused.refusal
        # Padded to the boundaries of the dropout generator.
        assert flashattn_ext.supports(q, k, v, dropout_p=0.1, origin=(0, 0, 5, 7))


@NEEDS_EMULATOR
def test_a_reason_names_the_queries_and_options_of_the_caller() -> None:
    """Dropout whose origin is not at a multiple of 16 rows runs as a call of more queries, with a Mask (dropout_padding.py)."""
    q, k = torch.randn(1, 3, 2, 16), torch.randn(1, 600, 2, 16)
    with flashattn_ext.use_backend("ascend-emulator"):
        support = flashattn_ext.supports(q, k, k, dropout_p=0.3, origin=(0, 0, 597, 0))
    assert support and "the 3 queries of this call" in support.slow and "mask" not in support.slow
