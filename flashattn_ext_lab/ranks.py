"""The ranks of a command that torchrun has started on several devices."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flashattn_ext import distributed

from .console import CommandError, one_line
from .data import Batch

# In the message of an error, that another rank has ended or is late.
OTHERS = re.compile(r"flashattn_ext\.distributed|connection (closed|reset)|timed out|broken pipe|nccl", re.IGNORECASE)
TIMEOUT = datetime.timedelta(minutes=5)  # how long a rank waits for another


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """The number of this process on its machine, and of its device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def start(device: torch.device) -> None:
    """Joins the other ranks: through NCCL on GPUs, HCCL on NPUs, gloo on the CPU."""
    if dist.is_initialized():
        return
    backend = {"cuda": "nccl", "npu": "hccl"}.get(device.type, "gloo")
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        why, start = one_line(error), "torchrun --nproc-per-node N -m flashattn_ext ..."
        raise CommandError(f"this rank could not join the others ({why}); start them with {start}") from None


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Joins the other ranks for the block.

    When a rank fails, the others see a lost connection, and torchrun sends them SIGTERM: whichever comes first, the block
    ends with the same CommandError.
    """

    def stop(number: int, _frame: object) -> NoReturn:
        raise _others_ended(f"torchrun sent {signal.Signals(number).name}")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        start(device)
        yield
    except BaseException as error:
        # SIGTERM must not end the process before it has reported the reason.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and OTHERS.search(str(error))):
            raise _others_ended(one_line(error)) from None
        raise
    else:
        signal.signal(signal.SIGTERM, previous)
    finally:
        end()


def _others_ended(reason: str) -> CommandError:
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "this rank"
    stops = f"{rank} stops: another rank has ended or is late"
    return CommandError(f"{stops}; the same command resumes from the last checkpoint ({reason})")


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class Layout:
    """This process's part of a batch: some of the rows, and of each row the shard of `distributed.shard`; by default everything."""

    rank: int = 0
    ranks: int = 1
    data_rank: int = 0
    data_ranks: int = 1  # ranks that share the rows of a batch
    context_group: Any = None  # the ranks that share each row; None without context parallelism

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, batch: Batch) -> Batch:
        """This rank's rows, with its shard of tokens and targets; documents stay whole."""
        rows = Batch(*(None if t is None else t[self.data_rank :: self.data_ranks] for t in batch))
        if self.context_group is None:
            return rows
        tokens, targets = (distributed.shard(t, group=self.context_group) for t in rows[:2])
        return rows._replace(tokens=tokens, targets=targets)

    def sum(self, value: float, device: torch.device) -> float:
        """The value, summed over the ranks."""
        return self._reduced(value, device, dist.ReduceOp.SUM)

    def largest(self, value: float, device: torch.device) -> float:
        """The largest value of all ranks."""
        return self._reduced(value, device, dist.ReduceOp.MAX)

    def _reduced(self, value: float, device: torch.device, operator: Any) -> float:
        if self.ranks == 1:
            return value
        of_all = torch.tensor(value, dtype=torch.float64).to(device)
        dist.all_reduce(of_all, operator)
        return of_all.item()


def layout_of(context_parallel: int, batch_size: int, device: torch.device) -> Layout:
    """The layout of a process that torchrun has started, after `start`; the default for any other process."""
    got = f"--context-parallel got {context_parallel}"
    if not dist.is_initialized():
        if context_parallel > 1:
            start = f"torchrun --nproc-per-node {context_parallel} -m flashattn_ext train ..."
            raise CommandError(f"{got}, and this is one process; start as many ranks with {start}")
        return Layout()
    ranks = dist.get_world_size()
    if ranks % context_parallel:
        raise CommandError(f"{got}; accepted are divisors of the {ranks} ranks")
    data_ranks = ranks // context_parallel
    if batch_size % data_ranks:
        sharing = f"{ranks} ranks, of which {context_parallel} share a row"
        raise CommandError(f"--batch-size got {batch_size}; accepted are multiples of {data_ranks}: {sharing}")
    mesh = dist.init_device_mesh(device.type, (data_ranks, context_parallel), mesh_dim_names=("data", "context"))
    group = mesh["context"].get_group() if context_parallel > 1 else None
    return Layout(dist.get_rank(), ranks, mesh.get_local_rank("data"), data_ranks, group)
