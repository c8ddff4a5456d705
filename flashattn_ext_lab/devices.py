"""Where a command runs: choosing the device, waiting for it, reading its peak memory."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import resource
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
        why = f"this torch ({torch.__version__}) sees no such device"
        raise CommandError(f"--device got {name!r}, but {why}; try --device auto")
    count = getattr(torch, kind).device_count()
    if index and int(index) >= count:
        raise CommandError(f"--device got {name!r}; this machine has {count} of {kind}: {kind}:0 to {kind}:{count - 1}")
    if needs_backend and not _has_backend(kind):
        only = f"this build has only the backends {', '.join(flashattn_ext.build_info()['backends'])}"
        fix = "use --device cpu, or rebuild where the toolkit is installed"
        raise CommandError(f"--device got {name!r}, but {only}; {fix}")
    return torch.device(name)


def use_threads(count: int | None) -> None:
    """Computes on `count` CPU threads; None leaves PyTorch's choice."""
    if count is None:
        return
    cpus = os.cpu_count() or 1
    if count > (most := MOST_THREADS_PER_CPU * cpus):
        raise CommandError(f"--threads got {count}; accepted are 1 to {most}: this machine has {cpus} CPUs")
    torch.set_num_threads(count)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, for the results of benchmarks and experiments, in the order in which they are shown."""
    kind = device.type
    about = {
        "machine": describe_cpu() if kind == "cpu" else getattr(torch, kind).get_device_name(device),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "flashattn_ext": flashattn_ext.__version__,
        "backends": ", ".join(flashattn_ext.build_info()["backends"]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "measured on": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "fp32 products": torch.get_float32_matmul_precision(),
    }
    if kind == "cpu":
        about["isa"] = flashattn_ext._C.cpu_isa()
    if kind == "cuda":
        about["compute_capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        about |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return about


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on the device; does nothing on the CPU."""
    getattr(torch, device.type).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The peak of the memory allocated on the device; on the CPU, of the memory of this process."""
    if device.type != "cpu":
        return getattr(torch, device.type).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _is_present(kind: str) -> bool:
    if kind == "npu":
        try:
            importlib.import_module("torch_npu")
        except ImportError:
            return False
    return getattr(torch, kind).is_available()


def _has_backend(kind: str) -> bool:
    prefix = {"cpu": "cpu", "cuda": "cuda", "npu": "ascend"}[kind]
    return any(name.startswith(prefix) and name != "ascend-emulator" for name in flashattn_ext.build_info()["backends"])
