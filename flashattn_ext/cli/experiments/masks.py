"""Masks that models use, one interval of rows for each key: what is visible, time over density, memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_ext

from ..bench_cases import BACKWARD_WORK
from ..flex import FLEX, block_mask_maker, flex
from ..patterns import PATTERNS
from ..timing import reported
from .context import (
    FORWARD,
    OURS,
    PASSES,
    SDPA,
    Context,
    Inputs,
    attention_flop,
    ours,
    per_second,
    ratio,
    remark,
    scaled,
    share,
    size_notes,
    time_cells,
    time_columns,
)
from .memory import MIB, WARM_UP_S, how_measured, peak_bytes
from .result import Cell, Column, Plot, Result

CAUSAL, VARLEN = "ours, causal", "ours, packed"
VISIBLE, RATE, OF_CAUSAL, TO_SDPA = "visible", "rate", "of causal", "to SDPA"
PICTURED_S, PICTURE_COLUMNS = 512, 32
PATTERNS_THAT_PACK = [name for name, pattern in PATTERNS.items() if pattern.lengths]


@dataclass(frozen=True)
class Sizes:
    H: int
    S: int
    D: int
    dtype: str


GPU_SIZES = Sizes(16, 16384, 128, "bf16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        return Sizes(2, 1024 if context.quick else 4096, 64, context.dtype)
    return Sizes(16, 4096, 128, "bf16") if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    names = (OURS, CAUSAL, SDPA, VARLEN, *((FLEX,) if context.device.type == "cuda" else ()))
    columns = [
        Column("mask"),
        Column("pass"),
        Column(VISIBLE, "%", ".1f"),
        *time_columns(names),
        Column(RATE, "TFLOP/s", ".3f"),
        Column(OF_CAUSAL, "%", ".0f"),
        Column(TO_SDPA, "x", ".2f"),
        *([Column("to flex", "x", ".2f")] if FLEX in names else []),
        *(Column(f"memory of {name}", "MiB", ".2f") for name in (OURS, SDPA)),
        Column("remark"),
    ]
    result = Result("masks", "Attention over visible scores alone", columns)
    result.notes = [*size_notes(sizes, GPU_SIZES), *_notes(context, sizes)]
    for pattern, direction in context.track(list(itertools.product(PATTERNS, PASSES))):
        result.rows.append(_row(context, sizes, pattern, direction, names))
    drawn = [name for name in names if name not in (CAUSAL, VARLEN)]
    series = {
        f"{name}, {direction}": sorted(result.points(VISIBLE, name, **{"pass": direction}))
        for name in drawn
        for direction in PASSES
    }
    result.plot = Plot("line", "visible scores, %", "ms", series)
    result.pictures = {
        name: pattern.whole(PICTURED_S).show(PICTURED_S, columns=PICTURE_COLUMNS) for name, pattern in PATTERNS.items()
    }
    return result


def _notes(context: Context, sizes: Sizes) -> list[str]:
    return [
        *(f"{name}: {pattern.about}" for name, pattern in PATTERNS.items()),
        f"S = {sizes.S}, one row of {sizes.H} heads. {VISIBLE}: of all scores; {RATE}: of ours, on visible scores; {OF_CAUSAL}: beside "
        f"that of a causal call of the same length; {TO_SDPA}: {SDPA} gets the mask as a bool matrix; {VARLEN}: the packed call that "
        "computes the same, where there is one",
        f"memory: with the mask, which the call makes; {how_measured(context)}",
        "flex: PyTorch's FlexAttention, compiled; its block mask is made before the time is taken"
        if context.device.type == "cuda"
        else "PyTorch's FlexAttention is compared on CUDA alone",
    ]


def _row(context: Context, sizes: Sizes, pattern: str, direction: str, names: Sequence[str]) -> list[Cell]:
    failures: dict[str, str] = {}
    calls: dict[str, Callable[[], object]] = {}
    shape = (1, sizes.H, sizes.S, sizes.D)
    inputs = Inputs.random(context, shape, sizes.dtype)
    for name in names:
        if name != VARLEN or PATTERNS[pattern].lengths:
            with reported(name, failures):
                calls[name] = call_of(inputs, name, pattern, direction)
    timings = context.time(calls, inputs.all, failures)
    peaks: dict[str, int] = {}
    for name in (OURS, SDPA):
        with reported(f"memory of {name}", failures):
            peaks[name] = peak_bytes(context, _prepare, sizes, name, pattern, direction)
    pairs = PATTERNS[pattern].visible_pairs(sizes.S)
    flop = 4.0 * pairs * sizes.H * sizes.D * (1 if direction == FORWARD else 1 + BACKWARD_WORK)
    rate = per_second(flop, timings, OURS)
    causal = per_second(attention_flop(*shape, causal=True, direction=direction), timings, CAUSAL)
    return [
        pattern,
        direction,
        100 * pairs / sizes.S**2,
        *time_cells(timings, names),
        scaled(rate, 1e12),
        share(rate, causal),
        ratio(timings, SDPA, OURS),
        *([ratio(timings, FLEX, OURS)] if FLEX in names else []),
        *(scaled(peaks.get(name), MIB) for name in (OURS, SDPA)),
        remark(failures),
    ]


def call_of(
    inputs: Inputs, name: str, pattern: str, direction: str, *, makes_mask: bool = False
) -> Callable[[], Tensor | Sequence[Tensor]]:
    """One attention with a mask: out, or with the backward (dq, dk, dv). With `makes_mask` the call makes the mask, too."""
    leaves = (inputs.q, inputs.k, inputs.v)
    prepare = functools.partial(_attention, name, pattern, inputs.q.shape[2], inputs.q.device)
    attention = (lambda *tensors: prepare()(*tensors)) if makes_mask else prepare()

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*leaves)

    def both() -> Sequence[Tensor]:
        return torch.autograd.grad(attention(*leaves), leaves, inputs.dout)

    return forward if direction == FORWARD else both


def _attention(name: str, pattern: str, S: int, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Over [1, H, S, D]."""
    of = PATTERNS[pattern]
    if name == OURS:
        return functools.partial(flashattn_ext.forward, causal=of.causal, layout="bhsd", mask=of.make(S, device))
    if name == CAUSAL:
        return functools.partial(ours, causal=True)
    if name == SDPA:
        return functools.partial(F.scaled_dot_product_attention, attn_mask=of.dense(S, device))
    if name == FLEX:
        return flex(None, block_mask_maker(of.rule(S, device), S, device)())
    lengths = of.lengths(S)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    def packed(*tensors: Tensor) -> Tensor:
        rows = (t[0].transpose(0, 1) for t in tensors)
        out = flashattn_ext.varlen_forward(*rows, starts, starts, max(lengths), max(lengths), causal=True)
        return out.transpose(0, 1)[None]

    return packed


def _prepare(device: torch.device, sizes: Sizes, name: str, pattern: str, direction: str) -> Callable[[], object]:
    context = Context(device, quick=True)
    for length in (min(sizes.S, WARM_UP_S), sizes.S):
        inputs = Inputs.random(context, (1, sizes.H, length, sizes.D), sizes.dtype)
        call = call_of(inputs, name, pattern, direction, makes_mask=True)
        if length != sizes.S:
            call()
    return call
