"""One way to time for every benchmark and experiment: calls of the candidates are interleaved, so that noise affects all of
them alike.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .console import one_line

Calls = Mapping[str, Callable[[], object]]
Around = Callable[[str], contextlib.AbstractContextManager[Any]]
BURST_MS, MAX_LAUNCHES = 5.0, 20  # launches between two events: about this long, at most so many
ROUNDS, QUICK_ROUNDS = 15, 3  # rounds of bursts on a GPU
SECONDS, QUICK_SECONDS = 2.0, 0.05  # elsewhere, for each group of interleaved calls, within these numbers of rounds
MIN_ROUNDS, QUICK_MIN_ROUNDS, MAX_ROUNDS = 5, 3, 1000
HEAD_START_CYCLES = 5_000_000  # about 3 ms, in which the host queues a burst of short launches


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `rounds` calls."""

    median_s: float
    fastest_s: float
    slowest_s: float
    rounds: int

    @property
    def spread(self) -> float:
        """Distance between the fastest and the slowest call, as a fraction of the median."""
        return (self.slowest_s - self.fastest_s) / self.median_s


def divided(part: float | None, whole: float | None) -> float | None:
    """None if either value was not measured."""
    return None if part is None or not whole else part / whole


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def wall_clock(call: Callable[[], object]) -> float:
    """Seconds of one call on the CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_interleaved(
    candidates: Calls,
    *,
    budget_s: float,
    min_rounds: int,
    clock: Callable[[Callable[[], object]], float] = wall_clock,
    refresh: Callable[[], None] = lambda: None,
    around: Around = contextlib.nullcontext,
    failures: dict[str, str] | None = None,
    warm_up: bool = True,
) -> dict[str, Timing]:
    """Calls every candidate once per round until the budget is spent, at least `min_rounds` times.

    A first, uncounted call warms caches and allocators, unless `warm_up` is False. The order rotates by one each round, so that
    positional effects average out.

    Args:
        clock: returns the seconds of one call; on an accelerator it waits for the queue.
        refresh: runs before every round, untimed: draws new inputs.
        around: a context for the calls of that name, entered outside the timed region.
        failures: receives the reasons of candidates that raise, which then drop out; None lets them raise.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)

    def one_round(first: int) -> None:
        for name in names[first:] + names[:first]:
            with reported(name, failures), around(name):
                seconds[name].append(clock(candidates[name]))
        names[:] = [name for name in names if name not in (failures or ())]

    if warm_up:
        one_round(0)
        seconds |= {name: [] for name in names}
    deadline, rounds = time.perf_counter() + budget_s, 0
    while names and (rounds < min_rounds or (rounds < MAX_ROUNDS and time.perf_counter() < deadline)):
        refresh()
        one_round(rounds % len(names))
        rounds += 1
    return {name: Timing(statistics.median(t := seconds[name]), min(t), max(t), rounds) for name in names}


def time_bursts(
    calls: Calls,
    rounds: int,
    failures: dict[str, str] | None = None,
    *,
    target_ms: float = BURST_MS,
    most: int | None = None,
    around: Around = contextlib.nullcontext,
    **options: Any,
) -> dict[str, Timing]:
    """GPU seconds of every call, one burst of each per round.

    Args:
        target_ms: how long a burst takes, with at most `most` launches (MAX_LAUNCHES).
        failures, around, options: of time_interleaved().
    """
    launches: dict[str, int] = {}
    for name, call in calls.items():
        with reported(name, failures), around(name):
            launches[name] = launches_for(burst_ms(call, 2) / 2, target_ms, most)

    def seconds(name: str) -> float:
        return burst_ms(calls[name], launches[name]) / launches[name] * 1e-3

    bursts = {name: functools.partial(seconds, name) for name in launches}
    options |= {"around": around, "failures": failures, "clock": lambda burst: burst(), "warm_up": False}
    return time_interleaved(bursts, budget_s=0, min_rounds=rounds, **options)


def time_on(device: str, calls: Calls, quick: bool, *, rounds: int = 0, **options: Any) -> dict[str, Timing]:
    """time_bursts() on CUDA, time_interleaved() elsewhere; `options` are of both. `rounds` fixes their number for long calls."""
    if device == "cuda":
        return time_bursts(calls, rounds or (QUICK_ROUNDS if quick else ROUNDS), **options)
    budget_s, least = (QUICK_SECONDS, QUICK_MIN_ROUNDS) if quick else (SECONDS, MIN_ROUNDS)
    return time_interleaved(calls, budget_s=0.0 if rounds else budget_s, min_rounds=rounds or least, **options)


def launches_for(ms: float, target_ms: float = BURST_MS, most: int | None = None) -> int:
    """How many launches of `ms` each make a burst."""
    return min(most or MAX_LAUNCHES, max(1, math.ceil(target_ms / max(ms, 1e-6))))


def burst_ms(call: Callable[[], object], launches: int) -> float:
    """Milliseconds that the GPU takes for this many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)  # otherwise the time of short kernels would include waiting for Python
    begin.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """Peak GPU memory of a call beyond the memory in use before it, results included."""
    gc.collect()  # reference cycles freed during the call would lower its measured peak
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextlib.contextmanager
def reported(name: str, failures: dict[str, str] | None) -> Iterator[None]:
    """Records any exception of the block and continues, so that one candidate cannot stop the benchmark; None: raises it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about every reason why a backend cannot run
            yield
    except Exception as error:
        if failures is None:
            raise
        failures[name] = one_line(error)
