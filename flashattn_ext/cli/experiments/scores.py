"""Softcap and a relative bias with its gradient: what they cost here, and beside unfused attention, which keeps every score."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import flashattn_ext

from ..flex import FLEX, block_mask_maker, causal_rule, flex
from ..score_options import RELATIVE_REACH, SCORE_OPTIONS, SOFTCAP
from ..timing import reported
from ..unfused import hidden_scores, unfused_attention
from .context import (
    BOTH,
    FORWARD,
    OURS,
    PASSES,
    UNFUSED,
    Context,
    Inputs,
    ours,
    ratio,
    remark,
    scaled,
    size_notes,
    time_cells,
    time_columns,
)
from .memory import MIB, WARM_UP_S, how_measured, peak_bytes
from .result import Cell, Column, Plot, Result

OPTIONS = ("softcap", "relative bias")
PLAIN = "ours, plain"
COST, TO_UNFUSED = "cost of the option", "to unfused"


@dataclass(frozen=True)
class Sizes:
    B: int
    H: int
    S: tuple[int, ...]
    D: int
    dtype: str


GPU_SIZES = Sizes(1, 8, (2048, 4096, 8192, 16384), 128, "bf16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(1, 2, (512, 1024) if context.quick else (1024, 2048, 4096), 64, context.dtype)
    return Sizes(1, 8, (1024, 2048), 128, "bf16") if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    peers = (UNFUSED, FLEX) if context.device.type == "cuda" else (UNFUSED,)
    measured = (OURS, *peers)
    columns = [
        Column("option"),
        Column("pass"),
        Column("S"),
        *time_columns((OURS, PLAIN, *peers)),
        Column(COST, "%", ".0f"),
        *(Column(f"to {name}", "x", ".2f") for name in peers),
        *(Column(f"memory of {name}", "MiB", ".2f") for name in measured),
        Column("remark"),
    ]
    result = Result("scores", "Causal attention with softcap, and with a relative bias", columns)
    result.notes = [*size_notes(sizes, GPU_SIZES), *_notes(context)]
    for option, direction, S in context.track([(o, d, S) for o in OPTIONS for d in PASSES for S in sizes.S]):
        result.rows.append(_row(context, sizes, option, direction, S, measured))
    series = {
        f"{name}, {option}": result.points("S", f"memory of {name}", option=option, **{"pass": BOTH})
        for name in measured
        for option in OPTIONS
    }
    result.plot = Plot("line", "S", "MiB, forward+backward", series, log="xy")
    return result


def _notes(context: Context) -> list[str]:
    notes = [
        f"softcap: scores become {SOFTCAP:g} * tanh(score / {SOFTCAP:g}), as in Gemma 2. relative bias: a number for each head and distance "
        f"up to {RELATIVE_REACH}, as in T5, in fp32; forward+backward gives its gradient too, and unfused attention gathers it into a matrix",
        f"{PLAIN}: the same call without the option; {COST}: how much longer ours takes with it. memory: {how_measured(context)}",
    ]
    if context.device.type == "cuda":
        return [
            *notes,
            f"{FLEX}: PyTorch's FlexAttention, compiled; not asked for the gradient of a relative bias, which it sums up score by score",
        ]
    return [*notes, "PyTorch's FlexAttention is compared on CUDA alone"]


def _row(context: Context, sizes: Sizes, option: str, direction: str, S: int, measured: Sequence[str]) -> list[Cell]:
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    inputs = Inputs.random(context, (sizes.B, sizes.H, S, sizes.D), sizes.dtype)
    for name in (OURS, PLAIN, *measured[1:]):
        if name != FLEX or option == "softcap" or direction == FORWARD:
            with reported(name, failures):
                calls[name] = call_of(inputs, name, option, direction)
    timings = context.time(calls, inputs.all, failures)
    peaks: dict[str, int] = {}
    for name in measured:
        if name in timings:
            with reported(f"memory of {name}", failures):
                peaks[name] = peak_bytes(context, _prepare, sizes, name, option, direction, S)
    slower = ratio(timings, OURS, PLAIN)
    return [
        option,
        direction,
        S,
        *time_cells(timings, (OURS, PLAIN, *measured[1:])),
        None if slower is None else 100 * (slower - 1),
        *(ratio(timings, name, OURS) for name in measured[1:]),
        *(scaled(peaks.get(name), MIB) for name in measured),
        remark(failures),
    ]


def call_of(inputs: Inputs, name: str, option: str, direction: str) -> Callable[[], Tensor | Sequence[Tensor]]:
    """One attention with an option: out, or with the backward the gradients, of the relative bias too."""
    leaves = (inputs.q, inputs.k, inputs.v)
    of = SCORE_OPTIONS[option]
    value = of.draw(inputs.q.shape[1], inputs.q.shape[2], inputs.q.dtype, inputs.q.device)
    if of.trains and name != PLAIN:
        value.requires_grad_()
        leaves = (*leaves, value)
    attention = _attention(inputs, name, option, value)

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves[:3])

    def both() -> Sequence[Tensor]:
        return torch.autograd.grad(attention(*leaves[:3]), leaves, inputs.dout)

    return forward if direction == FORWARD else both


def _attention(inputs: Inputs, name: str, option: str, value: object) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    of, S, device = SCORE_OPTIONS[option], inputs.q.shape[2], inputs.q.device
    if name == OURS:
        return functools.partial(flashattn_ext.forward, causal=True, layout="bhsd", **{of.keyword: value})
    if name == PLAIN:
        return functools.partial(ours, causal=True)
    if name == FLEX:
        return flex(of.score_mod(value), block_mask_maker(causal_rule, S, device)())
    if of.added is None:
        return functools.partial(unfused_attention, causal=True, softcap=value)
    return lambda q, k, v: unfused_attention(q, k, v, causal=True, bias=of.added(value, S).to(q.dtype))


def _prepare(
    device: torch.device, sizes: Sizes, name: str, option: str, direction: str, S: int
) -> Callable[[], object]:
    context = Context(device, quick=True)
    for length in (min(S, WARM_UP_S), S):
        inputs = Inputs.random(context, (sizes.B, sizes.H, length, sizes.D), sizes.dtype)
        call = call_of(inputs, name, option, direction)
        if length != S:
            call()
    if name == UNFUSED:
        hidden_scores(S, device)
    return call
