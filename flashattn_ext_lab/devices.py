"""Where a command runs: choosing the device, waiting for it, reading its peak memory."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import torch

import flashattn_ext
from flashattn_ext._build import describe_cpu

from .console import CommandError

DEVICES = ("auto", "cpu", "cuda", "npu")
MOST_THREADS_PER_CPU = 16  # OpenMP ends the process where the system cannot start a thread


def choose_device(name: str, *, needs_backend: bool = True) -> torch.device:
    """The device for `--device name`. `auto` is the first accelerator that works, else the CPU.

    With `needs_backend`, `auto` passes over an accelerator for which this build has no kernels.
    """
    if name == "auto":
        usable = (d for d in ("cuda", "npu") if _is_present(d) and (_has_backend(d) or not needs_backend))
        return torch.device(next(usable, "cpu"))
    kind, _, index = name.partition(":")
    if kind not in DEVICES[1:] or not (index or "0").isdecimal():
        raise CommandError(f"--device got {name!r}; accepted are {', '.join(DEVICES)}")
    if not _is_present(kind):
        raise CommandError(
            f"--device got {name!r}, but this torch ({torch.__version__}) sees no such device; try --device auto"
        )
    count = getattr(torch, kind).device_count()
    if index and int(index) >= count:
        raise CommandError(f"--device got {name!r}; this machine has {count} of {kind}: {kind}:0 to {kind}:{count - 1}")
    if needs_backend and not _has_backend(kind):
        backends = ", ".join(flashattn_ext.build_info()["backends"])
        raise CommandError(
            f"--device got {name!r}, but this build has only the backends {backends}; "
            "use --device cpu, or rebuild where the toolkit is installed"
        )
    return torch.device(name)


def use_threads(count: int | None) -> None:
    """Computes on `count` CPU threads; None leaves PyTorch's choice."""
    if count is None:
        return
    cpus = os.cpu_count() or 1
    if count > (most := MOST_THREADS_PER_CPU * cpus):
        raise CommandError(f"--threads got {count}; accepted are 1 to {most}: this machine has {cpus} CPUs")
    torch.set_num_threads(count)


def describe_machine() -> dict[str, Any]:
    """The CPU and torch, for the results of a benchmark."""
    return {
        "machine": describe_cpu(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": flashattn_ext._C.cpu_isa(),
    }


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on the device; does nothing on the CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of the memory allocated on the device; on the CPU, of the memory of this process."""
    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _is_present(kind: str) -> bool:
    if kind == "cpu":
        return True
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError:
            return False
    return getattr(torch, kind).is_available()


def _has_backend(kind: str) -> bool:
    prefix = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}[kind]
    return any(name.startswith(prefix) and name != "ascend-emulator" for name in flashattn_ext.build_info()["backends"])
