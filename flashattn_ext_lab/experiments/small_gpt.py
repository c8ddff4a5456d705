"""Trains the small GPT of `train` on the text that comes with CPython, for the experiments: several seeds, losses on held-out text
along the way.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..data import Corpus, load_corpus
from ..model import ModelConfig
from ..timing import reported
from ..trainer import TrainConfig, Training
from .harness import Context, Sizes
from .result import Cell, Column, Plot, cell

VALIDATION_WINDOWS = 64
Curve = list[tuple[int, float]]  # (step, loss in nats per byte)


@functools.cache
def corpus_of(context: int) -> Corpus:
    corpus = load_corpus(None, context)
    return replace(corpus, validation=corpus.validation[: VALIDATION_WINDOWS * context + 1])


def train_all(
    context: Context, sizes: Sizes, failures: dict[str, str], options: Mapping[str, dict[str, Any]]
) -> dict[str, list[Training]]:
    """Trains with each of the options, once for each seed; `failures` receives the reasons of the others."""
    runs: dict[str, list[Training]] = {label: [] for label in options}
    for label, seed in context.steps(options, range(sizes.seeds)):
        with reported(label, failures):
            runs[label].append(_train(context, sizes, seed, **options[label]))
    return runs


def _train(context: Context, sizes: Sizes, seed: int, attention: str, softmax: str, dropout: float) -> Training:
    """The same seed means the same initial weights and batches, whatever the attention."""
    model = ModelConfig(sizes.layers, sizes.width, sizes.heads, sizes.heads, dropout, softmax, attention)
    dtype, every = "float32" if context.on_cpu else "bfloat16", max(1, sizes.steps // sizes.validations)
    config = TrainConfig(
        model=model, text=None, context=sizes.context, dtype=dtype, seed=seed, steps=sizes.steps, batch_size=sizes.batch,
        learning_rate=4e-3, warmup=0.05, weight_decay=0.1, clip=1.0, validate_every=every,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with a model this small, several threads take longer: they wait for each other
    try:
        training = Training(config, corpus_of(sizes.context), context.device)
        for _ in context.track(range(sizes.steps)):
            training.one_step()
            training.validate_when_due()
    finally:
        torch.set_num_threads(threads)
    return training


def training_note(context: Context, sizes: Sizes) -> str:
    corpus = corpus_of(sizes.context)
    epochs = sizes.steps * sizes.batch * sizes.context / len(corpus.train)
    how = "fp32, one thread" if context.on_cpu else "bf16 autocast"
    return (
        f"text: the documentation topics that come with this CPython ({corpus.name}, {len(corpus.train)} bytes of training text); "
        f"losses are of {VALIDATION_WINDOWS} held-out windows, without dropout; {sizes.steps} steps read {epochs:.2f} times "
        f"as many bytes as there are; {how}. Spread: between the best and the worst seed, at the end"
    )


def mean_curve(runs: Sequence[Training]) -> Curve:
    return [(step, statistics.fmean(losses)) for step, losses in _by_step(runs)]


def _by_step(runs: Sequence[Training]) -> list[tuple[int, list[float]]]:
    """The losses of the seeds at every step; all runs of an experiment are validated at the same steps."""
    points = zip(*(run.validation_losses for run in runs), strict=True)
    return [(of[0][0], [loss for _, loss in of]) for of in points]


def loss_cells(runs: Sequence[Training]) -> list[tuple[Column, Cell]]:
    """The mean of the final losses, and the distance between the best and the worst seed relative to it."""
    losses = _by_step(runs)[-1][1] if runs else []
    mean = statistics.fmean(losses) if losses else None
    spread = (max(losses) - min(losses)) / mean if losses else None
    return [cell("final loss", mean, "nats/byte", ".4f"), cell("final loss spread", spread, "%", ".2f", 100)]


def curves(runs: Mapping[str, Sequence[Training]]) -> Plot:
    trained = {label: of for label, of in runs.items() if of}
    bands = {label: [(at, min(losses), max(losses)) for at, losses in _by_step(of)] for label, of in trained.items()}
    series: dict[str, Any] = {label: mean_curve(of) for label, of in trained.items()}
    return Plot("line", "step", "nats/byte, mean and range of the seeds", series, bands=bands)
