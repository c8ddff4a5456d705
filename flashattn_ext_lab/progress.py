"""The progress bar of a training run: step, loss, tokens per second, peak memory, time left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .console import require

if TYPE_CHECKING:
    from rich.console import Console

LOSS_SMOOTHING = 0.95
LINES = 20  # of a whole run without a terminal


class TrainingProgress:
    """rich's bar, or without a terminal a plain line now and then. `bar` is its context manager."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        rich = require("rich.progress")
        columns = [rich.BarColumn(bar_width=24), rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[status]}")]
        columns += [rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn()]
        self.bar = rich.Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self.bar.add_task("train", total=steps, completed=done, status="")
        self._console, self._steps = console, steps
        self._begin, self._tokens = time.perf_counter(), 0
        self._loss: float | None = None

    def update(self, step: int, *, loss: float, validation: float | None, tokens: int, peak_bytes: int) -> None:
        """After a step: its loss and the last validation loss in nats per byte, its tokens, the peak memory so far."""
        self._loss = loss if self._loss is None else LOSS_SMOOTHING * self._loss + (1 - LOSS_SMOOTHING) * loss
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._begin, 1e-9)
        validated = "" if validation is None else f"  val {validation:.3f}"
        status = f"loss {self._loss:.3f}{validated}  {rate:,.0f} tokens/s  peak {peak_bytes / 2**20:,.0f} MiB"
        self.bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and step * LINES // self._steps != (step - 1) * LINES // self._steps:
            self._console.print(f"step {step}/{self._steps}  {status}", highlight=False)
