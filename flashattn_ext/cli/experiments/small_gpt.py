"""Trains the small GPT of `train` on the text that comes with CPython, as experiments want it: several seeds,
losses on held-out text along the way, the norms of the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..data import Corpus, load_corpus
from ..model import GPT, ModelConfig
from ..trainer import TrainConfig, Training
from .context import Context

VALIDATION_WINDOWS = 64
Curve = list[tuple[int, float]]  # (step, loss in nats per byte)


@dataclass(frozen=True)
class GptSizes:
    layers: int
    width: int
    heads: int
    context: int  # bytes
    batch: int
    steps: int
    validations: int  # along the way, evenly
    seeds: int


@dataclass(frozen=True)
class Run:
    """One training; `gradient_norms` are those before clipping, one a step."""

    losses: Curve
    gradient_norms: list[float]
    model: GPT


@functools.cache
def corpus_of(context: int) -> Corpus:
    corpus = load_corpus(None, context)
    return replace(corpus, validation=corpus.validation[: VALIDATION_WINDOWS * context + 1])


def train(context: Context, sizes: GptSizes, *, seed: int, attention: str, softmax: str, dropout: float) -> Run:
    """The same seed means the same initial weights and batches, whatever the attention."""
    model = ModelConfig(sizes.layers, sizes.width, sizes.heads, sizes.heads, dropout, softmax, attention)
    config = TrainConfig(
        model=model,
        text=None,
        context=sizes.context,
        dtype="float32" if context.on_cpu else "bfloat16",
        seed=seed,
        steps=sizes.steps,
        batch_size=sizes.batch,
        learning_rate=4e-3,
        warmup=0.05,
        weight_decay=0.1,
        clip=1.0,
        validate_every=max(1, sizes.steps // sizes.validations),
    )
    norms = []
    with _one_cpu_thread():
        training = Training(config, corpus_of(sizes.context), context.device)
        for _ in context.track(range(sizes.steps)):
            norms.append(training.one_step())
            training.validate_when_due()
    return Run(training.validation_losses, norms, training.model)


@contextlib.contextmanager
def _one_cpu_thread() -> Iterator[None]:
    """A model this small is not worth sharing: threads that wait for each other are several times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def training_notes(context: Context, sizes: GptSizes) -> list[str]:
    corpus = corpus_of(sizes.context)
    epochs = sizes.steps * sizes.batch * sizes.context / len(corpus.train)
    how = "fp32, one thread" if context.on_cpu else "bf16 autocast"
    return [
        f"text: the documentation topics that come with this CPython ({corpus.name}, {len(corpus.train)} bytes to learn); "
        f"losses are of {VALIDATION_WINDOWS} held-out windows, without dropout; {sizes.steps} steps read {epochs:.2f} times "
        f"as many bytes as there are; {how}"
    ]


# Curves of several seeds, all validated at the same steps


def mean_curve(runs: Sequence[Run]) -> Curve:
    return [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in _by_step(runs)]


def band(runs: Sequence[Run]) -> list[tuple[int, float, float]]:
    """The least and the largest loss of the seeds at every step."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points)) for points in _by_step(runs)
    ]


def _by_step(runs: Sequence[Run]) -> Iterable[tuple[tuple[int, float], ...]]:
    return zip(*(run.losses for run in runs), strict=True)
