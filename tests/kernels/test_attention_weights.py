"""attention_weights: the weights by which forward multiplies v, for chosen rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Case, make_inputs, reference
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn_ext
from flashattn_ext import reference as module

CASES = {
    "plain": Case(Hq=4, Hk=2),
    "causal, more queries": Case(Sq=40, Sk=20, causal=True),
    "window": Case(window_size=(7, 3), Sk=50),
    "scale": Case(softmax_scale=-0.4),
    "softcap": Case(softcap=0.7),
    "sink": Case(sink_dtype=torch.float32, causal=True),
    "smooth": Case(smooth_softmax=True),
    "slopes": Case(alibi="batch"),
    "relative": Case(relative=5, Sk=50),
    "bias": Case(bias="hq", bias_hides=0.3),
    "bias of keys": Case(bias="b"),
    "documents": Case(mask="documents", mask_heads="k", Hq=4, Hk=2, causal=True),
    "intervals": Case(mask="intervals", mask_heads="q"),
    "bhsd": Case(layout="bhsd", causal=True),
    "no keys": Case(Sk=0),
    "no batch": Case(B=0),
}


def weights(case: Case, inputs: Any, rows: Any) -> torch.Tensor:
    options = {name: value for name, value in case.options().items() if name not in ("dropout_p", "rng_seed")}
    return flashattn_ext.attention_weights(inputs.q, inputs.k, rows, **options, **inputs.optional())


@pytest.mark.parametrize("at_once", [1 << 20, 1, 60], ids=["at once", "one by one", "some"])
@pytest.mark.parametrize("name", CASES)
def test_they_make_the_result_of_the_values(
    device: str, name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any chunk size, and rows in any order, some of them twice."""
    monkeypatch.setattr(module, "_WEIGHTS_AT_ONCE", at_once)
    case = CASES[name]
    inputs = make_inputs(case, device)
    rows = [case.Sq - 1, 0, 5, 5]
    got = weights(case, inputs, rows)
    assert got.shape == (case.B, case.Hq, 4, case.Sk) and got.dtype == torch.float32 and not got.requires_grad
    v = inputs.v if case.layout == "bhsd" else inputs.v.transpose(1, 2)
    out, _, _ = reference(case, inputs)
    out = out if case.layout == "bhsd" else out.transpose(1, 2)
    expected = out[:, :, rows].detach()
    torch.testing.assert_close(
        got @ v.repeat_interleave(case.Hq // case.Hk, 1).detach(), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.dtypes("float64", "bfloat16", "float16")
def test_every_dtype_gives_fp32(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype, causal=True), device)
    got = flashattn_ext.attention_weights(inputs.q, inputs.k, torch.tensor([3, 20]), causal=True)
    assert got.dtype == torch.float32
    wide = flashattn_ext.attention_weights(inputs.q.double(), inputs.k.double(), [3, 20], causal=True)
    torch.testing.assert_close(got, wide, rtol=1e-5, atol=1e-6)


def test_rows_that_see_nothing_and_sinks(device: str) -> None:
    q = torch.randn(1, 4, 1, 8, device=device)
    got = flashattn_ext.attention_weights(q, q[:, :2], range(4), causal=True)
    torch.testing.assert_close(got[0, 0].sum(-1).cpu(), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert not got[0, 0, :2].any()
    nan = q.clone()
    nan[:, 3] = math.nan  # a key that row 2 does not see
    assert torch.isfinite(flashattn_ext.attention_weights(q, nan, [0, 1, 2], causal=True)).all()
    sink = torch.full((1,), 40.0, device=device)
    assert flashattn_ext.attention_weights(q, q, range(4), sink=sink).sum() < 1e-6


@pytest.mark.parametrize("size", [-1e7, -1e9, -2.5e38, torch.finfo(torch.float32).min, 3e38])
def test_rows_whose_keys_all_have_a_large_bias(device: str, size: float) -> None:
    """exp(logit - lse) is 1 for each of them, because lse rounds to the bias: the weights of a row added up to the number of keys."""
    q, k = torch.randn(1, 3, 2, 8, device=device), torch.randn(1, 50, 2, 8, device=device)
    bias = torch.full((1, 1, 1, 50), size, device=device)
    got = flashattn_ext.attention_weights(q, k, range(3), bias=bias)
    expected = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8) + bias).softmax(-1)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]))


def test_sinks_at_the_ends_of_the_range(device: str) -> None:
    q = torch.randn(1, 4, 2, 8, device=device)
    got = flashattn_ext.attention_weights(q, q, range(4), sink=torch.tensor([3e38, -3e38], device=device))
    assert not got[:, 0].any()
    torch.testing.assert_close(got[:, 1].sum(-1), torch.ones_like(got[:, 1, :, 0]))


@pytest.mark.parametrize("given", ["float32", "bfloat16", "mixed"])
def test_autocast_casts_what_forward_casts_and_no_more(device: str, given: str) -> None:
    """Logits of 100 were rounded to bfloat16: some weights were off by a fifth of their size."""
    q, k = (8 * torch.randn(1, 40, 2, 8, device=device) for _ in range(2))
    bias = torch.randn(1, 2, 40, 40, device=device)
    if given != "float32":
        q = q.bfloat16()
    if given == "bfloat16":
        k = k.bfloat16()
    expected = flashattn_ext.attention_weights(q.bfloat16(), k.bfloat16(), range(40), bias=bias, causal=True)
    with torch.autocast(device, torch.bfloat16):
        got = flashattn_ext.attention_weights(q, k, range(40), bias=bias, causal=True)
    assert torch.equal(got, expected)
    wide = flashattn_ext.attention_weights(
        q.bfloat16().double(), k.bfloat16().double(), range(40), bias=bias, causal=True
    )
    torch.testing.assert_close(got, wide.float(), rtol=1e-4, atol=1e-6)


def test_it_is_placed_by_an_origin(device: str) -> None:
    q, k = torch.randn(1, 20, 2, 8, device=device), torch.randn(1, 30, 2, 8, device=device)
    whole = flashattn_ext.attention_weights(q, k, [12], causal=True, window_size=(9, -1), origin=(0, 0, 0, 0))
    part = flashattn_ext.attention_weights(
        q[:, 8:], k[:, :13], [4], causal=True, window_size=(9, -1), origin=(0, 0, 8, 0)
    )
    torch.testing.assert_close(part, whole[..., :13])


class Allocations(TorchDispatchMode):
    """Numbers of elements of every storage that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for t in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage.data_ptr()] = max(self.storages.get(storage.data_ptr(), 0), storage.nbytes())
        return results


def test_it_holds_little_beside_what_it_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, keys = 1 << 13, 20000
    monkeypatch.setattr(module, "_WEIGHTS_AT_ONCE", at_once)
    q, k = torch.randn(1, 8, 4, 32).bfloat16(), torch.randn(1, keys, 1, 32).bfloat16()
    with Allocations() as made:
        got = flashattn_ext.attention_weights(q, k, range(8), causal=True, smooth_softmax=True)
    given = {t.untyped_storage().data_ptr() for t in (q, k, got)}
    largest = max(size for storage, size in made.storages.items() if storage not in given)
    assert largest <= 8 * (keys + 1)  # positions of keys, or one row: they are more than is computed with at once


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([9], ValueError),
        ([-1], ValueError),
        ([1.5], TypeError),
        (torch.tensor([0.5]), TypeError),
        (torch.tensor([[1]]), TypeError),
    ],
    ids=str,
)
def test_bad_rows(rows: Any, error: type[Exception]) -> None:
    q = torch.randn(1, 9, 1, 8)
    with pytest.raises(error, match=r"^rows: "):
        flashattn_ext.attention_weights(q, q, rows)


def test_bad_shapes() -> None:
    q = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match=r"^k: "):
        flashattn_ext.attention_weights(q, q[..., :4], [0])
    with pytest.raises(ValueError, match=r"^q: "):
        flashattn_ext.attention_weights(q[:, :, :1], q, [0])
