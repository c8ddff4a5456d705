"""`bench decode`: bytes of keys and values per second of a step of decoding, beside PyTorch's scaled_dot_product_attention, FlashAttention-3 where
it can be imported, and how quickly this machine copies (GPU) or reads (CPU) memory.

Several caches take turns, so that none is found in a CPU's or GPU's own cache.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashattn_ext

from .._build import describe_cpu
from .bench_cases import OURS
from .bench_cuda import burst_ms
from .console import markdown_table, print_table
from .devices import choose_device
from .timing import Timing, time_interleaved, wall_clock

SDPA, FA3 = "torch sdpa", "fa3"
TURNING_BYTES = 512 << 20  # of the caches that take turns, more than any cache of a machine
LAUNCHES = 20  # of a call in a burst on a GPU


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
    ragged: bool = False  # lengths that differ by up to 100 times, as many keys in all
    dtype: str = "bf16"

    @property
    def bytes(self) -> int:
        """Of the keys and values that a call reads."""
        return 2 * sum(self.lengths()) * self.Hk * self.D * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[self.dtype]

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.S] * self.B
        short = max(self.S // 50, 1)
        return [short if b % 2 else 2 * self.S - short for b in range(self.B)]

    def room(self) -> int:
        """Keys that an entry of the cache has room for, whole pages."""
        granule = self.page or 1
        return -(-max(self.lengths()) // granule) * granule


def cases(device: torch.device, quick: bool) -> list[Case]:
    if quick:
        return [Case(2, 128, 8, 2, 64), Case(2, 128, 8, 2, 64, page=16), Case(2, 128, 8, 2, 64, Sq=4, ragged=True)]
    base = Case(16, 16384, 32, 8, 128) if device.type == "cuda" else Case(4, 8192, 32, 8, 128)
    rows = [
        base,
        replace(base, D=64),
        replace(base, D=256),
        replace(base, Hq=64),
        replace(base, Hq=8, Hk=1, B=base.B * 8),
    ]
    rows += [replace(base, page=page) for page in (16, 64, 256)]
    rows += [replace(base, ragged=True), replace(base, Sq=8), replace(base, dtype="fp32")]
    if device.type == "cuda":
        rows += [
            Case(1, 131072, 32, 8, 128),
            Case(256, 2048, 32, 8, 128),
            Case(1, 8192, 32, 8, 128),
            Case(8, 4096, 32, 8, 128),
        ]
    return rows


def measure(*, quick: bool) -> dict[str, Any]:
    """Times every case on the GPU where there is one, else on the CPU. The result holds plain numbers only, ready for JSON."""
    device = choose_device("cuda" if torch.cuda.is_available() and "cuda" in str(flashattn_ext.build_info()) else "cpu")
    rate = memory_rate(device, quick)
    rows = [_measure_case(case, device, rate, quick) for case in cases(device, quick)]
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "machine": describe_cpu(),
        "threads": torch.get_num_threads(),
        "isa": flashattn_ext._C.cpu_isa(),
        "torch": torch.__version__,
        "memory_bytes_per_s": rate,
        "rows": rows,
    }


def memory_rate(device: torch.device, quick: bool) -> float:
    """Bytes per second: read and written by a copy on a GPU, read by a sum on the CPU."""
    x = torch.ones((8 << 20 if quick else TURNING_BYTES) // 4, device=device)
    y = torch.empty_like(x) if device.type == "cuda" else x
    call: Callable[[], object] = (lambda: y.copy_(x)) if device.type == "cuda" else (lambda: x.sum())
    timing = _timings({"memory": call}, device, quick)["memory"]
    return x.numel() * 4 * (2 if device.type == "cuda" else 1) / timing.median_s


def _timings(calls: dict[str, Callable[[], object]], device: torch.device, quick: bool) -> dict[str, Timing]:
    def burst(call: Callable[[], object]) -> float:
        return burst_ms(call, LAUNCHES) / LAUNCHES * 1e-3

    return time_interleaved(
        calls,
        budget_s=0.02 if quick else 1.0,
        min_rounds=2 if quick else 5,
        clock=burst if device.type == "cuda" else wall_clock,
    )


def _measure_case(case: Case, device: torch.device, rate: float, quick: bool) -> dict[str, Any]:
    calls = {name: call for name, make in CONTESTANTS.items() if (call := make(case, device, quick)) is not None}
    timings = _timings(calls, device, quick)
    return {
        **asdict(case),
        "bytes": case.bytes,
        "bytes_per_s": {name: case.bytes / timing.median_s for name, timing in timings.items()},
        "of_memory_rate": case.bytes / timings[OURS].median_s / rate,
        "spread": timings[OURS].spread,
    }


def _in_turns(case: Case, device: torch.device, quick: bool, call: Callable[..., object]) -> Callable[[], object]:
    """`call` with a query and another pair of caches each time."""
    torch.manual_seed(0)
    q = torch.randn(case.B, case.Sq, case.Hq, case.D, device=device).to(case.torch_dtype)
    shape = (case.B, case.room(), case.Hk, case.D)
    pairs = 1 if quick else max(-(-TURNING_BYTES // max(case.bytes, 1)), 1)
    caches = [
        [torch.empty(shape, dtype=case.torch_dtype, device=device).normal_() for _ in range(2)] for _ in range(pairs)
    ]
    turn = itertools.cycle(caches)
    return lambda: call(q, *next(turn))


def _lengths(case: Case, device: torch.device) -> Tensor:
    return torch.tensor(case.lengths(), dtype=torch.int32, device=device)


def _table(case: Case, device: torch.device) -> Tensor | None:
    if not case.page:
        return None
    return torch.randperm(case.B * case.room() // case.page, device=device).view(case.B, -1).to(torch.int32)


def _paged(case: Case, cache: Tensor) -> Tensor:
    return cache.view(-1, case.page, case.Hk, case.D) if case.page else cache


def _ours(case: Case, device: torch.device, quick: bool) -> Callable[[], object]:
    lengths, table = _lengths(case, device), _table(case, device)
    return _in_turns(
        case, device, quick,
        lambda q, k, v: flashattn_ext.flash_attn_with_kvcache(
            q, _paged(case, k), _paged(case, v), cache_seqlens=lengths, block_table=table, causal=True
        ),
    )  # fmt: skip


def _sdpa(case: Case, device: torch.device, quick: bool) -> Callable[[], object] | None:
    """It has neither pages nor lengths, and its causal mask is aligned at the other end."""
    if case.page or case.ragged or case.Sq > 1:
        return None
    return _in_turns(
        case, device, quick,
        lambda q, k, v: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True),
    )  # fmt: skip


def _fa3(case: Case, device: torch.device, quick: bool) -> Callable[[], object] | None:
    if device.type != "cuda" or case.dtype == "fp32":
        return None
    try:
        fa3 = importlib.import_module("flash_attn_interface")
    except ImportError:
        return None
    lengths, table = _lengths(case, device), _table(case, device)
    return _in_turns(
        case, device, quick,
        lambda q, k, v: fa3.flash_attn_with_kvcache(
            q, _paged(case, k), _paged(case, v), cache_seqlens=lengths, page_table=table, causal=True
        ),
    )  # fmt: skip


CONTESTANTS = {OURS: _ours, SDPA: _sdpa, FA3: _fa3}
HEADER = ("dtype", "B", "keys", "heads", "D", "queries", "pages", "MB", "ours", SDPA, FA3, "of memory rate", "spread")


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the table: GB/s of keys and values."""
    rate, what = results["memory_bytes_per_s"], "read" if results["device"] == "cpu" else "copied"
    cpu = f"{results['machine']}, {results['threads']} threads, {results['isa']}"
    where = cpu if results["device"] == "cpu" else results["device"]
    about = f"GB/s of keys and values, {where}, torch {results['torch']}; memory is {what} at {rate / 1e9:.0f}"
    cells = [_cells(row) for row in results["rows"]]
    if markdown:
        print(markdown_table(about, HEADER, cells), end="")
    else:
        print_table(about, HEADER, cells, left=(0, 6))


def _cells(row: dict[str, Any]) -> list[str]:
    rates = row["bytes_per_s"]
    return [
        row["dtype"], str(row["B"]), f"{row['S']}{' uneven' if row['ragged'] else ''}", f"{row['Hq']}:{row['Hk']}", str(row["D"]),
        str(row["Sq"]), str(row["page"] or "none"), f"{row['bytes'] / 1e6:.0f}",
        *(f"{rates[name] / 1e9:.1f}" if name in rates else "" for name in CONTESTANTS),
        f"{row['of_memory_rate']:.0%}", f"{row['spread']:.0%}",
    ]  # fmt: skip
