"""`bench cuda`: forward and backward of this package compared with PyTorch's backends and flash-attn.

Times are GPU times, between two events around several launches. bench_cases.py defines the measured cases, and
bench_contestants.py the compared attentions.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import flashattn_ext
from flashattn_ext import BlockMask
from flashattn_ext._build import REBUILD

from .bench_cases import BESIDE, BF16, CAUSAL, DENSE, FA2, FLEX, OURS, PLAIN, VARLEN, Case, cases
from .bench_contestants import contestants, extras, inputs, kernel_of, keywords, skip_reason, tensors_of, timed_call
from .console import Columns, CommandError, fields, make_console, print_rows, text_of, track
from .devices import describe_machine
from .timing import Timing, divided, peak_extra_bytes, reported, time_bursts, time_on

REFERENCE_LIMIT_BYTES = 2 << 30  # size of the fp64 scores of the compared heads
RNG_SEED = 1234
# Milliseconds of each call without a pause, as in training, and how often: at the power limit clocks fall, most for the kernels
# that spend the most energy per product.
SUSTAINED_MS, SUSTAINED_ROUNDS = 200.0, 3
WIDTH = 320  # width of piped tables, which are wider than the others


def running_backend(requested: str | None) -> str:
    """The CUDA backend that runs on this GPU: the requested one, or the preferred one."""
    if not torch.cuda.is_available():
        raise CommandError(f"bench cuda needs a CUDA device, and this torch ({torch.__version__}) sees none")
    backends = flashattn_ext.build_info()["backends"]
    usable = [name for name in backends if name.startswith("cuda")]
    if not usable:
        only = f"this build has only the backends {', '.join(backends)}"
        raise CommandError(f"{only}; rebuild where the CUDA toolkit is installed: {REBUILD}")
    if requested not in (None, *usable):
        raise CommandError(f"--backend got {requested!r}; accepted are {', '.join(usable)}")
    preferred, reason = f"cuda-{os.environ.get('FLASHATTN_EXT_CUDA_PATH')}", ""
    for name in [requested] if requested else sorted(usable, key=lambda name: name != preferred):
        with flashattn_ext.use_backend(name):
            try:
                flashattn_ext.forward(*inputs(Case(1, 1, 1, 64, 64, False, "bf16"))[:3])
                return name
            except NotImplementedError as error:
                reason = str(error)
    raise CommandError(reason)


def measure(
    *,
    quick: bool,
    sets: Sequence[str] | None = None,
    passes: str = "both",
    peers: str | None = None,
    backend: str | None = None,
    sustained: bool = False,
) -> dict[str, Any]:
    """Times every row. The result contains plain numbers only, ready for JSON.

    Without a terminal for the progress bar, each row is reported on stderr as soon as it is measured.
    """
    rows, names = cases(sets, passes), contestants(peers)
    backend_in_use = running_backend(backend)
    results = []
    # Graphs of compiled functions are retained for another backward.
    retained = torch._functorch.config.patch(donated_buffer=False)
    torch.set_float32_matmul_precision("highest")  # with TF32 the math backend would be less precise than ours
    with flashattn_ext.use_backend(backend), retained:
        about = {
            **describe_machine(torch.device("cuda")),
            "backend": backend_in_use,
            "contestants": names,
            "quick": quick,
        }
        for case in track(rows):
            results.append(measure_case(case, names, quick=quick, sustained=sustained))
            if not make_console().is_terminal:
                print(f"{len(results)} of {len(rows)}: {in_one_line(results[-1])}", file=sys.stderr, flush=True)
    return {**about, "flash_attn": getattr(sys.modules.get("flash_attn"), "__version__", None), "rows": results}


def measure_case(
    case: Case, names: Sequence[str], *, quick: bool, sustained: bool = False, device: str = "cuda"
) -> dict[str, Any]:
    """One row. A contestant that cannot run has its reason in `failures`, and no numbers. On the CPU only times are measured."""
    draw = inputs if device == "cuda" else functools.partial(inputs, device=device, heads_first=True)
    tensors = draw(case)
    failures = {name: reason for name in names if (reason := skip_reason(case, name))}
    calls: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    timed_calls = {name: (case, name, tensors) for name in names}
    timed_calls |= {name: (other, OURS, draw(other)) for name, other in case.beside().items()}
    for name, (timed, contestant, given) in timed_calls.items():
        if name not in failures:
            with reported(name, failures), kernel_of(name):
                call = timed_call(timed, contestant, *given)
                if device == "cuda":
                    call()  # warm-up; libraries allocate their persistent workspaces
                    memory[name] = peak_extra_bytes(call)
                calls[name] = call
            call = None  # a graph of a contestant that failed would keep its memory
    timings = time_on(device, calls, quick, failures=failures, around=kernel_of)
    steady = None
    if sustained:
        steadily = {"target_ms": SUSTAINED_MS, "most": 10**6, "around": kernel_of}
        contenders = {name: call for name, call in calls.items() if name in names and name in timings}
        steady = time_bursts(contenders, SUSTAINED_ROUNDS, failures, **steadily)
        del contenders
    calls.clear()  # their graphs: the reference needs the memory
    measures_errors = device == "cuda" and not quick and not case.derivative
    max_error = max_errors(case, names, tensors, failures) if measures_errors else {}
    return row(case, names, timings, memory, max_error, failures, steady)


def max_errors(
    case: Case, names: Sequence[str], tensors: tuple[Tensor, ...], failures: dict[str, str]
) -> dict[str, float]:
    """The largest error of out, or of the gradients, in the first heads of the first batch entry, against attention in fp64."""
    max_error: dict[str, float] = {}
    with reported("reference", failures):
        expected = reference_results(case, *tensors)
    for name in names if "reference" not in failures else ():
        # A peer draws its own dropout mask, which the reference does not have.
        if name not in failures and (name == OURS or not case.dropout):
            with reported(name, failures), kernel_of(name):
                got = timed_call(case, name, *tensors, RNG_SEED if case.dropout else None)()
                max_error[name] = largest_error(_compared(case, tensors_of(got)[:3]), expected)
            got = None
    return max_error


def compared_heads(case: Case) -> tuple[int, int]:
    """How many of the first query and KV heads are compared with fp64: at most two KV heads.

    KV heads come with all of their query heads, as their gradients are sums over the query heads.
    """
    group = case.Hq // case.Hk
    fitting = REFERENCE_LIMIT_BYTES // (case.S * case.S * 8 * group)
    kv_heads = max(1, min(2, case.Hk, fitting))
    return kv_heads * group, kv_heads


def _compared(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The compared heads of the first sequence, [1, S, heads, D] in fp64, of one tensor or of those of (q, k, v)."""
    query_heads, kv_heads = compared_heads(case)
    first = [t[None, : case.lengths[0]] if case.lengths else t[:1] for t in tensors]
    return [t[:, :, :heads].double() for t, heads in zip(first, (query_heads, kv_heads, kv_heads), strict=False)]


def reference_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    heads, _ = compared_heads(case)
    if (scores := case.S * case.S * 8 * heads) > REFERENCE_LIMIT_BYTES and not case.lengths:
        raise ValueError(f"skipped: in fp64 the scores of {heads} heads take {scores / 2**30:.0f} GiB")
    slices = [t.requires_grad_(case.backward) for t in _compared(case, [t.detach() for t in (q, k, v)])]
    head_dimension = {"alibi_slopes": 0, "relative_bias": 0, "bias": 1}

    def of_first(name: str, value: Any) -> Any:
        """The part of an argument for the compared heads."""
        if isinstance(value, BlockMask) and value.shape[1] > 1:
            return BlockMask(value.lists[:, :heads], value.bits, value.Sq, value.Sk)
        return value.detach().narrow(head_dimension[name], 0, heads).double() if name in head_dimension else value

    of_heads = {name: of_first(name, value) for name, value in extras(case, q.device).keywords.items()}
    out = flashattn_ext.attention_reference(*slices, **keywords(case, RNG_SEED if case.dropout else None), **of_heads)
    return list(torch.autograd.grad(out, slices, *_compared(case, [dout]))) if case.backward else [out]


def largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of all tensors; NaN if any of them has a NaN."""
    return torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max().item()


def row(
    case: Case, names: Sequence[str], timings: Mapping[str, Timing], memory: Mapping[str, int],
    max_error: Mapping[str, float], failures: Mapping[str, str], sustained: Mapping[str, Timing] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A row as plain numbers; None for what was not measured. Ratios above 1: ours is faster."""
    rates = _rates(case, names, timings)
    ms = rates["ms"]
    return {
        **case.described(),
        **rates,
        "sustained": None if sustained is None else _rates(case, names, sustained),
        "ratio_fa2": divided(ms.get(FA2), ms[OURS]),
        "ratio_flex": divided(ms.get(FLEX), ms[OURS]),
        "beside": {name: _beside(case, other, name, timings) for name, other in case.beside().items()},
        "spread": {name: timings[name].spread if name in timings else None for name in names},
        "peak_extra_bytes": {name: memory.get(name) if name in timings else None for name in names},
        "max_error": {name: max_error.get(name) for name in names},
        "failures": dict(failures),
    }


def _rates(case: Case, names: Sequence[str], timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Times and rates of the contestants, and the ratio of the best peer's time to ours."""
    ms = {name: timings[name].median_s * 1e3 if name in timings else None for name in names}
    best = min((ms[name] for name in names if name != OURS and ms[name] is not None), default=None)
    tflops = {name: None if time is None else case.flop / time * 1e-9 for name, time in ms.items()}
    return {"ms": ms, "tflops": tflops, "ratio_best": divided(best, ms[OURS])}


def _beside(case: Case, other: Case, name: str, timings: Mapping[str, Timing]) -> dict[str, Any] | None:
    """Our time in a reference call, and the ratio of the row's rate to that one's; None where it did not run."""
    if name not in timings:
        return None
    seconds = timings[name].median_s
    ratio = case.flop / timings[OURS].median_s / (other.flop / seconds) if OURS in timings else None
    return {"shape": other.shape, "ms": seconds * 1e3, "tflops": other.flop / seconds * 1e-12, "ratio": ratio}


def _pair(first: float | None, first_form: str, second: float | None, second_form: str) -> str:
    if first is None and second is None:
        return "-"
    return f"{text_of(first, first_form)} / {text_of(second, second_form)}"


ABOUT = fields({"set": "set", "BxHxSxD": "shape", "dtype": "dtype", "mask": "option", "pass": "direction"})
RATIOS: Columns = {
    **fields({"to best": "ratio_best", "to fa2": "ratio_fa2", "to flex": "ratio_flex"}, ".2f", "x"),
    **{
        f"to {name}": lambda row, name=name: text_of((row["beside"].get(name) or {}).get("ratio"), ".2f", "x")
        for name in BESIDE
    },
    "spread": lambda row: text_of(row["spread"][OURS], ".0%"),
}
MEANINGS = {
    "to flex": "its block mask is built before timing",
    f"to {DENSE}": "our rate relative to a dense batch with the same work",
    f"to {PLAIN}": "our rate relative to the same call without the option",
    f"to {CAUSAL}": "our rate on visible scores relative to a causal call of the same length",
    f"to {VARLEN}": "our rate relative to the equivalent packed call",
    f"to {BF16}": "our rate relative to the same call in bf16",
    "spread": "of our calls",
}
MEMORY_TITLE = "MiB that a call allocates / largest error against fp64, of out or of the gradients"
SUSTAINED_TITLE = "The same without a pause, as in training: milliseconds / TFLOP/s"


def speed_columns(names: Sequence[str], ratios: Iterable[str] = RATIOS) -> Columns:
    rates = {name: lambda row, name=name: _pair(row["ms"][name], ".3f", row["tflops"][name], ".1f") for name in names}
    return {**ABOUT, **rates, **{name: RATIOS[name] for name in ratios}}


def memory_columns(names: Sequence[str]) -> Columns:
    def text(row: Any, name: str) -> str:
        return _pair(divided(row["peak_extra_bytes"][name], 2**20), ".1f", row["max_error"][name], ".1e")

    return {**ABOUT, **{name: functools.partial(text, name=name) for name in names}}


def sustained_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were timed without pauses, with those times in place of the others."""
    return [{**row, **row["sustained"]} for row in rows if row["sustained"]]


def is_slower(row: dict[str, Any]) -> bool:
    """Whether a peer is faster than ours."""
    return row["ratio_best"] is not None and row["ratio_best"] < 1


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the speed, then memory and accuracy, then why ours could not run somewhere."""
    rows = results["rows"]
    skipped = [{name for name, reason in row["failures"].items() if reason.startswith("skipped")} for row in rows]
    names = [name for name in results["contestants"] if not all(name in of for of in skipped)]
    ratios = [name for name, text in RATIOS.items() if name == "to best" or any(text(row) != "-" for row in rows)]
    about = (
        f"Milliseconds / TFLOP/s on {results['machine']}, {results['backend']}, torch {results['torch']}, "
        f"CUDA {results['cuda']}, cuDNN {results['cudnn']}"
    )
    title = "; ".join([about, *(f"{name}: {MEANINGS[name]}" for name in ratios if name in MEANINGS)])
    tables = [(title, speed_columns(names, ratios), rows)]
    if steady := sustained_rows(rows):
        tables.append((SUSTAINED_TITLE, speed_columns(names, ["to best"]), steady))
    tables.append((MEMORY_TITLE, memory_columns(names), rows))
    for title, columns, shown in tables:
        print_rows(title, columns, shown, markdown=markdown, marked=map(is_slower, shown), width=WIDTH)
    for note in notes(rows):
        print(note)


def _about(row: dict[str, Any]) -> str:
    return " ".join(str(text(row)) for text in ABOUT.values())


def in_one_line(row: dict[str, Any]) -> str:
    """A row and the rates of its contestants."""
    rates = [f"{name} {rate:.1f}" for name, rate in row["tflops"].items() if rate is not None]
    return f"{_about(row)}: " + (", ".join(rates) + " TFLOP/s" if rates else "nothing could run")


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where ours or the reference failed, and why. A peer's reasons are in the JSON."""
    names = (OURS, *BESIDE, "reference")
    failed = [(row, name) for row in rows for name in names if name in row["failures"]]
    return [f"{_about(row)}: {name}: {row['failures'][name]}" for row, name in failed]
