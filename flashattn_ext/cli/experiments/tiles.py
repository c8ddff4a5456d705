"""Tile sizes of the forward: what each really takes, and which do not fit.

The CPU's kernels are told theirs. On CUDA and Ascend tiles are constants of the kernels: other ones are compiled from the checkout
when the experiment runs (private_build.py), for the Ascend emulator by `make emulator-tilings`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashattn_ext
from flashattn_ext import _C

from .. import private_build
from ..bench_cases import DTYPES
from ..bench_tune import Tile, cpu_tiles, cuda_tiles
from ..console import CommandError
from ..private_build import PrivateBuild
from ..timing import Timing
from .ascend import CORES, MEMORIES, TILINGS, Counts, Tiling, count_forward, tiling, why_no_tilings
from .context import (
    FORWARD,
    NOT_MEASURED,
    OURS,
    Context,
    Inputs,
    Shape,
    ratio,
    share,
    size_notes,
    time_cells,
    time_columns,
)
from .result import Cell, Column, Comparison, Plot, Result

KIB, MIB = 1 << 10, 1 << 20
TILE, TO_DEFAULT, SCRATCH = "queries x keys", "time to default", "memory of a tile"
EMULATOR, ASCEND, MODELLED = "Ascend emulator", "Ascend ", "modelled time"


@dataclass(frozen=True)
class Sizes(Shape):
    tiles: tuple[int, ...]


GPU_SIZES = Sizes(4, 32, 4096, 128, "fp16", (64, 128, 256, 512))


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        if context.quick:
            return Sizes(1, 4, 1024, 64, context.dtype, (64, 512))
        return Sizes(1, 4, 2048, 64, context.dtype, GPU_SIZES.tiles)
    return Sizes(4, 32, 1024, 128, context.dtype, GPU_SIZES.tiles) if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column(TILE),
        *time_columns(["time"]),
        Column(TO_DEFAULT, "x", ".3f"),
        Column("tiles"),
        Column("k and v read", "MiB", ".1f"),
        Column(SCRATCH, "KiB", ".0f"),
        Column("of what there is", "%", ".0f"),
        Column(MODELLED, "kcycles", ".1f"),
        Column("workspace moved", "MiB", ".1f"),
        Column(", ".join(MEMORIES), "%"),
        Column("remark"),
    ]
    result = Result("tiles", "Tile sizes, full attention, forward", columns, notes=size_notes(sizes, GPU_SIZES))
    if context.on_cpu:
        _measure_cpu(context, sizes, result)
    elif context.device.type == "cuda":
        _measure_cuda(context, sizes, result)
    result.notes.append(
        "tiles: all pairs of a query tile and a key tile. k and v read: once for each query tile, which is what moves if no cache keeps "
        "them; by arithmetic, but counted by the Ascend emulator"
    )
    series = {OURS: result.points(TILE, TO_DEFAULT)}
    _measure_emulator(context, sizes, result)
    series[f"{EMULATOR}, modelled"] = [
        (name.removeprefix(ASCEND), time) for name, time in result.points(TILE, TO_DEFAULT)[len(series[OURS]) :]
    ]
    result.plot = Plot("bar", TILE, TO_DEFAULT, {label: points for label, points in series.items() if points})
    article = "512, by an estimate"
    result.comparisons = [Comparison("best tile", article, quickest(result))]
    if modelled := result.points(TILE, MODELLED):
        tile, _ = min(modelled, key=lambda point: point[1])
        result.comparisons.append(
            Comparison(f"best tile, {EMULATOR}", article, f"{tile.removeprefix(ASCEND)}, modelled")
        )
    return result


def _row(
    sizes: Sizes,
    name: str,
    shape: tuple[int, int] | None,
    timings: Mapping[str, Timing],
    default: str,
    scratch: int | None = None,
    capacity: int | None = None,
    why: str = "",
) -> list[Cell]:
    """`shape` is None where the backend does not tell."""
    tiles = moved = None
    if shape:
        query_tiles, key_tiles = (math.ceil(sizes.S / length) for length in shape)
        tiles = sizes.B * sizes.H * query_tiles * key_tiles
        moved = sizes.B * sizes.H * query_tiles * sizes.S * 2 * sizes.D * DTYPES[sizes.dtype].itemsize / MIB
    return [
        name,
        *time_cells({"time": timings[name]} if name in timings else {}, ["time"]),
        ratio(timings, name, default),
        tiles,
        moved,
        None if scratch is None else scratch / KIB,
        share(scratch, capacity),
        *[None] * 3,
        why,
    ]


def quickest(result: Result) -> str:
    """The tile with the least median, and whether that is more than chance."""
    times = result.points(TILE, "time")
    if not times:
        return NOT_MEASURED
    tile, best = min(times, key=lambda point: point[1])
    spread = best * max(spread for _, spread in result.points(TILE, "time spread")) / 100
    default, time = times[0]
    doubt = f", but {default} is no slower than the spread of the calls" if 0 < time - best < spread else ""
    return f"{tile}, measured{doubt}"


# On the CPU


def _measure_cpu(context: Context, sizes: Sizes, result: Result) -> None:
    own = _C.cpu_tile(sizes.dtype, sizes.D)
    tiles = cpu_tiles(sizes.dtype, sizes.D, [(tile, tile) for tile in sizes.tiles])
    default = f"{tiles[0].name} (default)"
    tiles = (replace(tiles[0], name=default), *tiles[1:])
    timings, failures = _time(context, sizes, {tile.name: lambda tile=tile: tile for tile in tiles})
    cache = dict(_C.cpu_caches()).get(2)
    for tile in tiles:
        name, shape = tile.name, own if tile.name == default else tile.cpu_size
        scratch = scratch_bytes(*shape, sizes.D)
        result.rows.append(_row(sizes, name, shape, timings, default, scratch, cache, failures.get(name, "")))
    size = f"the {cache // KIB} KiB of a core's L2 cache" if cache else "a core's L2 cache, of unknown size here"
    result.notes.append(f"{SCRATCH}: q, k, v, scores and results of one thread in fp32, by arithmetic, beside {size}")


def scratch_bytes(queries: int, keys: int, D: int) -> int:
    return 4 * (2 * queries * D + 2 * keys * D + queries * keys)


def _time(
    context: Context, sizes: Sizes, tiles: Mapping[str, Callable[[], Tile]]
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Times the forward with each tile, in turns, and says why one has no time. Compiles what is missing first."""
    there, failures = dict[str, Tile](), dict[str, str]()
    for name, make in tiles.items():
        try:
            there[name] = make()
        except CommandError as error:
            failures[name] = str(error)
    problems = private_build.load(tile.backend for tile in there.values() if isinstance(tile.backend, PrivateBuild))
    for name, tile in list(there.items()):
        if isinstance(tile.backend, PrivateBuild) and tile.backend.name in problems:
            failures[name] = problems[there.pop(name).backend.name]
    inputs = Inputs.random(context, (sizes.B, sizes.H, sizes.S, sizes.D), sizes.dtype)
    call = inputs.call(OURS, FORWARD, causal=False)
    calls = {name: functools.partial(tile.run, call) for name, tile in there.items()}
    timings = dict[str, Timing]()
    for _ in context.track(["all take turns"]):
        timings = context.time(calls, inputs.all, failures)
    return timings, failures


# On CUDA


def _measure_cuda(context: Context, sizes: Sizes, result: Result) -> None:
    tiles = tiles_of_head_dim(sizes.D)
    timings, failures = _time(
        context, sizes, {name: functools.partial(_cuda_tile, name, tile, sizes) for name, tile in tiles.items()}
    )
    properties = torch.cuda.get_device_properties(context.device)
    capacity, default = properties.shared_memory_per_block_optin, next(iter(timings), "")
    for name, tile in tiles.items():
        shape, why = (tile["queries"], tile["keys"]), failures.get(name, "")
        shared = (tile["queries"] + 2 * tile["stages"] * tile["keys"]) * tile["head_dim"] * DTYPES[sizes.dtype].itemsize
        result.rows.append(_row(sizes, name, shape, timings, default, shared, capacity, why))
    result.rows += [fit_on_gpu(sizes, tile, properties) for tile in sizes.tiles]
    result.notes += [
        "alternatives: those of csrc/cuda/*/tiles.h, of every backend, beside the first one that runs here, which is the default; a kernel's "
        "scores and results lie in registers, so another tile is another kernel to compile",
        f"{SCRATCH}: shared memory of a tile of q, and of k and v in every stage, beside what a thread block can have",
    ]


def _cuda_tile(name: str, tile: Mapping[str, Any], sizes: Sizes) -> Tile:
    backend, choice = tile["backend"], tile["choice"]
    return Tile(name, private_build.cuda(backend, choice, sizes.dtype, tile["head_dim"]) if choice else backend)


def tiles_of_head_dim(D: int) -> dict[str, dict[str, Any]]:
    """The tiles of a forward without dropout of this head dim, the default one of the preferred backend first."""
    backends = [name for name in flashattn_ext.build_info()["backends"] if name.startswith("cuda")]
    tiles = [
        tile
        for backend in backends
        for tile in cuda_tiles(backend)
        if not tile["backward"] and not tile["dropout"] and tile["head_dim_v"] >= D
    ]
    head_dim = min(tile["head_dim"] for tile in tiles)
    return {
        f"{tile['name']} ({tile['backend']}{', default' if tile['choice'] == 0 else ''})": tile
        for tile in tiles
        if tile["head_dim"] == head_dim
    }


def fit_on_gpu(sizes: Sizes, tile: int, properties: Any) -> list[Cell]:
    """Whether a square tile fits a thread block."""
    shared = 3 * tile * sizes.D * DTYPES[sizes.dtype].itemsize
    needs = {
        "shared memory": (shared, properties.shared_memory_per_block_optin),
        "registers, for fp32 scores and results": (4 * tile * (tile + sizes.D), 4 * properties.regs_per_multiprocessor),
    }
    reasons = [f"{what} {need // KIB} KiB of {limit // KIB}" for what, (need, limit) in needs.items() if need >= limit]
    why = f"does not fit: {', '.join(reasons)}" if reasons else "fits; not measured, because no table has it"
    capacity = properties.shared_memory_per_block_optin
    return _row(sizes, f"{tile} x {tile}", (tile, tile), {}, "", shared, capacity, why)


# On the Ascend emulator


def _measure_emulator(context: Context, sizes: Sizes, result: Result) -> None:
    """A row for every tiling, that of the package first; the others are compiled unless the experiment shall be quick."""
    try:
        default = tiling(sizes.D)
        others = [tiling(sizes.D, *shape) for shape in TILINGS if shape != (default.rows, default.keys)]
    except FileNotFoundError as error:
        result.rows.append([EMULATOR, *[None] * (len(result.columns) - 2), str(error)])
        return
    problem = why_no_tilings(compiles=not context.quick)
    cores = even_cores(sizes)
    count = functools.partial(count_forward, sizes.B, sizes.H, sizes.S, sizes.D, causal=False, cores=cores)
    baseline = count()
    for of in context.track([default, *others]):
        counts, why = None, ""
        if of.overflows:
            why = "too large for " + ", ".join(f"{memory} by {bytes} bytes" for memory, bytes in of.overflows.items())
        elif of is default:
            counts = baseline
        elif problem:
            why = problem
        else:
            counts = count(of=of)
        name = ASCEND + of.name + (" (default)" if of is default else "")
        result.rows.append(_row_of_emulator(sizes, name, of, counts, baseline, why))
    result.notes.append(
        f"{EMULATOR}: the forward compiled with each tiling, in fp16; time modelled for {cores} cores, never measured. "
        f"{', '.join(MEMORIES)}: what a core takes of its memories, without dropout. Workspace moved: scores, probabilities and partial "
        "results between the cores of a block, written and read"
    )


def even_cores(sizes: Shape) -> int:
    """The most cores of a die that get the same number of tasks each: uneven shares would favour small tasks, whatever they cost."""
    tasks = sizes.B * sizes.H * math.ceil(sizes.S / max(rows for rows, _ in TILINGS))
    return max(cores for cores in range(1, CORES + 1) if tasks % cores == 0)


def _row_of_emulator(
    sizes: Sizes, name: str, of: Tiling, counts: Counts | None, baseline: Counts, why: str
) -> list[Cell]:
    tiles = sizes.B * sizes.H * math.ceil(sizes.S / of.rows) * math.ceil(sizes.S / of.keys)
    occupied = ", ".join(f"{100 * taken / there:.0f}" for taken, there in zip(of.taken, of.there, strict=True))
    to_default = read = cycles = workspace = None
    if counts:
        to_default = counts.cycles / baseline.cycles
        read = (counts.read - sizes.B * sizes.H * sizes.S * sizes.D * 2) / MIB
        cycles = counts.cycles / 1000
        workspace = (counts.workspace_read + counts.workspace_written) / MIB
    return [name, *[None] * 2, to_default, tiles, read, *[None] * 2, cycles, workspace, occupied, why]
