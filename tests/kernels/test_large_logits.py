"""Logits of every finite size: large products, rows whose keys all have a bias of -1e9, biases and sinks up to the largest number.

A weight is exp2 of a difference of two large numbers, so that one rounding of either is an error of the weight, and of all weights of a
row in common: their sum is then not 1. Plain PyTorch normalises the weights that it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from helpers import (
    TENSORS,
    Case,
    Error,
    Inputs,
    Result,
    assert_max_logits_close,
    call,
    cotangents,
    gradients,
    make_inputs,
    max_abs,
    op_arguments,
    run,
    run_reference,
)
from test_derivatives import derivatives, reference_derivatives, some_tangents
from torch import Tensor

import flashattn_ext
from flashattn_ext import attention_reference, ops

pytestmark = pytest.mark.no_emulator  # its kernels compute in natural units, and read one word of the log-sum-exp

Alter = Callable[[Inputs], None]
LARGEST = torch.finfo(torch.float32).max

# (Sq, Sk): one tile, several tiles, more than a tile of either, few queries for many keys.
SIZES = {"tile": (64, 64), "tiles": (70, 300), "long": (150, 1000), "few queries": (5, 1500)}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (40, 3)},
    "negative scale": {"softmax_scale": -0.2},
    "gqa": {"Hq": 4, "Hk": 1, "D": 32},
    "bhsd": {"layout": "bhsd"},
    "mask": {"mask": "documents"},
    "varlen": {"lengths_q": (3, 0, 60, 17), "lengths_k": (300, 40, 70, 17)},
    "dropout": {"dropout_p": 0.3, "rng_seed": 3},
    "sink": {"sink_dtype": torch.float32},
    "smooth": {"smooth_softmax": True, "use_lse": True},
    "softcap": {"softcap": 300.0},
    "alibi": {"alibi": "heads"},
    "relative": {"relative": 20},
    "bias": {"bias": "bhq"},
    "hiding bias": {"bias": "q", "bias_hides": 0.3},
    "origin": {"origin": (1, 2, 30, 5)},
    "max logits": {"max_logits": True},
    "wide": {"D": 128, "Dv": 70},
}


def magnified(factor: float) -> Alter:
    """Logits of 5 * magnitude^2 at most, with the head dim 64 and its scale. fp16: products that plain PyTorch can hold."""

    def alter(inputs: Inputs) -> None:
        magnitude = min(factor, 30) if inputs.q.dtype == torch.float16 else factor
        inputs.q.mul_(magnitude)
        inputs.k.mul_(magnitude)

    return alter


def plain_results(case: Case, compute: Callable[[torch.dtype], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Plain PyTorch's results in the dtype of the case, or in fp32 where numbers are infinite in that dtype."""
    plain = compute(case.dtype)
    return plain if all(t.isfinite().all() for t in plain.values()) else compute(torch.float32)


def errors_of(
    case: Case, inputs: Inputs, got: dict[str, Tensor], exact: dict[str, Tensor], plain: dict[str, Tensor]
) -> dict[str, Error]:
    """Section 4's rule. The floor of dq and dk is that of dS times the keys or queries that it is multiplied with."""
    scale = abs(case.softmax_scale or case.D**-0.5)
    units = {"dq": scale * max_abs(inputs.k), "dk": scale * max_abs(inputs.q)}
    errors = {}
    for name, result in got.items():
        unit = max(1.0, units.get(name, case.unit(name[1:])))
        error = errors[name] = Error.of(name, result, exact[name], plain[name].to(result.dtype), case.dtype, unit)
        if case.dtype.itemsize == 2 and (plain["out"].dtype == torch.float32 or case.dropout_p):
            # Plain PyTorch in fp32 does not round its results. With dropout a row of one weight has an out of
            # v / p_keep, whose rounding is in delta; plain PyTorch multiplies its weight, 1, with exactly 0.
            error.floor += torch.finfo(case.dtype).eps * (4 * unit if name in units else 1 + max_abs(exact[name]))
    return errors


def assert_within(measure: Callable[[int], dict[str, Error]]) -> None:
    """The errors of the first seed follow the rule, or the medians of nine seeds: plain PyTorch is at times exact by luck."""
    first = measure(0)
    broken = [name for name, error in first.items() if not error.got <= error.allowed]
    draws = [first, *(measure(seed) for seed in range(1, 9))] if broken else []
    for name in broken:
        got, allowed = (median(getattr(draw[name], value) for draw in draws) for value in ("got", "allowed"))
        assert got <= allowed, f"{name}: error {got:.3e}, allowed {allowed:.3e}"


def rounding_of_products(case: Case, inputs: Inputs) -> float:
    """Half of the spacing of fp32 at the size of the terms of a logit, with which a GPU's tensor cores sum them: terms cancel in some
    rows."""
    scale = abs(case.softmax_scale or case.D**-0.5)
    return 2**-24 * scale * max(t.double().norm(dim=-1).max().item() for t in (inputs.q, inputs.k)) ** 2


def kernel_error(case: Case, inputs: Inputs) -> float:
    """The error of logits, and so of weights, that kernels on a GPU may have where plain PyTorch has none, by luck or because one key has
    all the weight: of their products; in 16 bits of the tanh of a softcap (general_score.cuh), and of a bias that all rows share beside
    products, which the forward adds in natural units and its gradient's kernel in those of log2."""
    if inputs.q.device.type == "cpu":
        return 0
    error = min(rounding_of_products(case, inputs), 2**-9)  # beyond, one key has all the weight, which is then exact
    if case.dtype.itemsize != 2:
        return error
    if case.softcap:
        error += case.softcap * (2**-15 if case.dtype == torch.float16 else 2**-11)
    if case.bias == "" and case.dtype == torch.float16:
        error += 2**-8  # half of the spacing of 65504 * log2(e)
    return error


def check(case: Case, device: str, alter: Alter) -> None:
    """Every result of forward and backward, and lse within one rounding of its size."""

    def measure(seed: int) -> dict[str, Error]:
        of_seed = replace(case, seed=seed)
        inputs = altered(of_seed, device, alter)
        lse, max_logits = {}, {}

        def results(name: str, result: Result) -> dict[str, Tensor]:
            lse[name], max_logits[name] = result.lse, result.max_logits
            return {"out": result.out, **{f"d{leaf}": grad for leaf, grad in result.grads.items()}}

        got = results("got", run(of_seed, inputs))
        exact = results("exact", run_reference(of_seed, inputs, torch.float64))
        plain = plain_results(case, lambda dtype: results("plain", run_reference(of_seed, inputs, dtype)))
        check_lse(lse["got"], lse["exact"], *lse_tolerance(case, inputs))
        if case.max_logits:
            assert_max_logits_close(max_logits["got"], max_logits["exact"], max_logits["plain"], case.dtype)
        errors = errors_of(of_seed, inputs, got, exact, plain)
        for name, error in errors.items():
            error.floor += kernel_error(case, inputs) * max_abs(exact[name])
        return errors

    assert_within(measure)


def check_derivatives(case: Case, device: str, alter: Alter) -> None:
    """J and H, with the rule of test_derivatives.py: three times plain PyTorch's error."""

    def measure(seed: int) -> dict[str, Error]:
        of_seed = replace(case, seed=seed)
        inputs = altered(of_seed, device, alter)
        tangents = some_tangents(of_seed, inputs, ("q", "k", "v", "sink"))
        got = derivatives(of_seed, inputs, tangents)
        exact = reference_derivatives(of_seed, inputs, tangents, torch.float64)
        plain = plain_results(case, lambda dtype: reference_derivatives(of_seed, inputs, tangents, dtype))
        rename = {"tout": "out", "tlse": "lse"}
        got, exact, plain = ({rename.get(n, n): t for n, t in results.items()} for results in (got, exact, plain))
        errors = errors_of(of_seed, inputs, got, exact, plain)
        for name, error in errors.items():
            error.factor, error.floor = 3, error.floor * max(1.0, max_abs(exact[name]))
            error.floor += kernel_error(case, inputs) * max_abs(exact[name])
        return errors

    assert_within(measure)


def altered(case: Case, device: str, alter: Alter) -> Inputs:
    inputs = make_inputs(case, device)
    with torch.no_grad():
        alter(inputs)
    return inputs


def lse_tolerance(case: Case, inputs: Inputs) -> tuple[float, float]:
    """Relative, and absolute. The tanh of 16-bit kernels on a GPU has a relative error of 2^-15 (general_score.cuh)."""
    rtol = 1e-12 if case.dtype == torch.float64 else 2e-6
    if inputs.q.device.type == "cpu":
        return rtol, 10 * rtol
    return 2**-15 if case.softcap and case.dtype.itemsize == 2 else rtol, 2e-5 + rounding_of_products(case, inputs)


def check_lse(got: Tensor, exact: Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    rtol = rtol or (1e-12 if got.dtype == torch.float64 else 2e-6)
    torch.testing.assert_close(got.double(), exact, rtol=rtol, atol=atol or 10 * rtol, msg=lambda m: f"lse: {m}")


def assert_equal_values(got: Tensor, values: Tensor) -> None:
    """Products with weights of 1 and 0. On a GPU fp32 products are three of TF32, which leave out the last digit of a value."""
    if got.device.type == "cuda" and got.dtype == torch.float32:
        torch.testing.assert_close(got, values, rtol=5e-7, atol=0)
    else:
        assert torch.equal(got, values)


@pytest.mark.every_isa
@pytest.mark.parametrize("magnitude", [1.5e4, 6e4])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "documents"}, {"Hq": 4}], ids=str)
def test_one_key_has_all_the_weight(device: str, dtype: torch.dtype, magnitude: float, options: dict[str, Any]) -> None:
    """The logits are 1.8e9 and 2.9e10, in fp16 as well. exp2 of the rounding error of an offset is then infinite or 0."""
    case = Case(dtype=dtype, Sq=1, Sk=1, D=64, Dv=64, **options)
    inputs = make_inputs(case, device)
    with torch.no_grad():
        for t in (inputs.q, inputs.k):
            t.copy_(magnitude * (1 + torch.rand(t.shape, device=device) / 32))
    got = run(case, inputs)
    dout, _ = cotangents(case, got.out, got.lse)
    group = case.Hq // case.Hk
    assert_equal_values(got.out, inputs.v.detach().repeat_interleave(group, 2))
    assert not got.grads["q"].any() and not got.grads["k"].any(), "one weight has no gradient"
    if group == 1:
        assert_equal_values(got.grads["v"], dout)
    products = (inputs.q * inputs.k.repeat_interleave(group, 2).double()).sum(-1) / 8
    check_lse(got.lse, products.detach().transpose(1, 2))


@pytest.mark.every_isa
@pytest.mark.parametrize("magnitude", [10, 40, 3e5], ids="{:g}".format)
@pytest.mark.parametrize("size", SIZES)
def test_large_products(device: str, dtype: torch.dtype, size: str, magnitude: float) -> None:
    """fp32 and bf16: logits of 400, 6400 and 4e11."""
    Sq, Sk = SIZES[size]
    check(Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64), device, magnified(magnitude))


@pytest.mark.every_isa
@pytest.mark.parametrize("name", OPTIONS)
def test_large_products_with_options(device: str, dtype: torch.dtype, name: str) -> None:
    check(Case(**{**dict(dtype=dtype, B=2, Sq=70, Sk=300, D=64, Dv=64), **OPTIONS[name]}), device, magnified(40))


@pytest.mark.parametrize("name", OPTIONS)
def test_large_products_of_few_queries_with_options(device: str, dtype: torch.dtype, name: str) -> None:
    check(Case(**{**dict(dtype=dtype, B=2, Sq=5, Sk=1500, D=64, Dv=64), **OPTIONS[name]}), device, magnified(40))


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_one_weight(device: str, dtype: torch.dtype, size: str) -> None:
    """Each query equals one key, so that its row has one weight: out is a value, and dq and dk are 0 but for its last digit."""
    Sq, Sk = SIZES[size]
    case = Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64)
    inputs = make_inputs(case, device)
    chosen = torch.randperm(Sk)[:Sq].to(device)
    with torch.no_grad():
        inputs.k.copy_(40 * torch.sign(inputs.k))
        inputs.q.copy_(inputs.k[:, chosen])
    got = run(case, inputs)
    dout, _ = cotangents(case, got.out, got.lse)
    dv = torch.zeros_like(inputs.v)
    dv[:, chosen] = dout
    on_cpu = inputs.q.device.type == "cpu"
    rtol = 0 if dtype != torch.float32 else 2e-7 if on_cpu else 5e-7
    torch.testing.assert_close(got.out, inputs.v[:, chosen], rtol=rtol, atol=0)
    floor = 2e-5 if on_cpu else 1e-5 * 40 / 8  # of dq and dk, as in errors_of
    assert max_abs(got.grads["q"]) < floor and max_abs(got.grads["k"]) < floor
    torch.testing.assert_close(got.grads["v"], dv, rtol=4e-7 if on_cpu else 5e-7, atol=1e-20)


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "size,magnitude", [("tile", 13), ("few queries", 13), ("tiles", 25), ("long", 48), ("few queries", 48)]
)
def test_derivatives_of_large_products(device: str, dtype: torch.dtype, size: str, magnitude: float) -> None:
    """Logits of 700, 2500 and 9400. J and H of rows with one weight are 0."""
    Sq, Sk = SIZES[size]
    check_derivatives(Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64, use_lse=True), device, magnified(magnitude))


@pytest.mark.parametrize("name", OPTIONS)
def test_derivatives_of_large_products_with_options(device: str, dtype: torch.dtype, name: str) -> None:
    case = Case(**{**dict(dtype=dtype, B=2, Sq=40, Sk=300, D=64, Dv=64), **OPTIONS[name]})
    check_derivatives(case, device, magnified(30))


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("scale", [0.0, 1e-45])
def test_derivatives_at_a_scale_of_zero(device: str, dtype: torch.dtype, scale: float) -> None:
    """Exponents are divided by the factor of products, which is then as small as it can be."""
    check_derivatives(
        Case(dtype=dtype, Sq=40, Sk=300, D=64, Dv=64, softmax_scale=scale, use_lse=True), device, lambda _: None
    )


# --- biases ---


def equal_keys(inputs: Inputs) -> None:
    """All logits of a row differ by their biases alone, in every precision."""
    inputs.k.copy_(inputs.k[:, :1].expand_as(inputs.k))


def biased(value: float, rows: str) -> Alter:
    """rows: all of them have this bias for every key; some: every third row, and half of the keys of the row after it."""

    def alter(inputs: Inputs) -> None:
        assert inputs.bias is not None
        equal_keys(inputs)
        bias = inputs.bias
        if rows == "all":
            bias.fill_(value)
            return
        bias.zero_()
        bias[:, :, ::3] = value
        bias[:, :, 1::3, ::2] = value

    return alter


def check_uniform(case: Case, device: str, alter: Alter) -> None:
    """Forward, backward, J and H where plain PyTorch's weights are exact."""
    check(case, device, alter)
    check_derivatives(case, device, alter)


@pytest.mark.every_isa
@pytest.mark.parametrize("value,rows", [(-1e9, "all"), (-1e9, "some"), (-1e7, "some"), (1e9, "some")])
@pytest.mark.parametrize("size", ["tile", "tiles", "few queries"])
def test_biases_of_all_keys(device: str, dtype: torch.dtype, size: str, value: float, rows: str) -> None:
    """Of each of n weights log2(n) is lost in one word of the log-sum-exp: each would be 1."""
    Sq, Sk = SIZES[size]
    statistics = torch.promote_types(dtype, torch.float32)
    case = Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64, bias="bhq", bias_dtype=statistics, use_lse=True)
    check_uniform(case, device, biased(value, rows))


@pytest.mark.every_isa
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("form", ["bhq", "q", ""], ids=["each", "shared", "row"])
@pytest.mark.parametrize("size", ["tiles", "few queries"])
def test_biases_of_the_largest_number(device: str, dtype: torch.dtype, size: str, form: str, sign: int) -> None:
    """Its product with log2(e) is infinite, but for fp16: such a bias counted as -inf, or made NaN."""
    Sq, Sk = SIZES[size]
    case = Case(
        dtype=dtype,
        B=1,
        Sq=Sq,
        Sk=Sk,
        D=64,
        Dv=64,
        bias=form,
        use_lse=True,
        max_logits=form == "q" and dtype != torch.float64,
    )
    rows = "some" if "q" in form else "all"
    check_uniform(case, device, biased(sign * torch.finfo(dtype).max, rows))


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("value", [-LARGEST, LARGEST, -1e38], ids="{:g}".format)
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": "documents"}, {"alibi": "heads"}, {"softcap": 3.0}], ids=str
)
def test_large_fp32_biases(device: str, dtype: torch.dtype, options: dict[str, Any], value: float) -> None:
    case = Case(dtype=dtype, B=1, Sq=70, Sk=300, D=64, Dv=64, bias="q", bias_dtype=torch.float32, **options)
    check_uniform(case, device, biased(value, "some"))


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("value", [-LARGEST, LARGEST, -1e9], ids="{:g}".format)
def test_large_relative_biases(device: str, dtype: torch.dtype, value: float) -> None:
    def alter(inputs: Inputs) -> None:
        assert inputs.relative_bias is not None
        equal_keys(inputs)
        inputs.relative_bias.fill_(value)
        inputs.relative_bias[1, 3:] = 0

    # In 16 bits an entry's gradient, a sum of dS over many rows, has an error that is no fixed multiple of plain PyTorch's.
    needs = ("q", "k", "v", *(["relative_bias"] if dtype == torch.float32 else []))
    check_uniform(Case(dtype=dtype, B=1, Sq=70, Sk=200, D=64, Dv=64, relative=9, needs_grad=needs), device, alter)


@pytest.mark.every_isa
@pytest.mark.parametrize("size", ["tiles", "few queries"])
@pytest.mark.parametrize("value", [3e38, 1e7, -1e9, -LARGEST], ids="{:g}".format)
@pytest.mark.parametrize("with_bias", [False, True], ids=["alone", "as the keys"])
def test_large_sinks(device: str, dtype: torch.dtype, with_bias: bool, value: float, size: str) -> None:
    """Beside keys of ordinary logits, and beside keys with the same bias, of which each weighs as much as the sink."""
    Sq, Sk = SIZES[size]
    statistics = torch.promote_types(dtype, torch.float32)
    sizes = dict(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64, sink_dtype=statistics, use_lse=True)

    def alter(inputs: Inputs) -> None:
        assert inputs.sink is not None
        inputs.sink.fill_(value)
        if inputs.bias is not None:
            inputs.q.zero_()
            inputs.bias.fill_(value)

    extra = dict(bias="q", bias_dtype=statistics) if with_bias else {}
    check_uniform(Case(**sizes, **extra), device, alter)  # type: ignore[arg-type]


def test_a_sink_of_infinity_is_no_large_sink(device: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, 9, 2, 16, device=device).to(dtype).requires_grad_()
    sink = torch.tensor([torch.inf, 3e38], device=device, requires_grad=True)
    out, lse = flashattn_ext.forward(q, q, q, sink=sink.to(lse_dtype(dtype)), return_lse=True)
    assert not out.any() and lse[:, 0].isposinf().all()
    torch.testing.assert_close(lse[:, 1].float(), torch.full((1, 9), 3e38, device=device))
    (gradient,) = torch.autograd.grad(lse.sum(), sink)
    assert gradient.tolist() == [9, 9]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- other entrances ---


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("magnitude", [1, 40, 2e4], ids="{:g}".format)
@pytest.mark.parametrize("new", [1, 7])
def test_decoding(device: str, dtype: torch.dtype, new: int, magnitude: float) -> None:
    """With a KV cache, in splits and in one: the rows of one weight have its value."""
    B, Sk, H, D = 2, 3000, 2, 64
    k = (magnitude * torch.sign(torch.randn(B, Sk, H, D, device=device))).to(dtype)
    v = torch.randn(B, Sk, H, D, device=device).to(dtype)
    for num_splits in (1, 7):
        q = k[:, -new:].clone()
        out, lse = flashattn_ext.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=Sk, causal=True, num_splits=num_splits, return_softmax_lse=True
        )
        exact, exact_lse = attention_reference(q.double(), k.double(), v.double(), causal=True, return_lse=True)
        if magnitude > 1:
            assert_equal_values(out, v[:, -new:])
        torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)
        check_lse(lse, exact_lse)


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("size,magnitude", [("tiles", 10), ("tiles", 3e5), ("few queries", 10), ("few queries", 3e5)])
def test_invariant_calls(device: str, dtype: torch.dtype, magnitude: float, size: str) -> None:
    """A row that rounds its products has the same bits beside rows that do not, and in a call of its own."""
    Sq, Sk = SIZES[size]
    q, k, v = (torch.randn(1, S, 2, 64, device=device).to(dtype) for S in (Sq, Sk, Sk))
    magnitude = min(magnitude, 150) if dtype == torch.float16 else magnitude
    q[:, ::2] *= magnitude
    k *= magnitude
    out, lse = flashattn_ext.forward(q, k, v, invariant=True, return_lse=True)
    exact = attention_reference(q.double(), k.double(), v.double())
    plain = attention_reference(q, k, v)
    if plain.isfinite().all():
        error = Error.of("out", out, exact, plain)
        assert error.got <= error.allowed
    assert out.isfinite().all()
    for row in (0, 1, Sq - 1):
        alone, lse_alone = flashattn_ext.forward(q[:, row : row + 1], k, v, invariant=True, return_lse=True)
        assert torch.equal(alone, out[:, row : row + 1]) and torch.equal(lse_alone, lse[:, :, row : row + 1])


@pytest.mark.every_isa
@pytest.mark.dtypes("bfloat16", "float16")
def test_backward_from_lse_alone(device: str, dtype: torch.dtype) -> None:
    """The rounding of a log-sum-exp in one word is common to the weights of a row, whose sum shows it."""
    case = Case(dtype=dtype, B=1, Sq=64, Sk=64, D=64, Dv=64, needs_grad=("q", "k", "v"))
    inputs = altered(case, device, magnified(40))
    out, lse = call(case, inputs)
    dout, _ = cotangents(case, out, lse)
    exact = run_reference(case, inputs, torch.float64).grads
    by_words = gradients(case, inputs, out, lse)
    by_lse = flashattn_ext.backward(dout, inputs.q, inputs.k, inputs.v, out, lse)
    for name, gradient in zip("qkv", by_lse, strict=False):
        error, own = (max_abs(g.double() - exact[name]) for g in (gradient, by_words[name]))
        assert error <= 2 * own + 1e-5, name


@pytest.mark.every_isa
@pytest.mark.dtypes("float32", "bfloat16", "float16")
@pytest.mark.parametrize("size", ["tiles", "few queries"])
def test_jvp_from_lse_alone(device: str, dtype: torch.dtype, size: str) -> None:
    """The sums of a row are divided by the sum of its weights, so that the rounding of lse does not change them."""
    Sq, Sk = SIZES[size]
    case = Case(dtype=dtype, B=1, Sq=Sq, Sk=Sk, D=64, Dv=64, sink_dtype=torch.float32)
    inputs = altered(case, device, magnified(13))
    tensors, options = op_arguments(case, inputs)
    tangents = some_tangents(case, inputs, ("q", "k", "v", "sink"))
    moved = [tangents.get(name) for name in TENSORS]
    with torch.no_grad():
        out, lse, words, *_ = ops.pure_forward(*tensors, *options, None, True, False, False, [])
        by_words, by_lse = (
            torch.ops.flashattn_ext.jvp(*tensors, *options, out, lse, given, None, *moved, [])
            for given in (words, None)
        )
    for one, two in zip(by_lse, by_words, strict=True):
        size_of_terms = 13 * 64**0.5  # of softmax_scale * <tq, k>
        assert max_abs(one - two) <= max(2e-5, torch.finfo(dtype).eps) * size_of_terms


def test_two_words_of_a_row(device: str, dtype: torch.dtype) -> None:
    """Their sum is the log-sum-exp in units of log2; of a row without keys it is infinite, so that every weight is 0."""
    case = Case(dtype=dtype, lengths_q=(5, 40, 3), lengths_k=(300, 7, 0), D=64, Dv=64, causal=True)
    inputs = make_inputs(case, device)
    tensors, options = op_arguments(case, inputs)
    with torch.no_grad():
        _, lse, words, *_ = ops.pure_forward(*tensors, *options, None, True, False, False, [])
    total = words.double().sum(-1) / 1.4426950408889634
    seen = lse.isfinite()
    assert words.shape == (*lse.shape, 2) and seen.any() and not seen.all()
    assert torch.equal(total.isposinf(), ~seen)
    rtol = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(total[seen], lse[seen].double(), rtol=rtol, atol=rtol)
    assert (words[..., 1][seen] >= -1e-5).all(), "top is the largest logit"
