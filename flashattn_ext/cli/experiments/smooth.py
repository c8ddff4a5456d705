"""The same small GPT with plain softmax, smooth softmax and a learnable sink: does it learn in fewer steps?"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import validation_batches
from ..model import GPT, Attention
from ..timing import reported
from .context import Context, number, remark, size_notes
from .result import Cell, Column, Comparison, Plot, Result
from .small_gpt import Curve, GptSizes, Run, band, corpus_of, mean_curve, train, training_notes

PLAIN, SMOOTH, SINK = "plain", "smooth", "sink"  # keys of SOFTMAX
# Share of the training -> name. The steps are counted until the loss that plain softmax has there.
MILESTONES = {1 / 3: "a third", 2 / 3: "two thirds", 1.0: "the end"}
SEEDS = "seeds at two thirds"
FIRST_QUERY = 16  # earlier ones have few keys, and the first token gets much of their attention anyway


@dataclass(frozen=True)
class Sizes(GptSizes):
    pass


# Three times the bytes of the text, as in the article three epochs.
GPU_SIZES = Sizes(layers=4, width=256, heads=4, context=256, batch=16, steps=300, validations=30, seeds=4)


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu and context.quick:
        return Sizes(layers=2, width=32, heads=2, context=64, batch=8, steps=60, validations=12, seeds=2)
    if context.on_cpu:
        return Sizes(layers=2, width=64, heads=4, context=128, batch=16, steps=600, validations=30, seeds=3)
    if context.quick:
        return Sizes(layers=4, width=256, heads=4, context=256, batch=16, steps=60, validations=12, seeds=2)
    return GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("softmax"),
        Column("final loss", "nats/byte", ".4f"),
        Column("seed spread", "nats/byte", ".4f"),
        *(Column(f"to plain's at {name}", "steps", ".0f") for name in MILESTONES.values()),
        Column(SEEDS),
        Column("of plain's steps", "%", ".0f"),
        Column("gradient norm", "median", ".3f"),
        Column("its spread", "%", ".0f"),
        Column("on first token", "%", ".2f"),
        Column("on no token", "%", ".2f"),
        Column("remark"),
    ]
    result = Result("smooth", "Training a small GPT with other softmaxes", columns, notes=size_notes(sizes, GPU_SIZES))
    failures: dict[str, str] = {}
    runs: dict[str, list[Run]] = {name: [] for name in (PLAIN, SMOOTH, SINK)}
    for name, seed in context.track([(name, seed) for name in runs for seed in range(sizes.seeds)]):
        with reported(name, failures):
            runs[name].append(train(context, sizes, seed=seed, attention="flashattn", softmax=name, dropout=0.0))
    targets = [loss_at(mean_curve(runs[PLAIN]), share * sizes.steps) for share in MILESTONES] if runs[PLAIN] else []
    result.rows = [_row(context, sizes, name, runs[name], targets, failures) for name in runs]
    result.notes += [*training_notes(context, sizes), *_notes(sizes)]
    result.plot = Plot(
        "line",
        "step",
        "nats/byte, mean and range of the seeds",
        {name: mean_curve(of) for name, of in runs.items() if of},
        bands={name: band(of) for name, of in runs.items() if of},
    )
    result.comparisons = [
        Comparison(
            f"steps of {name} to the loss that plain softmax ends with",
            "67 % (2 epochs instead of 3)",
            _steps_text(result, sizes, name),
        )
        for name in (SMOOTH, SINK)
    ]
    return result


def _notes(sizes: Sizes) -> list[str]:
    uniform = statistics.fmean(1 / (i + 1) for i in range(FIRST_QUERY, sizes.context))
    return [
        "to plain's at ...: steps until the mean curve reaches the loss that plain softmax has after that share of the training "
        f"({', '.join(f'{share * sizes.steps:.0f}' for share in MILESTONES)} steps); - if it never does. of plain's steps: at the end. "
        f"{SEEDS}: the least and the largest count of the single seeds. The learning rate falls along a cosine over all steps, "
        "for every softmax alike",
        "gradient norm: before clipping, median of all steps and seeds; its spread: between the 5th and the 95th percentile of one "
        "training, as a share of the median, mean of the seeds; both without the first tenth of the steps",
        f"on first token, on no token: mean attention of trained models over layers, heads and queries from {FIRST_QUERY} on; "
        f"attention that is the same everywhere would have {uniform:.2%} on the first token",
    ]


def _steps_text(result: Result, sizes: Sizes, name: str) -> str:
    share = result.value("of plain's steps", softmax=name)
    if share is None and result.value("final loss", softmax=name) is not None:
        return f"not reached in {sizes.steps} steps"
    return number(share, ".0f", " %")


def _row(
    context: Context,
    sizes: Sizes,
    name: str,
    runs: Sequence[Run],
    targets: Sequence[float],
    failures: dict[str, str],
) -> list[Cell]:
    why = remark({name: failures[name]} if name in failures else {})
    if not runs:
        return [name, *[None] * (len(MILESTONES) + 8), why]
    curve = mean_curve(runs)
    _, low, high = band(runs)[-1]
    steps = [steps_to(curve, target) for target in targets] or [None] * len(MILESTONES)
    seeds = [steps_to(run.losses, targets[1]) for run in runs] if targets else []
    norms = [run.gradient_norms[sizes.steps // 10 :] for run in runs]
    [batch, *_] = validation_batches(corpus_of(sizes.context).validation, sizes.batch, sizes.context)
    masses = [attention_mass(run.model, batch.tokens.to(context.device)) for run in runs]
    return [
        name,
        curve[-1][1],
        high - low,
        *steps,
        _range(seeds),
        None if steps[-1] is None else 100 * steps[-1] / sizes.steps,
        statistics.median(norm for of_run in norms for norm in of_run),
        statistics.fmean(map(norm_spread, norms)),
        *(100 * statistics.fmean(values) for values in zip(*masses, strict=True)),
        why,
    ]


def _range(steps: Sequence[float | None]) -> str:
    reached = [step for step in steps if step is not None]
    if not reached:
        return ""
    of = "" if len(reached) == len(steps) else f", {len(reached)} of {len(steps)} seeds"
    return f"{min(reached):.0f}..{max(reached):.0f}{of}"


def loss_at(curve: Curve, step: float) -> float:
    """Between validations along the straight line."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if before <= step <= after:
            return high + (low - high) * (step - before) / (after - before)
    return curve[0][1] if step < curve[0][0] else curve[-1][1]


def steps_to(curve: Curve, target: float) -> float | None:
    """Steps until the curve is at the target or below for the first time; None if it never is."""
    if curve[0][1] <= target:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def norm_spread(norms: Sequence[float]) -> float:
    """The distance between the 5th and the 95th percentile, in percent of the median."""
    low, median, high = torch.tensor(norms).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return 100 * (high - low) / median


def attention_mass(model: GPT, tokens: Tensor) -> tuple[float, float]:
    """Mean attention on the first token and on none at all.

    Read off the attention itself, through values that are 1 for the first token, and 1 for every token.
    """
    seen: list[Tensor] = []

    def with_a_look(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def look_and_attend(q: Tensor, k: Tensor, v: Tensor, *options: object) -> Tensor:
            marks = torch.ones_like(v[..., :2])
            marks[:, 1:, :, 0] = 0
            seen.append(attend(q, k, marks, *options)[:, FIRST_QUERY:].float().mean((0, 1, 2)))
            return attend(q, k, v, *options)

        return look_and_attend

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    originals = [layer.attend for layer in layers]
    try:
        for layer in layers:
            layer.attend = with_a_look(layer.attend)
        model.eval()
        with torch.no_grad():
            model(tokens)
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend
    first, any_token = torch.stack(seen).mean(0).tolist()
    return first, 1 - any_token
