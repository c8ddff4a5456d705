"""`bench distributed`: attention over a sequence that is sharded over several ranks, compared with a single device and torch's context parallelism.

    torchrun --nproc-per-node 2 -m flashattn_ext bench distributed --trace trace.json

All times are of the slowest rank. The efficiency is the rate of one rank (FLOP/s of the whole call, divided by the ranks) relative to the
rate of one device with the whole sequence. Exposed communication is the time in which a GPU only sends, from a profile of one forward and backward.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from flashattn_ext import distributed
from flashattn_ext.distributed.head_exchange import HeadShares
from flashattn_ext.distributed.plan import Rules, Side, plan_of
from flashattn_ext.distributed.sharding import Sharding

from . import ranks
from .bench_cases import DTYPES, OURS, Case
from .bench_contestants import attention, inputs
from .console import Columns, CommandError, chosen, fields, print_rows, text_of
from .devices import describe_machine
from .options import drawn_lengths
from .timing import burst_ms, covered, reported, wall_clock

MODES = ("ulysses", "allgather", "ring")
ONE = "one device"
TORCH = {"torch-flash": SDPBackend.FLASH_ATTENTION, "torch-cudnn": SDPBackend.CUDNN_ATTENTION}
ROUNDS, QUICK_ROUNDS = 7, 2


def cases_of(tokens: int, heads: tuple[int, int], D: int, document: int, dtype: str) -> list[Case]:
    """One sequence of this many tokens, and packed documents of 0.5 to 1.5 times `document` tokens, the same in every process."""
    generator = random.Random(0)
    lengths = drawn_lengths(tokens, lambda: document * generator.uniform(0.5, 1.5))
    whole = Case(1, *heads, tokens, D, True, dtype)
    return [whole, replace(whole, B=len(lengths), S=max(lengths), lengths=lengths)]


Step = Callable[[], Tensor]  # runs a forward and returns out, with a graph


def measure(
    *, quick: bool, tokens: int | None = None, trace: str | None = None, peers: str | None = None
) -> dict[str, Any]:
    """Runs on every rank. Rank 0 returns the result; the others return an empty one."""
    if not ranks.started_by_torchrun():
        start = "torchrun --nproc-per-node 2 -m flashattn_ext bench distributed"
        raise CommandError(f"bench distributed runs on several ranks; start them with {start}")
    names = chosen("--peers", peers.split(","), TORCH) if peers is not None else list(TORCH)
    if trace:
        Path(trace).parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", ranks.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    ranks.start(device)
    try:
        small = not tokens and (quick or device.type == "cpu")
        shape = (512, (4, 2), 32, 100, "fp32") if small else (tokens or 65536, (32, 8), 128, 8192, "bf16")
        rows = [
            _measure_case(case, device, QUICK_ROUNDS if quick else ROUNDS, trace, names) for case in cases_of(*shape)
        ]
        if dist.get_rank() > 0:
            return {}
        return {**describe_machine(device), "ranks": dist.get_world_size(), "quick": quick, "rows": rows}
    finally:
        ranks.end()


def _measure_case(case: Case, device: torch.device, rounds: int, trace: str | None, peers: list[str]) -> dict[str, Any]:
    layout, on_gpu = ranks.Layout(dist.get_rank(), dist.get_world_size()), device.type == "cuda"
    results: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name in (ONE, *MODES, *(peers if on_gpu and not case.lengths else ())):
        with reported(name, failures), _prepared(name, case, device) as (forward, leaves):
            times = _times(forward, leaves, rounds)
            result = {passes: layout.largest(seconds, device) for passes, seconds in times.items()}
            if on_gpu and name != ONE:
                file = f"{trace}.{name}.json" if trace and not case.lengths else None
                result["exposed_s"] = layout.largest(_exposed(forward, leaves, file), device)
            if name in MODES:
                sent = sent_bytes(case, name, layout.rank, layout.ranks)
                result["sent_bytes"] = layout.largest(float(sent), device)
            flops = 3.5 * case.flop / (1 if name == ONE else layout.ranks)  # the backward has 2.5 times as many
            result["both_tflops"] = flops / (result["forward_s"] + result["backward_s"]) * 1e-12
            results[name] = result
            if ONE in results:
                result["share"] = result["both_tflops"] / results[ONE]["both_tflops"]
        if on_gpu:
            torch.cuda.empty_cache()
    return {**case.described(), "results": results, "failures": failures}


@contextlib.contextmanager
def _prepared(name: str, case: Case, device: torch.device) -> Iterator[tuple[Step, list[Tensor]]]:
    """A contestant's forward, and the tensors whose gradients are computed: those of this rank, or on one device all."""
    whole = [t.detach() for t in inputs(case, device)[:3]]  # every rank has the same
    if name in TORCH:
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [t.transpose(1, 2).contiguous() for t in whole]
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]), sdpa_kernel(TORCH[name]):
            leaves = [t.detach().clone().requires_grad_() for t in buffers]
            yield lambda: F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True), leaves
    elif name in MODES:
        leaves = [distributed.shard(t, dim=0 if case.lengths else 1).requires_grad_() for t in whole]
        starts = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.lengths else None
        options = {"mode": name, "cu_seqlens": starts, "seqlen": case.tokens, "causal": True}
        yield lambda: distributed.attention(*leaves, **options), leaves
    else:
        leaves = [t.requires_grad_() for t in whole]
        yield lambda: attention(OURS)(case, *leaves), leaves


def _times(forward: Step, leaves: list[Tensor], rounds: int) -> dict[str, float]:
    """Median seconds of the forward and of the backward on this rank."""
    clock = (lambda call: burst_ms(call, 1) * 1e-3) if leaves[0].is_cuda else wall_clock
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": []}
    gradient = torch.randn_like(forward())
    outs: list[Tensor] = []
    for _ in range(rounds + 1):
        dist.barrier()
        times["forward_s"].append(clock(lambda: outs.append(forward())))
        times["backward_s"].append(clock(lambda: torch.autograd.grad(outs.pop(), leaves, gradient)))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


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
    busy = covered(spans[True] + spans[False])
    return (busy - covered(spans[False])) * 1e-6


def sent_bytes(case: Case, mode: str, rank: int, ranks: int) -> int:
    """Bytes that a rank sends in a forward and a backward."""
    sharding = Sharding(case.tokens, ranks)
    size = case.D * DTYPES[case.dtype].itemsize
    if mode == "ulysses":
        heads = HeadShares(case.Hq, case.Hk, ranks)
        others = [other for other in range(ranks) if other != rank]
        rows = sharding.length(rank)
        to_heads = sum(rows * (len(heads.queries(other)) + 2 * len(heads.keys(other))) for other in others)
        to_rows = sum(sharding.length(other) * heads.each for other in others)  # out
        gradients = sum(sharding.length(other) * (heads.each + 2 * len(heads.keys(rank))) for other in others)
        dout = sum(rows * len(heads.queries(other)) for other in others)
        return (to_heads + to_rows + gradients + dout) * size
    starts = tuple(itertools.accumulate(case.lengths or (case.S,), initial=0))
    rules = Rules(-1, 0, True, False, False, False)
    side = Side(sharding, starts)
    plan = plan_of(side, side, rank, rules, bool(case.lengths), mode == "ring")
    sent = sum(segment.rows for step in plan.steps for _, segment in step.sent)
    received = sum(segment.rows for step in plan.steps for segment in step.received)
    return (2 * sent + received) * 2 * case.Hk * size  # keys and values twice, and their gradients back


COLUMNS: Columns = {
    **fields({"": "name"}),
    "forward ms": lambda r: f"{1e3 * r['forward_s']:.2f}",
    "backward ms": lambda r: f"{1e3 * r['backward_s']:.2f}",
    **fields({"TFLOP/s per device": "both_tflops"}, ".1f"),
    "efficiency": lambda r: text_of(r.get("share"), ".3f"),
    "MiB sent": lambda r: f"{r['sent_bytes'] / 2**20:.0f}" if "sent_bytes" in r else "",
    "exposed ms": lambda r: f"{1e3 * r['exposed_s']:.2f}" if "exposed_s" in r else "",
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    for row in results["rows"]:
        title = f"{results['ranks']} x {results['machine']}, {row['shape']} {row['dtype']} {row['option']}"
        print_rows(title, COLUMNS, [{"name": name, **r} for name, r in row["results"].items()], markdown=markdown)
        for name, reason in row["failures"].items():
            print(f"{name}: {reason}")
