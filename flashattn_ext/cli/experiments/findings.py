"""What each experiment found: one sentence, made from the numbers of its table alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .context import BOTH, FORWARD, OURS, PASSES, SDPA, UNFUSED
from .result import Result


def finding(result: Result) -> str:
    """The sentence about a result. Where its table lacks the numbers for one, it says so."""
    if result.error:
        return f"It failed: {result.error}."
    try:
        return FINDINGS[result.name](result)
    except (ArithmeticError, LookupError, TypeError, ValueError):  # no such column, no such row, or nothing in it
        return "The numbers that a finding needs were not measured here."


def _number(result: Result, column: str, **where: object) -> float:
    value = result.value(column, **where)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{column}: nothing was measured")
    return value


def _of_pass(direction: str, **where: object) -> dict[str, object]:
    return {"pass": direction, **where}


def _and(values: Iterable[float]) -> str:
    return " and ".join(f"{value:.3g}" for value in values)


def _rates(tflops: Sequence[float]) -> str:
    """In the unit that suits the device."""
    if max(tflops) >= 1:
        return f"{_and(tflops)} TFLOP/s"
    return f"{_and(rate * 1e3 for rate in tflops)} GFLOP/s"


def _matmul(result: Result) -> str:
    rates = {dtype: max(rate for _, rate in result.points("size", "rate", dtype=dtype)) for dtype in _dtypes(result)}
    products = ", ".join(f"{_rates([rate])} in {dtype}" for dtype, rate in rates.items())
    copy = max(bandwidth for _, bandwidth in result.points("size", "bandwidth"))
    return f"Matrix products reach {products}, and a copy moves {copy:.0f} GB/s."


def _dtypes(result: Result) -> list[str]:
    return list(dict.fromkeys(str(dtype) for dtype in result.column("dtype")))


def _scaling(result: Result) -> str:
    S = max(length for length, _ in result.points("S", "to unfused"))
    unfused = [_number(result, "to unfused", **_of_pass(direction, S=S)) for direction in PASSES]
    sdpa = [ratio for _, ratio in result.points("S", "to SDPA")]
    rates = [_number(result, "rate", **_of_pass(direction, S=S)) for direction in PASSES]
    return (
        f"At S = {S} ours runs at {_rates(rates)} (forward, forward+backward), {_and(unfused)} times as fast as "
        f"unfused attention; over all lengths it is {min(sdpa):.2f} to {max(sdpa):.2f} times as fast as PyTorch's own."
    )


def _causal(result: Result) -> str:
    ours, unfused = (_number(result, "cost of the mask", **_of_pass(FORWARD, attention=a)) for a in (OURS, UNFUSED))
    return (
        f"The causal mask makes a forward of ours {_slower(ours)}, and an unfused one, which computes the hidden scores too, "
        f"{_slower(unfused)}."
    )


def _slower(percent: float) -> str:
    return f"{abs(percent):.0f} % {'slower' if percent >= 0 else 'quicker'}"


def _layout(result: Result) -> str:
    in_place = [abs(ratio - 1) for _, ratio in result.points("B,H,S,D", "beside [B,H,S,D]", way="[B,S,H,D] in place")]
    copies = [ratio for _, ratio in result.points("B,H,S,D", "beside [B,H,S,D]", way="transpose + contiguous")]
    return (
        f"In place, the two layouts differ by at most {100 * max(in_place):.0f} %; transposing and copying instead takes "
        f"{min(copies):.2f} to {max(copies):.2f} times as long."
    )


def _alignment(result: Result) -> str:
    worst, direction = max((loss, d) for d in PASSES for _, loss in result.points("D", "our loss", **_of_pass(d)))
    D = next(D for D, loss in result.points("D", "our loss", **_of_pass(direction)) if loss == worst)
    base, theirs = (result.value(column, **_of_pass(direction, D=D)) for column in ("beside D", "SDPA loss"))
    beside = f" (PyTorch's own: {theirs:.0f} %)" if isinstance(theirs, float) else ""
    return f"The costliest head size is {D}: {direction} loses {worst:.0f} % of the rate of {base}{beside}."


def _by_dtype(result: Result) -> str:
    ms = {dtype: _number(result, OURS, **_of_pass(FORWARD, dtype=dtype)) for dtype in _dtypes(result)}
    half = ", ".join(f"{dtype} {ms['fp32'] / ms[dtype]:.1f} times" for dtype in ms if dtype != "fp32")
    errors = zip(result.column("error of ours"), result.column("error of unfused"), strict=True)
    ratios = [ours / unfused for ours, unfused in errors if isinstance(ours, float) and isinstance(unfused, float)]
    return (
        f"Forward, {half} as fast as fp32; the largest error of ours is {min(ratios):.2f} to {max(ratios):.2f} of that of "
        "unfused attention in the same dtype."
    )


def _memory(result: Result) -> str:
    S = max(length for length, _ in result.points("S", "saved"))
    ours, unfused = (_number(result, name, **_of_pass(BOTH, S=S)) for name in (OURS, UNFUSED))
    saved = _number(result, "saved", **_of_pass(BOTH, S=S))
    return f"At S = {S} forward+backward takes {ours:.4g} MiB beyond its inputs, unfused {unfused:.5g} MiB: {saved:.1f} % less."


def _traffic(result: Result) -> str:
    sources = [str(source) for source, _ in result.points("source", "read saved")]
    source = "GPU counters" if "GPU counters" in sources else sources[0]
    read, written = (_number(result, f"{what} saved", source=source) for what in ("read", "written"))
    by = "counted by the GPU" if source == "GPU counters" else "by a model"
    return f"A forward of ours reads {read:.0f} % and writes {written:.0f} % less off-chip memory than an unfused one, {by}."


def _scores(result: Result) -> str:
    S = max(length for length, _ in result.points("S", "cost of the option"))

    def of(column: str, direction: str, option: str) -> float:
        return _number(result, column, **_of_pass(direction, S=S, option=option))

    options = ("softcap", "relative bias")
    costs, faster = (
        [of(column, FORWARD, option) for option in options] for column in ("cost of the option", "to unfused")
    )
    share = [100 * (1 - of("memory of ours", BOTH, o) / of("memory of unfused", BOTH, o)) for o in options]
    return (
        f"At S = {S} softcap makes a forward of ours {_slower(costs[0])} and a relative bias {_slower(costs[1])}; they are "
        f"{_and(faster)} times as fast as unfused attention with the same, and forward+backward takes {_and(share)} % less memory."
    )


def _masks(result: Result) -> str:
    visible = [share for _, share in result.points("mask", "visible")]
    kept, faster = ([number for _, number in result.points("mask", column)] for column in ("of causal", "to SDPA"))
    saved = [
        100 * (1 - ours / sdpa)
        for ours, sdpa in zip(result.column("memory of ours"), result.column(f"memory of {SDPA}"), strict=True)
        if isinstance(ours, float) and isinstance(sdpa, float)
    ]
    return (
        f"With {min(visible):.0f} to {max(visible):.0f} % of the scores visible, ours computes those at {min(kept):.0f} to "
        f"{max(kept):.0f} % of the rate of a causal call, {min(faster):.2f} to {max(faster):.2f} times as fast as PyTorch's own with a "
        f"dense mask, in {min(saved):.0f} to {max(saved):.0f} % less memory."
    )


def _tiles(result: Result) -> str:
    tile, best = min(result.points("queries x keys", "time"), key=lambda point: point[1])
    default, time = result.points("queries x keys", "time")[0]
    if tile == default:
        return f"The default tile, {default.removesuffix(' (default)')}, is the quickest of those that were measured."
    spread = best * max(spread for _, spread in result.points("queries x keys", "time spread")) / 100
    doubt = ", a difference within the spread of the calls" if time - best < spread else ""
    return (
        f"The quickest tile, {tile}, takes {100 * best / time:.1f} % of the time of the default one, {default}{doubt}."
    )


def _profile(result: Result) -> str:
    ours, unfused = (_number(result, "kernels", attention=name) for name in (OURS, UNFUSED))
    ratio = _number(result, "whole call", attention=UNFUSED) / _number(result, "whole call", attention=OURS)
    return (
        f"One call of ours is {ours} piece{'s' if ours > 1 else ''} of work for the device, one of unfused attention {unfused}, "
        f"which take {ratio:.1f} times as long."
    )


def _llama(result: Result) -> str:
    def of(column: str, name: str) -> float:
        return _number(result, column, what="training step", attention=name)

    sdpa = result.value("tokens", what="training step", attention=SDPA)
    beside = f", {of('tokens', OURS) / sdpa:.2f} times those of PyTorch's own" if isinstance(sdpa, float) else ""
    return (
        f"A training step handles {of('tokens', OURS):.0f} tokens per second with ours, {of('to unfused', OURS):.2f} times those "
        f"of unfused attention{beside}, and takes {of('peak memory', OURS):.3g} GiB where unfused takes "
        f"{of('peak memory', UNFUSED):.3g}."
    )


def _dropout(result: Result) -> str:
    verdicts = {p: result.value("verdict", attention=OURS, **{"dropout p": p}) for p in result.column("dropout p")}
    curves = ", ".join(f"{verdict} at p = {p:g}" for p, verdict in verdicts.items())
    off = max(
        abs(
            _number(result, "kept", attention=OURS, **{"dropout p": p})
            - _number(result, "asked for", **{"dropout p": p})
        )
        for p in verdicts
    )
    return (
        f"The loss curves of ours and of unfused attention: {curves}; the share of weights that ours keeps is within "
        f"{off:.2g} percentage points of what was asked for."
    )


def _smooth(result: Result) -> str:
    def steps(name: str) -> str:
        share = result.value("of plain's steps", softmax=name)
        return f"needs {share:.0f} % of its steps" if isinstance(share, float) else "does not get there"

    _number(result, "final loss", softmax="plain")
    return (
        f"To the loss that plain softmax ends with, smooth softmax {steps('smooth')} and a learned sink {steps('sink')}; they "
        f"leave {_number(result, 'on no token', softmax='smooth'):.1f} and {_number(result, 'on no token', softmax='sink'):.1f} % "
        "of the attention on no token."
    )


FINDINGS: dict[str, Callable[[Result], str]] = {
    "matmul": _matmul,
    "scaling": _scaling,
    "causal": _causal,
    "layout": _layout,
    "alignment": _alignment,
    "dtypes": _by_dtype,
    "memory": _memory,
    "traffic": _traffic,
    "scores": _scores,
    "masks": _masks,
    "tiles": _tiles,
    "profile": _profile,
    "llama": _llama,
    "dropout": _dropout,
    "smooth": _smooth,
}
