"""Head dims that are not multiples of 8, each compared with a multiple of 8."""

from __future__ import annotations

from .harness import OURS, SDPA, Context, Sizes, divided, size_table
from .result import FORWARD, PASSES, Result, cell, measured, number, quotient

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
        _measure_pass(context, sizes, direction, result)
    result.notes.append("loss: of TFLOP/s, relative to the head dim named")
    lost = number(result.value(LOSSES[OURS], D=129, pass_=FORWARD), ".1f", " %")
    result.compare("loss of D=129 relative to 128, forward", "over 20 %: defect", lost)


def found(result: Result) -> str:
    def kept(name: str) -> str:
        pairs = {each: [measured(result, RATES[name], name, D=D, pass_=each) for D in (129, 128)] for each in PASSES}
        return ", ".join(f"{quotient(*pair)} {direction}" for direction, pair in pairs.items())

    return f"Rate of D = 129 relative to 128: ours {kept(OURS)}; PyTorch's own {kept(SDPA)}."


def _measure_pass(context: Context, sizes: Sizes, direction: str, result: Result) -> None:
    """Calls of all head dims are interleaved, so that noise affects all of them alike."""
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
            cell("pass", direction),
            cell("D", D),
            *times.times(*RATES),
            *(cell(heading, rates[name, D], "TFLOP/s", ".3f", 1e-12) for name, heading in RATES.items()),
            cell("relative to D", base),
            *(cell(heading, kept[name] and 1 - kept[name], "%", ".1f", 100) for name, heading in LOSSES.items()),
            times.remark(),
        )
