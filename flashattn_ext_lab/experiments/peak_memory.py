"""Peak memory of one call beyond its inputs: on CUDA by PyTorch's allocator; on the CPU by the growth of a fresh process, the
high-water mark of its resident memory.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..console import one_line
from ..devices import peak_memory_bytes
from ..timing import peak_extra_bytes
from .harness import Context

LIMIT_S = 600
WARM_UP_S = 64  # the sequence length of a first call, which loads libraries and starts threads
Make = Callable[..., Callable[[], object]]


def peak_bytes(context: Context, make: Make, S: int, *arguments: object) -> int:
    """Peak memory of the call that `make(device, S, *arguments)` returns, beyond the memory in use before it.

    On the CPU `make` runs in a separate process, so it must be a module-level function.
    """
    if context.on_cpu:
        return growth_in_own_process(_warmed_up, make, S, *arguments)
    if not context.on_cuda:
        raise NotImplementedError(f"allocator statistics of {context.device.type} are not read yet")
    call = make(context.device, S, *arguments)
    call()  # libraries allocate their persistent workspaces
    torch.cuda.empty_cache()
    return peak_extra_bytes(call)


def how_measured(context: Context) -> str:
    if context.on_cpu:
        return (
            "measured as the growth of the resident memory of a separate process for each call, high-water mark; includes the "
            "results, and what the C library keeps; a few tenths of a MiB are noise"
        )
    return "measured by PyTorch's allocator; includes the results"


def _warmed_up(make: Make, S: int, *arguments: object) -> Callable[[], object]:
    device = torch.device("cpu")
    make(device, min(S, WARM_UP_S), *arguments)()
    return make(device, S, *arguments)


def growth_in_own_process(prepare: Make, *arguments: Any) -> int:
    """The growth in bytes of a fresh process during the call that `prepare(*arguments)` returns there.

    The process is forked off a server that has imported PyTorch and computed nothing.
    """
    if sys.platform == "win32":
        raise NotImplementedError("the peak of resident memory is not read on Windows")
    processes = multiprocessing.get_context("forkserver")
    modules = [of.__module__ for of in (prepare, *arguments) if callable(of)]
    processes.set_forkserver_preload([__name__, *modules])
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


def _child(sender: Connection, threads: int, prepare: Make, arguments: tuple[object, ...]) -> None:
    """Sends the growth in bytes, or the error."""
    try:
        torch.set_num_threads(threads)
        call = prepare(*arguments)
        before = _resident_bytes()
        call()
        sender.send(max(0, peak_memory_bytes(torch.device("cpu")) - before))
    except Exception as error:
        sender.send(one_line(error))


def _resident_bytes() -> int:
    """Current resident memory of the process; its high-water mark where the system does not report the former."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))
