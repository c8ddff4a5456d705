"""t5_relative_bias. tests/api/test_models.py tests it in a whole T5 block."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import flashattn_ext


def test_distances_from_the_largest_on_share_a_bucket() -> None:
    table = torch.arange(32.0)[:, None]
    bias = flashattn_ext.t5_relative_bias(table, 300)
    near = torch.arange(301)
    assert bias.shape == (1, 601)
    assert bias[0, 300:308].tolist() == [0, *range(17, 24)] and bias[0, 293:300].tolist() == list(range(7, 0, -1))
    assert (bias[0, :300] <= 15).all() and (bias[0, 301:] >= 16).all()
    assert (bias[0, 300 + near[128:]] == 31).all() and (bias[0, 300 - near[128:]] == 15).all()
    assert torch.equal(flashattn_ext.t5_relative_bias(table, 128)[0], bias[0, 172:429])


def test_one_direction() -> None:
    table = torch.arange(8.0)[:, None].expand(8, 3)
    bias = flashattn_ext.t5_relative_bias(table, 20, bidirectional=False, max_distance=16)
    assert bias.shape == (3, 41)
    assert not bias[:, 20:].any()
    assert bias[1, 15:20].tolist() == [4, 4, 3, 2, 1] and (bias[:, :5] == 7).all()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_gradients_flow_to_the_table(bidirectional: bool) -> None:
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda t: flashattn_ext.t5_relative_bias(t, 5, bidirectional, 12), table)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_of_the_table(dtype: torch.dtype) -> None:
    assert flashattn_ext.t5_relative_bias(torch.zeros(32, 2, dtype=dtype), 4).dtype == dtype


@pytest.mark.parametrize(
    "change,error,words",
    [
        (dict(table=[1.0]), TypeError, "table: expected a torch.Tensor, got list"),
        (dict(table=torch.zeros(32)), ValueError, r"table: expected shape \[buckets, heads\].* got \[32\]"),
        (dict(table=torch.zeros(31, 2)), ValueError, r"table: .* an even number .* got \[31, 2\]"),
        (dict(table=torch.zeros(1, 2), bidirectional=False), ValueError, r"table: .* at least 2 .* got \[1, 2\]"),
        (dict(L=-1), ValueError, "L: expected at least 0, got -1"),
        (dict(L=1.5), TypeError, "L: expected an int, got float 1.5"),
        (dict(max_distance=8), ValueError, "max_distance: expected more than 8, .* got 8"),
        (dict(bidirectional=2), TypeError, "bidirectional: expected True or False, got int 2"),
    ],
)
def test_wrong_arguments_are_named(change: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        flashattn_ext.t5_relative_bias(**{"table": torch.zeros(32, 2), "L": 8, **change})
