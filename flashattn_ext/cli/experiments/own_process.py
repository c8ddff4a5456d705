"""Peak memory on the CPU: the growth of a fresh process, by the high-water mark of its resident memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ..devices import peak_memory_bytes
from ..timing import one_line

LIMIT_S = 600


def growth_in_own_process(prepare: Callable[..., Callable[[], object]], *arguments: object) -> int:
    """The growth in bytes of a fresh process during the call that `prepare(*arguments)` returns there.

    The process is forked off a server that has imported PyTorch and computed nothing.
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


def _child(
    sender: Connection, threads: int, prepare: Callable[..., Callable[[], object]], arguments: tuple[object, ...]
) -> None:
    """Sends the growth in bytes, or what went wrong."""
    try:
        torch.set_num_threads(threads)
        call = prepare(*arguments)
        before = _resident_bytes()
        call()
        sender.send(max(0, peak_memory_bytes(torch.device("cpu")) - before))
    except Exception as error:
        sender.send(one_line(error))


def _resident_bytes() -> int:
    """What the process holds now; where the system does not tell, the most that it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))
