"""Softcap and a relative bias with its gradient: their cost in our kernels and in unfused attention, which stores every score."""

from __future__ import annotations

from ..bench_cases import FLEX
from ..options import RELATIVE_REACH, SOFTCAP
from .harness import OURS, OURS_PLAIN, UNFUSED, Context, Sizes, memory_cell, size_table
from .result import BOTH, FORWARD, PASSES, Plot, Result, cell, column_quotient, labels

OPTIONS = ("softcap", "relative bias")
COST = "cost of the option"
SIZES = size_table(
    gpu=dict(B=1, H=8, S=(2048, 4096, 8192, 16384), D=128, dtype="bf16"),
    gpu_quick=dict(S=(1024, 2048)),
    cpu=dict(H=2, S=(1024, 2048, 4096), D=64, dtype="fp32"),
    cpu_quick=dict(S=(512, 1024)),
)


def measure(context: Context, sizes: Sizes, result: Result) -> None:
    peers = (UNFUSED, FLEX) if context.on_cuda else (UNFUSED,)
    for option, direction, S in context.steps(OPTIONS, PASSES, sizes.S):
        inputs = context.inputs(sizes, S=S)
        gathers = direction != FORWARD and option != "softcap"  # FlexAttention would sum its gradient score by score
        names = [name for name in (OURS, OURS_PLAIN, *peers) if name != FLEX or not gathers]
        times = context.measure_attentions(inputs, names, direction, score=option)
        timed = [name for name in (OURS, *peers) if name in times.timings]
        memory = context.peaks(timed, times.failures, sizes.replace(S=S), direction, score=option)
        slower = times.ratio(OURS, OURS_PLAIN)
        result.add(
            *labels(option=option, pass_=direction, S=S),
            *times.times(OURS, OURS_PLAIN, *peers),
            cell(COST, slower and slower - 1, "%", ".0f", 100),
            *(cell(f"to {name}", times.ratio(name, OURS), "x", ".2f") for name in peers),
            *(memory_cell(f"memory of {name}", memory.get(name)) for name in (OURS, *peers)),
            times.remark(),
        )
    result.notes += [
        f"softcap: scores become {SOFTCAP:g} * tanh(score / {SOFTCAP:g}), as in Gemma 2. relative bias: a number for each head and distance "
        f"up to {RELATIVE_REACH}, as in T5, in fp32; forward+backward computes its gradient too, and unfused attention gathers it into a matrix",
        f"{OURS_PLAIN}: the same call without the option; {COST}: how much longer ours takes with it. memory: {context.memory_note}",
        f"{FLEX}: PyTorch's FlexAttention, compiled, on CUDA only; without the gradient of a relative bias, which it sums score by score",
    ]
    series = {
        f"{name}, {option}": result.points("S", f"memory of {name}", option=option, pass_=BOTH)
        for name in (OURS, *peers)
        for option in OPTIONS
    }
    result.plot = Plot("line", "S", "MiB, forward+backward", series, log="xy")


def compare(result: Result) -> None:
    S = max(result.column("S"))
    for option in OPTIONS:
        cost, speedup = (
            column_quotient(result, *pair, S=S, option=option) for pair in ((OURS, OURS_PLAIN), (UNFUSED, OURS))
        )
        result.compare(f"time with {option} relative to that without, S = {S}", cost)
        result.compare(f"time of unfused with {option} relative to ours, S = {S}", speedup)
