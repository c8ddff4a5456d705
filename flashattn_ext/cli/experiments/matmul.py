"""The ceilings: the rate of matrix products, and the bandwidth of a copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .context import Context, per_second, remark, scaled, size_notes, time_cells, time_columns
from .result import Cell, Column, Plot, Result

LIMIT_S = 5.0  # a product that would take longer is skipped: half precision without instructions for it, say


@dataclass(frozen=True)
class Sizes:
    n: tuple[int, ...]
    dtypes: tuple[str, ...]
    copy_mib: tuple[int, ...]


GPU_SIZES = Sizes((1024, 2048, 4096, 8192), ("fp32", "fp16", "bf16"), (64, 256, 1024))


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes((256, 512, 1024) if context.quick else (512, 1024, 2048), GPU_SIZES.dtypes, (16, 64))
    return Sizes((1024, 2048), GPU_SIZES.dtypes, (64, 256)) if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("what"),
        Column("dtype"),
        Column("size"),
        *time_columns(["time"]),
        Column("rate", "TFLOP/s", ".3f"),
        Column("bandwidth", "GB/s", ".1f"),
        Column("remark"),
    ]
    result = Result("matmul", "Ceilings: torch.matmul and a copy", columns, notes=size_notes(sizes, GPU_SIZES))
    for dtype, n in context.track([(dtype, n) for dtype in sizes.dtypes for n in sizes.n]):
        measured = result.points("size", "time", dtype=dtype)
        result.rows.append(_product(context, dtype, n, measured[-1] if measured else None))
    result.rows += [_copy(context, mib) for mib in context.track(sizes.copy_mib)]
    result.notes.append("bandwidth counts the bytes read and those written; small copies may stay in a cache")
    result.plot = Plot(
        "line",
        "n",
        "TFLOP/s",
        {dtype: result.points("size", "rate", what="matmul", dtype=dtype) for dtype in sizes.dtypes},
        log="x",
    )
    return result


def _product(context: Context, dtype: str, n: int, smaller: tuple[int, Cell] | None) -> list[Cell]:
    """`smaller` is a size before this one and its milliseconds: it tells whether this one would take too long."""
    if (
        smaller
        and isinstance(smaller[1], float)
        and (expected_s := smaller[1] * 1e-3 * (n / smaller[0]) ** 3) > LIMIT_S
    ):
        reason = f"skipped: at the rate of {smaller[0]} a call would take {expected_s:.0f} s"
        return ["matmul", dtype, n, None, None, None, None, reason]
    timing, reason = context.time_matmul(dtype, n)
    timings = {"time": timing} if timing else {}
    rate = scaled(per_second(2 * n**3, timings, "time"), 1e12)
    return ["matmul", dtype, n, *time_cells(timings, ["time"]), rate, None, reason]


def _copy(context: Context, mib: int) -> list[Cell]:
    side = math.isqrt((mib << 20) // 4)
    source = context.randn(side, side, dtype="fp32")
    target = source.clone()
    failures: dict[str, str] = {}
    timings = context.time({"time": lambda: target.copy_(source)}, (source,), failures)
    nbytes = 2 * source.numel() * source.element_size()
    bandwidth = scaled(per_second(nbytes, timings, "time"), 1e9)
    return ["copy", "fp32", f"{mib} MiB", *time_cells(timings, ["time"]), None, bandwidth, remark(failures)]
