"""Chrome traces of one attention call, fused and unfused: the number of kernels, and the gaps between them."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from ..devices import synchronize
from ..timing import covered, reported
from .harness import OURS, UNFUSED, Context, Sizes, size_table
from .result import FORWARD, Plot, Result, cell, labels, number

NAMES = (OURS, UNFUSED)
WARM_UP, CALLS = 2, 5
CALL = "attention call"  # the name of its annotation in the trace
GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
# CPU operators that only create tensors or views, or only call other operators. Every other outermost operator counts as
# one kernel, with all operators that it calls.
NO_KERNELS = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "permute", "reshape", "_reshape_alias", "resize_",
    "resolve_conj", "resolve_neg", "select", "slice", "squeeze", "t", "transpose", "unsqueeze", "_unsafe_view", "view", "contiguous",
    "matmul", "softmax", "to",
}  # fmt: skip
SIZES = size_table(
    gpu=dict(B=32, H=16, S=4096, D=128, dtype="fp16"),
    gpu_quick=dict(B=4, S=2048),
    cpu=dict(B=1, H=4, S=2048, D=64, dtype="fp32"),
    cpu_quick=dict(S=512),
)


class Work(NamedTuple):
    """A kernel, or on the CPU an operator, in microseconds."""

    start: float
    end: float
    name: str


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    timelines: dict[str, list[tuple[float, float]]] = {}
    for name in context.track(NAMES):
        failures: dict[str, str] = {}
        file_name = f"profile_{name}.trace.json" if context.out else ""
        works: list[Work] = []
        with reported(name, failures), tempfile.TemporaryDirectory() as folder:
            path = (context.out or Path(folder)) / (file_name or "trace.json")
            record(context.device, context.inputs(sizes).call(name, FORWARD, causal=False), path)
            calls = sorted(calls_in(json.loads(path.read_text()), on_cpu=context.on_cpu), key=span)
            works = calls[(len(calls) - 1) // 2]
            timelines[name] = [(work.start - works[0].start, work.end - work.start) for work in works]
        whole, idle = (span(works), gaps(works)) if works else (None, None)
        which = Counter(_short(work.name) for work in works)
        result.add(
            *labels(attention=name, kernels=len(works) or None),
            cell("whole call", whole, "us", ".1f"),
            cell("gaps", whole and idle / whole, "%", ".2f", 100),
            cell("which", ", ".join(f"{count} x {kernel}" if count > 1 else kernel for kernel, count in which.items())),
            cell("trace", file_name if works else ""),
            cell("remark", failures.get(name, "")),
        )
    what = "operators that compute" if context.on_cpu else "kernels, copies and fills on the GPU"
    result.notes.append(
        f"kernels: {what}, in the call of median length out of {CALLS} after {WARM_UP} that warm up; each call is synchronized. gaps: the "
        "fraction of the time from the first start to the last end in which none of them runs. The traces open in chrome://tracing or Perfetto"
    )
    result.plot = Plot("timeline", "us", "", timelines)


def compare(result: Result) -> None:
    counts = (number(result.value("kernels", attention=name), "d") for name in NAMES)
    result.compare("kernels, copies and fills of one call, ours and unfused", " and ".join(counts), "1 and at least 3")


def record(device: torch.device, call: Callable[[], object], path: Path) -> None:
    """Writes a Chrome trace of CALLS calls. The warm-up calls absorb the start of the profiler."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    call()
    synchronize(device)
    steps = schedule(wait=0, warmup=WARM_UP, active=CALLS, repeat=1)
    with torch_profile(activities=activities, schedule=steps) as profiler:
        profiler.on_trace_ready = lambda profiler: profiler.export_chrome_trace(str(path))
        for _ in range(WARM_UP + CALLS):
            with record_function(CALL):
                call()
                synchronize(device)
            profiler.step()


def calls_in(trace: dict[str, Any], *, on_cpu: bool) -> list[list[Work]]:
    """The kernels of every annotated call, in order of time."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == CALL]
    if on_cpu:
        operators = [event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]]
        chosen = [event for event in operators if event["name"].removeprefix("aten::") not in NO_KERNELS]
    else:
        chosen = [event for event in events if event.get("cat") in GPU_WORK]
    works = sorted(Work(event["ts"], event["ts"] + event["dur"], event["name"]) for event in chosen)
    if on_cpu:  # only outermost operators
        works = [a for a in works if not any(b is not a and b.start <= a.start and a.end <= b.end for b in works)]
    calls = [[work for work in works if mark["ts"] <= work.start <= mark["ts"] + mark["dur"]] for mark in marks]
    if not calls or not all(calls):
        raise RuntimeError("the trace shows no kernel in some calls: can the profiler see this device?")
    return calls


def span(works: Sequence[Work]) -> float:
    return max(work.end for work in works) - works[0].start


def gaps(works: Sequence[Work]) -> float:
    """How long none of the kernels runs between the first start and the last end."""
    return max(0.0, span(works) - covered((work.start, work.end) for work in works))


def _short(name: str) -> str:
    """A kernel's name without its return type, arguments and template arguments."""
    plain = name.removeprefix("void ").split("<")[0].split("(")[0].strip()
    return plain or name[:40]
