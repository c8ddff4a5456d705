"""Reference rates: matrix products, and the bandwidth of a copy."""

from __future__ import annotations

import math

from .harness import Context, Measured, Sizes, size_table
from .result import Plot, Result, alone, cell, labels, measured

LIMIT_S = 5.0  # a product that would take longer is skipped: half precision without hardware support, for example
SIZES = size_table(
    gpu=dict(n=(1024, 2048, 4096, 8192), dtypes=("fp32", "fp16", "bf16"), copy_mib=(64, 256, 1024)),
    gpu_quick=dict(n=(1024, 2048), copy_mib=(64, 256)),
    cpu=dict(n=(512, 1024, 2048), copy_mib=(16, 64)),
    cpu_quick=dict(n=(256, 512, 1024)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    def add(what: str, dtype: str, size: int | str, times: Measured, flop: float = 0, moved: float = 0) -> None:
        result.add(
            *labels(what=what, dtype=dtype, size=size),
            *times.times("time"),
            cell("rate", times.rate(flop, "time") if flop else None, "TFLOP/s", ".3f", 1e-12),
            cell("bandwidth", times.rate(moved, "time") if moved else None, "GB/s", ".1f", 1e-9),
            times.remark(),
        )

    for dtype, n in context.steps(sizes.dtypes, sizes.n):
        times = None
        for smaller, ms in result.points("size", "time", dtype=dtype)[-1:]:
            if (expected_s := ms * 1e-3 * (n / smaller) ** 3) > LIMIT_S:
                why = f"skipped: at the rate of {smaller} a call would take {expected_s:.0f} s"
                times = Measured({}, {"time": why})
        add("matmul", dtype, n, times or context.matmul(dtype, n), flop=2 * n**3)
    for mib in context.track(sizes.copy_mib):
        side = math.isqrt((mib << 20) // 4)
        source = context.randn(side, side, dtype="fp32")
        target = source.clone()
        times = context.measure({"time": lambda: target.copy_(source)}, (source,))  # noqa: B023
        add("copy", "fp32", f"{mib} MiB", times, moved=2 * source.nbytes)
    result.notes.append("bandwidth counts the bytes read and those written; small copies may stay in a cache")
    series = {dtype: result.points("size", "rate", what="matmul", dtype=dtype) for dtype in sizes.dtypes}
    result.plot = Plot("line", "n", "TFLOP/s", series, log="x")


def compare(result: Result) -> None:
    def largest(what: str, column: str, unit: str, dtype: str) -> str:
        size, _ = [(None, 0), *result.points("size", column, what=what, dtype=dtype)][-1]
        return alone(measured(result, column, "time", what=what, dtype=dtype, size=size), unit)

    for dtype in map(str, dict.fromkeys(result.column("dtype"))):
        result.compare(f"largest torch.matmul in {dtype}", largest("matmul", "rate", "TFLOP/s", dtype))
    result.compare("largest copy", largest("copy", "bandwidth", "GB/s", "fp32"))
