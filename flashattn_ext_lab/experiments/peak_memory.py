"""Peak memory of one call beyond its inputs: on CUDA by PyTorch's allocator; on the CPU by the growth of a fresh process, the
high-water mark of its resident memory.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..bench_contestants import extras
from ..console import one_line
from ..devices import peak_memory_bytes
from ..timing import peak_extra_bytes, reported
from .harness import Context, Inputs, Sizes

CPU = torch.device("cpu")
LIMIT_S = 600
WARM_UP_S = 64  # the sequence length of a first call, which loads libraries and starts threads
Call = Callable[[], object]


def peaks(
    context: Context, names: Iterable[str], failures: dict[str, str], sizes: Sizes, direction: str, **options: Any
) -> dict[str, int]:
    """The peaks of calls as Inputs.call() makes them, in bytes; `failures` receives the reasons of the others."""
    measured: dict[str, int] = {}
    for name in names:
        with reported(f"memory of {name}", failures):
            measured[name] = _peak_bytes(context, sizes, name, direction, options)
    return measured


def _peak_bytes(context: Context, sizes: Sizes, *call: Any) -> int:
    if context.on_cpu:
        return growth_in_own_process(_warmed_up, sizes, *call)
    if not context.on_cuda:
        raise NotImplementedError(f"allocator statistics of {context.device.type} are not read yet")
    run = make_call(context.device, sizes, *call)
    run()  # libraries allocate their persistent workspaces
    torch.cuda.empty_cache()
    return peak_extra_bytes(run)


def make_call(device: torch.device, sizes: Sizes, name: str, direction: str, options: dict[str, Any]) -> Call:
    """A call of Inputs.call(); one with a mask makes it each time."""
    call = Inputs.random(device, sizes).call(name, direction, **options)
    return (lambda: (extras.cache_clear(), call())) if "pattern" in options else call


def how_measured(context: Context) -> str:
    if context.on_cpu:
        return (
            "measured as the growth of the resident memory of a separate process for each call, high-water mark; includes the "
            "results, and what the C library keeps; a few tenths of a MiB are noise"
        )
    return "measured by PyTorch's allocator; includes the results"


def _warmed_up(sizes: Sizes, *call: Any) -> Call:
    make_call(CPU, sizes.replace(S=min(sizes.S, WARM_UP_S)), *call)()
    return make_call(CPU, sizes, *call)


def growth_in_own_process(prepare: Callable[..., Call], *arguments: Any) -> int:
    """The growth in bytes of a fresh process during the call that `prepare(*arguments)` returns there.

    The process is forked off a server that has imported PyTorch and computed nothing; `prepare` is a module-level function.
    """
    if sys.platform == "win32":
        raise NotImplementedError("the peak of resident memory is not read on Windows")
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__, prepare.__module__])
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_child, args=(sender, torch.get_num_threads(), prepare, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv() if receiver.poll(LIMIT_S) else f"no answer within {LIMIT_S} s"
    except EOFError:
        process.join()
        answer = f"its process ended with {process.exitcode}; out of memory?"
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _child(sender: Connection, threads: int, prepare: Callable[..., Call], arguments: tuple[object, ...]) -> None:
    """Sends the growth in bytes, or the error."""
    try:
        torch.set_num_threads(threads)
        call = prepare(*arguments)
        before = _resident_bytes()
        call()
        sender.send(max(0, peak_memory_bytes(CPU) - before))
    except Exception as error:
        sender.send(one_line(error))


def _resident_bytes() -> int:
    """Current resident memory of the process; its high-water mark where the system does not report the former."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(CPU)
