"""Trains the small GPT of `train` on the text that comes with CPython, for the experiments: several seeds, losses on held-out text
along the way.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..data import Corpus, load_corpus
from ..model import GPT, ModelConfig
from ..trainer import TrainConfig, Training
from .harness import Context, Sizes
from .result import Plot

VALIDATION_WINDOWS = 64
Curve = list[tuple[int, float]]  # (step, loss in nats per byte)


@dataclass(frozen=True)
class Run:
    """One training; all runs of an experiment are validated at the same steps."""

    losses: Curve
    model: GPT


@functools.cache
def corpus_of(context: int) -> Corpus:
    corpus = load_corpus(None, context)
    return replace(corpus, validation=corpus.validation[: VALIDATION_WINDOWS * context + 1])


def train(context: Context, sizes: Sizes, *, seed: int, attention: str, softmax: str, dropout: float) -> Run:
    """The same seed means the same initial weights and batches, whatever the attention."""
    model = ModelConfig(sizes.layers, sizes.width, sizes.heads, sizes.heads, dropout, softmax, attention)
    dtype, every = "float32" if context.on_cpu else "bfloat16", max(1, sizes.steps // sizes.validations)
    config = TrainConfig(
        model=model, text=None, context=sizes.context, dtype=dtype, seed=seed, steps=sizes.steps, batch_size=sizes.batch,
        learning_rate=4e-3, warmup=0.05, weight_decay=0.1, clip=1.0, validate_every=every,
    )  # fmt: skip
    with _one_cpu_thread():
        training = Training(config, corpus_of(sizes.context), context.device)
        for _ in context.track(range(sizes.steps)):
            training.one_step()
            training.validate_when_due()
    return Run(training.validation_losses, training.model)


@contextlib.contextmanager
def _one_cpu_thread() -> Iterator[None]:
    """With a model this small, several threads take longer than one, because they wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def training_note(context: Context, sizes: Sizes) -> str:
    corpus = corpus_of(sizes.context)
    epochs = sizes.steps * sizes.batch * sizes.context / len(corpus.train)
    how = "fp32, one thread" if context.on_cpu else "bf16 autocast"
    return (
        f"text: the documentation topics that come with this CPython ({corpus.name}, {len(corpus.train)} bytes of training text); "
        f"losses are of {VALIDATION_WINDOWS} held-out windows, without dropout; {sizes.steps} steps read {epochs:.2f} times "
        f"as many bytes as there are; {how}. Seed spread: between the best and the worst seed, at the end"
    )


def mean_curve(runs: Sequence[Run]) -> Curve:
    return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in _by_step(runs)]


def band(runs: Sequence[Run]) -> list[tuple[int, float, float]]:
    """The smallest and the largest loss of the seeds at every step."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points)) for points in _by_step(runs)
    ]


def _by_step(runs: Sequence[Run]) -> Iterable[tuple[tuple[int, float], ...]]:
    return zip(*(run.losses for run in runs), strict=True)


def final(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """The mean of the final losses, and the distance between the best and the worst seed."""
    if not runs:
        return None, None
    _, low, high = band(runs)[-1]
    return mean_curve(runs)[-1][1], high - low


def curves(runs: Mapping[str, Sequence[Run]]) -> Plot:
    trained: dict[str, Any] = {label: of for label, of in runs.items() if of}
    series, bands = ({label: make(of) for label, of in trained.items()} for make in (mean_curve, band))
    return Plot("line", "step", "nats/byte, mean and range of the seeds", series, bands=bands)
