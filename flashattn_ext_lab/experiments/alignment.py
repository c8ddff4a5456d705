"""Head dims that are not multiples of 8, each compared with a multiple of 8."""

from __future__ import annotations

from .harness import OURS, SDPA, Context, Sizes, divided, size_table
from .result import PASSES, Result, cell, labels, measured, of_passes, quotient

RATES = {OURS: "our rate", SDPA: "SDPA rate"}
LOSSES = {OURS: "our loss", SDPA: "SDPA loss"}
BASE_OF = {65: 64, 97: 96, 120: 128, 129: 128, 136: 128}  # head dim -> the head dim that it is compared with
SIZES = size_table(
    gpu=dict(B=16, H=16, S=2048, D=(64, 65, 96, 97, 120, 128, 129, 136), dtype="fp16"),
    cpu=dict(B=1, H=4, S=1024, dtype="fp32"),
    cpu_quick=dict(S=256),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    for direction in context.track(PASSES):
        # Calls of all head dims are interleaved, so that noise affects all of them alike.
        inputs = {D: context.inputs(sizes, D=D) for D in sizes.D}
        calls = {f"{name} D={D}": of.call(name, direction, causal=False) for D, of in inputs.items() for name in RATES}
        whole = context.measure(calls, [t for of in inputs.values() for t in of])
        rates = {
            (name, D): whole.rate(of.flop(direction, causal=False), f"{name} D={D}")
            for D, of in inputs.items()
            for name in RATES
        }
        for D in sizes.D:
            times = whole.renamed({f"{name} D={D}": name for name in RATES})
            base = BASE_OF.get(D)
            kept = {name: divided(rates[name, D], rates.get((name, base))) for name in RATES}
            result.add(
                *labels(pass_=direction, D=D),
                *times.times(*RATES),
                *(cell(heading, rates[name, D], "TFLOP/s", ".3f", 1e-12) for name, heading in RATES.items()),
                cell("relative to D", base),
                *(cell(heading, kept[name] and 1 - kept[name], "%", ".1f", 100) for name, heading in LOSSES.items()),
                times.remark(),
            )
    result.notes.append("loss: of TFLOP/s, relative to the head dim named")


def compare(result: Result) -> None:
    for name, article in ((OURS, "below 0.8x forward: a defect"), (SDPA, "")):

        def kept(direction: str, name: str = name) -> str:
            return quotient(*(measured(result, RATES[name], name, D=D, pass_=direction) for D in (129, 128)))

        result.compare(f"rate of D = 129 relative to 128, {name}", of_passes(kept), article)
