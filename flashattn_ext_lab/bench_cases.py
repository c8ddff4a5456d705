"""The rows of the benchmarks: names of the contestants, the sizes and options of every row, and how much work it is.

FLOP are the products of visible scores: 4 * B * Hq * S * S * D forward, half of it causal, and 2.5 times that backward (with
another size of v, two products of D + Dv and five of 3 D + 2 Dv columns); for packed sequences the sum over them; with a mask
only of the scores that it leaves visible, with blocks of those of visible blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .bench_derivatives import DERIVATIVES
from .block_patterns import ALL_PATTERNS, BLOCK_PATTERNS, HEADS
from .console import chosen
from .options import PATTERNS, SCORE_OPTIONS, drawn_lengths

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}

OURS, FA2, CUDNN, MATH, FLASH_ATTN, FA3, FA4, FLEX = "ours", "fa2", "cudnn", "math", "flash-attn", "fa3", "fa4", "flex"
JVP_FLASH = "jvp-flash"  # the package jvp_flash_attention, of the derivatives alone
CUDNN_FP8 = "cudnn-fp8"  # the package nvidia-cudnn-frontend, in fp8 alone
# Names of the reference calls of a row: Case.beside().
BESIDE = DENSE, PLAIN, CAUSAL, VARLEN, BF16 = "dense", "plain", "causal", "varlen", "bf16"
PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Case:
    """One row: self-attention over [B, S, H, D], or over `lengths`, of B packed sequences of at most S."""

    B: int
    Hq: int
    Hk: int
    S: int
    D: int
    causal: bool
    dtype: str
    dropout: float = 0.0
    set: str = ""
    backward: bool = False
    lengths: tuple[int, ...] = ()
    score: str = ""  # a key of SCORE_OPTIONS
    pattern: str = ""  # a key of PATTERNS or BLOCK_PATTERNS
    Dv: int = 0  # head dim of v; 0: D
    window: int = 0  # with causal, the most keys that a query sees, its own included; 0: all
    deterministic: bool = False
    derivative: str = ""  # a key of DERIVATIVES, in place of a forward or backward
    invariant: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths) or self.B * self.S

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of one head, over all sequences."""
        return sum(length**2 for length in self.lengths) or self.B * self.S**2

    @property
    def visible_pairs(self) -> float:
        """Number of visible query-key pairs of one head."""
        if self.pattern:
            return self.B * ALL_PATTERNS[self.pattern].visible_pairs(self.S)
        if self.window:
            width = min(self.window, self.S)
            return self.B * width * (self.S - (width - 1) / 2)
        return self.pairs * (0.5 if self.causal else 1.0)

    @property
    def flop(self) -> float:
        if self.derivative:
            of_qk, of_v = DERIVATIVES[self.derivative]
            return 2 * self.visible_pairs * self.Hq * (of_qk * self.D + of_v * self.head_dim_v)
        # The forward has one product of D and one of Dv columns, the backward three of D and two of Dv.
        columns = 3 * self.D + 2 * self.head_dim_v if self.backward else self.D + self.head_dim_v
        return 2 * self.visible_pairs * self.Hq * columns

    @property
    def head_dim_v(self) -> int:
        return self.Dv or self.D

    @property
    def shape(self) -> str:
        heads = f"{self.Hq}" if self.Hq == self.Hk else f"{self.Hq}:{self.Hk}"
        length = f"{min(self.lengths)}-{self.S}" if self.lengths else f"{self.S}"
        head_dims = f"{self.D}:{self.Dv}" if self.Dv else f"{self.D}"
        return f"{self.B}x{heads}x{length}x{head_dims}"

    def dense(self) -> Case:
        """A case with the same work and about as many tokens, in sequences of equal length."""
        B = max(1, round(sum(self.lengths) ** 2 / self.pairs))
        return replace(self, B=B, S=round(math.sqrt(self.pairs / B)), lengths=())

    def beside(self) -> dict[str, Case]:
        """Reference calls of ours whose rates show what the options of this row cost: name -> case."""
        if self.lengths:
            return {DENSE: self.dense()}
        if self.score or self.dropout or self.deterministic or self.invariant:
            return {PLAIN: replace(self, score="", dropout=0.0, deterministic=False, invariant=False)}
        if self.window:
            return {CAUSAL: replace(self, window=0)}
        if self.dtype == "fp8":
            return {BF16: replace(self, dtype="bf16")}
        if not self.pattern:
            return {}
        calls = {CAUSAL: replace(self, pattern="", causal=True)}
        if self.pattern in BLOCK_PATTERNS:
            return {**calls, PLAIN: replace(self, pattern="")}
        if lengths := PATTERNS[self.pattern].lengths:
            packed = lengths(self.S) * self.B
            calls[VARLEN] = replace(calls[CAUSAL], B=len(packed), S=max(packed), lengths=packed)
        return calls

    @property
    def mask(self) -> str:
        """In words, with the other options of the row."""
        words = [self.pattern or ("causal" if self.causal else "full"), self.score]
        words += [self.window and f"window {self.window}", self.dropout and f"p={self.dropout:g}"]
        words += [self.deterministic and "deterministic", self.invariant and "invariant"]
        return " ".join(filter(None, words))

    @property
    def direction(self) -> str:
        return self.derivative or ("backward" if self.backward else "forward")

    def described(self) -> dict[str, Any]:
        """As plain values, ready for JSON, with the words of the tables."""
        words = {"shape": self.shape, "option": self.mask, "direction": self.direction, "flop": self.flop}
        return {**asdict(self), "lengths": list(self.lengths), **words}


def _square(tokens: int, S: int, D: int, causal: bool, dtype: str = "bf16", **options: Any) -> Case:
    """As in the benchmark of the FlashAttention papers: a number of tokens in sequences of S, hidden size 2048."""
    return Case(tokens // S, 2048 // D, 2048 // D, S, D, causal, dtype, **options)


WAYS = (False, True)
LENGTHS = drawn_lengths(16384, functools.partial(random.Random(0).randint, 128, 4096))  # lengths of packed sequences
LONG_PATTERNS = ("documents", "one document", "window")
SETS: dict[str, list[Case]] = {
    "fa_paper": [
        _square(16384, S, D, causal)
        for D, causal, S in itertools.product((64, 128, 256), WAYS, (512, 1024, 2048, 4096, 8192, 16384))
    ],
    "align": [Case(16, 16, 16, 2048, D, False, "fp16") for D in (128, 129, 136, 144)],
    "head_dims": [
        *(Case(4, 16, 16, 4096, D, True, "bf16") for D in (80, 96, 160)),
        Case(2, 32, 32, 4096, 192, True, "bf16", Dv=128),
    ],
    "dropout": [_square(16384, 4096, D, True, dropout=0.1) for D in (128, 64)],
    "gqa": [Case(2, 32, 8, 8192, 128, True, "bf16"), Case(1, 64, 8, 4096, 64, True, "bf16")],
    "window": [_square(16384, 16384, 128, True, window=1024)],
    "deterministic": [_square(16384, 4096, 128, causal, deterministic=True) for causal in WAYS],
    "invariant": [
        _square(16384, S, D, causal, invariant=True)
        for D, causal, S in itertools.product((64, 128, 256), WAYS, (4096, 16384))
    ],
    "fp32": [Case(4, 16, 16, 2048, D, causal, "fp32") for D, causal in itertools.product((64, 128), WAYS)],
    "fp8": [
        _square(32768, S, D, causal, "fp8")
        for D, causal, S in itertools.product((64, 128, 256), WAYS, (1024, 8192, 32768))
    ],
    "short": [Case(B, H, H, S, 64, False, "fp16") for B, H, S in ((12, 64, 256), (4, 8, 512), (4, 8, 1024))],
    "wide": [Case(2, 8, 8, 8192, D, causal, "bf16") for D, causal in itertools.product((320, 384, 512), WAYS)],
    "varlen": [
        replace(_square(max(LENGTHS), max(LENGTHS), D, causal, lengths=LENGTHS), B=len(LENGTHS))
        for D, causal in itertools.product((64, 128), WAYS)
    ],
    # A bias of every score at half the length, and a relative bias at a length at which the former takes 32 GiB.
    "scores": [
        *(
            replace(_square(16384, 8192, D, score != "bias", score=score), S=4096 if score == "bias" else 8192)
            for D, score in itertools.product((128, 64), SCORE_OPTIONS)
        ),
        _square(32768, 32768, 128, True, score="relative bias"),
    ],
    "masks": [
        replace(_square(S, S, D, of.causal, pattern=name), **({"Hq": 64, "Hk": 8} if name == "documents" else {}))
        for D, (name, of) in itertools.product((128, 64), PATTERNS.items())
        for S in ((32768,) if name in LONG_PATTERNS else (16384,))
    ],
    "blocks": [
        Case(1, HEADS, HEADS, S, D, False, "bf16", pattern=name)
        for S, D, name in itertools.product((16384, 65536), (128, 64), BLOCK_PATTERNS)
    ],
    "derivatives": [
        Case(2, 2048 // D, 2048 // D, 4096, D, causal, "bf16", derivative=what)
        for D, causal, what in itertools.product((64, 128), WAYS, DERIVATIVES)
    ],
}


def cases(sets: Sequence[str] | None, passes: str) -> list[Case]:
    """The rows of the named sets (all without names), in the order of SETS. Those of fp8 and invariant ones have no backward."""
    names = SETS if sets is None else chosen("--set", sets, SETS)
    return [
        replace(case, set=name, backward=backward)
        for name in names
        for case in SETS[name]
        for backward in ((False,) if case.derivative or case.dtype == "fp8" or case.invariant else PASSES[passes])
        if backward in PASSES[passes] or case.derivative
    ]
