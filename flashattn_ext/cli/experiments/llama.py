"""Decoder layers of LLaMA-13B, one alone and several in a training step: time, tokens per second, memory."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..bench_cases import DTYPES
from ..model import ATTENTION, Block, ModelConfig, rotary_table
from ..timing import Timing, reported
from .context import (
    OURS,
    SDPA,
    UNFUSED,
    Context,
    number,
    per_second,
    ratio,
    remark,
    scaled,
    size_notes,
    time_cells,
    time_columns,
)
from .own_process import growth_in_own_process
from .result import Cell, Column, Comparison, Plot, Result

NAMES = {OURS: "flashattn", UNFUSED: "unfused", SDPA: "sdpa"}  # of this table -> keys of ATTENTION
LAYER, STEP = "one layer, forward+backward", "training step"
FITS, TO_UNFUSED, RATE, PEAK = "layers that fit", "to unfused", "tokens", "peak memory"
GIB = 1 << 30
MOST_LAYERS = 40  # of the whole model


@dataclass(frozen=True)
class Sizes:
    B: int  # on a GPU halved until a layer fits with every attention
    S: int
    heads: int
    D: int
    mlp: int
    layers: int | None  # of the training step; None: as many as fit with every attention
    rounds: int
    dtype: str


GPU_SIZES = Sizes(8, 4096, 40, 128, 13824, None, 3, "bf16")


def sizes_for(context: Context) -> Sizes:
    if context.on_cpu:
        quick = context.quick
        return Sizes(1, 256 if quick else 2048, 2 if quick else 4, 128, 704 if quick else 1376, 2, 3, "fp32")
    return Sizes(8, 1024, 40, 128, 13824, 2, 3, "bf16") if context.quick else GPU_SIZES


def measure(context: Context, sizes: Sizes) -> Result:
    columns = [
        Column("what"),
        Column("attention"),
        Column("layers"),
        *time_columns(["time"]),
        Column(TO_UNFUSED, "x", ".2f"),
        Column(RATE, "1/s", ".0f"),
        Column(PEAK, "GiB", ".3f"),
        Column(FITS),
        Column("remark"),
    ]
    result = Result("llama", "Decoder layers as in LLaMA-13B", columns, notes=size_notes(sizes, GPU_SIZES))
    failures: dict[str, str] = {}
    fitting: dict[str, int] = {}
    if context.device.type == "cuda":
        sizes = replace(sizes, B=_batch_that_fits(context, sizes))
        fitting = {} if sizes.layers else _layers_that_fit(context, sizes, failures)
    layers = sizes.layers or min(fitting.values(), default=1)
    for what, count in context.track([(LAYER, 1), (STEP, layers)]):
        result.rows += _rows(context, sizes, what, count, fitting, failures)
    result.notes += _notes(context, sizes)
    result.plot = Plot(
        "bar", "attention", "tokens/s", {what: result.points("attention", RATE, what=what) for what in (LAYER, STEP)}
    )
    result.comparisons = [
        Comparison(
            f"{what}, unfused to ours",
            article,
            " to ".join(
                number(result.value(column, what=STEP, attention=name), form, unit) for name in (UNFUSED, OURS)
            ),
        )
        for what, article, column, form, unit in (
            ("time of a step", "520 to 180 ms", "time", ".0f", " ms"),
            ("tokens per second", "1200 to 3500", RATE, ".0f", ""),
            ("peak memory", "18.3 to 6.1 GB", PEAK, ".2f", " GiB"),
        )
    ]
    return result


def _notes(context: Context, sizes: Sizes) -> list[str]:
    width = sizes.heads * sizes.D
    if context.on_cpu:
        how = "growth of the resident memory of a fresh process"
        fit = f"{FITS}: not searched on a CPU, whose memory has no sharp end"
    else:
        how = "the most that PyTorch's allocator gave out"
        fit = f"{FITS}: in a training step; every attention is measured with as many as fit with all of them"
    return [
        f"a layer: RMSNorm, {sizes.heads} heads of {sizes.D} with rotary positions, RMSNorm, SwiGLU of width {sizes.mlp} over {width}; "
        f"{sizes.dtype} weights, batch {sizes.B}; the training step updates them with AdamW; no embedding and no output head",
        f"{PEAK}: {how}: weights, gradients, activations, optimiser",
        fit,
    ]


class Stack:
    """Layers, their input and the gradient of their output."""

    def __init__(self, device: torch.device, sizes: Sizes, layers: int, *, trains: bool) -> None:
        width, dtype = sizes.heads * sizes.D, DTYPES[sizes.dtype]
        config = ModelConfig(layers, width, sizes.heads, sizes.heads, 0.0, "plain", "flashattn")
        with device:
            self.layers = nn.ModuleList(Block(config, sizes.mlp).to(dtype) for _ in range(layers))
            self.rotary = rotary_table(sizes.S, sizes.D)
            self.x, self.dout = (torch.randn(sizes.B, sizes.S, width, dtype=dtype) for _ in range(2))
        self.x.requires_grad_()
        self.optimiser = torch.optim.AdamW(self.layers.parameters(), lr=1e-5, fused=True) if trains else None

    def step(self, attention: str) -> None:
        """Forward, backward, and the update if there is an optimiser. `attention` is a key of NAMES."""
        try:
            out = self.x
            for layer in self.layers:
                layer.attention.attend = ATTENTION[NAMES[attention]]
                out = layer(out, self.rotary)
            out.backward(self.dout)
            if self.optimiser:
                self.optimiser.step()
        finally:
            self.layers.zero_grad(set_to_none=True)
            self.x.grad = None


def _rows(
    context: Context, sizes: Sizes, what: str, layers: int, fitting: Mapping[str, int], failures: Mapping[str, str]
) -> list[list[Cell]]:
    reasons = dict(failures)
    timings: dict[str, Timing] = {}
    with reported("all", reasons):
        stack = Stack(context.device, sizes, layers, trains=what == STEP)
        calls: dict[str, Callable[[], object]] = {name: functools.partial(stack.step, name) for name in NAMES}
        timings = context.time(calls, (stack.x, stack.dout), reasons, rounds=sizes.rounds)
        del stack, calls
    gc.collect()
    peaks: dict[str, int] = {}
    for name in timings:
        with reported(f"{name}, memory", reasons):
            peaks[name] = peak_bytes(context.device, sizes, name, layers, what == STEP)
    return [
        [
            what,
            name,
            layers,
            *time_cells({"time": timings[name]} if name in timings else {}, ["time"]),
            ratio(timings, UNFUSED, name),
            per_second(sizes.B * sizes.S, timings, name),
            scaled(peaks.get(name), GIB),
            fitting.get(name) if what == STEP else None,
            remark({key: reason for key, reason in reasons.items() if key == "all" or key.startswith(name)}),
        ]
        for name in NAMES
    ]


def peak_bytes(device: torch.device, sizes: Sizes, name: str, layers: int, trains: bool) -> int:
    """The most memory that one step takes, with everything that it needs."""
    if device.type == "cpu":
        return growth_in_own_process(_whole_step, sizes, name, layers, trains)
    if device.type != "cuda":
        raise NotImplementedError(f"no allocator statistics of {device.type} are read yet")
    stack = Stack(device, sizes, layers, trains=trains)
    stack.step(name)  # libraries take the workspaces that they keep, the optimiser its states
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    stack.step(name)
    return torch.cuda.max_memory_allocated(device)


def _whole_step(sizes: Sizes, name: str, layers: int, trains: bool) -> Callable[[], None]:
    return lambda: Stack(torch.device("cpu"), sizes, layers, trains=trains).step(name)


# What fits on a GPU


def peak_if_it_fits(device: torch.device, sizes: Sizes, name: str, layers: int) -> int | None:
    """The most memory that a training step takes; None where there is not enough."""
    peak = None
    with contextlib.suppress(torch.OutOfMemoryError):
        peak = peak_bytes(device, sizes, name, layers, True)
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _batch_that_fits(context: Context, sizes: Sizes) -> int:
    B = sizes.B
    while B > 1 and peak_if_it_fits(context.device, replace(sizes, B=B), UNFUSED, 1) is None:
        B //= 2
    return B


def most_layers(device: torch.device, sizes: Sizes, name: str, free_bytes: int) -> int:
    """The most layers with which a training step ran; 0 if not even one did."""
    one, two = (peak_if_it_fits(device, sizes, name, layers) for layers in (1, 2))
    if one is None or two is None:
        return 0 if one is None else 1
    layers = min(MOST_LAYERS, 1 + (free_bytes - one) // (two - one))
    while layers > 2 and peak_if_it_fits(device, sizes, name, layers) is None:
        layers -= 1
    return max(layers, 2)


def _layers_that_fit(context: Context, sizes: Sizes, failures: dict[str, str]) -> dict[str, int]:
    fitting: dict[str, int] = {}
    for name in context.track(list(NAMES)):
        with reported(name, failures):
            torch.cuda.empty_cache()
            free_bytes, _ = torch.cuda.mem_get_info(context.device)
            if layers := most_layers(context.device, sizes, name, free_bytes):
                fitting[name] = layers
    return fitting
