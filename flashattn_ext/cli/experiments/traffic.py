"""Bytes that attention reads from and writes to off-chip memory, unfused and ours."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import flashattn_ext

from ..bench_cases import DTYPES
from ..timing import reported
from .ascend import Counts, count_forward
from .context import NOT_MEASURED, OURS, UNFUSED, Context, Shape, number, scaled, size_notes
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, UNFUSED)
READ, WRITTEN = "read", "written"
MIB = 1 << 20
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
PROFILER_LIMIT_S = 300


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call, and its kernels."""

    read: int
    written: int
    kernels: int


GPU_SIZES = Shape(4, 32, 2048, 64, "fp16")


def sizes_for(context: Context) -> Shape:
    return GPU_SIZES


def measure(context: Context, sizes: Shape) -> Result:
    columns = [
        Column("source"),
        Column("attention"),
        Column("kernels"),
        Column(READ, "MiB", ".1f"),
        Column(WRITTEN, "MiB", ".1f"),
        Column(f"{READ} saved", "%", ".1f"),
        Column(f"{WRITTEN} saved", "%", ".1f"),
        Column("remark"),
    ]
    result = Result(
        "traffic", "Off-chip memory traffic, causal attention, forward", columns, notes=size_notes(sizes, GPU_SIZES)
    )
    for source in context.track(list(SOURCES)):
        result.rows += _rows(context, sizes, source)
    result.notes += [
        "model: every kernel reads each of its inputs once and writes its output once, masks of S x S bytes included",
        "GPU counters: by Nsight Compute, each kernel alone with cold caches; what is still in the L2 cache at a kernel's end is not "
        "counted as written",
        "Ascend emulator: counted exactly, in fp16; its workspace: scores and partial results between the cores of a block, meant to "
        "stay in the L2 cache",
    ]
    result.plot = Plot(
        "bar",
        f"{READ} or {WRITTEN}",
        "MiB",
        {
            f"{name}, {source}": [
                (what, value)
                for what in (READ, WRITTEN)
                for value in [result.value(what, source=source, attention=name)]
                if isinstance(value, float)
            ]
            for source in SOURCES
            for name in NAMES
            if result.value(READ, source=source, attention=name) is not None
        },
    )
    result.comparisons = [
        Comparison(f"bytes {what}, ours beside unfused", article, _by_source(result, f"{what} saved"))
        for what, article in ((READ, "-94.7 %"), (WRITTEN, "-95.1 %"))
    ]
    return result


def _rows(context: Context, sizes: Shape, source: str) -> list[list[Cell]]:
    counted: dict[str, Traffic] = {}
    failures: dict[str, str] = {}
    with reported(source, failures):
        for name in NAMES:
            counted[name] = SOURCES[source](context, sizes, name)
    if not counted:
        return [[source, *[None] * 6, failures.get(source, "")]]
    return [
        [
            source,
            name,
            traffic.kernels,
            scaled(traffic.read, MIB),
            scaled(traffic.written, MIB),
            *(_saved(counted, what) if name == OURS else None for what in (READ, WRITTEN)),
            failures.get(source, ""),
        ]
        for name, traffic in counted.items()
    ]


def _saved(counted: dict[str, Traffic], what: str) -> float | None:
    if len(counted) < 2 or not (whole := getattr(counted[UNFUSED], what)):
        return None
    return 100 * (1 - getattr(counted[OURS], what) / whole)


def _by_source(result: Result, column: str) -> str:
    saved = {source: result.value(column, source=source) for source in SOURCES}
    return (
        ", ".join(
            f"{number(-value, '+.1f', ' %')} ({source})" for source, value in saved.items() if isinstance(value, float)
        )
        or NOT_MEASURED
    )


# The sources: each gives the traffic of one attention, or raises with the reason why it cannot


def model(context: Context, sizes: Shape, name: str) -> Traffic:
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
    return Traffic(sum(read for read, _ in kernels), sum(written for _, written in kernels), len(kernels))


def gpu_counters(context: Context, sizes: Shape, name: str) -> Traffic:
    if context.device.type != "cuda":
        raise NotImplementedError(f"only CUDA has them, this ran on {context.device.type}")
    call = [sys.executable, "-m", f"{__package__}.one_call", name, *map(str, astuple(sizes))]
    return count_with_nsight(call)


def emulator(context: Context, sizes: Shape, name: str) -> Traffic:
    counts = _emulated(sizes, name)
    return Traffic(counts.read, counts.written, 1)


def emulator_workspace(context: Context, sizes: Shape, name: str) -> Traffic:
    counts = _emulated(sizes, name)
    return Traffic(counts.workspace_read, counts.workspace_written, 1)


def _emulated(sizes: Shape, name: str) -> Counts:
    if name != OURS:
        raise NotImplementedError("ours only: there are no unfused kernels in Ascend C")
    return count_forward(sizes.B, sizes.H, sizes.S, sizes.D, causal=True)


SOURCES: dict[str, Callable[[Context, Shape, str], Traffic]] = {
    "model": model,
    "GPU counters": gpu_counters,
    "Ascend emulator": emulator,
    "its workspace": emulator_workspace,
}


def count_with_nsight(call: list[str]) -> Traffic:
    """Runs a command under Nsight Compute and adds up the kernels between its cudaProfilerStart and cudaProfilerStop."""
    from torch.utils.cpp_extension import CUDA_HOME

    in_toolkit = str(Path(CUDA_HOME, "bin")) if CUDA_HOME else ""
    ncu = shutil.which("ncu") or shutil.which("ncu", path=in_toolkit)
    if ncu is None:
        raise FileNotFoundError("ncu was not found; install Nsight Compute, which comes with the CUDA toolkit")
    # The clocks stay as they are: they do not change the bytes, and the machine may be shared.
    options = [
        "--clock-control",
        "none",
        "--metrics",
        ",".join(METRICS),
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    root = str(Path(flashattn_ext.__file__).parents[1])  # the child is to import this very package
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path[1:]])}
    done = subprocess.run(
        [ncu, *options, "--profile-from-start", "off", *call],
        capture_output=True,
        text=True,
        timeout=PROFILER_LIMIT_S,
        env=environment,
        check=False,
    )
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    problem = next((line.removeprefix("==ERROR==").strip() for line in lines if line.startswith("==ERROR==")), "")
    if problem or done.returncode:
        raise RuntimeError(f"ncu: {problem or (lines or ['it failed without a word'])[-1]}")
    return parse_nsight(done.stdout)


def parse_nsight(output: str) -> Traffic:
    """The table that ncu prints: names, units, and a row for each kernel."""
    table = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    if len(table) < 3:
        raise RuntimeError("ncu saw no kernel")
    header, units, *kernels = table
    at = [header.index(metric) for metric in METRICS]
    if {units[index] for index in at} != {"byte"}:
        raise RuntimeError(f"ncu counts in {units[at[0]]}, expected byte")
    read, written = (sum(int(float(row[index].replace(",", ""))) for row in kernels) for index in at)
    return Traffic(read, written, len(kernels))
