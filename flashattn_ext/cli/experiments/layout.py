"""Layouts read in place, and the mistake of transposing and copying before the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import flashattn_ext

from .context import Context, number, ratio, remark, size_notes, time_cells, time_columns
from .result import Cell, Column, Comparison, Plot, Result

BSHD, BHSD, COPIES = "[B,S,H,D] in place", "[B,H,S,D] in place", "transpose + contiguous"
TO_BHSD = "beside [B,H,S,D]"


@dataclass(frozen=True)
class Sizes:
    shapes: tuple[tuple[int, int, int, int], ...]  # B, H, S, D
    dtype: str


GPU_SIZES = Sizes(((12, 64, 256, 64), (16, 128, 784, 128)), "fp16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        shapes = ((2, 8, 256, 64), (1, 8, 784, 128)) if context.quick else ((12, 16, 256, 64), (2, 16, 784, 128))
        return Sizes(shapes, context.dtype)
    return GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("B,H,S,D"),
        Column("way"),
        *time_columns(["time"], "us"),
        Column(TO_BHSD, "x", ".2f"),
        Column("remark"),
    ]
    result = Result("layout", "Layouts in place and by copies, forward", columns, notes=size_notes(sizes, GPU_SIZES))
    for shape in context.track(sizes.shapes):
        result.rows += _rows(context, shape, sizes.dtype)
    result.notes.append(f"{COPIES}: tensors in [B,H,S,D] are copied to [B,S,H,D] before the call, and the result back")
    series = {way: result.points("B,H,S,D", TO_BHSD, way=way) for way in (BSHD, BHSD, COPIES)}
    result.plot = Plot("bar", "B,H,S,D", f"time {TO_BHSD} in place", series)
    result.comparisons = _comparisons(result, sizes)
    return result


def _rows(context: Context, shape: tuple[int, ...], dtype: str) -> list[list[Cell]]:
    B, H, S, D = shape
    bhsd = [context.randn(B, H, S, D, dtype=dtype) for _ in range(3)]
    bshd = [context.randn(B, S, H, D, dtype=dtype) for _ in range(3)]
    calls: dict[str, Callable[[], Tensor]] = {
        BSHD: lambda: flashattn_ext.forward(*bshd),
        BHSD: lambda: flashattn_ext.forward(*bhsd, layout="bhsd"),
        COPIES: lambda: _with_copies(bhsd),
    }
    failures: dict[str, str] = {}
    with torch.no_grad():
        timings = context.time(calls, [*bhsd, *bshd], failures)
    return [
        [
            _text(shape),
            way,
            *time_cells({"time": timings[way]} if way in timings else {}, ["time"], 1e-6),
            ratio(timings, way, BHSD),
            remark({way: failures[way]} if way in failures else {}),
        ]
        for way in calls
    ]


def _with_copies(bhsd: list[Tensor]) -> Tensor:
    out = flashattn_ext.forward(*(t.transpose(1, 2).contiguous() for t in bhsd))
    return out.transpose(1, 2).contiguous()


def _text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def _comparisons(result: Result, sizes: Sizes) -> list[Comparison]:
    figures = (("364 us with copies, 121 us without", GPU_SIZES.shapes[0]), ("7392 us, 3845 us", GPU_SIZES.shapes[1]))
    return [
        Comparison(
            f"{_text(theirs)} there, {_text(shape)} here",
            article,
            f"{number(result.value('time', way=COPIES, **{'B,H,S,D': _text(shape)}), '.0f', ' us')} with copies, "
            f"{number(result.value('time', way=BHSD, **{'B,H,S,D': _text(shape)}), '.0f', ' us')} without",
        )
        for (article, theirs), shape in zip(figures, sizes.shapes, strict=False)
    ]
