"""Tile sizes of the forward, as `bench tune` measures them: the time of each."""

from __future__ import annotations

import flashattn_ext

from ..bench_cases import Case
from ..bench_cuda import running_backend
from ..bench_tune import Job, cpu_tiles, cuda_tiles_of, load_builds, measure_job
from .harness import Context, Sizes, divided, size_table
from .result import NOT_MEASURED, Figure, Result, cell, measured, quotient

TILE, TO_DEFAULT = "queries x keys", "time to default"
SIZES = size_table(
    gpu=dict(B=4, H=32, S=4096, D=128, dtype="fp16", tiles=()),  # those of the tables in csrc/cuda
    gpu_quick=dict(S=1024),
    cpu=dict(B=1, H=4, S=2048, D=64, dtype="fp32", tiles=(64, 128, 256, 512)),
    cpu_quick=dict(S=1024, tiles=(64, 512)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    case = Case(sizes.B, sizes.H, sizes.H, sizes.S, sizes.D, False, sizes.dtype)
    if context.on_cuda:
        backend = running_backend(None)
        job = Job(backend, case, cuda_tiles_of(backend, sizes.D, sizes.dtype))
    else:
        backend = None
        job = Job("cpu", case, cpu_tiles(sizes.dtype, sizes.D, [(tile, tile) for tile in sizes.tiles]))
    load_builds([job])
    with flashattn_ext.use_backend(backend):
        row = measure_job(job, context.device.type, context.quick)
    default = row["tiles"].get(row["default"], {}).get("ms")
    for tile in job.tiles:
        of = row["tiles"].get(tile.name, {})
        result.add(
            cell(TILE, f"{tile.name} (default)" if tile.name == row["default"] else tile.name),
            cell("time", of.get("ms"), "ms", ".3f"),
            cell("time spread", of.get("spread"), "%", ".0f", 100),
            cell(TO_DEFAULT, divided(of.get("ms"), default), "x", ".3f"),
            cell("remark", row["failures"].get(tile.name, "")),
        )
    result.notes.append(f"backend {job.backend}; `flashattn-ext bench tune` measures every kind of call")
    result.compare("best tile", "512, by an estimate", fastest(result))


def found(result: Result) -> str:
    times = _times(result)
    default, *others = times.items() or [("", None)]
    if not others:
        return f"Time of another tile relative to the default one: {NOT_MEASURED}."
    tile, best = min(others, key=lambda item: item[1].value)
    return f"Time of the fastest other tile, {tile}, relative to that of {default[0]}: {quotient(best, default[1])}."


def fastest(result: Result) -> str:
    """The tile with the smallest median, and whether the difference exceeds the spread."""
    times = _times(result)
    if not times:
        return NOT_MEASURED
    tile = min(times, key=lambda name: times[name].value)
    default, best = next(iter(times)), times[tile].value
    spread = best * max(2 * of.half / of.value for of in times.values())
    doubt = 0 < times[default].value - best < spread
    return f"{tile}, measured" + (f", but {default} is no slower than the spread of the calls" if doubt else "")


def _times(result: Result) -> dict[str, Figure]:
    times = {str(tile): measured(result, "time", **{TILE: tile}) for tile in result.column(TILE)}
    return {tile: time for tile, time in times.items() if time}
