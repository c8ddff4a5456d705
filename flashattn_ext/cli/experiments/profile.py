"""Chrome traces of one attention call, fused and unfused: how many kernels, and what is between them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from ..devices import synchronize
from ..timing import reported
from .context import FORWARD, OURS, UNFUSED, Context, Inputs, Shape, number, remark, size_notes
from .result import Cell, Column, Comparison, Plot, Result

NAMES = (OURS, UNFUSED)
KERNELS, BUSY, SPAN, GAPS = "kernels", "busy", "whole call", "gaps"
WARM_UP, CALLS = 2, 5
CALL = "attention call"  # the name of its annotation in the trace
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
# Operators of the CPU that only make tensors or views of them, or only call others. Of the rest, every outermost one is
# a kernel: what it calls is part of it.
NO_KERNELS = {
    *("aten::alias", "aten::as_strided", "aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided"),
    *("aten::expand", "aten::permute", "aten::reshape", "aten::_reshape_alias", "aten::resize_", "aten::resolve_conj"),
    *("aten::resolve_neg", "aten::select", "aten::slice", "aten::squeeze", "aten::t", "aten::transpose"),
    *("aten::unsqueeze", "aten::_unsafe_view", "aten::view"),
    *("aten::contiguous", "aten::matmul", "aten::softmax", "aten::to"),
}


GPU_SIZES = Shape(32, 16, 4096, 128, "fp16")


def sizes_for(context: Context) -> Shape:
    if context.on_cpu:
        return Shape(1, 4, 512 if context.quick else 2048, 64, context.dtype)
    return Shape(4, 16, 2048, 128, context.dtype) if context.quick else GPU_SIZES


def measure(context: Context, sizes: Shape) -> Result:
    columns = [
        Column("attention"),
        Column(KERNELS),
        Column(SPAN, "us", ".1f"),
        Column(BUSY, "us", ".1f"),
        Column(GAPS, "%", ".2f"),
        Column("longest gap", "%", ".2f"),
        Column("which"),
        Column("trace"),
        Column("remark"),
    ]
    result = Result("profile", "Profiler traces, full attention, forward", columns, notes=size_notes(sizes, GPU_SIZES))
    timelines: dict[str, list[tuple[float, float]]] = {}
    for name in context.track(NAMES):
        result.rows.append(_row(context, sizes, name, timelines))
    what = "operators that compute" if context.on_cpu else "kernels, copies and fills on the GPU"
    result.notes.append(
        f"{KERNELS}: {what}, in the call of median length out of {CALLS} after {WARM_UP} that warm up; every call is waited for. {GAPS}: "
        f"share of the time from the first start to the last end in which none of them runs. The traces open in chrome://tracing or Perfetto"
    )
    result.plot = Plot("timeline", "us", "", timelines)
    result.comparisons = [
        Comparison(
            "kernels of a call, ours and unfused",
            "1 and at least 3",
            " and ".join(number(result.value(KERNELS, attention=name), "d") for name in NAMES),
        )
    ]
    return result


@dataclass(frozen=True)
class Work:
    """A kernel, or on the CPU an operator, in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


def _row(context: Context, sizes: Shape, name: str, timelines: dict[str, list[tuple[float, float]]]) -> list[Cell]:
    failures: dict[str, str] = {}
    file_name = f"profile_{name}.trace.json" if context.out else ""
    with reported(name, failures), tempfile.TemporaryDirectory() as folder:
        call = Inputs.random(context, (sizes.B, sizes.H, sizes.S, sizes.D), sizes.dtype).call(name, FORWARD, False)
        path = (context.out or Path(folder)) / (file_name or "trace.json")
        record(context.device, call, path)
        calls = sorted(calls_in(json.loads(path.read_text()), on_cpu=context.on_cpu), key=span)
        works = calls[(len(calls) - 1) // 2]
        timelines[name] = [(work.start - works[0].start, work.duration) for work in works]
        between = gaps(works)
        which = Counter(_short(work.name) for work in works)
        return [
            name,
            len(works),
            span(works),
            span(works) - sum(between),
            100 * sum(between) / span(works),
            100 * max(between, default=0.0) / span(works),
            ", ".join(f"{count} x {kernel}" if count > 1 else kernel for kernel, count in which.items()),
            file_name,
            "",
        ]
    return [name, *[None] * 5, "", "", remark(failures)]


def record(device: torch.device, call: Callable[[], object], path: Path) -> None:
    """Writes a Chrome trace of CALLS calls.

    The profiler's own start falls into the calls that warm up.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    call()
    synchronize(device)
    with (
        _quiet_standard_error(),
        torch_profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=WARM_UP, active=CALLS, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler,
    ):
        for _ in range(WARM_UP + CALLS):
            with record_function(CALL):
                call()
                synchronize(device)
            profiler.step()


@contextlib.contextmanager
def _quiet_standard_error() -> Iterator[None]:
    """The profiler library of some builds of torch announces every start and stop there, past Python."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def calls_in(trace: dict[str, Any], *, on_cpu: bool) -> list[list[Work]]:
    """What computes in every annotated call, by time."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == CALL]
    if on_cpu:
        operators = [event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]]
        chosen = [event for event in operators if event["name"] not in NO_KERNELS]
    else:
        chosen = [event for event in events if event.get("cat") in GPU_WORK]
    works = [Work(event["name"], event["ts"], event["dur"]) for event in chosen]
    works = sorted(_outermost(works) if on_cpu else works, key=lambda work: work.start)
    calls = [[work for work in works if mark["ts"] <= work.start <= mark["ts"] + mark["dur"]] for mark in marks]
    if not calls or not all(calls):
        raise RuntimeError("the trace shows no kernel in some calls: can the profiler see this device?")
    return calls


def _outermost(works: Sequence[Work]) -> list[Work]:
    """Operators that no other one contains."""
    return [
        work
        for work in works
        if not any(other is not work and other.start <= work.start and work.end <= other.end for other in works)
    ]


def span(works: Sequence[Work]) -> float:
    return max(work.end for work in works) - works[0].start


def gaps(works: Sequence[Work]) -> list[float]:
    """The times between works, which are sorted and may overlap."""
    between, end = [], works[0].end
    for work in works[1:]:
        if work.start > end:
            between.append(work.start - end)
        end = max(end, work.end)
    return between


def _short(name: str) -> str:
    """A kernel's name without its return type, arguments and template arguments."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0].strip()
    return plain or name[:40]
