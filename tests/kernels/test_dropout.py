"""Dropout: the mask bit for bit, its statistics, its independence of everything but position, and where the seed comes from."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, assert_same_bits, assert_within_rule, check, make_inputs, reference_keep_mask, run

import flashattn_ext

SEEDS = [0, 1, 2**31, 2**32 + 5, 2**63 - 1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99])
def test_mask_bit_for_bit(device: str, seed: int, p: float) -> None:
    mask = flashattn_ext.dropout_mask(2, 3, 20, 131, p, seed, device)
    assert mask.dtype == torch.bool and mask.device.type == device
    assert torch.equal(mask.cpu(), reference_keep_mask(2, 3, 20, 131, p, seed))


def test_mask_of_many_keys_bit_for_bit(device: str) -> None:
    """Beyond the 16 words of 64 keys that the mask of the test above has."""
    mask = flashattn_ext.dropout_mask(1, 1, 2, 1300, 0.5, 9, device)
    assert torch.equal(mask.cpu(), reference_keep_mask(1, 1, 2, 1300, 0.5, 9))


def test_mask_of_no_dropout_keeps_all(device: str) -> None:
    assert flashattn_ext.dropout_mask(1, 2, 5, 70, 0.0, 1, device).all()


def realised_mask(
    B: int, H: int, Sq: int, Sk: int, p: float, seed: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """The scores that forward dropped: with equal scores and an identity for v, out shows the weights that were kept."""
    q = torch.zeros(B, Sq, H, 1, device=device, dtype=dtype)
    k = torch.zeros(B, Sk, H, 1, device=device, dtype=dtype)
    columns = []
    for first in range(0, Sk, 256):
        width = min(256, Sk - first)
        v = torch.zeros(B, Sk, H, width, device=device, dtype=dtype)
        v[:, first : first + width] = torch.eye(width, device=device, dtype=dtype)[:, None]
        columns.append(flashattn_ext.forward(q, k, v, dropout_p=p, rng_seed=seed))
    return torch.cat(columns, -1).transpose(1, 2) > 0


@pytest.mark.every_isa
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_forward_drops_what_the_mask_says(device: str, dtype: torch.dtype, p: float) -> None:
    expected = flashattn_ext.dropout_mask(2, 3, 130, 300, p, 12345, device)
    assert torch.equal(realised_mask(2, 3, 130, 300, p, 12345, dtype, device), expected)


@pytest.mark.every_isa
@pytest.mark.parametrize("p", [0.05, 0.3, 0.75])
def test_backward_uses_the_same_mask(device: str, dtype: torch.dtype, p: float) -> None:
    check(Case(dtype=dtype, Sq=130, Sk=200, Hq=4, dropout_p=p, rng_seed=77, causal=True, use_lse=True), device)


def test_lse_is_taken_before_dropout(device: str, dtype: torch.dtype) -> None:
    """With the same bits, or on CUDA, where other kernels with other steps may run such a call, with all but the last ones."""
    inputs = make_inputs(Case(dtype=dtype), device)
    _, plain = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, return_lse=True)
    _, dropped = flashattn_ext.forward(inputs.q, inputs.k, inputs.v, dropout_p=0.5, rng_seed=1, return_lse=True)
    if device == "cuda":
        torch.testing.assert_close(dropped, plain, rtol=4e-7, atol=1e-6)
    else:
        assert_same_bits(dropped, plain)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.2, 0.25, 0.5, 0.77, 0.9, 0.99])
def test_the_share_kept_is_what_was_asked_for(device: str, p: float) -> None:
    """The realised rate is T / 256, within 1/512 of the request; the mask follows it within five sigma."""
    mask = flashattn_ext.dropout_mask(2, 4, 512, 512, p, 2024, device)
    p_keep = min(max(math.floor(256 * (1 - p) + 0.5), 1), 256) / 256
    assert abs(p_keep - (1 - p)) <= 1 / 512
    sigma = math.sqrt(p_keep * (1 - p_keep) / mask.numel())
    assert abs(mask.double().mean().item() - p_keep) < 5 * sigma


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_dropout_is_unbiased(device: str, p: float) -> None:
    """Over many seeds, the mean of out is out without dropout: E[drop(p)] = p exactly, also for a quantised p."""
    q, k, v = (torch.randn(1, 16, 2, 8, device=device) for _ in range(3))
    runs = torch.stack([flashattn_ext.forward(q, k, v, dropout_p=p, rng_seed=s) for s in range(600)]).double()
    z = (runs.mean(0) - flashattn_ext.forward(q, k, v)) / (runs.std(0) / math.sqrt(len(runs)))
    assert z.abs().max() < 5.5
    assert abs(z.mean().item()) < 0.4


def test_rows_columns_heads_and_batches_are_independent(device: str) -> None:
    mask = flashattn_ext.dropout_mask(3, 4, 256, 256, 0.5, 31337, device).double().cpu() - 0.5
    flat = {
        "neighbouring rows": (mask[:, :, 1:], mask[:, :, :-1]),
        "rows 8 apart": (mask[:, :, 8:], mask[:, :, :-8]),
        "rows 16 apart": (mask[:, :, 16:], mask[:, :, :-16]),
        "neighbouring columns": (mask[..., 1:], mask[..., :-1]),
        "columns 8 apart": (mask[..., 8:], mask[..., :-8]),
        "columns 64 apart": (mask[..., 64:], mask[..., :-64]),
        "heads": (mask[:, 1:], mask[:, :-1]),
        "batches": (mask[1:], mask[:-1]),
        "transpose": (mask, mask.transpose(-1, -2)),
    }
    for name, (a, b) in flat.items():
        correlation = (a * b).mean().item() * 4
        assert abs(correlation) < 5 / math.sqrt(a.numel()) * (2 if name == "transpose" else 1), name
    for axis, name in ((-1, "row"), (-2, "column")):
        counts = (mask + 0.5).sum(axis)
        assert abs(counts.var().item() / 64 - 1) < 0.25, f"{name} sums do not vary like sums of fair coins"


def test_the_mask_depends_on_the_seed(device: str) -> None:
    masks = [flashattn_ext.dropout_mask(1, 1, 128, 128, 0.5, s, device) for s in (0, 1, 2, 2**40)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 0.05


def test_the_mask_depends_on_position_alone(device: str) -> None:
    whole = flashattn_ext.dropout_mask(3, 4, 200, 300, 0.3, 9, device)
    for B, H, Sq, Sk in ((1, 1, 1, 1), (2, 3, 37, 129), (3, 4, 64, 65)):
        part = flashattn_ext.dropout_mask(B, H, Sq, Sk, 0.3, 9, device)
        assert torch.equal(part, whole[:B, :H, :Sq, :Sk])


def test_dropout_zero_is_no_dropout(device: str, dtype: torch.dtype) -> None:
    inputs = make_inputs(Case(dtype=dtype), device)
    plain = flashattn_ext.forward(inputs.q, inputs.k, inputs.v)
    state = torch.get_rng_state()
    assert_same_bits(flashattn_ext.forward(inputs.q, inputs.k, inputs.v, dropout_p=0.0, rng_seed=4), plain)
    assert torch.equal(torch.get_rng_state(), state), "dropout_p=0 drew a random number"


def test_manual_seed_reproduces(device: str) -> None:
    inputs = make_inputs(Case(), device)

    def draw() -> torch.Tensor:
        return flashattn_ext.forward(inputs.q, inputs.k, inputs.v, dropout_p=0.5).detach()

    torch.manual_seed(5)
    first, second = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    assert not torch.equal(first, second)


def test_an_explicit_seed_leaves_the_generator_alone(device: str) -> None:
    inputs = make_inputs(Case(), device)
    state = torch.get_rng_state()
    outs = [flashattn_ext.forward(inputs.q, inputs.k, inputs.v, dropout_p=0.5, rng_seed=3) for _ in range(2)]
    assert torch.equal(*outs)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_replays_the_drawn_mask(device: str) -> None:
    """With a drawn seed too, dv is the transpose of the very weights that forward used."""
    q = torch.randn(1, 40, 2, 16, device=device)
    k = torch.randn(1, 50, 2, 16, device=device)
    v = torch.randn(1, 50, 2, 16, device=device, requires_grad=True)
    out = flashattn_ext.forward(q, k, v, dropout_p=0.5)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    # out is linear in v, so <dout, out> = <dv, v> exactly when both use the same weights.
    torch.testing.assert_close((dv * v).sum(), (dout * out).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.every_isa
def test_everything_dropped_in_a_row_gives_zero(device: str, dtype: torch.dtype) -> None:
    """With p=0.99 and few keys many rows lose them all; dropped weights are zeros, not NaN."""
    case = Case(dtype=dtype, Sq=100, Sk=3, dropout_p=0.99, rng_seed=8)
    inputs = make_inputs(case, device)
    got = run(case, inputs)
    empty = ~flashattn_ext.dropout_mask(2, 2, 100, 3, 0.99, 8, device).any(-1)
    assert empty.any() and not got.out.transpose(1, 2)[empty].any()
    zeros = torch.zeros_like(got.grads["q"].transpose(1, 2)[empty], dtype=torch.float64)
    assert_within_rule("dq of emptied rows", got.grads["q"].transpose(1, 2)[empty], zeros, zeros)


@pytest.mark.no_emulator  # its delta comes from the rounded out
@pytest.mark.parametrize("D", [32, 64, 128, 200, 300])
def test_rows_that_see_one_key_have_no_gradient_through_it(device: str, dtype: torch.dtype, D: int) -> None:
    """The weight of an only key is 1 whatever its logit, so that dq and dk are 0 although out, value / p_keep, is rounded."""
    q, k, v, dout = (torch.randn(2, 90, 2, D, device=device, dtype=dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flashattn_ext.forward(*leaves, window_size=(0, 0), dropout_p=0.75, rng_seed=5)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert max(dq.abs().max().item(), dk.abs().max().item()) <= 1e-5
    assert dv.abs().max() > 1
