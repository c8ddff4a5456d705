"""Where a command runs: choosing the device, waiting for it, reading its peak memory."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import torch

import flashattn_ext

from .console import CommandError

DEVICES = ("auto", "cpu", "cuda", "npu")
# A call of the CPU kernels with work for as many threads as it is told.
START_THREADS = """
import sys, torch, flashattn_ext
torch.set_num_threads(int(sys.argv[1]))
x = torch.ones(1, 1, 1, 8).expand(int(sys.argv[1]), -1, -1, -1)
flashattn_ext.forward(x, x, x)
"""
START_LIMIT_S = 60


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
    """Computes on `count` CPU threads; None leaves PyTorch's choice.

    OpenMP ends the process when it cannot start a thread. Counts beyond the number of CPUs are therefore
    tried in another process.
    """
    if count is None:
        return
    if count > (os.cpu_count() or 1) and (reason := _why_not_threads(count)):
        raise CommandError(
            f"--threads got {count}, and this machine could not start as many ({reason}); it has {os.cpu_count()} "
            "CPUs: more threads than those only wait for each other"
        )
    torch.set_num_threads(count)


def _why_not_threads(count: int) -> str:
    command = [sys.executable, "-c", START_THREADS, str(count)]
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=START_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"they did not start within {START_LIMIT_S} s"
    except OSError as error:
        return str(error.strerror)
    if done.returncode < 0:
        return f"a process with them ended with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return (lines or [f"status {done.returncode}"])[-1] if done.returncode else ""


def synchronize(device: torch.device) -> None:
    """Waits for the work queued on the device; nothing to do on the CPU."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory ever allocated on the device; on the CPU, the most that this process ever
    held.
    """
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
