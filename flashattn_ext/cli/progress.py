"""The progress bar of a training run: step, loss, tokens per second, peak memory, time left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from .console import require

if TYPE_CHECKING:
    from rich.console import Console

RATE_WINDOW_S = 5.0
LOSS_SMOOTHING = 0.95


class TrainingProgress:
    """A context manager around rich's bar.

    Without a terminal it prints a plain line now and then instead.
    """

    def __init__(self, console: Console, steps: int, done: int) -> None:
        rich = require("rich.progress")
        self._console = console
        self._steps = steps
        self._loss: float | None = None
        self._marks: list[tuple[float, int]] = []  # (time, tokens so far) within the last RATE_WINDOW_S
        self._tokens = 0
        self._bar = rich.Progress(
            rich.BarColumn(bar_width=24),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[status]}"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("left"),
            rich.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, status="")

    def __enter__(self) -> TrainingProgress:
        self._marks = [(time.perf_counter(), 0)]
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, step: int, *, loss: float, validation: float | None, tokens: int, peak_bytes: int) -> None:
        """After a step: its loss and last validation loss in nats per byte, its tokens, the peak
        memory so far.
        """
        self._loss = loss if self._loss is None else LOSS_SMOOTHING * self._loss + (1 - LOSS_SMOOTHING) * loss
        status = f"loss {self._loss:.3f}"
        if validation is not None:
            status += f"  val {validation:.3f}"
        status += f"  {self._rate(tokens):,.0f} tokens/s  peak {peak_bytes / 2**20:,.0f} MiB"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step * 20 // self._steps != (step - 1) * 20 // self._steps):
            self._console.print(f"step {step}/{self._steps}  {status}", highlight=False)

    def _rate(self, tokens: int) -> float:
        """Tokens per second over the last few seconds."""
        now = time.perf_counter()
        self._tokens += tokens
        self._marks.append((now, self._tokens))
        while len(self._marks) > 2 and now - self._marks[1][0] > RATE_WINDOW_S:
            self._marks.pop(0)
        begin, before = self._marks[0]
        return (self._tokens - before) / max(now - begin, 1e-9)
