"""`bench decode`: bytes of keys and values per second of a decoding step, compared with PyTorch's scaled_dot_product_attention,
FlashAttention-3 where it can be imported, and the rate at which this machine copies (GPU) or reads (CPU) memory.

A second table has few queries without a KV cache: `forward` and `flash_attn_with_kvcache` on the same tensors, and their gradients. Calls
cycle through several KV caches, so that none is still in a hardware cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_ext

from .bench_cases import DTYPES, FA3, OURS
from .bench_contestants import flash_module
from .console import Columns, fields, parts, print_rows
from .devices import choose_device, describe_machine
from .timing import time_on

SDPA = "torch sdpa"
INVARIANT = "ours, invariant"
ROTATION_BYTES = 512 << 20  # total size of the KV caches in rotation, larger than any hardware cache


@dataclass(frozen=True)
class Case:
    """One row: B sequences of S keys each, and Sq queries of each."""

    B: int
    S: int
    Hq: int
    Hk: int
    D: int
    Sq: int = 1
    page: int = 0  # keys of a page; 0: no pages
    ragged: bool = False  # lengths that differ by up to 100 times, with the same number of keys in total
    dtype: str = "bf16"

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that a call reads."""
        return 2 * sum(self.lengths()) * self.Hk * self.D * DTYPES[self.dtype].itemsize

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.S] * self.B
        short = max(self.S // 50, 1)
        return [short if b % 2 else 2 * self.S - short for b in range(self.B)]

    def capacity(self) -> int:
        """Keys that an entry of the cache has room for, in whole pages."""
        granule = self.page or 1
        return -(-max(self.lengths()) // granule) * granule


def cases(device: torch.device, quick: bool) -> list[Case]:
    if quick:
        return [Case(2, 128, 8, 2, 64), Case(2, 128, 8, 2, 64, page=16), Case(2, 128, 8, 2, 64, Sq=4, ragged=True)]
    base = Case(16, 16384, 32, 8, 128) if device.type == "cuda" else Case(4, 8192, 32, 8, 128)
    rows = [base, replace(base, D=64), replace(base, D=256), replace(base, Hq=64)]
    rows += [replace(base, Hq=8, Hk=1, B=base.B * 8), *(replace(base, page=page) for page in (16, 64, 256))]
    rows += [replace(base, ragged=True), replace(base, Sq=8), replace(base, dtype="fp32")]
    rows += [replace(row, dtype="fp8") for row in (*rows[:4], replace(base, page=64), replace(base, Sq=8))]
    if device.type == "cuda":
        rows += [Case(B, S, 32, 8, 128) for B, S in ((1, 131072), (256, 2048), (1, 8192), (8, 4096))]
    return rows


def few_queries_cases(device: torch.device, quick: bool) -> list[Case]:
    if quick:
        return [Case(2, 600, 8, 2, 64, Sq=rows) for rows in (1, 4)]
    long, batch = Case(1, 65536, 32, 8, 128), Case(8, 16384, 32, 8, 128)
    shapes = [long, batch, replace(batch, Hq=16, Hk=16, D=64), replace(batch, B=32, S=8192, Hq=64)]
    if device.type != "cuda":
        shapes = [replace(long, S=8192), replace(batch, B=4, S=8192)]
    return [replace(shape, Sq=rows) for shape in shapes for rows in (1, 4, 16, 64)]


@dataclass(frozen=True)
class Bench:
    """Where and how long the calls are timed."""

    device: torch.device
    quick: bool

    def memory_rate(self) -> float:
        """Bytes per second: read and written by a copy on a GPU, read by a sum on the CPU."""
        on_gpu = self.device.type == "cuda"
        x = torch.ones((8 << 20 if self.quick else ROTATION_BYTES) // 4, device=self.device)
        y = torch.empty_like(x) if on_gpu else x
        calls = {"memory": (lambda: y.copy_(x)) if on_gpu else x.sum}
        return x.nbytes * (2 if on_gpu else 1) / time_on(self.device.type, calls, self.quick)["memory"].median_s

    def rotating(self, case: Case, call: Callable[..., Any], backward: bool = False) -> Callable[[], object]:
        """`call` with a query and the next pair of caches each time, or its backward."""
        torch.manual_seed(0)
        dtype = DTYPES[case.dtype]  # dtype of the cache; a query for fp8 is bfloat16
        options: dict[str, Any] = {"dtype": torch.bfloat16 if case.dtype == "fp8" else dtype, "device": self.device}
        shape = (case.B, case.capacity(), case.Hk, case.D)
        pairs = 1 if self.quick else max(-(-ROTATION_BYTES // max(case.bytes, 1)), 1)
        q = torch.randn(case.B, case.Sq, case.Hq, case.D, **options)
        inputs = [[q, *(torch.empty(shape, **options).normal_().to(dtype) for _ in range(2))] for _ in range(pairs)]
        if not backward:
            rotation = itertools.cycle(inputs)
            return lambda: call(*next(rotation))
        dout, leaves = torch.randn_like(q), [[t.requires_grad_() for t in tensors] for tensors in inputs]
        graphs = itertools.cycle([(call(*tensors), tensors) for tensors in leaves])
        return lambda: torch.autograd.grad(*next(graphs), dout, retain_graph=True)


def measure(*, quick: bool) -> dict[str, Any]:
    """Times every case on the GPU where there is one, else on the CPU. The result contains plain numbers only, ready for JSON."""
    device = choose_device("cuda" if torch.cuda.is_available() and "cuda" in str(flashattn_ext.build_info()) else "cpu")
    bench = Bench(device, quick)
    rate = bench.memory_rate()
    return {
        **describe_machine(device),
        "device": device.type,
        "memory_bytes_per_s": rate,
        "rows": [_measure_case(case, bench, rate) for case in cases(device, quick)],
        "few_queries": [_measure_few_queries(case, bench) for case in few_queries_cases(device, quick)],
    }


def _measure_case(case: Case, bench: Bench, rate: float) -> dict[str, Any]:
    calls = {name: bench.rotating(case, call) for name, call in _contestants(case, bench).items()}
    timings = time_on(bench.device.type, calls, bench.quick)
    return {
        **asdict(case),
        "bytes": case.bytes,
        "bytes_per_s": {name: case.bytes / timing.median_s for name, timing in timings.items()},
        "of_memory_rate": case.bytes / timings[OURS].median_s / rate,
        "spread": timings[OURS].spread,
    }


def _measure_few_queries(case: Case, bench: Bench) -> dict[str, Any]:
    """Gradients read keys and values and write dk and dv."""
    cached = partial(flashattn_ext.flash_attn_with_kvcache, cache_seqlens=_lengths(case, bench.device))
    forwards = {"forward": flashattn_ext.forward, "with a cache": cached, SDPA: _torch_attention}
    backwards = {"backward": flashattn_ext.forward, f"{SDPA} backward": _torch_attention}
    calls = {name: bench.rotating(case, call) for name, call in forwards.items()}
    calls |= {name: bench.rotating(case, call, backward=True) for name, call in backwards.items()}
    rates = {
        name: case.bytes / timing.median_s for name, timing in time_on(bench.device.type, calls, bench.quick).items()
    }
    rates |= {name: 2 * rates[name] for name in backwards}
    return {**asdict(case), "bytes": case.bytes, "bytes_per_s": rates}


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)
    return out.transpose(1, 2)


def _lengths(case: Case, device: torch.device) -> Tensor:
    return torch.tensor(case.lengths(), dtype=torch.int32, device=device)


def _contestants(case: Case, bench: Bench) -> dict[str, Callable[..., Tensor]]:
    """The attentions that support the case, of a query and a pair of caches."""
    calls = {OURS: _decoding(case, bench.device, flashattn_ext.flash_attn_with_kvcache, "block_table")}
    if bench.device.type in ("cpu", "cuda"):
        invariant = partial(flashattn_ext.flash_attn_with_kvcache, invariant=True)
        calls[INVARIANT] = _decoding(case, bench.device, invariant, "block_table")
    if case.dtype == "fp8":
        return calls
    if not (case.page or case.ragged or case.Sq > 1):  # it has none of these with a causal mask aligned bottom-right
        calls[SDPA] = _torch_attention
    if bench.device.type == "cuda" and case.dtype != "fp32" and (module := flash_module(FA3)):
        calls[FA3] = _decoding(case, bench.device, module.flash_attn_with_kvcache, "page_table")
    return calls


def _decoding(
    case: Case, device: torch.device, attend: Callable[..., Tensor], table_name: str
) -> Callable[..., Tensor]:
    """A flash_attn_with_kvcache; `table_name` is its keyword for the block table."""
    lengths, paged, table = _lengths(case, device), (-1, case.page, case.Hk, case.D), None
    if case.page:
        entries = torch.randperm(case.B * case.capacity() // case.page, device=device)
        table = entries.view(case.B, -1).to(torch.int32)

    def call(q: Tensor, *caches: Tensor) -> Tensor:
        k, v = (cache.view(paged) for cache in caches) if case.page else caches
        return attend(q, k, v, cache_seqlens=lengths, causal=True, **{table_name: table})

    return call


SHAPE: Columns = {
    **fields({"dtype": "dtype", "B": "B"}),
    "keys": lambda row: f"{row['S']}{' uneven' if row['ragged'] else ''}",
    "heads": lambda row: f"{row['Hq']}:{row['Hk']}",
    **fields({"D": "D", "queries": "Sq"}),
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the tables: GB/s of keys and values."""
    on_cpu = results["device"] == "cpu"
    where = results["machine"] + (f", {results['threads']} threads, {results['isa']}" if on_cpu else "")
    about = (
        f"GB/s of keys and values, {where}, torch {results['torch']}; "
        f"memory is {'read' if on_cpu else 'copied'} at {results['memory_bytes_per_s'] / 1e9:.0f}"
    )
    columns = {
        **SHAPE,
        "pages": lambda row: row["page"] or "none",
        "MB": lambda row: f"{row['bytes'] / 1e6:.0f}",
        **parts("bytes_per_s", (OURS, INVARIANT, SDPA, FA3), ".1f", scale=1e-9),
        **fields({"of memory rate": "of_memory_rate", "spread": "spread"}, ".0%"),
    }
    print_rows(about, columns, results["rows"], markdown=markdown)
    few_queries = results["few_queries"]
    columns = SHAPE | parts("bytes_per_s", few_queries[0]["bytes_per_s"], ".1f", scale=1e-9)
    print_rows("few queries without a cache", columns, few_queries, markdown=markdown)
