"""`bench cuda`: forward and backward of this package compared with PyTorch's backends and flash-attn.

Times are GPU times, between two events around several launches. bench_cases.py defines the measured cases,
bench_contestants.py the compared attentions, and bench_cuda_tables.py prints the results.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext._build import REBUILD

from .bench_cases import OURS, Case, cases
from .bench_contestants import (
    FLASH_MODULES,
    PEERS,
    Extras,
    extras,
    flash_module,
    inputs,
    kernel_of,
    keywords,
    preparations,
    skip_reason,
    timed_call,
)
from .bench_cuda_tables import in_one_line, row
from .bench_cuda_tables import show as show
from .console import CommandError, chosen, make_console, track
from .flex import keeps_graphs
from .timing import Calls, Timing, peak_extra_bytes, reported, time_bursts

ROUNDS, QUICK_ROUNDS = 15, 3
REFERENCE_LIMIT_BYTES = 2 << 30  # size of the fp64 scores of the compared heads
RNG_SEED = 1234
SUSTAINED_MS, SUSTAINED_ROUNDS = 200.0, 3  # of each call without a pause, and how often


# Selection


def contestants(peers: str | None) -> list[str]:
    """Ours and the peers: the names in a comma-separated list, or all that can be imported."""
    if peers is None:
        return [OURS, *(name for name in PEERS if name not in FLASH_MODULES or flash_module(name))]
    names = chosen("--peers", peers.split(","), PEERS)
    for name, module in FLASH_MODULES.items():
        if name in names and not flash_module(name):
            raise CommandError(f"--peers got {name!r}, but flash_attn_func of {module} cannot be imported here")
    return [OURS, *names]


def check_cuda(backend: str | None) -> str:
    """The name of our backend that will run; raises if something is missing."""
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
    from_environment = f"cuda-{os.environ.get('FLASHATTN_EXT_CUDA_PATH')}"
    return backend or (from_environment if from_environment in usable else usable[0])


def running_backend(requested: str | None) -> str:
    """The CUDA backend that runs on this GPU: the requested one, or the preferred one."""
    preferred = check_cuda(requested)
    names = flashattn_ext.build_info()["backends"]
    others = [] if requested else [name for name in names if name.startswith("cuda") and name != preferred]
    reason = ""
    for name in [preferred, *others]:
        with flashattn_ext.use_backend(name):
            try:
                flashattn_ext.forward(*inputs(Case(1, 1, 1, 64, 64, False, "bf16"))[:3])
                return name
            except NotImplementedError as error:
                reason = str(error)
    raise CommandError(reason)


# Measuring


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
    with flashattn_ext.use_backend(backend), _exact_fp32_products(), keeps_graphs():
        for case in track(rows):
            results.append(measure_case(case, names, quick=quick, sustained=sustained))
            if not make_console().is_terminal:
                print(f"{len(results)} of {len(rows)}: {in_one_line(results[-1])}", file=sys.stderr, flush=True)
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
    """Disables TF32 for fp32 products: otherwise the math backend would compute at lower precision than ours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_case(case: Case, names: Sequence[str], *, quick: bool, sustained: bool = False) -> dict[str, Any]:
    """One row. A contestant that cannot run has its reason in `failures`, and no numbers."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    tensors = inputs(case)
    failures = {name: reason for name in names if (reason := skip_reason(case, name))}
    calls: dict[str, Callable[[], object]] = {}
    memory: dict[str, int] = {}
    timed_calls = {name: (case, name, tensors) for name in names}
    timed_calls |= {name: (other, OURS, inputs(other)) for name, other in case.beside().items()}
    for name, (timed, contestant, given) in timed_calls.items():
        if name not in failures:
            with reported(name, failures), kernel_of(name):
                call = timed_call(timed, contestant, *given)
                call()  # warm-up; libraries allocate their persistent workspaces
                memory[name] = peak_extra_bytes(call)
                calls[name] = call
            call = None  # a graph of a contestant that failed would keep its memory
    timings = time_bursts(calls, rounds, failures, around=kernel_of)
    steady = None
    if sustained:
        contenders = {name: call for name, call in calls.items() if name in names and name in timings}
        steady = time_sustained(contenders, failures)
    calls.clear()  # their graphs: the reference needs the memory
    once = preparations(case, [name for name in names if name in timings], tensors[0].device)
    for name, call in once.items():
        with reported(name, failures):
            call()  # compiles
    once = {name: call for name, call in once.items() if name not in failures}
    timings |= time_bursts(once, rounds, failures)
    max_error = {} if quick else _max_errors(case, names, tensors, failures)
    return row(case, names, timings, memory, max_error, failures, steady)


def time_sustained(calls: Calls, failures: dict[str, str]) -> dict[str, Timing]:
    """Times calls without pauses, as in a training run.

    At the power limit clocks fall, most for the kernels that spend the most energy per product.
    """
    return time_bursts(calls, SUSTAINED_ROUNDS, failures, target_ms=SUSTAINED_MS, most=10**6, around=kernel_of)


# Accuracy


def _max_errors(
    case: Case, names: Sequence[str], tensors: tuple[Tensor, ...], failures: dict[str, str]
) -> dict[str, float]:
    """The largest error of out, or of the gradients, in the first heads of the first batch entry, against attention in fp64."""
    max_error: dict[str, float] = {}
    with reported("reference", failures):
        expected = reference_results(case, *tensors, extras(case, tensors[0].device))
    for name in names if "reference" not in failures else ():
        # A peer draws its own dropout mask, which the reference does not have.
        if name not in failures and (name == OURS or not case.dropout):
            with reported(name, failures), kernel_of(name):
                got = timed_call(case, name, *tensors, RNG_SEED if case.dropout else None)()
                max_error[name] = largest_error(_compared_results(case, got), expected)
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


def _compared_results(case: Case, results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The compared heads, in fp64, of out or of (dq, dk, dv), of the first sequence."""
    query_heads, kv_heads = compared_heads(case)
    tensors = results if case.backward else (results,)
    heads = (query_heads, kv_heads, kv_heads)
    return [_first(case, t, count).double() for t, count in zip(tensors, heads, strict=False)]


def _first(case: Case, t: Tensor, heads: int) -> Tensor:
    """The first heads of the first sequence, [1, S, heads, D]."""
    return (t[None, : case.lengths[0]] if case.lengths else t[:1])[:, :, :heads]


def reference_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, extras: Extras) -> list[Tensor]:
    query_heads, kv_heads = compared_heads(case)
    if (scores := case.S * case.S * 8 * query_heads) > REFERENCE_LIMIT_BYTES and not case.lengths:
        raise ValueError(f"skipped: in fp64 the scores of {query_heads} heads take {scores / 2**30:.0f} GiB")
    slices = [
        _first(case, t.detach(), heads).double().requires_grad_(case.backward)
        for t, heads in ((q, query_heads), (k, kv_heads), (v, kv_heads))
    ]
    head_dimension = {"alibi_slopes": 0, "relative_bias": 0, "bias": 1}
    of_heads = {
        name: value.detach().narrow(head_dimension[name], 0, query_heads).double() if name in head_dimension else value
        for name, value in extras.keywords.items()
    }
    out = flashattn_ext.attention_reference(*slices, **keywords(case, RNG_SEED if case.dropout else None), **of_heads)
    if not case.backward:
        return [out]
    return list(torch.autograd.grad(out, slices, _first(case, dout, query_heads).double()))


def largest_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of all tensors; NaN if any of them has a NaN."""
    return torch.stack([(a - b).abs().max() for a, b in zip(got, expected, strict=True)]).max().item()
