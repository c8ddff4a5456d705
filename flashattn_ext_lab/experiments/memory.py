"""Peak memory of one call beyond its inputs: quadratic in S for unfused attention, linear for ours."""

from __future__ import annotations

from .harness import OURS, UNFUSED, Context, Measured, Sizes, divided, memory_cell, size_table
from .result import BOTH, PASSES, Plot, Result, cell, labels, number, of_passes

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
        memory = context.peaks(NAMES, failures, sizes.replace(S=S), direction)
        kept = divided(memory.get(OURS), memory.get(UNFUSED))
        result.add(
            *labels(pass_=direction, S=S),
            *(memory_cell(name, memory.get(name)) for name in NAMES),
            cell("saved", kept and 1 - kept, "%", ".2f", 100),
            Measured({}, failures).remark(),
        )
    result.notes.append(context.memory_note)
    series = {f"{name}, {each}": result.points("S", name, pass_=each) for name in NAMES for each in PASSES}
    result.plot = Plot("line", "S", "MiB", series, log="xy")


def compare(result: Result) -> None:
    for S, article in ((1024, "94 %"), (8192, "99 %")):
        saved = of_passes(lambda direction, S=S: number(result.value("saved", S=S, pass_=direction), ".1f", " %"))
        result.compare(f"memory saved at S={S}", saved, article)
    S = max(result.column("S"))
    sizes = (number(result.value(name, S=S, pass_=BOTH), ".1f", " MiB") for name in NAMES)
    result.compare(f"memory of ours and unfused at S={S}, {BOTH}, measured once", " and ".join(sizes))
