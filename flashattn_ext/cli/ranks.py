"""The ranks of a command that torchrun has started on several devices."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from .console import CommandError

TIMEOUT = datetime.timedelta(minutes=5)  # how long a rank waits for another


def started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_rank() -> int:
    """The number of this process on its machine, which is that of its device."""
    return int(os.environ.get("LOCAL_RANK", 0))


def start(device: torch.device, timeout: datetime.timedelta = TIMEOUT) -> None:
    """Joins the other ranks: through NCCL on GPUs, HCCL on NPUs, gloo on the CPU."""
    if dist.is_initialized():
        return
    backend = {"cuda": "nccl", "npu": "hccl"}.get(device.type, "gloo")
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    try:
        dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise CommandError(
            f"this rank could not join the others ({str(error).splitlines()[0]}); torchrun --nproc-per-node N -m flashattn_ext ... "
            "starts them"
        ) from None


def end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
