"""`bench cuda`: forward and backward of this package beside PyTorch's backends and flash-attn.

TFLOP/s counts the products of visible scores: 4 * B * Hq * S * S * D forward, half of it causal, and
2.5 times that backward; of packed sequences, the sum of what each counts. Times are those of the GPU alone, between two events around several launches.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_ext

from .._build import REBUILD
from .bench_cpu import BACKWARD_WORK, DTYPES
from .console import CommandError, make_console, markdown_table, print_table, require
from .timing import Timing
from .timing import reported as _reported

DEVICE = "cuda"
OURS, FA2, CUDNN, MATH, FLASH_ATTN = "ours", "fa2", "cudnn", "math", "flash-attn"
DENSE = "ours, dense"  # beside packed sequences
TORCH_BACKENDS = {
    FA2: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
PEERS = (*TORCH_BACKENDS, FLASH_ATTN)
PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}

ROUNDS, QUICK_ROUNDS = 15, 3
BURST_MS, MAX_LAUNCHES = 5.0, 20  # launches between two events: about this long, at most so many
HEAD_START_CYCLES = 5_000_000  # about 3 ms, in which the host queues a burst of short launches
MATH_LIMIT_BYTES = 8 << 30  # of one B x H x S x S matrix in 16 bits; math keeps several, and in 32 bits
REFERENCE_LIMIT_BYTES = 2 << 30  # of the fp64 scores of the heads that are compared
RNG_SEED = 1234

Calls = Mapping[str, Callable[[], object]]


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

    @property
    def pairs(self) -> int:
        """Of a query and a key of one head, in all sequences."""
        return sum(length**2 for length in self.lengths) or self.B * self.S**2

    @property
    def flop(self) -> float:
        flop = 4 * self.pairs * self.Hq * self.D * (0.5 if self.causal else 1.0)
        return flop * (BACKWARD_WORK if self.backward else 1.0)

    @property
    def shape(self) -> str:
        heads = f"{self.Hq}" if self.Hq == self.Hk else f"{self.Hq}:{self.Hk}"
        length = f"{min(self.lengths)}-{self.S}" if self.lengths else f"{self.S}"
        return f"{self.B}x{heads}x{length}x{self.D}"

    def dense(self) -> Case:
        """As much work and about as many tokens in sequences of one length."""
        B = max(1, round(sum(self.lengths) ** 2 / self.pairs))
        return replace(self, B=B, S=round(math.sqrt(self.pairs / B)), lengths=())

    @property
    def mask(self) -> str:
        return ("causal" if self.causal else "full") + (f" p={self.dropout:g}" if self.dropout else "")

    @property
    def direction(self) -> str:
        return "backward" if self.backward else "forward"


def _paper_cases() -> list[Case]:
    """The benchmark of the FlashAttention papers: 16384 tokens, hidden size 2048."""
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    return [
        Case(16384 // S, 2048 // D, 2048 // D, S, D, causal, "bf16")
        for D, causal, S in itertools.product((64, 128, 256), (False, True), lengths)
    ]


def draw_lengths(tokens: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Of sequences with so many tokens in all; the last one is what is left."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, generator.randint(shortest, longest)))
    return tuple(lengths)


def _varlen_cases() -> list[Case]:
    """16384 tokens, hidden size 2048, as in _paper_cases()."""
    lengths = draw_lengths(16384, 128, 4096, seed=0)
    return [
        Case(len(lengths), 2048 // D, 2048 // D, max(lengths), D, causal, "bf16", lengths=lengths)
        for D, causal in itertools.product((64, 128), (False, True))
    ]


SETS: dict[str, list[Case]] = {
    "fa_paper": _paper_cases(),
    "align": [Case(16, 16, 16, 2048, D, False, "fp16") for D in (128, 129, 136)],
    "dropout": [Case(4, 16, 16, 4096, 128, True, "bf16", 0.1), Case(4, 32, 32, 4096, 64, True, "bf16", 0.1)],
    "gqa": [Case(2, 32, 8, 8192, 128, True, "bf16")],
    "fp32": [Case(4, 16, 16, 2048, D, causal, "fp32") for D, causal in itertools.product((64, 128), (False, True))],
    "short": [Case(12, 64, 64, 256, 64, False, "fp16"), Case(4, 8, 8, 512, 64, False, "fp16")],
    "varlen": _varlen_cases(),
}


# What is asked for


def cases(sets: Sequence[str] | None, passes: str) -> list[Case]:
    """The rows of the named sets (all without names), in the order of SETS."""
    for name in sets or ():
        if name not in SETS:
            raise CommandError(f"--set got {name!r}; accepted are {', '.join(SETS)}")
    return [
        replace(case, set=name, backward=backward)
        for name, rows in SETS.items()
        if not sets or name in sets
        for case in rows
        for backward in PASSES[passes]
    ]


def contestants(peers: str | None) -> list[str]:
    """Ours and the peers: those of a list with commas, or all that can be imported."""
    if peers is None:
        return [OURS, *(name for name in PEERS if name != FLASH_ATTN or _flash_attn_func() is not None)]
    asked = [name.strip() for name in peers.split(",") if name.strip()]
    for name in asked:
        if name not in PEERS:
            raise CommandError(f"--peers got {name!r}; accepted are {', '.join(PEERS)}")
    if FLASH_ATTN in asked and _flash_attn_func() is None:
        raise CommandError(f"--peers got {FLASH_ATTN!r}, but the package flash_attn cannot be imported here")
    return [OURS, *(name for name in PEERS if name in asked)]


def check_cuda(backend: str | None) -> str:
    """The name of our backend that will run, or an error that says what is missing."""
    if not torch.cuda.is_available():
        raise CommandError(f"bench cuda needs a CUDA device, and this torch ({torch.__version__}) sees none")
    backends = flashattn_ext.build_info()["backends"]
    usable = [name for name in backends if name.startswith("cuda")]
    if not usable:
        raise CommandError(
            f"this build has only the backends {', '.join(backends)}; "
            f"rebuild where the CUDA toolkit is installed: {REBUILD}"
        )
    if backend is not None and backend not in usable:
        raise CommandError(f"--backend got {backend!r}; accepted are {', '.join(usable)}")
    of_environment = f"cuda-{os.environ.get('FLASHATTN_EXT_CUDA_PATH')}"
    return backend or (of_environment if of_environment in usable else usable[0])


def running_backend(asked: str | None) -> str:
    """The CUDA backend that runs on this GPU: the one asked for, or the preferred one."""
    preferred = check_cuda(asked)
    names = flashattn_ext.build_info()["backends"]
    others = [] if asked else [name for name in names if name.startswith("cuda") and name != preferred]
    reason = ""
    for name in [preferred, *others]:
        with flashattn_ext.use_backend(name):
            try:
                flashattn_ext.forward(*inputs(Case(1, 1, 1, 64, 64, False, "bf16"))[:3])
                return name
            except NotImplementedError as error:
                reason = str(error)
    raise CommandError(reason)


@functools.cache
def _flash_attn_func() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_func
    except Exception:  # one built for another torch fails in many ways, and none of them is ours to report
        return None
    return flash_attn_func


# Measuring


def measure(
    *,
    quick: bool,
    sets: Sequence[str] | None = None,
    passes: str = "both",
    peers: str | None = None,
    backend: str | None = None,
) -> dict[str, Any]:
    """Times every row. The result holds plain numbers only, ready for JSON."""
    rows, names = cases(sets, passes), contestants(peers)
    backend_in_use = running_backend(backend)
    track = require("rich.progress").track
    results = []
    with flashattn_ext.use_backend(backend), _exact_fp32_products():
        for case in track(rows, "measuring", console=make_console(), transient=True):
            results.append(measure_case(case, names, quick=quick))
    return {**machine(), "backend": backend_in_use, "contestants": names, "quick": quick, "rows": results}


def machine() -> dict[str, Any]:
    return {
        "machine": torch.cuda.get_device_name(),
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flash_attn": getattr(sys.modules.get("flash_attn"), "__version__", None),
    }


@contextlib.contextmanager
def _exact_fp32_products() -> Iterator[None]:
    """fp32 products in fp32: with TF32 the math backend would do other work than ours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_case(case: Case, names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """One row. What cannot run has its reason in `failures`, and no numbers."""
    tensors = inputs(case)
    failures = {name: reason for name in names if (reason := skip_reason(case, name))}
    calls: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    asked = {name: (case, name, tensors) for name in names}
    if case.lengths:
        asked[DENSE] = (case.dense(), OURS, inputs(case.dense()))
    for name, (timed, contestant, given) in asked.items():
        if name not in failures:
            with _reported(name, failures), _kernel_of(name):
                call = timed_call(timed, attention(contestant), *given)
                call()  # warms up, and lets libraries take the workspaces that they keep
                memory[name] = peak_extra_bytes(call)
                calls[name] = call
            call = None  # a graph of a contestant that failed would keep its memory
    timings = time_events(calls, QUICK_ROUNDS if quick else ROUNDS, failures)
    calls.clear()  # their graphs: the reference needs the memory
    max_error = {} if quick else _max_errors(case, names, tensors, failures)
    return row(case, names, timings, memory, max_error, failures)


def skip_reason(case: Case, name: str) -> str:
    """Why it is not even tried; empty when it is."""
    scores = case.pairs * case.Hq * 2
    if name == MATH and case.lengths:
        return "skipped: it takes no packed sequences"
    if name == MATH and scores > MATH_LIMIT_BYTES:
        return f"skipped: a matrix of scores takes {scores / 2**30:.0f} GiB"
    return ""


def time_events(calls: Calls, rounds: int, failures: dict[str, str]) -> dict[str, Timing]:
    """Times one burst of every call per round, in turns as time_interleaved does.

    What raises drops out and leaves its reason in `failures`.
    """
    launches: dict[str, int] = {}
    for name, call in calls.items():
        with _reported(name, failures), _kernel_of(name):
            launches[name] = launches_for(burst_ms(call, 2) / 2)
    names = list(launches)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds if names else 0):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name not in failures:
                with _reported(name, failures), _kernel_of(name):
                    seconds[name].append(burst_ms(calls[name], launches[name]) / launches[name] * 1e-3)
    return {
        name: Timing(statistics.median(times), min(times), max(times), rounds)
        for name, times in seconds.items()
        if name not in failures
    }


def launches_for(ms: float) -> int:
    """How many launches of `ms` each make a burst."""
    return min(MAX_LAUNCHES, max(1, math.ceil(BURST_MS / max(ms, 1e-6))))


def burst_ms(call: Callable[[], object], launches: int) -> float:
    """Milliseconds that the GPU takes for this many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)  # else short kernels would wait for Python, and that would be timed
    begin.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """The most memory that a call holds beyond what it found, its results included."""
    gc.collect()  # freed in the call, what a cycle of objects holds would count as saved by it
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# Contestants


def inputs(case: Case, device: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, all [B, S, H, D], or [tokens, H, D] of packed sequences."""
    torch.manual_seed(0)
    rows = (sum(case.lengths),) if case.lengths else (case.B, case.S)
    q, k, v, dout = (
        torch.randn(*rows, heads, case.D, device=device or DEVICE, dtype=DTYPES[case.dtype])
        for heads in (case.Hq, case.Hk, case.Hk, case.Hq)
    )
    for t in (q, k, v):
        t.requires_grad_(case.backward)
    return q, k, v, dout


@functools.cache
def _starts(lengths: tuple[int, ...], device: str) -> Tensor:
    """int32 [B + 1]: where each packed sequence starts, and the end of the last."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def attention(name: str, rng_seed: int | None = None) -> Callable[[Case, Tensor, Tensor, Tensor], Tensor]:
    """A contestant as a function of a case, q, k and v; `rng_seed` is for ours alone."""
    if name == OURS:
        return functools.partial(_ours, rng_seed)
    return _flash_attn if name == FLASH_ATTN else functools.partial(_torch, name)


def _ours(rng_seed: int | None, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options = {"causal": case.causal, "dropout_p": case.dropout, "rng_seed": rng_seed}
    if not case.lengths:
        return flashattn_ext.forward(q, k, v, **options)
    starts = _starts(case.lengths, DEVICE)
    return flashattn_ext.varlen_forward(q, k, v, starts, starts, case.S, case.S, **options)


def _torch(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention on views of the same memory; _kernel_of() chooses how."""
    if case.lengths:
        return _torch_packed(name, case, q, k, v)
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        dropout_p=case.dropout,
        is_causal=case.causal,
        enable_gqa=case.Hq != case.Hk,
    )
    return out.transpose(1, 2)


def _torch_packed(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The ops below PyTorch's nested tensors, whose Python takes longer than the kernels."""
    starts = _starts(case.lengths, DEVICE)
    sequences = (starts, starts, case.S, case.S)
    aten = torch.ops.aten
    if name == FA2:
        return aten._flash_attention_forward(q, k, v, *sequences, case.dropout, case.causal, False)[0]
    if name == CUDNN:
        return aten._cudnn_attention_forward(q, k, v, None, *sequences, True, case.dropout, case.causal)[0]
    batch = (t[None] for t in (q, k, v))
    return aten._efficient_attention_forward(*batch, None, *sequences, case.dropout, int(case.causal), True)[0][0]


def _flash_attn(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if case.lengths:
        from flash_attn import flash_attn_varlen_func

        starts = _starts(case.lengths, DEVICE)
        return flash_attn_varlen_func(
            q, k, v, starts, starts, case.S, case.S, dropout_p=case.dropout, causal=case.causal
        )
    return _flash_attn_func()(q, k, v, dropout_p=case.dropout, causal=case.causal)


def _kernel_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Outside of what is timed: entering this takes longer than a short kernel."""
    return sdpa_kernel(TORCH_BACKENDS[name]) if name in TORCH_BACKENDS else contextlib.nullcontext()


def timed_call(
    case: Case, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> Callable[[], Tensor | Sequence[Tensor]]:
    """What is timed: the forward, or the backward alone through a graph that is kept."""
    if not case.backward:
        return lambda: attention(case, q, k, v)
    out = attention(case, q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


# Accuracy


def compared_heads(case: Case) -> tuple[int, int]:
    """How many of the first query and key heads are compared with fp64: at most two key heads.

    Key heads come with all of their query heads, as their gradients are sums over those.
    """
    group = case.Hq // case.Hk
    fitting = REFERENCE_LIMIT_BYTES // (case.S * case.S * 8 * group)
    key_heads = max(1, min(2, case.Hk, fitting))
    return key_heads * group, key_heads


def _max_errors(
    case: Case, names: Sequence[str], tensors: tuple[Tensor, ...], failures: dict[str, str]
) -> dict[str, float]:
    """The largest error of out, or of the gradients, in the first heads of the first batch entry."""
    max_error: dict[str, float] = {}
    with _reported("reference", failures):
        expected = _reference(case, *tensors)
    if "reference" in failures:
        return max_error
    for name in names:
        # A peer's dropout mask is its own: there is nothing to compare it with.
        if name not in failures and (name == OURS or not case.dropout):
            with _reported(name, failures), _kernel_of(name):
                got = timed_call(case, attention(name, RNG_SEED if case.dropout else None), *tensors)()
                max_error[name] = largest_error(_compared(case, got), expected)
            got = None
    return max_error


def _compared(case: Case, results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The compared heads, in fp64, of out or of (dq, dk, dv), of the first sequence."""
    query_heads, key_heads = compared_heads(case)
    tensors = results if case.backward else (results,)
    heads = (query_heads, key_heads, key_heads)
    return [_first(case, t, count).double() for t, count in zip(tensors, heads, strict=False)]


def _first(case: Case, t: Tensor, heads: int) -> Tensor:
    """The first heads of the first sequence, [1, S, heads, D]."""
    return (t[None, : case.lengths[0]] if case.lengths else t[:1])[:, :, :heads]


def _reference(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    query_heads, key_heads = compared_heads(case)
    slices = [
        _first(case, t.detach(), heads).double().requires_grad_(case.backward)
        for t, heads in ((q, query_heads), (k, key_heads), (v, key_heads))
    ]
    rng_seed = RNG_SEED if case.dropout else None
    out = flashattn_ext.attention_reference(*slices, causal=case.causal, dropout_p=case.dropout, rng_seed=rng_seed)
    if not case.backward:
        return [out]
    return list(torch.autograd.grad(out, slices, _first(case, dout, query_heads).double()))


def largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """NaN where one of them has one."""
    return torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max().item()


# Results


def row(
    case: Case,
    names: Sequence[str],
    timings: Mapping[str, Timing],
    memory: Mapping[str, int],
    max_error: Mapping[str, float],
    failures: Mapping[str, str],
) -> dict[str, Any]:
    """A row as plain numbers; None for what was not measured. Ratios above 1: ours is faster."""
    ms = {name: timings[name].median_s * 1e3 if name in timings else None for name in names}
    best = min((ms[name] for name in names if name != OURS and ms[name] is not None), default=None)
    return {
        **asdict(case),
        "lengths": list(case.lengths),
        "flop": case.flop,
        "ms": ms,
        "tflops": {name: None if time is None else case.flop / time * 1e-9 for name, time in ms.items()},
        "ratio_best": _ratio(best, ms[OURS]),
        "ratio_fa2": _ratio(ms.get(FA2), ms[OURS]),
        **_beside_dense(case, timings),
        "spread": {name: timings[name].spread if name in timings else None for name in names},
        "peak_extra_bytes": {name: memory.get(name) if name in timings else None for name in names},
        "max_error": {name: max_error.get(name) for name in names},
        "failures": dict(failures),
    }


def _beside_dense(case: Case, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """Of packed sequences: ours on a dense batch of as much work, and the ratio of the rates."""
    if DENSE not in timings:
        return {"dense": None, "ratio_dense": None}
    dense, ms = case.dense(), timings[DENSE].median_s * 1e3
    rate = dense.flop / ms * 1e-9
    ratio = case.flop / (timings[OURS].median_s * 1e12) / rate if OURS in timings else None
    return {"dense": {"shape": dense.shape, "ms": ms, "tflops": rate}, "ratio_dense": ratio}


def _ratio(peer_ms: float | None, our_ms: float | None) -> float | None:
    return None if peer_ms is None or our_ms is None else peer_ms / our_ms


CASE_HEADER = ("set", "BxHxSxD", "dtype", "mask", "pass")
WIDTH = 220  # these tables are wider than the others


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the speed, then memory and accuracy, then why ours could not run somewhere."""
    rows, names = results["rows"], results["contestants"]
    tables = [
        (
            speed_title(results),
            (*CASE_HEADER, *names, "to best", "to fa2", "to dense", "spread"),
            speed_cells(rows, names),
        ),
        (
            "MiB that a call allocates / largest error against fp64, of out or of the gradients",
            (*CASE_HEADER, *names),
            memory_cells(rows, names),
        ),
    ]
    for title, header, lines in tables:
        if markdown:
            print(markdown_table(title, header, lines))
        else:
            slower = [row["ratio_best"] is not None and row["ratio_best"] < 1 for row in rows]
            print_table(title, header, lines, left=range(len(CASE_HEADER)), marked=slower, width=WIDTH)
    for note in notes(rows):
        print(note)


def speed_title(results: dict[str, Any]) -> str:
    return (
        f"Milliseconds / TFLOP/s on {results['machine']}, {results['backend']}, torch {results['torch']}, "
        f"CUDA {results['cuda']}, cuDNN {results['cudnn']}; to dense: our rate beside that of a dense batch of as much work; "
        "spread is that of ours"
    )


def speed_cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    return [
        [
            *_case_cells(row),
            *(_pair(row["ms"][name], ".3f", row["tflops"][name], ".1f") for name in names),
            _cell(row["ratio_best"], ".2f", "x"),
            _cell(row["ratio_fa2"], ".2f", "x"),
            _cell(row["ratio_dense"], ".2f", "x"),
            _cell(row["spread"][OURS], ".0%"),
        ]
        for row in rows
    ]


def memory_cells(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    def mib(size: int | None) -> float | None:
        return None if size is None else size / 2**20

    return [
        [
            *_case_cells(row),
            *(_pair(mib(row["peak_extra_bytes"][name]), ".1f", row["max_error"][name], ".1e") for name in names),
        ]
        for row in rows
    ]


def _case_of(row: dict[str, Any]) -> Case:
    return Case(**{**{name: row[name] for name in Case.__dataclass_fields__}, "lengths": tuple(row["lengths"])})


def _case_cells(row: dict[str, Any]) -> list[str]:
    case = _case_of(row)
    return [case.set, case.shape, case.dtype, case.mask, case.direction]


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _pair(first: float | None, first_form: str, second: float | None, second_form: str) -> str:
    if first is None and second is None:
        return "-"
    return f"{_cell(first, first_form)} / {_cell(second, second_form)}"


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where ours or the reference failed, and why. A peer's reasons are in the JSON."""
    return [
        " ".join(_case_cells(row)) + f": {name}: {row['failures'][name]}"
        for row in rows
        for name in (OURS, DENSE, "reference")
        if name in row["failures"]
    ]
