"""Time and error of every dtype. Errors are against fp64, beside those of unfused attention in the same
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flashattn_ext

from ..bench_accuracy import largest_error
from ..timing import reported
from .context import (
    CEILING_NOTE,
    FORWARD,
    OURS,
    PASSES,
    UNFUSED,
    Context,
    Inputs,
    attention_flop,
    per_second,
    remark,
    scaled,
    share,
    size_notes,
    time_cells,
    time_columns,
)
from .result import Cell, Column, Plot, Result

NAMES = (OURS, UNFUSED)


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    S: int
    D: int
    dtypes: tuple[str, ...]


GPU_SIZES = Sizes(4, 32, 2048, 64, ("fp32", "fp16", "bf16"))


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(1, 4, 512 if context.quick else 2048, 64, GPU_SIZES.dtypes)
    return GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("pass"),
        Column("dtype"),
        *time_columns(NAMES),
        Column("rate", "TFLOP/s", ".3f"),
        Column("of matmul", "%", ".0f"),
        *(Column(f"error of {name}", "", ".1e") for name in NAMES),
        Column("remark"),
    ]
    result = Result("dtypes", "Causal attention by dtype", columns, notes=size_notes(sizes, GPU_SIZES))
    for direction, dtype in context.track([(direction, dtype) for direction in PASSES for dtype in sizes.dtypes]):
        result.rows.append(_row(context, sizes, direction, dtype))
    result.notes += [
        CEILING_NOTE,
        "error: the largest difference from fp64, forward of out, with the backward of dq, dk and dv, over the first batch "
        "entry's first two heads; inputs are standard normal numbers rounded to the dtype",
        "fp8: not measured, this package has no fp8 kernels",
    ]
    result.plot = Plot("bar", "dtype", "ms", {p: result.points("dtype", OURS, **{"pass": p}) for p in PASSES})
    return result


def _row(context: Context, sizes: Sizes, direction: str, dtype: str) -> list[Cell]:
    shape = (sizes.B, sizes.H, sizes.S, sizes.D)
    inputs = Inputs.random(context, shape, dtype)
    failures: dict[str, str] = {}
    timings = context.time({name: inputs.call(name, direction, True) for name in NAMES}, inputs.all, failures)
    rate = per_second(attention_flop(*shape, causal=True, direction=direction), timings, OURS)
    errors = _errors(inputs, direction, failures)
    return [
        direction,
        dtype,
        *time_cells(timings, NAMES),
        scaled(rate, 1e12),
        share(rate, context.ceiling(dtype)),
        *(errors.get(name) for name in NAMES),
        remark(failures),
    ]


def _errors(inputs: Inputs, direction: str, failures: dict[str, str]) -> dict[str, float]:
    few = Inputs(*(t.detach()[:1, :2].clone().requires_grad_() for t in inputs.all))
    errors: dict[str, float] = {}
    with reported("fp64 reference", failures):
        expected = _reference(few, direction)
        for name in NAMES:
            with reported(name, failures):
                got = few.call(name, direction, causal=True)()
                error = largest_error([t.double() for t in _as_list(got)], expected)
                if not math.isfinite(error):
                    raise FloatingPointError("the results are not all finite")
                errors[name] = error
    return errors


def _reference(inputs: Inputs, direction: str) -> list[Tensor]:
    q, k, v, dout = (t.detach().double().requires_grad_() for t in inputs.all)
    out = flashattn_ext.attention_reference(q, k, v, causal=True, layout="bhsd")
    return [out.detach()] if direction == FORWARD else list(torch.autograd.grad(out, (q, k, v), dout))


def _as_list(results: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [results] if isinstance(results, Tensor) else results
