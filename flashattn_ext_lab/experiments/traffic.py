"""Bytes that attention reads from and writes to off-chip memory, by unfused attention and by ours."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flashattn_ext

from ..bench_cases import DTYPES
from ..timing import reported
from .harness import MIB, OURS, UNFUSED, Context, Inputs, Sizes, size_table
from .result import FORWARD, NOT_MEASURED, Result, cell, labels, number

NAMES = (OURS, UNFUSED)
WAYS = ("read", "written")
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NSIGHT = "--clock-control none --csv --page raw --print-units base --profile-from-start off --metrics"
PROFILER_LIMIT_S = 300
SIZES = size_table(gpu=dict(B=4, H=32, S=2048, D=64, dtype="fp16"), gpu_quick={}, cpu={}, cpu_quick={})


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for source in context.track(list(SOURCES)):
        _add_rows(context, sizes, source, result)
    result.notes += [
        "model: every kernel reads each of its inputs once and writes its output once, masks of S x S bytes included",
        "GPU counters: by Nsight Compute, each kernel alone with cold caches; data that is still in the L2 cache when a kernel ends is not "
        "counted as written",
    ]


def compare(result: Result) -> None:
    for what, article in (("read", "-94.7 %"), ("written", "-95.1 %")):
        saved = {source: result.value(f"{what} saved", source=source) for source in SOURCES}
        texts = [f"{number(-of, '+.1f', ' %')} ({source})" for source, of in saved.items() if of is not None]
        what = f"bytes {what} by a forward, relative to unfused, counted once"
        result.compare(what, ", ".join(texts) or NOT_MEASURED, article)


def _add_rows(context: Context, sizes: Sizes, source: str, result: Result) -> None:
    counted: dict[str, dict[str, int]] = {}
    failures: dict[str, str] = {}
    with reported(source, failures):
        counted = {name: SOURCES[source](context, sizes, name) for name in NAMES}
    for name in NAMES if counted else ("",):
        of, unfused = counted.get(name), counted.get(UNFUSED) if name == OURS else None
        saved = {what: 1 - of[what] / unfused[what] if unfused else None for what in WAYS}
        result.add(
            *labels(source=source, attention=name or None, kernels=of and of["kernels"]),
            *(cell(what, of and of[what], "MiB", ".1f", 1 / MIB) for what in WAYS),
            *(cell(f"{what} saved", saved[what], "%", ".1f", 100) for what in WAYS),
            cell("remark", failures.get(source, "")),
        )


# Sources: each returns the kernels of one attention, and the bytes read and written, or raises with the reason


def model(context: Context, sizes: Sizes, name: str) -> dict[str, int]:
    element = DTYPES[sizes.dtype].itemsize
    rows = sizes.B * sizes.H * sizes.S
    tensor, scores, mask, lse = rows * sizes.D * element, rows * sizes.S * element, sizes.S**2, rows * 4
    kernels = {
        OURS: [(3 * tensor, tensor + lse)],
        UNFUSED: [
            (tensor, tensor),  # the scale
            (2 * tensor, scores),  # q k^T
            (scores + mask, scores),  # the mask
            (scores, scores),  # softmax
            (scores + tensor, tensor),  # times v
        ],
    }[name]
    read, written = map(sum, zip(*kernels, strict=True))
    return {"kernels": len(kernels), "read": read, "written": written}


def gpu_counters(context: Context, sizes: Sizes, name: str) -> dict[str, int]:
    """Runs main() under Nsight Compute and adds up the kernels between its cudaProfilerStart and cudaProfilerStop.

    Clocks are not locked: they do not change the bytes, and the machine may have other users.
    """
    if not context.on_cuda:
        raise NotImplementedError(f"only CUDA has GPU counters, this ran on {context.device.type}")
    from torch.utils.cpp_extension import CUDA_HOME

    ncu = shutil.which("ncu") or (CUDA_HOME and shutil.which("ncu", path=str(Path(CUDA_HOME, "bin"))))
    if not ncu:
        raise FileNotFoundError("ncu was not found; install Nsight Compute, which comes with the CUDA toolkit")
    given = map(str, (sizes.B, sizes.H, sizes.S, sizes.D, sizes.dtype))
    command = [ncu, *NSIGHT.split(), ",".join(METRICS), sys.executable, "-m", __name__, name, *given]
    roots = [str(Path(package).parents[count]) for package, count in ((flashattn_ext.__file__, 1), (__file__, 2))]
    # The child has the packages of this process.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, *sys.path[1:]])}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": PROFILER_LIMIT_S, "env": environment}
    done = subprocess.run(command, check=False, **options)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    problem = next((line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")), "")
    if problem or done.returncode:
        raise RuntimeError(f"ncu: {problem or (lines or ['it failed without a message'])[-1]}")
    # It prints names, units, and a row for each kernel.
    table = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(table) < 2:
        raise RuntimeError("ncu saw no kernel")
    units, *kernels = table
    if wrong := {units[metric] for metric in METRICS} - {"byte"}:
        raise RuntimeError(f"ncu counts in {', '.join(wrong)}, expected byte")
    read, written = (sum(int(float(row[metric].replace(",", ""))) for row in kernels) for metric in METRICS)
    return {"kernels": len(kernels), "read": read, "written": written}


SOURCES: dict[str, Callable[[Context, Sizes, str], dict[str, int]]] = {"model": model, "GPU counters": gpu_counters}


def main(attention: str, *shape: str, dtype: str) -> None:
    """One causal forward on a GPU for a profiler, which is switched on for the second call: the first one loads libraries."""
    sizes = Sizes(**dict(zip("BHSD", map(int, shape), strict=True)), dtype=dtype)
    call = Inputs.random(torch.device("cuda"), sizes).call(attention, FORWARD)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:-1], dtype=sys.argv[-1])
