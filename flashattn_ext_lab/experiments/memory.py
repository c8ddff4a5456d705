"""Peak memory of one call beyond its inputs: quadratic in S for unfused attention, linear for ours."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..timing import reported
from .figures import number, of_passes
from .harness import BOTH, MIB, OURS, PASSES, UNFUSED, Context, Inputs, Measured, Sizes, divided, size_table
from .peak_memory import how_measured, peak_bytes
from .result import Plot, Result, cell

NAMES = (OURS, UNFUSED)
SIZES = size_table(
    gpu=dict(B=1, H=8, S=(1024, 2048, 4096, 8192, 16384, 32768), D=64, dtype="fp16"),
    gpu_quick=dict(S=(1024, 2048, 4096, 8192)),
    cpu=dict(H=2, S=(1024, 2048, 4096, 8192), dtype="fp32"),
    cpu_quick=dict(S=(1024, 2048)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for direction, S in context.steps(PASSES, sizes.S):
        failures: dict[str, str] = {}
        peaks: dict[str, int] = {}
        for name in NAMES:
            with reported(name, failures):
                peaks[name] = peak_bytes(context, make_call, S, sizes, name, direction)
        kept = divided(peaks.get(OURS), peaks.get(UNFUSED))
        result.add(
            cell("pass", direction),
            cell("S", S),
            *(cell(name, peaks.get(name), "MiB", ".2f", 1 / MIB) for name in NAMES),
            cell("saved", None if kept is None else 100 * (1 - kept), "%", ".2f"),
            Measured({}, failures).remark(),
        )
    result.notes.append(how_measured(context))
    series = {
        f"{name}, {direction}": result.points("S", name, pass_=direction) for name in NAMES for direction in PASSES
    }
    result.plot = Plot("line", "S", "MiB", series, log="xy")
    for S, article in ((1024, "94 %"), (8192, "99 %")):
        result.compare(f"memory saved at S={S}", article, of_passes(result, "saved", ".1f", " %", S=S))


def found(result: Result) -> str:
    S = max(result.column("S"))
    ours, unfused = (number(result.value(name, S=S, pass_=BOTH), ".1f", " MiB") for name in NAMES)
    return f"Beyond the inputs at S = {S}, {BOTH}, measured once: ours {ours}, unfused {unfused}."


def make_call(device: torch.device, S: int, sizes: Sizes, name: str, direction: str) -> Callable[[], object]:
    return Inputs.random(device, (sizes.B, sizes.H, S, sizes.D), sizes.dtype).call(name, direction, causal=True)
