"""scaled_dot_product_attention on this package's kernels: torch's semantics, counted fallbacks, and torch restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_ext

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("torch is older than 2.10, which has no registry of attention implementations", allow_module_level=True)

from flashattn_ext.integrations import sdpa


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    sdpa.restore()


def _random(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def _results(tensors: dict[str, Any], dtype: torch.dtype | None = None, **options: Any) -> dict[str, Tensor]:
    """out and the gradients of all floating-point inputs, computed in `dtype`."""
    leaves = {
        name: (t if dtype is None else t.to(dtype)).detach().requires_grad_() if t.is_floating_point() else t
        for name, t in tensors.items()
    }
    out = F.scaled_dot_product_attention(**leaves, **options)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    (out * weights.to(out)).sum().backward()
    return {"out": out.detach(), **{f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}}


def _check(tensors: dict[str, Any], **options: Any) -> None:
    """The call runs here; its error is at most twice (gradients: three times) the error of torch's formula in the inputs' dtype."""
    with sdpa.activate(report=True) as report:
        got = _results(tensors, **options)
    assert report is not None and report.ours == 1 and not report.torchs, str(report)
    with sdpa_kernel(SDPBackend.MATH):
        exact = _results(tensors, torch.float64, **options)
        plain = _results(tensors, **options)
    assert got.keys() == exact.keys()
    for name, expected in exact.items():
        assert got[name].dtype == plain[name].dtype and got[name].shape == plain[name].shape, name
        error, allowed = ((x.double() - expected).abs().max().item() for x in (got[name], plain[name]))
        floor = 1e-10 if plain[name].dtype == torch.float64 else 1e-5
        factor = 2 if name == "out" else 3  # gradients as in flash-attn 2's tests: these are single draws
        assert error <= factor * allowed + floor, f"{name}: error {error:.3e}, torch has {allowed:.3e}"


def _qkv(device: str, Sq: int = 33, Sk: int = 33, Hq: int = 4, Hk: int = 4, **kind: Any) -> dict[str, Tensor]:
    shapes = {"query": (2, Hq, Sq, 16), "key": (2, Hk, Sk, 16), "value": (2, Hk, Sk, 24)}
    return {name: _random(device, *shape, **kind) for name, shape in shapes.items()}


def test_every_dtype(device: str, dtype: torch.dtype) -> None:
    _check(_qkv(device, dtype=dtype), is_causal=True)


@pytest.mark.parametrize(("Sq", "Sk"), [(33, 33), (7, 40), (40, 7), (1, 20), (20, 1)])
def test_causal_is_aligned_at_the_top_left(device: str, Sq: int, Sk: int) -> None:
    _check(_qkv(device, Sq, Sk), is_causal=True)


def test_scale_and_grouped_heads(device: str) -> None:
    _check(_qkv(device, Hk=2), enable_gqa=True, scale=0.3)
    _check(_qkv(device, Hk=1), scale=0.0)


def test_shapes_that_broadcast(device: str) -> None:
    q, k, v = _qkv(device).values()
    _check({"query": q[0], "key": k[0], "value": v[0]}, is_causal=True)
    _check({"query": q[0, 0], "key": k[0, 0], "value": v[0, 0]})
    _check({"query": q[0], "key": k, "value": v})
    _check({"query": q, "key": k[:1], "value": v[:1]})
    _check({"query": q[:, :1], "key": k, "value": v})


# Shapes of attn_mask that broadcast against q [2, 3, 4, 20, 16] and k [2, 3, 4, 33, 16], in which 2 and 3 are batch dimensions and 4 is heads.
OF_PAIRS = {
    "one for all": (20, 33),
    "heads": (1, 1, 4, 20, 33),
    "of each batch entry": (2, 1, 4, 20, 33),  # OpenFold's triangle attention, Boltz' pair bias
    "of each row": (1, 3, 1, 20, 33),
    "of everything": (2, 3, 4, 20, 33),
    "padding": (2, 3, 1, 1, 33),  # Evoformer's mask of an alignment
    "padding of rows": (3, 1, 1, 33),
}


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("name", OF_PAIRS)
def test_masks_of_more_dimensions(device: str, name: str, kind: str) -> None:
    """Attention over pairs of residues: a bias that the rows share, with its gradient in its own shape."""
    q, k, v = (_random(device, 2, 3, 4, n, 16) for n in (20, 33, 33))
    bias = _random(device, *OF_PAIRS[name])
    mask = bias > -1.5 if kind == "bool" else bias
    _check({"query": q, "key": k, "value": v, "attn_mask": mask})


def test_tensors_of_more_dimensions(device: str) -> None:
    q, k, v = (_random(device, 2, 3, 4, n, 16) for n in (20, 33, 33))
    _check({"query": q, "key": k, "value": v}, is_causal=True)
    _check({"query": q, "key": k[:, :, :2], "value": v[:, :, :2]}, enable_gqa=True, scale=0.2)
    _check({"query": q, "key": k[:, :1], "value": v[0]})
    _check({"query": q[None], "key": k[None], "value": v[None], "attn_mask": _random(device, 2, 1, 4, 20, 33)})
    with sdpa.activate(report=True) as report:
        out = F.scaled_dot_product_attention(q[:, :0], k[:, :0], v[:, :0], _random(device, 2, 1, 4, 20, 33))
    assert report is not None and report.ours == 1 and out.shape == (2, 0, 4, 20, 16)
    rows = {
        name: t.transpose(0, 1).contiguous().transpose(0, 1) for name, t in (("query", q), ("key", k), ("value", v))
    }
    _check({**rows, "attn_mask": _random(device, 1, 3, 4, 20, 33)})


def test_a_bias_that_rows_share_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of its rows, or one for each batch entry, where entries have their own."""
    q, calls = torch.randn(2, 32, 4, 24, 16), []
    forward = flashattn_ext.api.forward
    monkeypatch.setattr(sdpa.api, "forward", lambda *a, **options: (calls.append(options), forward(*a, **options))[1])
    for shape, shapes in (((1, 1, 4, 24, 24), [(1, 4, 24, 24)]), ((2, 1, 4, 24, 24), [(1, 4, 24, 24)] * 2)):
        bias, calls[:] = torch.randn(shape), []
        with sdpa.activate(report=True) as report:
            F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        assert report is not None and report.ours == 1
        assert [tuple(call["bias"].shape) for call in calls] == shapes
        assert {call["bias"].untyped_storage().data_ptr() for call in calls} == {bias.untyped_storage().data_ptr()}


def _bool_masks(device: str, Sq: int, Sk: int) -> dict[str, Tensor]:
    documents = torch.arange(Sk) // 10
    lengths = torch.tensor([Sk - 5, Sk // 2])
    return {
        "causal": torch.ones(Sq, Sk, dtype=torch.bool).tril(),
        "padding": (torch.arange(Sk) < lengths[:, None])[:, None, None],
        "padding_of_all_rows": (torch.arange(Sk) < lengths[:, None])[:, None, None].expand(2, 1, Sq, Sk),
        "documents": (documents[:, None] == documents)[None, None],
        "everything": torch.ones(1, 1, Sq, Sk, dtype=torch.bool),
        "nothing_for_some": (torch.arange(Sq) % 4 != 1)[:, None].expand(Sq, Sk),
        "rows_in_two_runs": ((torch.arange(Sq) < 4) | (torch.arange(Sq) >= 20))[:, None].expand(Sq, Sk),
        "random": torch.rand(2, 4, Sq, Sk) < 0.5,
        "one_head": torch.rand(2, 1, Sq, Sk) < 0.5,
    }


@pytest.mark.parametrize("name", _bool_masks("cpu", 33, 33))
def test_bool_masks(device: str, name: str) -> None:
    mask = _bool_masks(device, 33, 33)[name].to(device)
    _check({**_qkv(device), "attn_mask": mask})


@pytest.mark.parametrize(
    "shape", [(33, 40), (1, 40), (33, 1), (2, 1, 33, 40), (1, 4, 33, 40), (2, 4, 1, 40), (4, 33, 40)]
)
def test_additive_masks_have_gradients(device: str, shape: tuple[int, ...]) -> None:
    _check({**_qkv(device, 33, 40), "attn_mask": _random(device, *shape)})


def test_additive_masks_that_hide(device: str) -> None:
    mask = torch.zeros(33, 33, device=device).masked_fill(~torch.ones(33, 33, device=device).tril().bool(), -torch.inf)
    tensors = _qkv(device)
    with sdpa.activate(report=True) as report:
        got = F.scaled_dot_product_attention(**tensors, attn_mask=mask)
    assert report.ours == 1
    torch.testing.assert_close(got, F.scaled_dot_product_attention(**tensors, is_causal=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("Sq", "Sk"), [(0, 5), (0, 0), (5, 0)])
@pytest.mark.parametrize("kind", ["bool", "expanded", "additive", "learned"])
def test_masks_without_queries_or_keys(device: str, Sq: int, Sk: int, kind: str) -> None:
    mask = torch.ones(Sq, Sk, device=device).tril()
    if kind in ("bool", "expanded"):
        mask = mask.bool() if kind == "bool" else mask.bool().expand(2, 4, -1, -1)
    elif kind == "learned":
        mask.requires_grad_()
    tensors = _qkv(device, Sq, Sk)
    with sdpa.activate(report=True) as report:
        out = F.scaled_dot_product_attention(**tensors, attn_mask=mask)
    assert report is not None and report.ours == 1
    expected = F.scaled_dot_product_attention(**tensors, attn_mask=mask)
    torch.testing.assert_close(out, expected)


INTERVALS = ("causal", "padding", "padding_of_all_rows", "documents", "everything")


@pytest.mark.parametrize("name", _bool_masks("cpu", 33, 33))
def test_masks_that_are_intervals_become_intervals(name: str) -> None:
    visible = _bool_masks("cpu", 33, 33)[name]
    mask, bias = sdpa._mask_and_bias(visible, torch.float32, 2, 4, 33, 33)
    if name not in INTERVALS:
        assert mask is None and bias is not None
        return
    assert bias is None
    assert (mask is None) == (name == "everything")
    if mask is not None:
        assert torch.equal(mask.dense(33).expand(2, 4, 33, 33), visible.expand(2, 4, 33, 33))
        additive = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
        assert torch.equal(sdpa._mask_and_bias(additive, torch.float32, 2, 4, 33, 33)[0].intervals, mask.intervals)


@pytest.mark.no_emulator
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_large_masks_that_are_no_intervals_become_blocks(kind: torch.dtype) -> None:
    """On the CPU, where that costs less than a dense bias."""
    visible = torch.rand(2, 1, 520, 512, generator=torch.Generator().manual_seed(0)) < 0.5
    attn_mask = visible if kind == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    mask, bias = sdpa._mask_and_bias(attn_mask, torch.float32, 2, 4, 520, 512)
    assert bias is None and isinstance(mask, flashattn_ext.BlockMask) and torch.equal(mask.dense(), visible)
    q, k = torch.randn(2, 3, 520, 16), torch.randn(2, 3, 512, 16)
    expected = F.scaled_dot_product_attention(q, k, k, attn_mask=attn_mask)
    with sdpa.activate(report=True) as report:
        got = F.scaled_dot_product_attention(q, k, k, attn_mask=attn_mask)
    assert report.ours == 1
    torch.testing.assert_close(got, expected)
    mask, bias = sdpa._mask_and_bias(attn_mask[:, :, :500], torch.float32, 2, 4, 500, 512)
    assert mask is None and bias is not None


def test_masks_that_no_value_says_become_intervals_without_reading_them() -> None:
    """On the meta device as on an accelerator: by its shape alone, a mask with one row hides the same keys from all rows."""
    padding = torch.ones(2, 1, 1, 33, dtype=torch.bool, device="meta")
    for mask in (padding, padding.expand(2, 1, 33, 33)):
        intervals, bias = sdpa._mask_and_bias(mask, torch.float32, 2, 4, 33, 33)
        assert bias is None and intervals.intervals.shape == (2, 1, 33, 2)
    intervals, bias = sdpa._mask_and_bias(
        torch.ones(33, 33, dtype=torch.bool, device="meta"), torch.bfloat16, 2, 4, 33, 33
    )
    assert intervals is None and bias.shape == (1, 1, 33, 33) and bias.dtype == torch.bfloat16


def test_dropout_draws_from_the_generator(device: str) -> None:
    q, k, v = (
        t.to(device) for t in (torch.randn(2, 3, 40, 16), torch.randn(2, 3, 40, 16), torch.eye(40).expand(2, 3, 40, 40))
    )
    with sdpa.activate(report=True) as report:
        torch.manual_seed(5)
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(5)
    expected = flashattn_ext.forward(q, k, v, dropout_p=0.25, layout="bhsd")
    assert report.ours == 1
    assert torch.equal(got, expected)
    assert 0.15 < (got == 0).float().mean() < 0.35


def test_the_result_is_laid_out_as_that_of_torchs_fused_kernels(device: str) -> None:
    """Models merge heads by out.transpose(1, 2).view(B, S, H * D)."""
    with sdpa.activate():
        out = F.scaled_dot_product_attention(**_qkv(device))
    assert out.transpose(1, 2).is_contiguous()


# --- torch's tools ----------------------------------------------------------------------------------------------------


def test_compiled_calls_run_here(device: str) -> None:
    tensors = _qkv(device)
    mask = torch.ones(33, 33, dtype=torch.bool, device=device).tril()

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return causal + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    expected = model(**tensors)
    with sdpa.activate(report=True) as report:
        leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**leaves)
        got.sum().backward()
    torch.compiler.reset()
    assert report.ours >= 2 and not report.torchs, str(report)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert all(t.grad is not None for t in leaves.values())


def test_inference_mode_autocast_and_checkpointing(device: str) -> None:
    tensors = _qkv(device)
    with sdpa.activate(report=True) as report:
        with torch.inference_mode():
            F.scaled_dot_product_attention(**tensors)
        with torch.autocast(device, torch.bfloat16):
            assert F.scaled_dot_product_attention(**tensors).dtype == torch.bfloat16
        q = tensors["query"].requires_grad_()

        def attend(q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, tensors["key"], tensors["value"], dropout_p=0.5)

        torch.manual_seed(1)
        (expected,) = torch.autograd.grad(attend(q).sum(), q)
        torch.manual_seed(1)
        (got,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False).sum(), q)
    # Recomputation stops inside the call, as soon as all saved tensors exist again.
    assert report.ours == 4 and not report.torchs, str(report)
    assert torch.equal(got, expected)


def test_multi_head_attention_module(device: str) -> None:
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    x = _random(device, 2, 9, 32).requires_grad_()
    padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
    padding[1, 6:] = True
    expected, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    with sdpa.activate(report=True) as report:
        got, _ = module(x, x, x, key_padding_mask=padding, need_weights=False)
    assert report.ours == 1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _torchs_samples() -> list[Any]:
    pytest.importorskip("expecttest")  # which torch's own list of samples imports
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = (info for info in op_db if info.name == "nn.functional.scaled_dot_product_attention")
    return [
        sample
        for dtype in (torch.float32, torch.float64)
        for sample in info.sample_inputs("cpu", dtype, requires_grad=True)
    ]


def test_torchs_own_samples() -> None:
    """The inputs that torch tests this function with, from the installed torch."""
    samples = _torchs_samples()
    assert len(samples) > 20
    for sample in samples:
        tensors = {"query": sample.input, "key": sample.args[0], "value": sample.args[1]}
        mask = {"attn_mask": mask} if (mask := sample.kwargs.pop("attn_mask", None)) is not None else {}
        if sample.kwargs.get("dropout_p", 0) == 0:
            _check({**tensors, **mask}, **sample.kwargs)
            continue
        with sdpa.activate(report=True) as report:
            out = F.scaled_dot_product_attention(**tensors, **mask, **sample.kwargs)
        assert report.ours == 1 and torch.isfinite(out).all()


# --- fallbacks to torch ----------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_counted_and_named() -> None:
    q = torch.randn(2, 2, 2, 8, 16)
    with sdpa.activate(report=True) as report:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(q[0], q[0], q[0])
            F.scaled_dot_product_attention(q[0], q[0], q[0])
        large = torch.randn(2, 1, 1, 4, 600)
        got = F.scaled_dot_product_attention(large, large, large)
    assert report.ours == 0
    reasons = dict(report.torchs)
    assert [count for reason, count in reasons.items() if "switched off" in reason] == [2]
    assert [count for reason, count in reasons.items() if "head_dim" in reason] == [1]
    assert "2 by torch: flash attention is switched off" in str(report)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(large, large, large))


def test_errors_are_torchs() -> None:
    q = torch.randn(1, 2, 4, 8)
    calls: list[dict[str, Any]] = [
        {"key": torch.randn(1, 2, 4, 9)},
        {"key": q.half()},
        {"key": torch.randn(1, 3, 4, 8), "value": torch.randn(1, 3, 4, 8)},
        {"attn_mask": torch.ones(3, 3)},
        # A mask of each key head, of which there are fewer than query heads.
        {
            "query": torch.randn(1, 4, 4, 8),
            "attn_mask": torch.ones(1, 2, 4, 4, dtype=torch.bool).tril(),
            "enable_gqa": True,
        },
        {"attn_mask": torch.ones(1, 3, 4, 4, dtype=torch.bool).tril()},
        {"query": q[None].expand(2, 3, 2, 4, 8), "attn_mask": torch.ones(3, 2, 1, 4, 4)},
    ]
    for changed in calls:
        messages = []
        for active in (False, True):
            if active:
                sdpa.activate()
            with pytest.raises(Exception) as error:
                F.scaled_dot_product_attention(**{"query": q, "key": q, "value": q, **changed})
            sdpa.restore()
            messages.append((error.type, str(error.value)))
        assert messages[0] == messages[1]


def test_forward_mode_and_double_backward_say_what_torch_says() -> None:
    q, t = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    with sdpa_kernel(SDPBackend.MATH):
        _, expected = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (t,))
        with sdpa.activate():
            _, got = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (t,))
    torch.testing.assert_close(got, expected)
