"""Training with dropout: our masks compared with PyTorch's own dropout between the steps of unfused attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..model import ATTENTION
from ..timing import reported
from .harness import OURS, UNFUSED, Context, Measured, Sizes, size_table
from .result import NOT_MEASURED, Result, cell, difference, labels, measured, number
from .small_gpt import curves, loss_cells, mean_curve, train_all, training_note

MODELS = {OURS: "flashattn", UNFUSED: "unfused"}  # name in this table -> key of ATTENTION
KEPT_S = 256  # scores per row of the calls that count kept weights
KEPT_WEIGHTS = 16 * 4 * KEPT_S * (KEPT_S + 1) // 2  # weights of those calls: batch entries, heads, visible scores
RISE = "largest rise"
SIZES = size_table(
    gpu=dict(
        layers=4, width=256, heads=4, context=256, batch=32, steps=150, validations=10, seeds=4, p=(0.0, 0.1, 0.3)
    ),
    gpu_quick=dict(steps=40, validations=4, seeds=2, p=(0.1,)),
    cpu=dict(layers=2, width=64, context=128, batch=8, steps=200),
    cpu_quick=dict(width=32, heads=2, context=64, steps=40, validations=4, seeds=2, p=(0.1,)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    failures: dict[str, str] = {}
    attentions = {(p, name): MODELS[name] for p in sizes.p for name in MODELS}
    options = {_label(*of): dict(attention=key, softmax="plain", dropout=of[0]) for of, key in attentions.items()}
    runs = train_all(context, sizes, failures, options)
    for (p, name), key in attentions.items():
        kept = mean = None
        label = _label(p, name)
        with reported(label, failures):
            kept, mean = weights_kept(context, ATTENTION[key], p)
        of = runs[label]
        rises = [after - before for (_, before), (_, after) in itertools.pairwise(mean_curve(of))] if of else []
        result.add(
            *labels(dropout=p, attention=name),
            *loss_cells(of),
            cell(RISE, max(rises, default=None), "nats/byte", ".4f"),
            cell("kept", kept, "%", ".2f"),
            cell("expected", 100 * (1 - p), "%", ".2f"),
            cell("mean weight", mean, "%", ".2f"),
            Measured({}, failures).remark(label),
        )
    result.notes += [training_note(context, sizes), *NOTES]
    result.plot = curves(runs)


NOTES = (
    f"{RISE}: of the mean curve of the seeds from one validation to the next, negative where it only falls",
    "kept: percentage of the weights that the attention itself keeps, counted in its output for values that show each weight; expected: "
    "1 - p. mean weight: of all weights after dropping and rescaling, relative to those without dropout",
    "both attentions start from the same weights and see the same batches; dropout also acts on the residual branches",
)


def compare(result: Result) -> None:
    for p in dict.fromkeys(result.column("dropout")):
        kept, text = result.value("kept", dropout=p, attention=OURS), NOT_MEASURED
        if isinstance(kept, float):
            text = f"{kept:.2f} % ± {2 * math.sqrt(kept * (100 - kept) / KEPT_WEIGHTS):.2f}"  # that of chance
        result.compare(f"weights that ours keeps, p = {p:g}", text)
        loss = difference(*(measured(result, "final loss", dropout=p, attention=name) for name in MODELS), ".4f")
        rises = " and ".join(number(result.value(RISE, dropout=p, attention=name), ".4f") for name in MODELS)
        what = f"final loss of ours minus that of unfused, nats/byte over the seeds, p = {p:g}"
        result.compare(what, f"{loss}, {RISE} {rises}", "unstable with ours" if p else "")


def _label(p: float, name: str) -> str:
    return f"{name}, p={p}"


def weights_kept(context: Context, attention: Callable[..., Tensor], p: float) -> tuple[float, float]:
    """The fraction of weights that an attention keeps, and their mean relative to the mean without dropout, in percent.

    Equal scores give key j of query i the weight 1/(i + 1), and the identity as values shows every weight in the output.
    """
    zeros = torch.zeros(16, KEPT_S, 4, KEPT_S, device=context.device)
    identity = torch.eye(KEPT_S, device=context.device)[:, None].expand(16, KEPT_S, 4, KEPT_S)
    with torch.no_grad():
        weights = attention(zeros, zeros, identity, p, False, None)  # [B, i, H, j]
    relative = weights * torch.arange(1, KEPT_S + 1, device=context.device)[:, None, None]
    return 100 * (weights != 0).sum().item() / KEPT_WEIGHTS, 100 * relative.double().sum().item() / KEPT_WEIGHTS
