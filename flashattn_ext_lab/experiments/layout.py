"""Layouts read in place, and the mistake of transposing and copying before the call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flashattn_ext

from .harness import Context, Sizes, size_table
from .result import Result, cell, labels, measured, quotient

BSHD, BHSD, COPIES = "[B,S,H,D] in place", "[B,H,S,D] in place", "transpose + contiguous"
RELATIVE = "relative to [B,H,S,D]"
SIZES = size_table(
    gpu=dict(shapes=((12, 64, 256, 64), (16, 128, 784, 128)), dtype="fp16"),  # B, H, S, D
    cpu=dict(shapes=((12, 16, 256, 64), (2, 16, 784, 128)), dtype="fp32"),
    cpu_quick=dict(shapes=((2, 8, 256, 64), (1, 8, 784, 128))),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for shape in context.track(sizes.shapes):
        B, H, S, D = shape
        bhsd = [context.randn(B, H, S, D, dtype=sizes.dtype) for _ in range(3)]
        bshd = [context.randn(B, S, H, D, dtype=sizes.dtype) for _ in range(3)]
        calls: dict[str, Callable[[], Tensor]] = {
            BSHD: lambda bshd=bshd: flashattn_ext.forward(*bshd),
            BHSD: lambda bhsd=bhsd: flashattn_ext.forward(*bhsd, layout="bhsd"),
            COPIES: lambda bhsd=bhsd: (
                flashattn_ext.forward(*(t.transpose(1, 2).contiguous() for t in bhsd)).transpose(1, 2).contiguous()
            ),
        }
        with torch.no_grad():
            times = context.measure(calls, [*bhsd, *bshd])
        for way in calls:
            result.add(
                cell("shape", ",".join(map(str, shape)), "B,H,S,D"),
                *labels(way=way),
                *times.alone(way, "us"),
                cell(RELATIVE, times.ratio(way, BHSD), "x", ".2f"),
                times.remark(way),
            )
    result.notes.append(f"{COPIES}: tensors in [B,H,S,D] are copied to [B,S,H,D] before the call, and the result back")


def compare(result: Result) -> None:
    articles = ("3.01x (364 to 121 us) at 12,64,256,64", "1.92x (7392 to 3845 us) at 16,128,784,128")
    for shape, article in zip(dict.fromkeys(result.column("shape")), articles, strict=False):
        for way, theirs in ((BSHD, ""), (COPIES, article)):
            times = (measured(result, "time", shape=shape, way=each) for each in (way, BHSD))
            result.compare(f"time of {way} {RELATIVE}, {shape}", quotient(*times), theirs)
