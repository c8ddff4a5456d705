"""`bench cuda`: forward and backward of this package beside PyTorch's backends and flash-attn.

Times are those of the GPU alone, between two events around several launches. bench_cases.py says what is measured,
bench_contestants.py has the attentions that are compared, bench_accuracy.py says what the errors are, and bench_cuda_tables.py shows the results.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import flashattn_ext

from .._build import REBUILD
from .bench_accuracy import RNG_SEED, compared_results, largest_error, reference_results
from .bench_cases import OURS, Case, cases
from .bench_contestants import (
    FLASH_MODULES,
    PEERS,
    extras,
    flash_module,
    inputs,
    kernel_of,
    preparations,
    skip_reason,
    timed_call,
)
from .bench_cuda_tables import in_one_line, row
from .bench_cuda_tables import show as show
from .console import CommandError, make_console, require
from .flex import keeps_graphs
from .timing import Timing
from .timing import reported as _reported

ROUNDS, QUICK_ROUNDS = 15, 3
BURST_MS, MAX_LAUNCHES = 5.0, 20  # launches between two events: about this long, at most so many
SUSTAINED_MS, SUSTAINED_ROUNDS = 200.0, 3  # of each call without a pause, so often
HEAD_START_CYCLES = 5_000_000  # about 3 ms, in which the host queues a burst of short launches

Calls = Mapping[str, Callable[[], object]]


# What is asked for


def contestants(peers: str | None) -> list[str]:
    """Ours and the peers: those of a list with commas, or all that can be imported."""
    if peers is None:
        return [OURS, *(name for name in PEERS if name not in FLASH_MODULES or flash_module(name))]
    asked = [name.strip() for name in peers.split(",") if name.strip()]
    for name in asked:
        if name not in PEERS:
            raise CommandError(f"--peers got {name!r}; accepted are {', '.join(PEERS)}")
    for name, module in FLASH_MODULES.items():
        if name in asked and not flash_module(name):
            raise CommandError(f"--peers got {name!r}, but flash_attn_func of {module} cannot be imported here")
    return [OURS, *(name for name in PEERS if name in asked)]


def check_cuda(backend: str | None) -> str:
    """The name of our backend that will run, or an error that says what is missing."""
    if not torch.cuda.is_available():
        raise CommandError(f"bench cuda needs a CUDA device, and this torch ({torch.__version__}) sees none")
    backends = flashattn_ext.build_info()["backends"]
    usable = [name for name in backends if name.startswith("cuda")]
    if not usable:
        raise CommandError(
            f"this build has only the backends {', '.join(backends)}; "
            f"rebuild where the CUDA toolkit is installed: {REBUILD}"
        )
    if backend is not None and backend not in usable:
        raise CommandError(f"--backend got {backend!r}; accepted are {', '.join(usable)}")
    of_environment = f"cuda-{os.environ.get('FLASHATTN_EXT_CUDA_PATH')}"
    return backend or (of_environment if of_environment in usable else usable[0])


def running_backend(asked: str | None) -> str:
    """The CUDA backend that runs on this GPU: the one asked for, or the preferred one."""
    preferred = check_cuda(asked)
    names = flashattn_ext.build_info()["backends"]
    others = [] if asked else [name for name in names if name.startswith("cuda") and name != preferred]
    reason = ""
    for name in [preferred, *others]:
        with flashattn_ext.use_backend(name):
            try:
                flashattn_ext.forward(*inputs(Case(1, 1, 1, 64, 64, False, "bf16"))[:3])
                return name
            except NotImplementedError as error:
                reason = str(error)
    raise CommandError(reason)


# Measuring


def measure(
    *,
    quick: bool,
    sets: Sequence[str] | None = None,
    passes: str = "both",
    peers: str | None = None,
    backend: str | None = None,
    sustained: bool = False,
) -> dict[str, Any]:
    """Times every row. The result holds plain numbers only, ready for JSON.

    Where nobody watches a progress bar, each row is reported on stderr as soon as it is there.
    """
    rows, names = cases(sets, passes), contestants(peers)
    backend_in_use = running_backend(backend)
    track = require("rich.progress").track
    results = []
    with flashattn_ext.use_backend(backend), _exact_fp32_products(), keeps_graphs():
        console = make_console()
        for case in track(rows, "measuring", console=console, transient=True):
            results.append(measure_case(case, names, quick=quick, sustained=sustained))
            if not console.is_terminal:
                print(f"{len(results)} of {len(rows)}: {in_one_line(results[-1])}", file=sys.stderr, flush=True)
    return {**machine(), "backend": backend_in_use, "contestants": names, "quick": quick, "rows": results}


def machine() -> dict[str, Any]:
    return {
        "machine": torch.cuda.get_device_name(),
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flash_attn": getattr(sys.modules.get("flash_attn"), "__version__", None),
    }


@contextlib.contextmanager
def _exact_fp32_products() -> Iterator[None]:
    """fp32 products in fp32: with TF32 the math backend would do other work than ours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_case(case: Case, names: Sequence[str], *, quick: bool, sustained: bool = False) -> dict[str, Any]:
    """One row. What cannot run has its reason in `failures`, and no numbers."""
    tensors = inputs(case)
    failures = {name: reason for name in names if (reason := skip_reason(case, name))}
    calls: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    asked = {name: (case, name, tensors) for name in names}
    asked |= {name: (other, OURS, inputs(other)) for name, other in case.beside().items()}
    for name, (timed, contestant, given) in asked.items():
        if name not in failures:
            with _reported(name, failures), kernel_of(name):
                call = timed_call(timed, contestant, *given)
                call()  # warms up, and lets libraries take the workspaces that they keep
                memory[name] = peak_extra_bytes(call)
                calls[name] = call
            call = None  # a graph of a contestant that failed would keep its memory
    timings = time_events(calls, QUICK_ROUNDS if quick else ROUNDS, failures)
    steady = None
    if sustained:
        steady = time_sustained({name: call for name, call in calls.items() if name in names}, timings, failures)
    calls.clear()  # their graphs: the reference needs the memory
    once = preparations(case, [name for name in names if name in timings], tensors[0].device)
    for name, call in once.items():
        with _reported(name, failures):
            call()  # compiles
    once = {name: call for name, call in once.items() if name not in failures}
    timings |= time_events(once, QUICK_ROUNDS if quick else ROUNDS, failures)
    max_error = {} if quick else _max_errors(case, names, tensors, failures)
    return row(case, names, timings, memory, max_error, failures, steady)


def time_events(calls: Calls, rounds: int, failures: dict[str, str]) -> dict[str, Timing]:
    """Times one burst of every call per round, in turns as time_interleaved does.

    What raises drops out and leaves its reason in `failures`.
    """
    launches: dict[str, int] = {}
    for name, call in calls.items():
        with _reported(name, failures), kernel_of(name):
            launches[name] = launches_for(burst_ms(call, 2) / 2)
    names = list(launches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds if names else 0):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name not in failures:
                with _reported(name, failures), kernel_of(name):
                    seconds[name].append(burst_ms(calls[name], launches[name]) / launches[name] * 1e-3)
    return {
        name: Timing(statistics.median(times), min(times), max(times), rounds)
        for name, times in seconds.items()
        if name not in failures
    }


def time_sustained(calls: Calls, bursts: Mapping[str, Timing], failures: dict[str, str]) -> dict[str, Timing]:
    """Times every call that has a time of bursts without a pause, as a training run does, in turns.

    Clocks fall where the power limit is reached, for those the most who spend the most energy on a product.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls if name in bursts}
    for _ in range(SUSTAINED_ROUNDS):
        for name, times in seconds.items():
            if name not in failures:
                with _reported(name, failures), kernel_of(name):
                    launches = max(1, math.ceil(SUSTAINED_MS * 1e-3 / bursts[name].median_s))
                    times.append(burst_ms(calls[name], launches) / launches * 1e-3)
    return {
        name: Timing(statistics.median(times), min(times), max(times), SUSTAINED_ROUNDS)
        for name, times in seconds.items()
        if name not in failures
    }


def launches_for(ms: float) -> int:
    """How many launches of `ms` each make a burst."""
    return min(MAX_LAUNCHES, max(1, math.ceil(BURST_MS / max(ms, 1e-6))))


def burst_ms(call: Callable[[], object], launches: int) -> float:
    """Milliseconds that the GPU takes for this many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)  # else short kernels would wait for Python, and that would be timed
    begin.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what it found, its results included."""
    gc.collect()  # freed in the call, what a cycle of objects holds would count as saved by it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# Accuracy


def _max_errors(
    case: Case, names: Sequence[str], tensors: tuple[Tensor, ...], failures: dict[str, str]
) -> dict[str, float]:
    """The largest error of out, or of the gradients, in the first heads of the first batch entry."""
    max_error: dict[str, float] = {}
    with _reported("reference", failures):
        expected = reference_results(case, *tensors, extras(case, tensors[0].device))
    if "reference" in failures:
        return max_error
    for name in names:
        # A peer's dropout mask is its own: there is nothing to compare it with.
        if name not in failures and (name == OURS or not case.dropout):
            with _reported(name, failures), kernel_of(name):
                got = timed_call(case, name, *tensors, RNG_SEED if case.dropout else None)()
                max_error[name] = largest_error(compared_results(case, got), expected)
            got = None
    return max_error
