"""Training with dropout: our masks beside PyTorch's own dropout between the steps of unfused attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model import ATTENTION
from ..timing import reported
from .context import OURS, UNFUSED, Context, number, remark, size_notes
from .result import Cell, Column, Comparison, Plot, Result
from .small_gpt import GptSizes, Run, band, mean_curve, train, training_notes

MODELS = {OURS: "flashattn", UNFUSED: "unfused"}  # names of this table -> keys of ATTENTION
UNLIKELY = 0.05
KEPT_S = 256  # scores per row of the calls that count what is kept
GAP, RISE = "gap to unfused", "largest rise"


@dataclass(frozen=True)
class Sizes(GptSizes):
    p: tuple[float, ...]


GPU_SIZES = Sizes(
    layers=4, width=256, heads=4, context=256, batch=32, steps=150, validations=10, seeds=4, p=(0.0, 0.1, 0.3)
)


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu and context.quick:
        return Sizes(layers=2, width=32, heads=2, context=64, batch=8, steps=40, validations=4, seeds=2, p=(0.1,))
    if context.on_cpu:
        return Sizes(
            layers=2, width=64, heads=4, context=128, batch=8, steps=200, validations=10, seeds=4, p=GPU_SIZES.p
        )
    if context.quick:
        return Sizes(layers=4, width=256, heads=4, context=256, batch=32, steps=40, validations=4, seeds=2, p=(0.1,))
    return GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("dropout p"),
        Column("attention"),
        Column("final loss", "nats/byte", ".4f"),
        Column("seed spread", "nats/byte", ".4f"),
        Column(RISE, "nats/byte", ".4f"),
        Column(GAP, "nats/byte", ".4f"),
        Column("of seed spread", "%", ".0f"),
        Column("by chance", "%", ".0f"),
        Column("verdict"),
        Column("kept", "%", ".2f"),
        Column("asked for", "%", ".2f"),
        Column("mean weight", "%", ".2f"),
        Column("remark"),
    ]
    result = Result("dropout", "Training a small GPT with dropout", columns, notes=size_notes(sizes, GPU_SIZES))
    failures: dict[str, str] = {}
    runs: dict[tuple[float, str], list[Run]] = {(p, name): [] for p in sizes.p for name in MODELS}
    for p, name, seed in context.track([(*key, seed) for key in runs for seed in range(sizes.seeds)]):
        with reported(f"{p} {name}", failures):
            runs[p, name].append(train(context, sizes, seed=seed, attention=MODELS[name], softmax="plain", dropout=p))
    result.rows = [_row(context, p, name, runs, failures) for p, name in runs]
    result.notes += [*training_notes(context, sizes), *NOTES]
    result.plot = _plot(sizes, runs)
    result.comparisons = [
        Comparison(
            "training with dropout",
            "unstable loss with ours",
            f"largest rise of the loss {number(result.value(RISE, attention=OURS, **{'dropout p': p}), '.4f')} with ours, "
            f"{number(result.value(RISE, attention=UNFUSED, **{'dropout p': p}), '.4f')} unfused, at p={p}",
        )
        for p in sizes.p
        if p
    ]
    return result


NOTES = (
    f"{GAP}: the largest distance between the mean curves of the seeds. of seed spread: the largest share that it has of the "
    "distance between the best and the worst seed of the same step, of the attention where the seeds differ more",
    "by chance: share of all ways to deal the runs out to the two attentions in which the mean curves are as far apart, on average over "
    f"the steps, as they are; below {UNLIKELY:.0%} the verdict is that they are apart",
    f"{RISE}: of the mean curve from one validation to the next, negative where it only falls. seed spread: at the end",
    "kept: share of the weights that attention itself keeps, counted in its output for values that show each weight; asked "
    "for: 1 - p. mean weight: of all weights after dropping and rescaling, beside those without dropout",
    "both attentions start from the same weights and see the same batches; dropout also acts on the residual branches",
)


def _row(
    context: Context,
    p: float,
    name: str,
    runs: dict[tuple[float, str], list[Run]],
    failures: dict[str, str],
) -> list[Cell]:
    key = f"{p} {name}"
    kept: tuple[Cell, Cell] = (None, None)
    with reported(key, failures):
        kept = weights_kept(context, ATTENTION[MODELS[name]], p)
    verdict = ""
    final = spread = rise = distance = relative = by_chance = None
    if runs[p, name]:
        curve = mean_curve(runs[p, name])
        _, low, high = band(runs[p, name])[-1]
        final, spread = curve[-1][1], high - low
        rise = max((after - before for (_, before), (_, after) in itertools.pairwise(curve)), default=None)
    if name == OURS and runs[p, OURS] and runs[p, UNFUSED]:
        distance, relative = gap(runs[p, OURS], runs[p, UNFUSED])
        by_chance, verdict = compare(runs[p, OURS], runs[p, UNFUSED])
    why = remark({name: failures[key]} if key in failures else {})
    return [
        *(p, name, final, spread, rise, distance, relative, by_chance, verdict),
        *(kept[0], 100 * (1 - p), kept[1], why),
    ]


def gap(ours: Sequence[Run], others: Sequence[Run]) -> tuple[float, float | None]:
    """The largest distance of the mean curves, and the largest share in percent of the seeds' distance at its step."""
    distances = [abs(a - b) for (_, a), (_, b) in zip(mean_curve(ours), mean_curve(others), strict=True)]
    spreads = [max(high - low for _, low, high in both) for both in zip(band(ours), band(others), strict=True)]
    shares = [100 * distance / spread for distance, spread in zip(distances, spreads, strict=True) if spread]
    return max(distances), max(shares, default=None)


def compare(ours: Sequence[Run], others: Sequence[Run]) -> tuple[float, str]:
    """How likely chance alone makes curves differ that much, in percent, and what that says.

    A permutation test: of all ways to deal the runs out to two attentions, the share in which the mean distance of the
    mean curves is at least that of the true one.
    """
    losses = torch.tensor([[loss for _, loss in run.losses] for run in (*ours, *others)], dtype=torch.float64)

    def distance(members: Sequence[int]) -> float:
        chosen = torch.zeros(len(losses), dtype=torch.bool)
        chosen[list(members)] = True
        return (losses[chosen].mean(0) - losses[~chosen].mean(0)).abs().mean().item()

    true = distance(range(len(ours)))
    deals = [distance(members) for members in itertools.combinations(range(len(losses)), len(ours))]
    by_chance = sum(dealt >= true * (1 - 1e-9) for dealt in deals) / len(deals)
    if 2 / len(deals) > UNLIKELY:
        return 100 * by_chance, "too few seeds"
    return 100 * by_chance, "apart" if by_chance < UNLIKELY else "coincide"


def weights_kept(context: Context, attention: Callable[..., Tensor], p: float) -> tuple[float, float]:
    """Which share of the weights an attention keeps, and their mean beside that without dropout, in percent.

    Equal scores give key j of query i the weight 1/(i + 1), and the identity as values shows every weight in the output.
    """
    zeros = torch.zeros(16, KEPT_S, 4, KEPT_S, device=context.device)
    identity = torch.eye(KEPT_S, device=context.device)[:, None].expand(16, KEPT_S, 4, KEPT_S)
    with torch.no_grad():
        weights = attention(zeros, zeros, identity, p, False, None)  # [B, i, H, j]
    relative = weights * torch.arange(1, KEPT_S + 1, device=context.device)[:, None, None]
    visible = 16 * 4 * KEPT_S * (KEPT_S + 1) / 2
    return 100 * (weights != 0).sum().item() / visible, 100 * relative.double().sum().item() / visible


def _plot(sizes: Sizes, runs: dict[tuple[float, str], list[Run]]) -> Plot:
    measured = {f"{name}, p={p}": of for (p, name), of in runs.items() if of}
    return Plot(
        "line",
        "step",
        "nats/byte, mean and range of the seeds",
        {label: mean_curve(of) for label, of in measured.items()},
        bands={label: band(of) for label, of in measured.items()},
    )
