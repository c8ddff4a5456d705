"""Softcap, biases with their gradients, and Masks on the emulated Ascend C kernels, with every other option."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import Case, assert_same_bits, check, make_inputs, measure, run
from mask_cases import KINDS

import flashattn_ext
from flashattn_ext_lab import bench_ascend

MODES = ("mode=eager,cores=1", "mode=late,cores=2", "mode=random,seed=1,cores=3")

SMALL = Case(B=2, Sq=70, Sk=90, Hq=4, Hk=2, D=40, Dv=24)
LONG = Case(B=1, Sq=150, Sk=600, Hq=2, Hk=1, D=64, Dv=64)  # several steps of the forward, several tasks of the backward
PACKED = Case(lengths_q=(5, 0, 140, 20), lengths_k=(9, 30, 0, 300), Hq=2, Hk=1, D=64, Dv=64)
DROPOUT = {"dropout_p": 0.2, "rng_seed": 7}

CASES = {
    "softcap": replace(LONG, softcap=2.0, causal=True),
    "softcap, small logits": replace(SMALL, softcap=5000.0),
    "softcap, dropout": replace(LONG, softcap=2.0, **DROPOUT),
    "softcap, packed": replace(PACKED, softcap=2.0, causal=True, softmax_scale=-0.3),
    "slopes": replace(LONG, alibi="heads", causal=True),
    "slopes of batch entries": replace(SMALL, alibi="batch", window_size=(40, 10)),
    "slopes, packed": replace(PACKED, alibi="batch"),
    "relative bias": replace(LONG, relative=20),
    "relative bias, as far as the rows": replace(LONG, relative=700, causal=True),
    "relative bias, packed": replace(PACKED, relative=7, **DROPOUT),
    "bias": replace(LONG, bias="bhq"),
    "bias of fp32 for all batch entries": replace(SMALL, bias="hq", bias_dtype=torch.float32),
    "bias for all heads": replace(SMALL, bias="bq", bias_hides=0.3),
    "bias of a key": replace(SMALL, bias="b"),
    "bias for everything": replace(SMALL, bias="", sink_dtype=torch.float32),
    "everything": replace(
        SMALL, softcap=3.0, alibi="heads", relative=30, bias="hq", mask="intervals", mask_heads="q", sink_dtype=torch.float32,
        **DROPOUT,
    ),
    "everything, packed": replace(
        PACKED, softcap=3.0, alibi="heads", relative=9, mask="documents", window_size=(60, 20), smooth_softmax=True, **DROPOUT
    ),
    "wide heads": replace(SMALL, Dv=200, D=130, relative=9, bias="q"),
    "mask, wide heads": replace(SMALL, Dv=200, mask="documents"),
}  # fmt: skip
MASKS = {
    **{kind: replace(SMALL, Sq=90, mask=kind, causal=kind in ("documents", "window")) for kind in KINDS},
    "of KV heads": replace(LONG, Hq=4, Hk=2, mask="intervals", mask_heads="k"),
    "of query heads": replace(LONG, Hq=4, Hk=2, mask="intervals", mask_heads="q", mask_batch=False),
    "long documents": replace(LONG, Sq=600, mask="documents", causal=True, D=32, Dv=32),
    "dropout": replace(LONG, Sq=600, mask="chunked", D=32, Dv=32, **DROPOUT),
    "packed": replace(PACKED, mask="intervals"),
    "more rows than keys": replace(SMALL, Sq=150, Sk=20, mask="window", causal=True),
}


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    with flashattn_ext.use_backend("ascend-emulator"):
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype, use_lse=True), "cpu")


def test_relative_bias_of_one_entry() -> None:
    """Only the gradient through lse remains. In 16 bits the rounding of out, which enters delta, would hide it."""
    check(replace(SMALL, relative=0, use_lse=True), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", MASKS.values(), ids=MASKS)
def test_masks_agree_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype), "cpu")


@pytest.mark.parametrize("name", ["everything", "everything, packed", "bias for all heads"])
@pytest.mark.usefixtures("deterministic")
def test_no_mode_and_no_number_of_cores_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES[name], dtype=torch.float16)
    inputs = make_inputs(case, "cpu")
    expected = run(case, inputs)
    for mode in MODES:
        monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
        got = run(case, inputs)
        assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse), mode
        for grad_name, grad in expected.grads.items():
            assert torch.equal(got.grads[grad_name], grad), (mode, grad_name)


@pytest.mark.parametrize("name", ["everything", "bias for everything"])
def test_gradients_that_many_cores_add_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", "mode=random,seed=3,cores=3")
    check(replace(CASES[name], dtype=torch.float32, Sq=150, Sk=200), "cpu")


def test_dropout_with_a_mask_drops_the_same_scores() -> None:
    """Columns are paired with dropout alone: with a Mask, which hides nothing here, the bits are those of another order."""
    case = replace(LONG, dtype=torch.float16, **DROPOUT)
    inputs = make_inputs(case, "cpu")
    expected = run(case, inputs)
    everybody = torch.tensor([0, 2**31 - 1], dtype=torch.int32).expand(1, 1, case.Sk, 2)
    inputs.mask = flashattn_ext.Mask(everybody.contiguous())
    got = run(case, inputs)
    assert torch.equal(got.lse, expected.lse)
    torch.testing.assert_close(got.out, expected.out, rtol=2e-3, atol=2e-3)


ONE_KEY = {
    "one key": Case(B=1, Sq=33, Sk=1, D=128, Dv=128, softmax_scale=1.0),
    "diagonal": replace(LONG, window_size=(0, 0), use_lse=True),
    "dropout": replace(SMALL, Sk=1, **DROPOUT),
    "softcap, dropout": replace(SMALL, Sk=1, softcap=0.3, **DROPOUT),
    "chunks": replace(LONG, Sq=200, Sk=200, mask="chunked", window_size=(0, 200), alibi="heads"),
}


@pytest.mark.parametrize("name", ONE_KEY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_see_few_keys_have_the_delta_of_their_weights(name: str, dtype: torch.dtype) -> None:
    """delta from a rounded `out` would leave its rounding error in dS, which is 0 where a row sees one key (row_delta.h)."""
    errors = measure(replace(ONE_KEY[name], dtype=dtype), "cpu")
    for tensor in ("dq", "dk"):
        assert errors[tensor].got <= errors[tensor].allowed, errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_slopes_of_rows_that_see_few_keys(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, Sq=65, Sk=65, Hq=6, Hk=2, softcap=1.5, alibi="batch", mask="documents", mask_heads="k")
    errors = [measure(replace(case, seed=seed), "cpu")["dalibi_slopes"] for seed in range(3)]
    assert sum(e.got for e in errors) <= 0.1 * sum(e.plain for e in errors), errors


def test_rows_with_the_lse_of_more_keys_keep_their_delta() -> None:
    """Gradients of a call in two parts of its keys, each with out and lse of the whole call, add up to those of the call."""
    case = replace(SMALL, dtype=torch.float16, sink_dtype=torch.float32)
    i = make_inputs(case, "cpu")
    q, k, v, sink = (t.detach() for t in (i.q, i.k, i.v, i.sink))
    out, lse = flashattn_ext.forward(q, k, v, sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    whole = flashattn_ext.backward(dout, q, k, v, out, lse, sink=sink, dlse=dlse)
    for part, other in ((slice(0, 60), slice(60, 90)), (slice(60, 90), slice(0, 60))):
        dq, dk, dv, _ = flashattn_ext.backward(dout, q, k[:, part], v[:, part], out, lse, sink=sink, dlse=dlse)
        torch.testing.assert_close(dk, whole[1][:, part], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(dv, whole[2][:, part], rtol=1e-3, atol=2e-3)
        rest = flashattn_ext.backward(dout, q, k[:, other], v[:, other], out, lse, sink=sink, dlse=dlse)[0]
        torch.testing.assert_close(dq + rest, whole[0], rtol=1e-3, atol=4e-3)


BIASES = {"bias": "q", "alibi": "heads", "relative": 40}
MASK = {"mask": "intervals", "mask_heads": "q"}
TOGETHER = {
    "dropout, biases": DROPOUT | BIASES,
    "dropout, mask": DROPOUT | MASK,
    "biases, mask": BIASES | MASK,
    "all": DROPOUT | BIASES | MASK,
}


@pytest.mark.parametrize("Dv", [129, 256])
@pytest.mark.parametrize("options", TOGETHER.values(), ids=TOGETHER)
def test_options_with_large_head_dims_share_ub(
    options: dict[str, Any], Dv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits UB has no room for two buffers of scores beside them."""
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", "mode=random,seed=3,cores=2")
    check(replace(LONG, dtype=torch.float16, D=72, Dv=Dv, causal=True, seed=1, **options), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 2.0**-3, 2.0**-40])
def test_a_power_of_two_is_multiplied_with_the_subtraction(dtype: torch.dtype, scale: float) -> None:
    """In one instruction, for the bits of two: slopes of 0 change no score, but take the way of a product and a subtraction."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator).to(dtype) for n in (150, 600, 600))
    options = dict(causal=True, softmax_scale=scale, sink=torch.tensor([0.5, -torch.inf]), return_lse=True)
    with flashattn_ext.use_backend("ascend-emulator"):
        got = flashattn_ext.forward(q, k, v, **options)
        expected = flashattn_ext.forward(q, k, v, alibi_slopes=torch.zeros(2), **options)
    for a, b, name in zip(got, expected, ("out", "lse"), strict=True):
        assert_same_bits(a, b, name)


def test_one_instruction_less_where_the_scale_is_a_power_of_two() -> None:
    """By the time model: of two head dims that take the same steps, the scale of 64 is a power of two."""
    library = ctypes.CDLL(str(bench_ascend.LIBRARY))
    library.flashattn_ext_model.restype = ctypes.c_char_p
    busy = {
        dim: bench_ascend.model(library, bench_ascend._case(1024, dim))["busy_aiv"]["V"]
        * bench_ascend.model(library, bench_ascend._case(1024, dim))["cycles"]
        for dim in (63, 64)
    }
    assert busy[64] < 0.95 * busy[63]


@pytest.mark.parametrize(
    ("S", "D", "options", "steps"),
    [
        (1024, 64, {}, 2),
        (2048, 64, {}, 2),
        (2048, 128, {}, 2),
        (2048, 192, {}, 4),
        (2048, 64, dict(dropout=0.1), 4),
        (2048, 64, dict(score="softcap"), 4),
        (2048, 64, dict(score="alibi"), 4),
    ],
)
def test_long_rows_take_long_steps(S: int, D: int, options: dict[str, Any], steps: int) -> None:
    """By what the time model counts: every score and weight is written once, and a product with V for each step of a row."""
    library = ctypes.CDLL(str(bench_ascend.LIBRARY))
    library.flashattn_ext_model.restype = ctypes.c_char_p
    case = bench_ascend._case(S, D, **options)
    written = bench_ascend.model(library, case)["workspace_bytes"]["written"]
    assert written == case.Hq * S * (S * (4 + 2) + steps * D * 4)


def test_packed_sequences_are_dealt_by_area() -> None:
    """By the time model, on 24 cores: dealt by their number, the tasks would leave the pipe that limits them idle for 36 %."""
    library = ctypes.CDLL(str(bench_ascend.LIBRARY))
    library.flashattn_ext_model.restype = ctypes.c_char_p
    case = bench_ascend._case(8192, 64, True, lengths=(3000, 200, 2500, 900, 500, 1092))
    assert bench_ascend.model(library, replace(case, set=bench_ascend.PACKED))["busy_aic"]["FIX"] > 0.7
