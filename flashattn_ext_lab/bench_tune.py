"""`bench tune`: the fastest tile for each kind of call, compared with the default one.

On CUDA they are the rows of csrc/cuda/table/kernel_table.h whose tiles compete; all tiles but the first are compiled from the checkout when they are
first measured (csrc/private_build.py). On the CPU they are pairs of sizes, which the kernels take as arguments.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext import _C

from . import bench_cuda
from .bench_cases import OURS, Case
from .bench_contestants import inputs, tensors_of, timed_call
from .console import Columns, CommandError, fields, print_rows, text_of, track
from .devices import choose_device, describe_machine
from .timing import Timing, reported, time_on

DROPOUT = 0.1
# The calls of a row of the table, by the options that it supports: full and causal, or with two masks.
CALLS: dict[str, dict[str, Any]] = {"kDropout": {"dropout": DROPOUT}, "kBias": {"score": "bias"}}
CALLS["kScores"] = CALLS["kGeneral"] = {"score": "softcap"}
WAYS, MASKED_WAYS = (("", False), ("", True)), (("one document", True), ("documents", True))  # pattern, causal
CPU_TILES, CPU_QUICK_TILES = (64, 128, 192, 256, 512), (64, 128)
LARGEST_DIFFERENCE = 0.02  # relative to the default's results: a larger one is not 16-bit rounding
T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """A tile to be measured, of a backend of the package or of a private build, which has to be loaded."""

    name: str
    backend: str
    build: Any = None  # a PrivateBuild
    cpu_size: tuple[int, int] | None = None  # queries and keys for the CPU kernels; None: their default

    def run(self, call: Callable[[], T]) -> T:
        with flashattn_ext.use_backend(self.backend):
            if self.cpu_size is None:
                return call()
            _C.set_cpu_tile(*self.cpu_size)
            try:
                return call()
            finally:
                _C.set_cpu_tile(0, 0)


@dataclass(frozen=True)
class Job:
    """One kind of call, and the tiles that can run it, the default one first."""

    backend: str
    case: Case
    tiles: tuple[Tile, ...]


def measure(*, quick: bool, device: str = "auto", backend: str | None = None) -> dict[str, Any]:
    """Times every tile of every kind of call. The result contains plain numbers only, ready for JSON."""
    kind = choose_device(device).type
    if kind == "cuda":
        backend = bench_cuda.running_backend(backend)
        jobs = cuda_jobs(backend, quick)
    elif backend is not None:
        raise CommandError(f"--backend got {backend!r}, which is for --device cuda")
    else:
        kind, jobs = "cpu", cpu_jobs(quick)
    load_builds(jobs)
    with flashattn_ext.use_backend(backend):
        rows = [measure_job(job, kind, quick) for job in track(jobs)]
    return {**describe_machine(torch.device(kind)), "device": kind, "quick": quick, "rows": rows}


@functools.cache
def private_build() -> ModuleType:
    """csrc/private_build.py of the checkout with this package, or of the current folder."""
    for folder in (Path(__file__).parents[1] / "csrc", Path.cwd() / "csrc"):
        if (folder / "private_build.py").exists():
            sys.path.insert(0, str(folder))
            return importlib.import_module("private_build")
    missing = "other tiles are compiled from the sources, which an installed package does not have"
    raise CommandError(f"{missing}; start this in a checkout")


def load_builds(jobs: Iterable[Job]) -> None:
    """Compiles the tiles that the package does not have."""
    try:
        if builds := [tile.build for job in jobs for tile in job.tiles if tile.build]:
            private_build().load(builds)
    except RuntimeError as error:
        raise CommandError(str(error)) from None


def cuda_jobs(backend: str, quick: bool) -> list[Job]:
    """The calls of the backend's rows of the table in which speed decides among several tiles."""
    table = private_build().sources.table()
    rows = [row for row in table if f"cuda-{row.architecture}" == backend and len(row.competing) > 1]
    tiles = [tuple(cuda_tile(backend, row, choice) for choice in range(len(row.competing))) for row in rows]
    return [Job(backend, case, its) for row, its in zip(rows, tiles, strict=True) for case in cuda_cases(row, quick)]


def cuda_tile(backend: str, row: Any, choice: int) -> Tile:
    build = private_build().cuda(backend, choice, row.dtypes[-1]) if choice else None
    return Tile(private_build().sources.describe(row, choice), build.name if build else backend, build)


def cuda_cases(row: Any, quick: bool) -> list[Case]:
    masked, D = row.options in ("kIntervals", "kGeneral", "kFp8General"), row.head_dim
    B, S = (1, 16384) if masked else (4, 4096)
    shape = (B, 2048 // D, 2048 // D, S // (4 if quick else 1), D)
    options = {"Dv": row.head_dim_v * (row.head_dim_v != D), "derivative": "J" * (row.stage == "jvp")}
    options |= {"backward": row.stage == "backward", **CALLS.get(row.options, {})}
    dtype, ways = row.dtypes[-1], MASKED_WAYS if masked else WAYS
    return [Case(*shape, causal, dtype, pattern=pattern, **options) for pattern, causal in ways]


def cpu_tiles(dtype: str, D: int, sizes: Iterable[tuple[int, int]]) -> tuple[Tile, ...]:
    """The tile that the package has for heads of this size, and the entries of `sizes` that differ from it."""
    own = _C.cpu_tile(dtype, D)
    return tuple(
        Tile(f"{queries} x {keys}", "cpu", cpu_size=None if (queries, keys) == own else (queries, keys))
        for queries, keys in dict.fromkeys([own, *sizes])
    )


def cpu_jobs(quick: bool) -> list[Job]:
    sizes = CPU_QUICK_TILES if quick else CPU_TILES
    S = 256 if quick else 2048
    return [
        Job("cpu", Case(1, 4, 4, S, D, causal, "fp32", dropout), cpu_tiles("fp32", D, itertools.product(sizes, sizes)))
        for D, dropout, causal in itertools.product((64, 128), (0.0, DROPOUT), (False, True))
    ]


def measure_job(job: Job, device: str, quick: bool) -> dict[str, Any]:
    """One row. A tile that cannot run, or whose results differ, has its reason in `failures` and no time."""
    case, failures = job.case, dict[str, str]()
    rng_seed = bench_cuda.RNG_SEED if case.dropout else None
    call = timed_call(case, OURS, *inputs(case, device), rng_seed)
    calls = {tile.name: functools.partial(tile.run, call) for tile in job.tiles}
    differences: dict[str, float] = {}
    expected: list[Tensor] = []  # results of the default tile, which comes first
    for name, run in calls.items():
        with reported(name, failures):
            results = tensors_of(run())
            expected = expected or results
            differences[name] = difference(results, expected)
            if not differences[name] <= LARGEST_DIFFERENCE:
                failures[name] = f"its results differ from the default ones by {differences[name]:.1%}"
    calls = {name: run for name, run in calls.items() if name not in failures}
    return row(job, time_on(device, calls, quick, failures=failures), differences, failures)


def difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor as a whole; NaN if either tensor has a NaN."""
    norms = [((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, expected, strict=True)]
    return torch.stack(norms).max().item()


def row(
    job: Job, timings: Mapping[str, Timing], differences: Mapping[str, float], failures: Mapping[str, str]
) -> dict[str, Any]:
    """A kind of call as plain numbers; `gain` above 1: the best tile is faster than the default one."""
    case, default = job.case, job.tiles[0].name
    best = min(timings, key=lambda name: timings[name].median_s, default=None)
    tiles = {
        name: {
            "ms": of.median_s * 1e3, "fastest_ms": of.fastest_s * 1e3, "slowest_ms": of.slowest_s * 1e3,
            "spread": of.spread, "tflops": case.flop / of.median_s * 1e-12, "difference": differences[name],
        }
        for name, of in timings.items()
    }  # fmt: skip
    gain = tiles[default]["ms"] / tiles[best]["ms"] if default in tiles and best is not None else None
    about = {**case.described(), "backend": job.backend}
    return {**about, "default": default, "best": best, "gain": gain, "tiles": tiles, "failures": dict(failures)}


COLUMNS: Columns = {
    **fields({"backend": "backend"}),
    "D": lambda row: f"{row['D']}:{row['Dv']}" if row["Dv"] else f"{row['D']}",
    **fields({"pass": "direction", "mask": "option", "default tile": "default"}),
    "ms / spread": lambda row: _time_text(row, row["default"]),
    "best tile": lambda row: "the same" if row["best"] == row["default"] else text_of(row["best"], ""),
    "its ms / spread": lambda row: "-" if row["best"] == row["default"] else _time_text(row, row["best"]),
    "gain": lambda row: (
        "-"
        if row["gain"] is None or row["best"] == row["default"]
        else f"{row['gain']:.2f}x" + ("" if is_faster(row) else ", within the spread")
    ),
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the best tile and the default one, and what could not be compared."""
    rows, about = results["rows"], f"{results['machine']}, torch {results['torch']}"
    title = f"Tiles (queries x keys) on {about}: medians; spread: between the fastest and the slowest call"
    print_rows(title, COLUMNS, rows, markdown=markdown, marked=[is_faster(row) for row in rows], width=bench_cuda.WIDTH)
    for row in rows:
        about = " ".join(str(COLUMNS[name](row)) for name in ("backend", "D", "pass", "mask"))
        for name, reason in row["failures"].items():
            print(f"{about}: {name}: {reason}")


def _time_text(row: Mapping[str, Any], name: str) -> str:
    tile = row["tiles"].get(name)
    return f"{tile['ms']:.3f} / {tile['spread']:.0%}" if tile else "-"


def is_faster(row: Mapping[str, Any]) -> bool:
    """Whether the slowest call of the best tile is faster than the fastest one of the default tile."""
    if row["gain"] is None:
        return False
    return row["tiles"][row["best"]]["slowest_ms"] < row["tiles"][row["default"]]["fastest_ms"]
