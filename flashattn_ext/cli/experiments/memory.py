"""Peak memory of one call beyond its inputs: quadratic in S for unfused attention, linear for ours.

On CUDA by PyTorch's allocator; on the CPU in a process of its own per call, by the high-water mark of
its resident memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..bench_cuda import peak_extra_bytes
from ..timing import reported
from ..unfused import hidden_scores
from .context import OURS, PASSES, UNFUSED, Context, Inputs, of_passes, remark, scaled, size_notes
from .own_process import growth_in_own_process
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, UNFUSED)
MIB = 1 << 20
WARM_UP_S = 64  # the sequence length of a first call, which loads libraries and starts threads


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    S: tuple[int, ...]
    D: int
    dtype: str


GPU_SIZES = Sizes(1, 8, (1024, 2048, 4096, 8192, 16384, 32768), 64, "fp16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(1, 2, (1024, 2048) if context.quick else (1024, 2048, 4096, 8192), 64, context.dtype)
    return Sizes(1, 8, (1024, 2048, 4096, 8192), 64, context.dtype) if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("pass"),
        Column("S"),
        *(Column(name, "MiB", ".2f") for name in NAMES),
        Column("saved", "%", ".2f"),
        Column("remark"),
    ]
    result = Result("memory", "Peak memory of a causal call beyond its inputs", columns)
    result.notes = [*size_notes(sizes, GPU_SIZES), how_measured(context)]
    for direction, S in context.track([(direction, S) for direction in PASSES for S in sizes.S]):
        result.rows.append(_row(context, sizes, direction, S))
    series = {
        f"{name}, {direction}": result.points("S", name, **{"pass": direction})
        for name in NAMES
        for direction in PASSES
    }
    result.plot = Plot("line", "S", "MiB", series, log="xy")
    result.comparisons = [
        Comparison(
            f"memory saved at S={S}",
            article,
            of_passes(result, "saved", ".1f", " %", S=S),
        )
        for S, article in ((1024, "94 %"), (8192, "99 %"))
    ]
    return result


def how_measured(context: Context) -> str:
    if context.on_cpu:
        return (
            "measured as the growth of the resident memory of a process of its own per call, high-water mark; includes the "
            "results, and what the C library keeps; a few tenths of a MiB are chance"
        )
    return "measured by PyTorch's allocator; includes the results"


def _row(context: Context, sizes: Sizes, direction: str, S: int) -> list[Cell]:
    failures: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for name in NAMES:
        with reported(name, failures):
            peaks[name] = _peak_bytes(context, sizes, name, direction, S)
    saved = 100 * (1 - peaks[OURS] / peaks[UNFUSED]) if len(peaks) == 2 and peaks[UNFUSED] else None
    return [direction, S, *(scaled(peaks.get(name), MIB) for name in NAMES), saved, remark(failures)]


def _peak_bytes(context: Context, sizes: Sizes, name: str, direction: str, S: int) -> int:
    return peak_bytes(context, _prepare, sizes, name, direction, S)


def peak_bytes(context: Context, prepare: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """The most memory that the call holds which `prepare(device, *arguments)` returns, beyond what was there before it.

    On the CPU that runs in a process of its own, so that `prepare` is a function of a module, and warms up there.
    """
    if context.on_cpu:
        return growth_in_own_process(prepare, torch.device("cpu"), *arguments)
    if context.device.type != "cuda":
        raise NotImplementedError(f"no allocator statistics of {context.device.type} are read yet")
    call = prepare(context.device, *arguments)
    call()  # libraries take the workspaces that they keep
    torch.cuda.empty_cache()
    return peak_extra_bytes(call)


def _prepare(device: torch.device, sizes: Sizes, name: str, direction: str, S: int) -> Callable[[], object]:
    context = Context(device, quick=True)
    warm_up = Inputs.random(context, (sizes.B, sizes.H, min(S, WARM_UP_S), sizes.D), sizes.dtype)
    warm_up.call(name, direction, causal=True)()
    call = Inputs.random(context, (sizes.B, sizes.H, S, sizes.D), sizes.dtype).call(name, direction, causal=True)
    if name == UNFUSED:
        hidden_scores(S, context.device)
    return call
