"""The same small GPT with plain softmax, smooth softmax and a learned sink: does it learn in fewer steps?"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from ..data import validation_batches
from ..model import GPT, Attention
from .harness import Context, Measured, Sizes, size_table
from .result import Result, cell, difference, measured, number
from .small_gpt import Curve, corpus_of, curves, loss_cells, mean_curve, train_all, training_note

PLAIN, SMOOTH, SINK = "plain", "smooth", "sink"  # keys of SOFTMAX
STEPS, RELATIVE = "steps to plain's loss", "of plain's steps"
FIRST_QUERY = 16  # earlier ones have few keys, and the first token gets much of their attention anyway
SIZES = size_table(  # three times the bytes of the text, as in the article three epochs
    gpu=dict(layers=4, width=256, heads=4, context=256, batch=16, steps=300, validations=30, seeds=4),
    gpu_quick=dict(steps=60, validations=12, seeds=2),
    cpu=dict(layers=2, width=64, context=128, steps=600, seeds=3),
    cpu_quick=dict(width=32, heads=2, context=64, batch=8, steps=60, validations=12, seeds=2),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    failures: dict[str, str] = {}
    options = {name: dict(attention="flashattn", softmax=name, dropout=0.0) for name in (PLAIN, SMOOTH, SINK)}
    runs = train_all(context, sizes, failures, options)
    target = mean_curve(runs[PLAIN])[-1][1] if runs[PLAIN] else None
    [batch, *_] = validation_batches(corpus_of(sizes.context).validation, sizes.batch, sizes.context)
    for name, of in runs.items():
        steps = steps_to(mean_curve(of), target) if of and target is not None else None
        masses = [attention_mass(run.model, batch.tokens.to(context.device)) for run in of]
        first, none = (statistics.fmean(values) for values in zip(*masses, strict=True)) if of else (None, None)
        result.add(
            cell("softmax", name),
            *loss_cells(of),
            cell(STEPS, steps, "steps", ".0f"),
            cell(RELATIVE, steps and steps / sizes.steps, "%", ".0f", 100),
            cell("on first token", first, "%", ".2f", 100),
            cell("on no token", none, "%", ".2f", 100),
            Measured({}, failures).remark(name),
        )
    uniform = statistics.fmean(1 / (i + 1) for i in range(FIRST_QUERY, sizes.context))
    result.notes += [
        training_note(context, sizes),
        f"{STEPS}: steps until the mean curve reaches the loss that plain softmax ends with; - if it never does. The learning rate follows "
        "a cosine over all steps, for every softmax alike",
        f"on first token, on no token: mean attention of trained models over layers, heads and queries from {FIRST_QUERY} on; "
        f"attention that is the same everywhere would have {uniform:.2%} on the first token",
    ]
    result.plot = curves(runs)


def compare(result: Result) -> None:
    for name in (SMOOTH, SINK):
        loss = difference(*(measured(result, "final loss", softmax=each) for each in (name, PLAIN)), ".4f")
        result.compare(f"final loss of {name} minus that of {PLAIN}, nats/byte over the seeds", loss)
        taken = result.value(RELATIVE, softmax=name)
        unreached = taken is None and result.value("final loss", softmax=name) is not None
        steps = "not reached" if unreached else number(taken, ".0f", " %")
        result.compare(f"steps of {name} to the loss that {PLAIN} ends with", steps, "67 % (2 epochs instead of 3)")


def steps_to(curve: Curve, target: float) -> float | None:
    """Steps until the curve is first at the target or below, interpolated between validations; None if it never is."""
    if curve[0][1] <= target:
        return curve[0][0]
    for (before, high), (after, low) in itertools.pairwise(curve):
        if low <= target:
            return before + (after - before) * (high - target) / (high - low)
    return None


def attention_mass(model: GPT, tokens: Tensor) -> tuple[float, float]:
    """Mean attention weight on the first token and on no token.

    Measured by attention itself, with values that are 1 for the first token only, and 1 for every token.
    """
    seen: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    originals = [layer.attend for layer in layers]

    def observe_and_attend(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *options: object) -> Tensor:
        marks = torch.ones_like(v[..., :2])
        marks[:, 1:, :, 0] = 0
        seen.append(attend(q, k, marks, *options)[:, FIRST_QUERY:].float().mean((0, 1, 2)))
        return attend(q, k, v, *options)

    try:
        for layer in layers:
            layer.attend = functools.partial(observe_and_attend, layer.attend)
        model.eval()
        with torch.no_grad():
            model(tokens)
    finally:
        for layer, attend in zip(layers, originals, strict=True):
            layer.attend = attend
    first, any_token = torch.stack(seen).mean(0).tolist()
    return first, 1 - any_token
