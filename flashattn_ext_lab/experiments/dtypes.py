"""Time and error of every dtype. Errors are against fp64, and compared with those of unfused attention in the same dtype."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import flashattn_ext

from ..bench_contestants import tensors_of
from ..bench_cuda import largest_error
from ..timing import reported
from .harness import MATMUL_NOTE, OURS, UNFUSED, Context, Inputs, Sizes, size_table
from .result import FORWARD, NOT_MEASURED, PASSES, Result, cell, measured, quotient

NAMES = (OURS, UNFUSED)
FP8 = "fp8"
SIZES = size_table(
    gpu=dict(B=4, H=32, S=2048, D=64, dtypes=("fp32", "fp16", "bf16")), cpu=dict(B=1, H=4), cpu_quick=dict(S=512)
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    rows = [*itertools.product(PASSES, sizes.dtypes), (FORWARD, FP8)]  # fp8 has a forward only
    for direction, dtype in context.track(rows):
        inputs = context.inputs(sizes, dtype="fp32" if dtype == FP8 else dtype)
        calls, flop = {name: inputs.call(name, direction) for name in NAMES}, inputs.flop(direction)
        if dtype == FP8:
            inputs = Inputs(*(t.detach().to(torch.float8_e4m3fn) for t in inputs))
            calls = {OURS: lambda: flashattn_ext.forward(*inputs[:3], causal=True)}  # noqa: B023
        times = context.measure(calls, () if dtype == FP8 else inputs)
        errors = _errors(inputs, calls, direction, times.failures)
        result.add(
            cell("pass", direction),
            cell("dtype", dtype),
            *times.times(*NAMES),
            *context.rate_cells(times.rate(flop, OURS), None if dtype == FP8 else dtype),
            *(cell(f"error of {name}", errors.get(name), "", ".1e") for name in NAMES),
            times.remark(),
        )
    result.notes += [
        MATMUL_NOTE,
        "error: the largest difference from fp64, forward of out, with the backward of dq, dk and dv, over the first two heads of the "
        "first batch entry; inputs are standard normal numbers rounded to the dtype",
        f"{FP8}: forward of float8_e4m3fn; the error is that of the kernel, against fp64 of the values that the elements stand for, and "
        "leaves out the rounding of the inputs to fp8; in bfloat16 `out`; unfused attention has no fp8",
    ]


def compare(result: Result) -> None:
    for dtype in dict.fromkeys(result.column("dtype")):
        if dtype != "fp32":
            times = (measured(result, OURS, dtype=each, pass_=FORWARD) for each in ("fp32", dtype))
            result.compare(f"time of fp32 relative to {dtype}, {FORWARD}", quotient(*times))
    pairs = zip(*(result.column(f"error of {name}") for name in NAMES), strict=True)
    ratios = [ours / unfused for ours, unfused in pairs if ours is not None and unfused]
    errors = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else NOT_MEASURED
    result.compare("largest error relative to that of unfused, of one sample", errors)


def _errors(
    inputs: Inputs,
    calls: Mapping[str, Callable[[], Tensor | Sequence[Tensor]]],
    direction: str,
    failures: dict[str, str],
) -> dict[str, float]:
    errors: dict[str, float] = {}
    with reported("fp64 reference", failures):
        q, k, v, dout = (t.detach()[:1, :, :2].double().requires_grad_() for t in inputs)
        out = flashattn_ext.attention_reference(q, k, v, causal=True)
        expected = tensors_of(out if direction == FORWARD else torch.autograd.grad(out, (q, k, v), dout))
        for name, call in calls.items():
            with reported(name, failures):
                error = largest_error([t[:1, :, :2].double() for t in tensors_of(call())], expected)
                if not math.isfinite(error):
                    raise FloatingPointError("the results are not all finite")
                errors[name] = error
    return errors
