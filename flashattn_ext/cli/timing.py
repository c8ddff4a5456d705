"""One way to time for every benchmark: candidates take turns, so that a noisy moment touches them
all alike.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `rounds` calls."""

    median_s: float
    fastest_s: float
    slowest_s: float
    rounds: int

    @property
    def spread(self) -> float:
        """Distance between the quickest and the slowest call, as a share of the median."""
        return (self.slowest_s - self.fastest_s) / self.median_s


def wall_clock(call: Callable[[], object]) -> float:
    """Seconds of one call on the CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int,
    max_rounds: int = 1000,
    clock: Callable[[Callable[[], object]], float] = wall_clock,
    refresh: Callable[[], None] = lambda: None,
    failures: dict[str, str] | None = None,
) -> dict[str, Timing]:
    """Calls every candidate once per round until the budget is spent, at least `min_rounds` times.

    A first, uncounted call warms caches and allocators. The order turns by one each round, so that
    nobody always runs after the same neighbour.

    Args:
        clock: gives the seconds of one call; on an accelerator it waits for the queue.
        refresh: runs before every round, untimed: draws new inputs.
        failures: takes the reasons of candidates that raise, which then drop out; None lets them raise.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)

    def turn_of_all(order: list[str]) -> None:
        for name in order:
            with contextlib.nullcontext() if failures is None else reported(name, failures):
                seconds[name].append(clock(candidates[name]))
        names[:] = [name for name in names if name not in (failures or ())]

    turn_of_all(list(names))
    for name in names:
        seconds[name].clear()
    deadline = time.perf_counter() + budget_s
    rounds = 0
    while names and (rounds < min_rounds or (rounds < max_rounds and time.perf_counter() < deadline)):
        refresh()
        start = rounds % len(names)
        turn_of_all(names[start:] + names[:start])
        rounds += 1
    return {name: Timing(statistics.median(t := seconds[name]), min(t), max(t), rounds) for name in names}


@contextlib.contextmanager
def reported(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Notes what goes wrong inside, whatever it is, and goes on: nobody stops the bench."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about every reason why a backend cannot run
            yield
    except Exception as error:
        failures[name] = one_line(error)


def one_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
