"""Time and error of every dtype. Errors are against fp64, and compared with those of unfused attention in the same dtype."""

from __future__ import annotations

import itertools
import math

from ..bench_cuda import max_errors
from .harness import MATMUL_NOTE, OURS, UNFUSED, Context, Sizes, size_table
from .result import FORWARD, NOT_MEASURED, PASSES, Result, cell, labels, measured, quotient

NAMES = (OURS, UNFUSED)
FP8 = "fp8"
SIZES = size_table(
    gpu=dict(B=4, H=32, S=2048, D=64, dtypes=("fp32", "fp16", "bf16")), cpu=dict(B=1, H=4), cpu_quick=dict(S=512)
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    rows = [*itertools.product(PASSES, sizes.dtypes), (FORWARD, FP8)]  # fp8 has a forward only
    for direction, dtype in context.track(rows):
        inputs, names = context.inputs(sizes, dtype=dtype), (OURS,) if dtype == FP8 else NAMES
        times = context.measure_attentions(inputs, names, direction)
        errors = max_errors(inputs.case(direction), names, inputs, times.failures)
        for name in [name for name, error in errors.items() if not math.isfinite(error)]:
            times.failures[name] = f"the largest error is {errors.pop(name)}"
        result.add(
            *labels(pass_=direction, dtype=dtype),
            *times.times(*NAMES),
            *context.rate_cells(times.rate(inputs.flop(direction), OURS), None if dtype == FP8 else dtype),
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
