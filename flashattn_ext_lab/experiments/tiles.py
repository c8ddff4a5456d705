"""Tile sizes of the plain forward: the time of each, as `bench tune` measures them, and what each reads."""

from __future__ import annotations

import itertools
import math

import flashattn_ext
from flashattn_ext import _C

from ..bench_cases import DTYPES, Case
from ..bench_cuda import running_backend
from ..bench_tune import Job, Tile, cpu_tiles, cuda_tile, load_builds, measure_job, private_build
from ..console import CommandError
from .harness import Context, Sizes, divided, memory_cell, size_table
from .result import Plot, Result, cell, measured, quotient

TILE, TO_DEFAULT = "queries x keys", "time to default"
SIZES = size_table(
    # On a GPU the tiles are those of a row of csrc/cuda/table/kernel_table.h, which are compiled in the checkout.
    gpu=dict(B=4, H=32, S=4096, D=128, dtype="bf16", tiles=()),
    gpu_quick=dict(S=1024),
    cpu=dict(B=1, H=4, S=2048, D=64, dtype="fp32", tiles=(64, 128, 256, 512)),
    cpu_quick=dict(S=1024, tiles=(64, 128, 512)),
)
Shaped = tuple[Tile, tuple[int, int] | None]  # a tile with its queries and keys, if they are known


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    case = Case(sizes.B, sizes.H, sizes.H, sizes.S, sizes.D, False, sizes.dtype)
    backend, others = running_backend(None) if context.on_cuda else "cpu", ""
    try:
        shaped = cuda_shaped(backend, case) if context.on_cuda else cpu_shaped(case, sizes.tiles)
        load_builds([job := Job(backend, case, tuple(tile for tile, _ in shaped))])
    except CommandError as error:  # no checkout, or no compiler
        shaped, others = [(Tile("the package's", backend), None)], f"only this tile is measured: {error}"
        job = Job(backend, case, (shaped[0][0],))
    for _ in context.track(["all tiles in turn"]):
        with flashattn_ext.use_backend(backend):
            row = measure_job(job, context.device.type, context.quick)
    curves: dict[str, list[tuple[int, float]]] = {}
    default_ms = row["tiles"].get(row["default"], {}).get("ms")
    for tile, shape in shaped:
        of, is_default = row["tiles"].get(tile.name, {}), tile.name == row["default"]
        to_default = divided(of.get("ms"), default_ms)
        result.add(
            cell(TILE, f"{tile.name} (default)" if is_default else tile.name),
            cell("time", of.get("ms"), "ms", ".3f"),
            cell("time spread", of.get("spread"), "%", ".0f", 100),
            cell(TO_DEFAULT, to_default, "x", ".3f"),
            memory_cell("k and v read", shape and bytes_read(case, shape[0])),
            cell("remark", row["failures"].get(tile.name, others)),
        )
        if shape and to_default is not None:
            curve = f"{shape[0]} queries, default" if is_default else f"{shape[0]} queries"
            curves.setdefault(curve, []).append((shape[1], to_default))
    result.notes += [
        "k and v read: once for each tile of queries, which is what moves if no cache keeps them; by arithmetic",
        f"backend {backend}; `flashattn-ext bench tune` compares the tiles of every kind of call",
    ]
    curves = {name: sorted(curve) for name, curve in curves.items()}
    result.plot = Plot("line", "keys of a tile", TO_DEFAULT, curves, log="x")


def cpu_shaped(case: Case, sizes: tuple[int, ...]) -> list[Shaped]:
    """The package's tile, and every pair of sizes."""
    own = _C.cpu_tile(case.dtype, case.D)
    return [(tile, tile.cpu_size or own) for tile in cpu_tiles(case.dtype, case.D, itertools.product(sizes, sizes))]


def cuda_shaped(backend: str, case: Case) -> list[Shaped]:
    """The tiles of the row of the table that serves the call on this GPU, the package's first."""
    sources = private_build().sources
    rows = (
        row
        for row in sources.table()
        if (f"cuda-{row.architecture}", row.stage, row.options) == (backend, "forward", "kPlain")
        and case.dtype in row.dtypes
        and min(row.head_dim, row.head_dim_v) >= case.D
    )
    row = min(rows, key=lambda row: (row.head_dim, row.head_dim_v))
    return [
        (cuda_tile(backend, row, choice), sources.queries_and_keys(row, choice)) for choice in range(len(row.competing))
    ]


def bytes_read(case: Case, queries: int) -> int:
    """Keys and values that the tiles of this many queries read."""
    return case.B * case.Hk * math.ceil(case.S / queries) * case.S * 2 * case.D * DTYPES[case.dtype].itemsize


def compare(result: Result) -> None:
    figures = {str(tile): measured(result, "time", **{TILE: tile}) for tile in result.column(TILE)}
    timed = [(tile, figure) for tile, figure in figures.items() if figure]
    (default, its), *others = timed or [("the default one", None)]
    tile, best = min(others, key=lambda item: item[1].value, default=("none", None))
    what = f"time of the fastest other tile, {tile}, relative to that of {default}"
    result.compare(what, quotient(best, its), "512 is best, by an estimate")
