"""One way to time for every benchmark: candidates take turns, so that a noisy moment touches them
all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
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


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int,
    max_rounds: int = 1000,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Calls every candidate once per round until the budget is spent, at least `min_rounds` times.

    A first, uncounted call warms caches and allocators. The order turns by one each round, so that
    nobody always runs behind the same neighbour. `synchronize` waits for an accelerator's queue.
    """
    for call in candidates.values():
        call()
    synchronize()
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    deadline = time.perf_counter() + budget_s
    rounds = 0
    while rounds < min_rounds or (rounds < max_rounds and time.perf_counter() < deadline):
        for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
            begin = time.perf_counter()
            candidates[name]()
            synchronize()
            seconds[name].append(time.perf_counter() - begin)
        rounds += 1
    return {name: Timing(statistics.median(times), min(times), max(times), rounds) for name, times in seconds.items()}
