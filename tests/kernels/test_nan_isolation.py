"""A value that is not finite affects only its query row, or its sequence and its heads."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same_bits, cu_seqlens, make_inputs, run

import flashattn_ext

pytestmark = pytest.mark.usefixtures("deterministic")

POISON = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_in_a_query_row(device: str, dtype: torch.dtype, poison: float, causal: bool) -> None:
    case = Case(dtype=dtype, Sq=100, Sk=130, causal=causal, needs_grad=())
    inputs = make_inputs(case, device)
    clean = run(case, inputs)
    inputs.q[1, 70, 1] = poison
    got = run(case, inputs)
    assert got.out[1, 70, 1].isnan().any() and not got.lse[1, 1, 70].isfinite()
    got.out[1, 70, 1] = clean.out[1, 70, 1]
    got.lse[1, 1, 70] = clean.lse[1, 1, 70]
    assert_same_bits(got.out, clean.out, "other rows of out")
    assert_same_bits(got.lse, clean.lse, "other rows of lse")


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("which", ["k", "v"])
def test_in_a_key_or_value(device: str, dtype: torch.dtype, poison: float, which: str) -> None:
    """KV head 1 serves query heads 2 and 3: only their results in batch entry 1 may change."""
    case = Case(dtype=dtype, Sq=70, Sk=90, Hq=4, Hk=2)
    inputs = make_inputs(case, device)
    clean = run(case, inputs)
    with torch.no_grad():
        getattr(inputs, which)[1, 40, 1] = poison
    got = run(case, inputs)
    assert not got.out[1, :, 2:].isfinite().all()
    for b, heads in ((0, slice(0, 4)), (1, slice(0, 2))):
        assert_same_bits(got.out[b, :, heads], clean.out[b, :, heads], f"out of batch entry {b}")
        assert_same_bits(got.lse[b, heads], clean.lse[b, heads], f"lse of batch entry {b}")
        assert_same_bits(got.grads["q"][b, :, heads], clean.grads["q"][b, :, heads], f"dq of batch entry {b}")
        for name in "kv":
            keys = slice(0, heads.stop // 2)
            assert_same_bits(got.grads[name][b, :, keys], clean.grads[name][b, :, keys], f"d{name} of batch entry {b}")


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("D", [32, 128])
def test_in_a_packed_neighbour(device: str, dtype: torch.dtype, D: int, poison: float) -> None:
    """q, k, v and the incoming gradient of sequence 1 are not finite. Tiles of its neighbours read past their ends."""
    lengths = (33, 40, 27, 64)
    case = Case(
        dtype=dtype, lengths_q=lengths, lengths_k=lengths, D=D, Dv=D, causal=True, use_lse=True, sink_dtype=None
    )
    inputs = make_inputs(case, device)
    leaves = [inputs.q, inputs.k, inputs.v]
    dout = torch.randn(sum(lengths), 2, D, device=device).to(dtype)

    def results() -> list[torch.Tensor]:
        out, lse = flashattn_ext.varlen_forward(
            *leaves, **inputs.cu_seqlens, **inputs.max_seqlens, causal=True, return_lse=True
        )
        return [out, lse.T, *torch.autograd.grad(out, leaves, dout)]

    clean = results()
    with torch.no_grad():
        for t in (*leaves, dout):
            t[33:73] = poison
    for what, got, ref in zip(("out", "lse", "dq", "dk", "dv"), results(), clean, strict=True):
        assert_same_bits(got[:33], ref[:33], f"{what} before")
        assert_same_bits(got[73:], ref[73:], f"{what} after")


@pytest.mark.dtypes("float16", "bfloat16")
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 33, 63, 65, 129])
def test_in_queries_behind_a_sequence_of_many_keys(device: str, dtype: torch.dtype, D: int, length: int) -> None:
    """Both halves of a tile of keys see the last queries of sequence 0, and tiles of those reach into sequence 1. So many heads that a
    thread block of a GPU computes several; a thread of the CPU and a core of the emulator compute several of six.
    """
    heads, keys = 6 if device == "cpu" else 24, (200, 130)
    starts_q, starts_k = cu_seqlens([length, 60], device), cu_seqlens(keys, device)
    q, dout = (torch.randn(length + 60, heads, D, device=device).to(dtype) for _ in range(2))
    k, v = (torch.randn(sum(keys), heads, D, device=device).to(dtype) for _ in range(2))

    def gradients() -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flashattn_ext.varlen_forward(*leaves, starts_q, starts_k, max(length, 60), max(keys))
        return list(torch.autograd.grad(out, leaves, dout))

    clean = gradients()
    q[length:] = dout[length:] = torch.nan
    for name, rows, got, ref in zip("qkv", (length, keys[0], keys[0]), gradients(), clean, strict=True):
        assert got[rows:].isnan().any()
        assert_same_bits(got[:rows], ref[:rows], f"d{name} of the sequence before")


@pytest.mark.every_isa
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (33, 31), (65, 127), (130, 257)])
@pytest.mark.parametrize("D,Dv", [(7, 9), (40, 33), (64, 64), (161, 100)])
def test_in_memory_around_the_tensors(device: str, dtype: torch.dtype, Sq: int, Sk: int, D: int, Dv: int) -> None:
    """The tensors are views into NaN-filled memory: rows, heads and columns that a tile may overrun are NaN on every side."""

    def framed(B: int, S: int, H: int, D: int) -> torch.Tensor:
        frame = torch.full((B + 2, S + 70, H + 2, D + 70), torch.nan, device=device, dtype=dtype)
        view = frame[1:-1, 3 : 3 + S, 1:-1, 5 : 5 + D]
        return view.copy_(torch.randn(view.shape, device=device))

    q, k, v, dout = framed(2, Sq, 2, D), framed(2, Sk, 2, D), framed(2, Sk, 2, Dv), framed(2, Sq, 2, Dv)

    def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors[:3]]
        out, lse = flashattn_ext.forward(*leaves, return_lse=True)
        return [out, lse, *torch.autograd.grad(out, leaves, tensors[3])]

    got = results(q, k, v, dout)
    expected = results(*(t.contiguous() for t in (q, k, v, dout)))
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        assert torch.isfinite(a).all(), f"{what} is not finite"
        assert_same_bits(a, b, what)


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", POISON)
def test_masked_keys_in_tiles_of_their_own(device: str, dtype: torch.dtype, poison: float) -> None:
    """A poisoned key changes no row that does not see it: earlier causal rows, rows of other sequences."""
    q, k, v = (torch.randn(2, 90, 1, 16, device=device).to(dtype) for _ in range(3))
    clean = flashattn_ext.forward(q, k, v, causal=True)
    k[0, 80] = poison
    v[0, 81] = poison
    assert_same_bits(flashattn_ext.forward(q, k, v, causal=True)[1], clean[1])


def test_rows_of_no_sequence_are_not_read(device: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(40, 2, 16, device=device).to(dtype) for _ in range(3))
    starts = cu_seqlens([10, 20], device)
    clean = flashattn_ext.varlen_forward(q, k, v, starts, starts, 20, 20)
    for t in (q, k, v):
        t[30:] = torch.nan
    assert_same_bits(flashattn_ext.varlen_forward(q, k, v, starts, starts, 20, 20), clean)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("Sq", [5, 70])
@pytest.mark.parametrize("form", ["each score", "each distance"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_behind_a_bias_in_an_invariant_call_of_the_cpu(
    isa: str, dtype: torch.dtype, form: str, Sq: int, which: str, poison: float
) -> None:
    """A bias of -inf hides a key from a row of an invariant call as a mask does."""
    Sk, key = 300, 77
    q, k, v = (torch.randn(1, S, 2, 64).to(dtype) for S in (Sq, Sk, Sk))
    if form == "each score":
        hidden = torch.zeros(1, 2, Sq, Sk, dtype=torch.bool)
        hidden[..., key] = True
        hidden[:, 0, 1, key] = hidden[:, 1, 3:, key] = False
        hidden[:, 0, 0, key - 1 : key + 2] = True
        sees = ~hidden[0, :, :, key]
        options = {"bias": torch.zeros(hidden.shape).to(dtype).masked_fill_(hidden, -torch.inf)}
    else:  # row i is at position i + Sk - Sq
        distances = key - (torch.arange(Sq) + Sk - Sq)
        relative = torch.zeros(2, 2 * Sk + 1, dtype=torch.promote_types(dtype, torch.float32))
        relative[:, Sk + distances] = -torch.inf
        relative[:, Sk + distances[1]] = 0
        sees = (torch.arange(Sq) == 1).expand(2, Sq)
        options = {"relative_bias": relative}
    clean = flashattn_ext.forward(q, k, v, invariant=True, return_lse=True, **options)
    tensors = {"k": k.clone(), "v": v.clone()}
    tensors[which][0, key] = poison
    out, lse = flashattn_ext.forward(q, **tensors, invariant=True, return_lse=True, **options)
    rows = out[0].transpose(0, 1)
    assert not rows[sees].isfinite().all()
    assert_same_bits(rows[~sees], clean[0][0].transpose(0, 1)[~sees], "out")
    assert_same_bits(lse[0][~sees], clean[1][0][~sees], "lse")


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [40, 64, 128, 192])
def test_in_biases_of_distances_that_no_pair_has(
    device: str, dtype: torch.dtype, D: int, causal: bool, poison: float
) -> None:
    """Rows of a tile after the last query have such distances to its keys."""
    Sq, Sk, reach = 100, 130, 512
    q = torch.randn(2, Sq, 4, D, device=device, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, Sk, 2, D, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    dout = torch.randn(2, Sq, 4, D, device=device, dtype=dtype)
    bias = torch.randn(4, 2 * reach + 1, device=device)

    def results() -> list[torch.Tensor]:
        leaf = bias.clone().requires_grad_()
        out = flashattn_ext.forward(q, k, v, relative_bias=leaf, causal=causal)
        return [out, *torch.autograd.grad(out, (q, k, v, leaf), dout)]

    clean = results()
    bias[:, : reach - (Sk - 1)] = poison
    bias[:, reach + (1 if causal else Sq) :] = poison
    for what, got, expected in zip(("out", "dq", "dk", "dv", "dbias"), results(), clean, strict=True):
        assert_same_bits(got, expected, what)
