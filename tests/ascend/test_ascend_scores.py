"""Softcap, biases with their gradients, and Masks on the emulated Ascend C kernels, with every other option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import Case, check, make_inputs, run
from mask_cases import KINDS

import flashattn_ext

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
    "of key heads": replace(LONG, Hq=4, Hk=2, mask="intervals", mask_heads="k"),
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
    """Of its gradient nothing is left but that of lse. In 16 bits the rounding of out, which delta has, would hide that."""
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


@pytest.mark.parametrize("options", [{"bias": "q"}, {"mask": "documents"}])
def test_what_does_not_fit_names_what_does(options: dict[str, str]) -> None:
    case = replace(SMALL, dtype=torch.float16, Dv=200, **DROPOUT, **options)
    with pytest.raises(
        NotImplementedError, match=r"two of dropout_p, biases and mask .* head dims of v above 128; use fp32"
    ):
        run(case, make_inputs(case, "cpu"))
    check(replace(case, dtype=torch.float32), "cpu")
