"""Peak memory of one call beyond its inputs: quadratic in S for unfused attention, linear for ours.

On CUDA by PyTorch's allocator; on the CPU in a process of its own per call, by the high-water mark of
its resident memory.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ..bench_cuda import peak_extra_bytes
from ..devices import peak_memory_bytes
from ..timing import one_line, reported
from .context import OURS, PASSES, UNFUSED, Context, Inputs, hidden_scores, of_passes, remark, scaled, size_notes
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, UNFUSED)
MIB = 1 << 20
CHILD_LIMIT_S = 600
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
    result.notes = [*size_notes(sizes, GPU_SIZES), _how(context)]
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


def _how(context: Context) -> str:
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
    if context.on_cpu:
        return in_own_process(sizes, name, direction, S, torch.get_num_threads())
    if context.device.type != "cuda":
        raise NotImplementedError(f"no allocator statistics of {context.device.type} are read yet")
    call = Inputs.random(context, (sizes.B, sizes.H, S, sizes.D), sizes.dtype).call(name, direction, causal=True)
    call()  # libraries take the workspaces that they keep
    torch.cuda.empty_cache()
    return peak_extra_bytes(call)


# On the CPU


def in_own_process(sizes: Sizes, name: str, direction: str, S: int, threads: int) -> int:
    """The growth of a fresh process during one call, in bytes.

    The process is forked off a server that has imported PyTorch and computed nothing.
    """
    if sys.platform == "win32":
        raise NotImplementedError("the peak of resident memory is not read on Windows")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_child, args=(sender, sizes, name, direction, S, threads), daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(CHILD_LIMIT_S) else f"no answer within {CHILD_LIMIT_S} s"
    except EOFError:
        process.join()
        answer = f"its process ended with {process.exitcode}; out of memory?"
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _child(sender: Connection, sizes: Sizes, name: str, direction: str, S: int, threads: int) -> None:
    """Sends the growth in bytes, or what went wrong."""
    try:
        torch.set_num_threads(threads)
        sender.send(_growth_bytes(sizes, name, direction, S))
    except Exception as error:
        sender.send(one_line(error))


def _growth_bytes(sizes: Sizes, name: str, direction: str, S: int) -> int:
    context = Context(torch.device("cpu"), quick=True)
    warm_up = Inputs.random(context, (sizes.B, sizes.H, min(S, WARM_UP_S), sizes.D), sizes.dtype)
    warm_up.call(name, direction, causal=True)()
    call = Inputs.random(context, (sizes.B, sizes.H, S, sizes.D), sizes.dtype).call(name, direction, causal=True)
    if name == UNFUSED:
        hidden_scores(S, context.device)
    before = _resident_bytes()
    call()
    return max(0, peak_memory_bytes(context.device) - before)


def _resident_bytes() -> int:
    """What the process holds now; where the system does not tell, the most that it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))
