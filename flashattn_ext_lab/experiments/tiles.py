"""Tile sizes of the forward, as `bench tune` measures them: the time of each."""

from __future__ import annotations

import flashattn_ext

from ..bench_cases import Case
from ..bench_cuda import running_backend
from ..bench_tune import Job, cpu_tiles, cuda_tiles_of, load_builds, measure_job
from .harness import Context, Sizes, divided, size_table
from .result import Result, cell, measured, quotient

TILE, TO_DEFAULT = "queries x keys", "time to default"
SIZES = size_table(
    gpu=dict(B=4, H=32, S=4096, D=128, dtype="fp16", tiles=()),  # those of the tables in csrc/cuda
    gpu_quick=dict(S=1024),
    cpu=dict(B=1, H=4, S=2048, D=64, dtype="fp32", tiles=(64, 128, 256, 512)),
    cpu_quick=dict(S=1024, tiles=(64, 512)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    case = Case(sizes.B, sizes.H, sizes.H, sizes.S, sizes.D, False, sizes.dtype)
    backend = running_backend(None) if context.on_cuda else None
    if backend:
        tiles = cuda_tiles_of(backend, sizes.D, sizes.dtype)
    else:
        tiles = cpu_tiles(sizes.dtype, sizes.D, [(tile, tile) for tile in sizes.tiles])
    job = Job(backend or "cpu", case, tiles)
    load_builds([job])
    with flashattn_ext.use_backend(backend):
        row = measure_job(job, context.device.type, context.quick)
    times = {name: of["ms"] for name, of in row["tiles"].items()}
    for name in (tile.name for tile in tiles):
        result.add(
            cell(TILE, f"{name} (default)" if name == row["default"] else name),
            cell("time", times.get(name), "ms", ".3f"),
            cell("time spread", row["tiles"][name]["spread"] if name in times else None, "%", ".0f", 100),
            cell(TO_DEFAULT, divided(times.get(name), times.get(row["default"])), "x", ".3f"),
            cell("remark", row["failures"].get(name, "")),
        )
    result.notes.append(f"backend {job.backend}; `flashattn-ext bench tune` measures every kind of call")


def compare(result: Result) -> None:
    figures = {str(tile): measured(result, "time", **{TILE: tile}) for tile in result.column(TILE)}
    timed = [(tile, figure) for tile, figure in figures.items() if figure]
    (default, its), *others = timed or [("the default one", None)]
    tile, best = min(others, key=lambda item: item[1].value, default=("none", None))
    what = f"time of the fastest other tile, {tile}, relative to that of {default}"
    result.compare(what, quotient(best, its), "512 is best, by an estimate")
