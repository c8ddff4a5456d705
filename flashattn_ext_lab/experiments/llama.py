"""Decoder layers of LLaMA-13B, one alone and several in a training step: time, tokens per second, memory."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch
from torch import nn

from ..bench_cases import DTYPES
from ..model import ATTENTION, Block, ModelConfig, rotary_table
from ..timing import reported
from .harness import OURS, SDPA, UNFUSED, Context, Measured, Sizes, size_table
from .result import Result, cell, labels, measured, number, quotient

NAMES = {OURS: "flashattn", UNFUSED: "unfused", SDPA: "sdpa"}  # name in this table -> key of ATTENTION
LAYER, STEP = "one layer, forward+backward", "training step"
RATE, PEAK = "tokens", "peak memory"
GIB = 1 << 30
SIZES = size_table(  # layers: of the training step
    gpu=dict(B=8, S=4096, heads=40, D=128, mlp=13824, layers=2, rounds=3, dtype="bf16"),
    gpu_quick=dict(S=1024),
    cpu=dict(B=1, S=2048, heads=4, mlp=1376, dtype="fp32"),
    cpu_quick=dict(S=256, heads=2, mlp=704),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for what, layers in context.track([(LAYER, 1), (STEP, sizes.layers)]):
        failures: dict[str, str] = {}
        times, peaks, trains = Measured({}, failures), dict[str, int](), what == STEP
        with reported("all", failures):
            stack = Stack(context.device, sizes, layers, trains)
            calls: dict[str, Callable[[], object]] = {name: functools.partial(stack.step, name) for name in NAMES}
            times = context.measure(calls, (stack.x, stack.dout), failures, rounds=sizes.rounds)
            del stack, calls
        gc.collect()
        for name in times.timings:
            with reported(f"{name}, memory", failures):
                peaks[name] = context.peak_bytes(two_steps, sizes, name, layers, trains)
        for name in NAMES:
            result.add(
                *labels(what=what, attention=name, layers=layers),
                *times.alone(name),
                cell("to unfused", times.ratio(UNFUSED, name), "x", ".2f"),
                cell(RATE, times.rate(sizes.B * sizes.S, name), "1/s", ".0f"),
                cell(PEAK, peaks.get(name), "GiB", ".3f", 1 / GIB),
                times.remark("all", name, f"{name}, memory"),
            )
    width = sizes.heads * sizes.D
    how = "growth of the resident memory of a fresh process" if context.on_cpu else "by PyTorch's allocator"
    result.notes += [
        f"a layer: RMSNorm, {sizes.heads} heads of {sizes.D} with rotary positions, RMSNorm, SwiGLU of width {sizes.mlp} over {width}; "
        f"{sizes.dtype} weights, batch {sizes.B}; the training step updates them with AdamW; no embedding and no output head",
        f"{PEAK}: {how}: weights, gradients, activations, optimizer",
    ]


def compare(result: Result) -> None:
    ours, unfused, sdpa = (measured(result, "time", what=STEP, attention=name) for name in (OURS, UNFUSED, SDPA))
    theirs = "2.89x: 520 to 180 ms, 1200 to 3500 tokens per second"
    result.compare(f"time of a {STEP} relative to ours, unfused", quotient(unfused, ours), theirs)
    result.compare(f"time of a {STEP} relative to ours, {SDPA}", quotient(sdpa, ours))
    peaks = (number(result.value(PEAK, what=STEP, attention=name), ".3g", " GiB") for name in (UNFUSED, OURS))
    result.compare(f"{PEAK}, unfused to ours, measured once", " to ".join(peaks), "18.3 to 6.1 GB")


class Stack:
    """Layers, their input and the gradient of their output."""

    def __init__(self, device: torch.device, sizes: Sizes, layers: int, trains: bool) -> None:
        width, dtype = sizes.heads * sizes.D, DTYPES[sizes.dtype]
        config = ModelConfig(layers, width, sizes.heads, sizes.heads, 0.0, "plain", "flashattn")
        with device:
            self.layers = nn.ModuleList(Block(config, sizes.mlp).to(dtype) for _ in range(layers))
            self.rotary = rotary_table(sizes.S, sizes.D)
            self.x, self.dout = (torch.randn(sizes.B, sizes.S, width, dtype=dtype) for _ in range(2))
        self.x.requires_grad_()
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-5, fused=True) if trains else None

    def step(self, attention: str) -> None:
        """Forward, backward, and the update if there is an optimizer. `attention` is a key of NAMES."""
        try:
            out = self.x
            for layer in self.layers:
                layer.attention.attend = ATTENTION[NAMES[attention]]
                out = layer(out, self.rotary)
            out.backward(self.dout)
            if self.optimizer:
                self.optimizer.step()
        finally:
            self.layers.zero_grad(set_to_none=True)
            self.x.grad = None


def two_steps(device: torch.device, sizes: Sizes, name: str, layers: int, trains: bool) -> Callable[[], None]:
    """Two steps of layers that the call makes: in the first one the optimizer allocates its states."""

    def run() -> None:
        stack = Stack(device, sizes, layers, trains)
        stack.step(name)
        stack.step(name)

    return run
