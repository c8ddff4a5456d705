"""Processes that are the ranks of torch.distributed for the tests of this folder. They start once and run one job after the other.

A job is a function of a module that the ranks can import too. It is called with its arguments on every rank, and fails the test with the
traceback of each rank on which it raises.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
# The time that a job may take. A job takes a few seconds at most, except on an emulated processor (tools/check_arm64.sh).
TIMEOUT_S = float(os.environ.get("FLASHATTN_EXT_TEST_TIMEOUT_S", 60))

_groups: dict[int, Any] = {}  # on a rank: the groups of the first n ranks


def group_of(ranks: int) -> Any:
    """On a rank: the group of the first `ranks` ranks."""
    return _groups[ranks]


def _serve(rank: int, rendezvous: str, device: str, ranks: int, jobs: Connection) -> None:
    """The main function of a rank."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    importlib.import_module("poison").poison_empty_tensors()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    for count in {2, ranks}:
        _groups[count] = dist.new_group(list(range(count)))
    here = importlib.import_module("rank_pool")  # jobs import this module; here it may be __main__
    here._groups.update(_groups)
    while True:
        job = jobs.recv()
        if job is None:
            break
        module, name, arguments = job
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name)(*arguments)
            jobs.send("")
        except Exception:
            jobs.send(traceback.format_exc())
    dist.destroy_process_group()


class RankPool:
    """`ranks` processes, on the CPU through gloo or on as many GPUs through NCCL."""

    def __init__(self, device: str, ranks: int) -> None:
        self.device = device
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        environment = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
        os.environ.update(OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="1")  # ranks share the cores
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            arguments = (rank, f"{self._folder.name}/rendezvous", device, ranks, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        for name, value in environment.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value

    def run(self, function: Callable[..., None], *arguments: Any) -> None:
        """Runs the job on every rank; raises AssertionError with the ranks' tracebacks."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(2 * TIMEOUT_S):
                answers.append(f"rank {rank} has not answered within {2 * TIMEOUT_S} s")
                continue
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(f"rank {rank} has ended")
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        assert not problems, "\n".join(problems)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
