"""Communication between ranks: point-to-point transfers of rows, and the all-to-all of heads and rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def guarded(group: Any, what: str) -> Iterator[None]:
    """Explains the errors of torch's backends, which only name sockets, where a rank is late or has ended."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, (NotImplementedError, torch.OutOfMemoryError)) or str(error).startswith("flashattn_ext"):
            raise
        raise RuntimeError(
            f"flashattn_ext.distributed: {what} failed on rank {dist.get_rank(group)} of {dist.get_world_size(group)}: another rank has "
            "ended, is later than the timeout of the group (init_process_group(timeout=...)), or has not made the same call; "
            f"look at what the other ranks printed first. torch says: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


class Segment(NamedTuple):
    """Rows that one rank sends to another: [source_row, source_row + rows) of its part, to target_row of the receiver's buffer."""

    source: int
    source_row: int
    target_row: int
    rows: int


class Transfer:
    """Asynchronous sends and receives; call wait() before their tensors are read or written.

    With NCCL they run on the streams of the group, and wait() blocks the current stream, not the process.
    """

    def __init__(self, group: Any, what: str) -> None:
        self._group = group
        self._what = what
        self._operations: list[Any] = []
        self._late_copies: list[tuple[Tensor, Tensor]] = []
        self._kept: list[Tensor] = []
        self._works: list[Any] = []

    def send(self, t: Tensor, to: int) -> None:
        t = t.contiguous()
        self._kept.append(t)
        self._add(dist.isend, t, to)

    def receive(self, t: Tensor, source: int) -> None:
        """Receives into t, through a contiguous staging tensor where t is not contiguous."""
        if t.is_contiguous():
            self._add(dist.irecv, t, source)
            return
        arrived = torch.empty_like(t, memory_format=torch.contiguous_format)
        self._late_copies.append((t, arrived))
        self._add(dist.irecv, arrived, source)

    def _add(self, operation: Any, t: Tensor, peer: int) -> None:
        if t.numel():
            self._operations.append(dist.P2POp(operation, t, dist.get_global_rank(self._group, peer), self._group))

    def start(self) -> Transfer:
        if self._operations:
            with guarded(self._group, self._what):
                self._works = dist.batch_isend_irecv(self._operations)
        return self

    def wait(self) -> None:
        with guarded(self._group, self._what):
            for work in self._works:
                work.wait()
        for t, arrived in self._late_copies:
            t.copy_(arrived)
        self._works, self._late_copies, self._kept, self._operations = [], [], [], []


def all_to_all(sent: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int], group: Any, what: str) -> Tensor:
    """All-to-all of flat tensors: piece r of `sent` goes to rank r, and piece r of the result comes from rank r."""
    received = sent.new_empty(sum(received_sizes))
    with guarded(group, what):
        dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), group=group)
    return received
