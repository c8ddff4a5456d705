"""The ops `jvp` and `second` against forward mode and double backward of the reference, over the options of a Case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from helpers import (
    TENSORS,
    Case,
    Error,
    Inputs,
    allocated_bytes,
    assert_same_bits,
    make_inputs,
    op_arguments,
    reference,
    strided_view,
)
from hypothesis import given, settings
from test_fuzz import EXCLUSIVE, FEATURES, cases
from torch import Tensor

import flashattn_ext
from flashattn_ext import ops

# The Ascend C kernels have no derivatives of this kind: test_a_backend_without_the_kernels_says_so.
pytestmark = pytest.mark.no_emulator

OP = torch.ops.flashattn_ext
GRADIENTS = [f"d{name}" for name in TENSORS]


def some_tangents(case: Case, inputs: Inputs, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Random tangents of the inputs of these names, in their dtypes. The tangents of q, k and v lie in memory like q, k and v."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    kinds = dict(zip("qkv", case.views, strict=True))
    made = {}
    for name, t in inputs.leaves().items():
        tangent = torch.randn(t.shape, generator=generator).to(t.device, t.dtype)
        if name in names:
            made[name] = strided_view(tangent, kinds.get(name, "plain"))
    return made


def cotangents(case: Case, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """(dout, dlse), the same numbers for every dtype; dlse is None without use_lse."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    dout = torch.randn(out.shape, generator=generator).to(case.dtype)
    dlse = torch.randn(lse.shape, generator=generator)
    return dout.to(out), dlse.to(lse) if case.use_lse else None


def derivatives(
    case: Case, inputs: Inputs, tangents: dict[str, Tensor], *, deterministic: bool = False
) -> dict[str, Tensor]:
    """tout, tlse and the second derivatives, by name, from the ops."""
    tensors, options = op_arguments(case, inputs)
    options = options._replace(deterministic=deterministic)
    state = ops.dropout_state(inputs.q, case.dropout_p, case.rng_seed)
    with torch.no_grad():
        out, lse, words, *_ = ops.pure_forward(*tensors, *options, state, True, False, False, [])
        moved = [tangents.get(name) for name in TENSORS]
        tout, tlse = OP.jvp(*tensors, *options, out, lse, words, state, *moved, [])
        needs = [name in case.needs_grad for name in TENSORS[4:]]
        dout, dlse = cotangents(case, out, lse)
        found = OP.second(*tensors, *options, out, lse, words, state, dout, dlse, tout, tlse, *moved, *needs, [])
    wanted = [name for name in inputs.leaves() if name in ("q", "k", "v", "sink") or name in case.needs_grad]
    gradients = {f"d{name}": grad for name, grad in zip(TENSORS, found, strict=True) if name in wanted}
    return {"tout": tout, "tlse": tlse, **gradients}


def reference_derivatives(
    case: Case, inputs: Inputs, tangents: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The same by torch.func.jvp and autograd through attention_reference in `dtype`."""

    def copy(name: str, t: Tensor) -> Tensor:
        keeps = dtype.itemsize == 2 and name in TENSORS[4:]
        return t.detach().to(t.dtype if keeps else dtype)

    leaves = {name: copy(name, t).requires_grad_() for name, t in inputs.leaves().items()}
    moved = {name: copy(name, t) for name, t in tangents.items()} or {"q": torch.zeros_like(leaves["q"])}
    names = list(moved)

    def function(*given: Tensor) -> tuple[Tensor, Tensor]:
        these = {**leaves, **dict(zip(names, given, strict=True))}
        out, lse, _ = reference(case, Inputs(**these, mask=inputs.mask, cu_seqlens=inputs.cu_seqlens))
        return out, lse

    (out, lse), (tout, tlse) = torch.func.jvp(function, tuple(leaves[n] for n in names), tuple(moved.values()))
    dout, dlse = cotangents(case, out, lse)
    total = (dout * tout).sum() + (0 if dlse is None else (dlse * tlse).sum())
    inputs_of_grad = list(leaves.values())
    if total.requires_grad:
        found = torch.autograd.grad(total, inputs_of_grad, materialize_grads=True)
    else:
        found = tuple(torch.zeros_like(t) for t in inputs_of_grad)
    gradients = {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    return {"tout": tout.detach(), "tlse": tlse.detach(), **gradients}


def measure(case: Case, names: tuple[str, ...], device: str) -> dict[str, Error]:
    """The error of every result, with three times plain PyTorch's own as the bound."""
    inputs = make_inputs(case, device)
    tangents = some_tangents(case, inputs, names)
    before = {name: t.detach().clone() for name, t in inputs.leaves().items()}
    got = derivatives(case, inputs, tangents)
    ref = reference_derivatives(case, inputs, tangents, torch.float64)
    plain = reference_derivatives(case, inputs, tangents, case.dtype)
    errors = {}
    for name, result in got.items():
        leaf = inputs.leaves().get(name[1:])
        if leaf is not None:
            assert result.dtype == leaf.dtype, f"{name}: dtype {result.dtype}, expected {leaf.dtype}"
        unit = case.unit(name[1:]) * max(1.0, ref[name].abs().max().item() if ref[name].numel() else 0.0)
        errors[name] = Error.of(name, result, ref[name], plain[name].to(result.dtype), case.dtype, unit)
        errors[name].factor = 3
    for name, t in inputs.leaves().items():
        assert torch.equal(t, before[name]), f"{name} was changed by the call"
    return errors


def check(case: Case, device: str, names: tuple[str, ...] = TENSORS) -> None:
    """Bounds every error; where plain PyTorch is exact by luck, the medians over more draws of the inputs."""
    first = measure(case, names, device)
    broken = [name for name, error in first.items() if not error.got <= error.allowed]
    if not broken:
        return
    draws = [first] + [measure(replace(case, seed=case.seed + 1009 * n), names, device) for n in range(1, 21)]
    for name in broken:
        errors = [draw[name] for draw in draws]
        got, plain = median(e.got for e in errors), median(e.plain for e in errors)
        floor = median(e.floor for e in errors)
        assert got <= 3 * plain + floor, f"{name}: error {got:.3e}, plain PyTorch's {plain:.3e}, floor {floor:.3e}"


BASE: dict[str, Any] = {"Sq": 65, "Sk": 65, "Hq": 4, "use_lse": True}
USED = {name: options for name, options in FEATURES.items() if name not in ("max_logits", "frozen_k", "lse")}
PAIRS = [pair for pair in itertools.combinations(USED, 2) if set(pair) not in EXCLUSIVE]


@pytest.mark.every_isa
@pytest.mark.parametrize("feature", USED)
def test_every_option_agrees_with_the_reference(device: str, dtype: torch.dtype, feature: str) -> None:
    check(Case(**{**BASE, "dtype": dtype, **USED[feature]}), device)


@pytest.mark.dtypes("float64")
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_every_pair_of_options_agrees_with_the_reference(
    device: str, dtype: torch.dtype, pair: tuple[str, str]
) -> None:
    check(Case(**{**BASE, "dtype": dtype, "Sq": 33, "Sk": 33, **USED[pair[0]], **USED[pair[1]]}), device)


@pytest.mark.every_isa
@pytest.mark.parametrize("form", ["varlen", "bias"])
def test_all_options_at_once_agree_with_the_reference(device: str, dtype: torch.dtype, form: str) -> None:
    together: dict[str, Any] = {}
    for name in ("causal", "window", "scale", "dropout", "origin", "sink", "gqa", "mla", "strided", "softcap"):
        together |= FEATURES[name]
    for name in ("alibi", "relative", "intervals"):
        together |= FEATURES[name]
    check(Case(**{**BASE, "dtype": dtype, **together, **FEATURES[form]}), device)


@settings(
    max_examples=settings.default.max_examples // 5
)  # each also differentiates the reference twice, in two dtypes
@given(case=cases())
def test_any_call_agrees_with_the_reference(device: str, dtype: torch.dtype, case: Case) -> None:
    case = replace(case, dtype=dtype, D=min(case.D, 128), Dv=min(case.Dv, 128))
    if device != "cpu" and case.dropout_p and len(case.origin or ()) > 2:  # the GPU's generator draws whole blocks
        batch, head, row, key, *shift = case.origin
        case = replace(case, origin=(batch, head, row // 16 * 16, key // 64 * 64, *shift))
    check(case, device)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_several_tiles_agree_with_the_reference(device: str, dtype: torch.dtype, causal: bool, biased: bool) -> None:
    """Tangents of slopes move logits by hundreds: sums about a fixed value would lose the digits of 16-bit results."""
    biases: dict[str, Any] = dict(alibi="heads", relative=20) if biased else {}
    check(
        Case(
            dtype=dtype, B=1, Sq=450, Sk=500, D=40, Dv=24, causal=causal, sink_dtype=torch.float32, use_lse=True,
            **biases,
        ),
        device,
    )  # fmt: skip


FORMS: dict[str, dict[str, Any]] = {
    "more queries": dict(Sq=330, Sk=140, causal=True),
    "window": dict(Sq=250, Sk=300, window_size=(90, 40)),
    "gqa": dict(Sq=150, Sk=150, Hk=1, causal=True, sink_dtype=torch.float32),
    "varlen": dict(lengths_q=(33, 170, 0, 64), lengths_k=(40, 190, 17, 64)),
}


@pytest.mark.dtypes("float16", "bfloat16")
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("form", FORMS)
def test_every_class_of_head_dims_agrees_with_the_reference(
    device: str, dtype: torch.dtype, form: str, head_dim: int
) -> None:
    check(Case(**{**BASE, "dtype": dtype, "B": 1, "Hq": 2, "D": head_dim, "Dv": head_dim, **FORMS[form]}), device)


@pytest.mark.dtypes("bfloat16")
@pytest.mark.parametrize("names", [names for n in (1, 2) for names in itertools.combinations("qkv", n)], ids="+".join)
def test_some_tangents_of_wide_heads_agree_with_the_reference(
    device: str, dtype: torch.dtype, names: tuple[str, ...]
) -> None:
    check(Case(**{**BASE, "dtype": dtype, "B": 1, "Hq": 2, "Sq": 150, "Sk": 150, "D": 128, "Dv": 128}), device, names)


@pytest.mark.dtypes("float64", "bfloat16")
@pytest.mark.parametrize(
    "names",
    [(), *((name,) for name in TENSORS), ("q", "v"), ("k", "v"), ("q", "k")],
    ids=lambda n: "+".join(n) or "none",
)
def test_a_missing_tangent_is_zero(device: str, dtype: torch.dtype, names: tuple[str, ...]) -> None:
    case = Case(
        **BASE, dtype=dtype, sink_dtype=torch.float32, alibi="heads", relative=5, bias="h", softcap=2.0, causal=True
    )
    check(case, device, names)
    check(Case(**BASE, dtype=dtype, sink_dtype=torch.float32), device, names)  # without the rule of biases
    inputs = make_inputs(case, device)
    given = some_tangents(case, inputs, names)
    zeros = {name: given.get(name, torch.zeros_like(t)) for name, t in inputs.leaves().items()}
    expected = derivatives(case, inputs, zeros, deterministic=True)
    for name, result in derivatives(case, inputs, given, deterministic=True).items():
        torch.testing.assert_close(result, expected[name], msg=lambda m, n=name: f"{n}: {m}")


def check_that_bits_repeat(case: Case, device: str) -> None:
    inputs = make_inputs(case, device)
    tangents = some_tangents(case, inputs, TENSORS)
    expected = derivatives(case, inputs, tangents, deterministic=True)
    for _ in range(3):
        for name, t in derivatives(case, inputs, tangents, deterministic=True).items():
            assert_same_bits(t, expected[name], name)


@pytest.mark.parametrize("options", ["causal", "dropout", "intervals", "alibi"])
def test_results_repeat_bit_for_bit(device: str, dtype: torch.dtype, options: str) -> None:
    """Many key tiles add to a row of dq, in a fixed order."""
    case = Case(
        **{**BASE, "dtype": dtype, "Sq": 300, "Sk": 300, "Hk": 2, "sink_dtype": torch.float32, **FEATURES[options]}
    )
    check_that_bits_repeat(case, device)


@pytest.mark.dtypes("float16", "bfloat16")
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("form", ["causal", "varlen"])
def test_every_class_of_head_dims_repeats_bit_for_bit(
    device: str, dtype: torch.dtype, form: str, head_dim: int
) -> None:
    forms: dict[str, Any] = {"causal": dict(Sq=700, Sk=700, causal=True), "varlen": FORMS["varlen"]}
    case = Case(**{**BASE, "dtype": dtype, "B": 1, "Hq": 2, "Hk": 1, "D": head_dim, "Dv": head_dim, **forms[form]})
    check_that_bits_repeat(case, device)


@torch.no_grad()
def test_an_invariant_call_has_the_tangents_of_an_ordinary_one(device: str, dtype: torch.dtype) -> None:
    case = Case(**{**BASE, "dtype": dtype, "causal": True})
    inputs = make_inputs(case, device)
    tensors, options = op_arguments(case, inputs)
    tangents = some_tangents(case, inputs, TENSORS)
    out, lse, words, *_ = ops.pure_forward(*tensors, *options, None, True, False, False, [])
    moved = [tangents.get(name) for name in TENSORS]
    expected = OP.jvp(*tensors, *options, out, lse, words, None, *moved, [])
    got = OP.jvp(*tensors, *options._replace(invariant=True), out, lse, words, None, *moved, [])
    for name, of_ordinary, of_invariant in zip(("tout", "tlse"), expected, got, strict=True):
        assert_same_bits(of_invariant, of_ordinary, name)


def test_results_do_not_depend_on_threads(device: str) -> None:
    case = Case(
        **BASE, dtype=torch.float32, B=3, Hk=2, causal=True, sink_dtype=torch.float32, relative=4, bias="q",
        dropout_p=0.3, rng_seed=3,
    )  # fmt: skip
    case = replace(case, Sq=420, Sk=430)
    inputs = make_inputs(case, "cpu")
    tangents = some_tangents(case, inputs, TENSORS)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(derivatives(case, inputs, tangents))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name, t in result.items():
            assert_same_bits(t, results[0][name], name)


def test_memory_is_linear_in_the_length(device: str) -> None:
    def used(length: int) -> int:
        case = Case(B=1, Sq=length, Sk=length, Hq=1, Hk=1, D=16, Dv=16)
        inputs = make_inputs(case, device)
        tangents = some_tangents(case, inputs, TENSORS)
        if device != "cuda":
            return allocated_bytes(lambda: derivatives(case, inputs, tangents))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        derivatives(case, inputs, tangents)
        return torch.cuda.max_memory_allocated() - before

    short, long = used(1024), used(4096)
    assert long < 4.5 * short, f"{short} bytes at 1024 rows, {long} at 4096"


def test_a_query_row_that_is_not_finite_stays_alone(device: str, dtype: torch.dtype) -> None:
    """NaN in one row of q, or of its tangent, reaches the tangents of no other row."""
    case = Case(**{**BASE, "dtype": dtype, "causal": True})
    for poisoned in ("q", "tangent"):
        inputs = make_inputs(case, device)
        tangents = some_tangents(case, inputs, TENSORS)
        expected = derivatives(case, inputs, tangents, deterministic=True)
        (inputs.q.detach() if poisoned == "q" else tangents["q"])[0, 20] = torch.nan
        got = derivatives(case, inputs, tangents, deterministic=True)
        rows = torch.arange(65, device=device) != 20
        assert got["tout"][0, 20].isnan().any()
        assert_same_bits(got["tout"][:, rows], expected["tout"][:, rows], poisoned)
        assert_same_bits(got["tlse"][..., rows], expected["tlse"][..., rows], poisoned)
        assert_same_bits(got["dq"][:, rows], expected["dq"][:, rows], poisoned)


def test_what_one_document_holds_stays_there(device: str, dtype: torch.dtype) -> None:
    """NaN in keys, values and tangents of one document of a Mask reaches the results of no other one."""
    case = Case(**{**BASE, "dtype": dtype, "B": 1})
    inputs = make_inputs(case, device)
    inputs.mask = flashattn_ext.Mask.documents(torch.arange(65, device=device)[None] // 22)
    tangents = some_tangents(case, inputs, TENSORS)
    expected = derivatives(case, inputs, tangents)
    for t in (*inputs.leaves().values(), *tangents.values()):
        t.detach()[0, 22:44] = torch.nan
    got = derivatives(case, inputs, tangents)
    keys = torch.arange(65, device=device)
    others = (keys < 22) | (keys >= 44)
    for name in ("tout", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name][:, others], expected[name][:, others], msg=lambda m, n=name: f"{n}: {m}")


def test_fully_masked_rows_have_tangents_of_zero(device: str, dtype: torch.dtype) -> None:
    case = Case(**{**BASE, "dtype": dtype, "Sq": 9, "Sk": 5, "causal": True})
    got = derivatives(case, inputs := make_inputs(case, device), some_tangents(case, inputs, TENSORS))
    assert not got["tout"][:, :4].any() and not got["tlse"][..., :4].any() and not got["dq"][:, :4].any()
    assert all(torch.isfinite(t).all() for t in got.values())


REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "tq": lambda c: c.update(tq=torch.zeros(1)),
    "tv": lambda c: c.update(tv=c["tv"].double()),
    "tsink": lambda c: c.update(tsink=torch.zeros(4)),
    "tlse": lambda c: c.update(tlse=c["tlse"][..., 1:]),
    "tout": lambda c: c.update(tout=c["tout"].double()),
    "dout": lambda c: c.update(dout=c["dout"][:, 1:]),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_a_wrong_argument_is_named(device: str, argument: str) -> None:
    case = Case(**{**BASE, "Sq": 5, "Sk": 5})
    inputs = make_inputs(case, "cpu")
    (tensors, options), t = op_arguments(case, inputs), some_tangents(case, inputs, TENSORS)
    out = torch.zeros_like(inputs.q, requires_grad=False)
    lse = torch.zeros(2, 4, 5)
    given = dict(dout=out, dlse=None, tout=out, tlse=lse, tq=t["q"], tk=t["k"], tv=t["v"], tsink=None)
    REFUSED[argument](given)
    with torch.no_grad(), pytest.raises((ValueError, TypeError), match=f"^{argument}: expected"):
        OP.second(*tensors, *options, out, lse, None, None, *given.values(), *[None] * 3, *[False] * 3, [])


@pytest.mark.skipif(
    not Path(flashattn_ext.__file__).with_name("_ascend_emulator.so").exists(), reason="the emulator is not built"
)
def test_a_backend_without_the_kernels_says_so() -> None:
    case = Case(dtype=torch.float16)
    inputs = make_inputs(case, "cpu")
    with (
        flashattn_ext.use_backend("ascend-emulator"),
        pytest.raises(NotImplementedError, match=r"jvp .* second .*attention_reference"),
    ):
        derivatives(case, inputs, some_tangents(case, inputs, TENSORS))
