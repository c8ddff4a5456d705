"""`bench distributed`: attention over a sequence that is sharded over several ranks, compared with a single device and torch's context parallelism.

    torchrun --nproc-per-node 2 -m flashattn_ext bench distributed --trace trace.json

All times are of the slowest rank. The efficiency is the rate of one rank (FLOP/s of the whole call, divided by the ranks) relative to the
rate of one device with the whole sequence. Exposed communication is the time in which a GPU only sends, from a profile of one forward and backward.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import flashattn_ext
from flashattn_ext import distributed
from flashattn_ext.distributed.head_exchange import HeadShares
from flashattn_ext.distributed.plan import Rules, plan_of
from flashattn_ext.distributed.sharding import Sharding

from . import ranks
from .console import CommandError, chosen, print_rows, text_of
from .patterns import drawn_lengths
from .timing import reported

MODES = ("ulysses", "allgather", "ring")
ONE = "one device"
TORCH = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS, QUICK_ROUNDS = 7, 2


@dataclass(frozen=True)
class Case:
    """One batch entry of `tokens` tokens in total, or packed documents of about `document` tokens."""

    tokens: int
    heads_q: int
    heads_k: int
    head_dim: int
    document: int | None = None
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        what = "causal" if self.document is None else f"causal, documents of about {self.document}"
        return f"{self.tokens} tokens, {self.heads_q}:{self.heads_k} heads of {self.head_dim}, {what}, {self.dtype}"

    def lengths(self) -> tuple[int, ...]:
        """Lengths of the documents: 0.5 to 1.5 times the mean, the same in every process."""
        if self.document is None:
            return (self.tokens,)
        generator = random.Random(0)
        return drawn_lengths(self.tokens, lambda: self.document * generator.uniform(0.5, 1.5))

    def flops(self) -> int:
        """FLOP of the forward; the backward has 2.5 times as many."""
        return sum(4 * self.heads_q * self.head_dim * (n * (n + 1) // 2) for n in self.lengths())


FULL = [Case(65536, 32, 8, 128), Case(65536, 32, 8, 128, document=8192)]
QUICK = [Case(512, 4, 2, 32, dtype="float32"), Case(512, 4, 2, 32, document=100, dtype="float32")]

Step = Callable[[], Tensor]  # runs a forward and returns out, with a graph


def measure(
    *, quick: bool, tokens: int | None = None, trace: str | None = None, peers: str | None = None
) -> dict[str, Any]:
    """Runs on every rank. Rank 0 returns the result; the others return an empty one."""
    if not ranks.started_by_torchrun():
        raise CommandError(
            "bench distributed runs on several ranks; start them with torchrun --nproc-per-node 2 -m flashattn_ext bench distributed"
        )
    names = chosen("--peers", peers.split(","), TORCH) if peers is not None else list(TORCH)
    if trace:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", ranks.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    ranks.start(device)
    try:
        cases = QUICK if quick or device.type == "cpu" else FULL
        cases = [replace(case, tokens=tokens) for case in FULL] if tokens else cases
        rows = [_measure_case(case, device, QUICK_ROUNDS if quick else ROUNDS, trace, names) for case in cases]
        if dist.get_rank() > 0:
            return {}
        machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        about = {"machine": machine, "ranks": dist.get_world_size(), "torch": torch.__version__, "quick": quick}
        return {**about, "rows": rows}
    finally:
        ranks.end()


def _measure_case(case: Case, device: torch.device, rounds: int, trace: str | None, names: list[str]) -> dict[str, Any]:
    contestants: dict[str, Prepare] = {ONE: _one_device, **{mode: _ours(mode) for mode in MODES}}
    if device.type == "cuda" and case.document is None:
        contestants |= {name: _torchs(TORCH[name]) for name in names}
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name, prepare in contestants.items():
        with reported(name, failures), prepare(case, device) as (forward, leaves):
            results[name] = _times(forward, leaves, device, rounds)
            if device.type == "cuda" and name != ONE:
                file = f"{trace}.{name}.json" if trace and case.document is None else None
                results[name]["exposed_s"] = _exposed(forward, leaves, file)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, result in results.items():
        if name in MODES:
            result["sent_bytes"] = _largest(float(sent_bytes(case, name, rank, world)), device)
        for passes, factor in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
            seconds = result["forward_s"] + result["backward_s"] if passes == "both" else result[f"{passes}_s"]
            result[f"{passes}_tflops"] = factor * case.flops() / seconds / (1 if name == ONE else world) * 1e-12
        if ONE in results:
            result["share"] = result["both_tflops"] / results[ONE]["both_tflops"]
    return {**asdict(case), "name": case.name, "results": results, "failures": failures}


# --- contestants --------------------------------------------------------------------------------------------------------


# Each prepares a call: a function of a case and a device that returns a context of a Step and the tensors of its gradients.
Prepare = Callable[[Case, torch.device], contextlib.AbstractContextManager[tuple[Step, list[Tensor]]]]


def _whole(case: Case, device: torch.device) -> list[Tensor]:
    """q, k and v of all tokens, the same on every rank; packed ones without a batch."""
    generator = torch.Generator(device).manual_seed(0)
    rows = [case.tokens] if case.document else [1, case.tokens]
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype), "generator": generator}
    heads = (case.heads_q, case.heads_k, case.heads_k)
    return [torch.randn(*rows, count, case.head_dim, **options) for count in heads]


def _starts(case: Case) -> Tensor | None:
    return torch.tensor([0, *case.lengths()]).cumsum(0).int() if case.document else None


@contextlib.contextmanager
def _one_device(case: Case, device: torch.device) -> Iterator[tuple[Step, list[Tensor]]]:
    q, k, v = leaves = [t.requires_grad_() for t in _whole(case, device)]
    if case.document is None:
        yield lambda: flashattn_ext.forward(q, k, v, causal=True), leaves
        return
    starts, longest = _starts(case).to(device), max(case.lengths())
    yield lambda: flashattn_ext.varlen_forward(q, k, v, starts, starts, longest, longest, causal=True), leaves


def _ours(mode: str) -> Prepare:
    @contextlib.contextmanager
    def prepared(case: Case, device: torch.device) -> Iterator[tuple[Step, list[Tensor]]]:
        dim = 0 if case.document else 1
        parts = [distributed.shard(t, dim=dim).requires_grad_() for t in _whole(case, device)]
        options: dict[str, Any] = {"mode": mode, "cu_seqlens": _starts(case), "seqlen": case.tokens, "causal": True}
        yield lambda: distributed.attention(*parts, **options), parts

    return prepared


def _torchs(backend: SDPBackend) -> Prepare:
    @contextlib.contextmanager
    def prepared(case: Case, device: torch.device) -> Iterator[tuple[Step, list[Tensor]]]:
        from torch.distributed.tensor.experimental import context_parallel

        q, k, v = (t.transpose(1, 2).contiguous() for t in _whole(case, device))
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), sdpa_kernel(backend):
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            yield lambda: F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves

    return prepared


# --- times --------------------------------------------------------------------------------------------------------------


def _times(forward: Step, leaves: list[Tensor], device: torch.device, rounds: int) -> dict[str, Any]:
    """Median seconds of the forward and of the backward, each of the slowest rank."""
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": []}
    gradient = torch.randn_like(forward())
    for _ in range(rounds + 1):
        dist.barrier()
        marks = [_mark(device)]
        out = forward()
        marks.append(_mark(device))
        torch.autograd.grad(out, leaves, gradient)
        marks.append(_mark(device))
        for name, begin, end in zip(times, marks, marks[1:], strict=False):
            times[name].append(_seconds_between(begin, end))
        del out
    return {name: _largest(statistics.median(seconds[1:]), device) for name, seconds in times.items()}


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _largest(value: float, device: torch.device) -> float:
    t = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.item()


def _exposed(forward: Step, leaves: list[Tensor], trace: str | None) -> float:
    """Seconds in which this GPU sends and computes nothing; the timeline of rank 0 goes to the file `trace`."""
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        out = forward()
        torch.autograd.grad(out, leaves, torch.ones_like(out))
        torch.cuda.synchronize()
    if trace and dist.get_rank() == 0:
        profiled.export_chrome_trace(trace)
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            if event.name.startswith(("nccl:", "flashattn_ext", "aten::")):
                continue  # ranges around kernels
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    busy = _length(spans[True] + spans[False])
    return _largest((busy - _length(spans[False])) * 1e-6, leaves[0].device)


def _length(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# --- bytes --------------------------------------------------------------------------------------------------------------


def sent_bytes(case: Case, mode: str, rank: int, ranks: int) -> int:
    """Bytes that a rank sends in a forward and a backward."""
    sharding = Sharding(case.tokens, ranks)
    size = case.head_dim * getattr(torch, case.dtype).itemsize
    if mode == "ulysses":
        heads = HeadShares(case.heads_q, case.heads_k, ranks)
        others = [other for other in range(ranks) if other != rank]
        rows = sharding.length(rank)
        to_heads = sum(rows * (len(heads.queries(other)) + 2 * len(heads.keys(other))) for other in others)
        to_rows = sum(sharding.length(other) * heads.each for other in others)  # out
        gradients = sum(sharding.length(other) * (heads.each + 2 * len(heads.keys(rank))) for other in others)
        dout = sum(rows * len(heads.queries(other)) for other in others)
        return (to_heads + to_rows + gradients + dout) * size
    lengths = case.lengths()
    starts = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    rules = Rules(-1, 0, True, False, False, False)
    plan = plan_of(sharding, rank, starts, rules, case.document is not None, mode == "ring")
    sent = sum(segment.rows for step in plan.steps for _, segment in step.sent)
    received = sum(segment.rows for step in plan.steps for segment in step.received)
    return (2 * sent + received) * 2 * case.heads_k * size  # keys and values twice, and their gradients back


# --- tables -------------------------------------------------------------------------------------------------------------


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "": lambda r: r["name"],
    "forward ms": lambda r: f"{1e3 * r['forward_s']:.2f}",
    "backward ms": lambda r: f"{1e3 * r['backward_s']:.2f}",
    "TFLOP/s per device": lambda r: f"{r['both_tflops']:.1f}",
    "efficiency": lambda r: text_of(r.get("share"), ".3f"),
    "MiB sent": lambda r: f"{r['sent_bytes'] / 2**20:.0f}" if "sent_bytes" in r else "",
    "exposed ms": lambda r: f"{1e3 * r['exposed_s']:.2f}" if "exposed_s" in r else "",
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    for row in results["rows"]:
        title = f"{results['ranks']} x {results['machine']}, {row['name']}"
        print_rows(title, COLUMNS, [{"name": name, **r} for name, r in row["results"].items()], markdown=markdown)
        for name, reason in row["failures"].items():
            print(f"{name}: {reason}")
