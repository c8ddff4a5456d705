"""What the experiments share: the device, sizes, inputs, the attentions that are compared, and how they are measured."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import timing
from ..bench_cases import CAUSAL, DTYPES, PLAIN, VARLEN, Case
from ..bench_cases import OURS as OURS
from ..bench_contestants import SDPA as SDPA
from ..bench_contestants import UNFUSED, extras, timed_call
from ..bench_contestants import inputs as draw_inputs
from ..devices import peak_memory_bytes, synchronize
from ..model import hidden_scores
from ..timing import Timing, peak_extra_bytes, reported
from ..timing import divided as divided
from .result import BOTH, Cell, Column, cell

OURS_PLAIN, OURS_CAUSAL, OURS_PACKED = "ours, plain", "ours, causal", "ours, packed"
BESIDE = {OURS_PLAIN: PLAIN, OURS_CAUSAL: CAUSAL, OURS_PACKED: VARLEN}  # our reference call -> key of Case.beside()
Changes = Mapping[str, Any]
MIB = 1 << 20
WARM_UP_S = 64  # the sequence length of a first call where memory is measured
Call = Callable[[], object]
MATMUL_NOTE = (
    "of matmul: relative to the rate of the fastest torch.matmul of this run in this dtype, or in fp32 where that is faster; a reference "
    "that was measured at another time, not a limit: more than 100 % is possible"
)


class Sizes(SimpleNamespace):
    """The sizes of an experiment, by name."""

    def replace(self, **changes: Any) -> Sizes:
        return Sizes(**{**vars(self), **changes})


WHOLE = ("gpu", False)  # the sizes of the article, where it names any


def size_table(
    gpu: Changes, cpu: Changes, cpu_quick: Changes, gpu_quick: Changes | None = None
) -> dict[tuple[str, bool], Sizes]:
    """(device, --quick) -> sizes. `cpu` says only what differs from `gpu`, and the quick ones what differs from their device's."""
    whole = Sizes(**gpu)
    on_cpu = whole.replace(**cpu)
    quick = {("gpu", True): whole.replace(**(gpu_quick or {})), ("cpu", True): on_cpu.replace(**cpu_quick)}
    return {WHOLE: whole, ("cpu", False): on_cpu, **quick}


def size_notes(sizes: Sizes, gpu_sizes: Sizes) -> list[str]:
    """The note on the measured sizes, and on what a GPU measures if that differs."""

    def text(value: Any) -> str:
        if not isinstance(value, tuple):
            return str(value)
        return " ".join("x".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)

    def listed(sizes: Sizes) -> str:
        return ", ".join(f"{name} = {text(value)}" for name, value in vars(sizes).items())

    if sizes == gpu_sizes:
        return [f"sizes: {listed(sizes)}"]
    return [f"sizes, scaled down for this run: {listed(sizes)}", f"sizes of a whole run on a GPU: {listed(gpu_sizes)}"]


@dataclass
class Measured:
    """Timings of interleaved calls, and why the others have none. Methods return None, or cells of None, for the latter."""

    timings: dict[str, Timing]
    failures: dict[str, str] = field(default_factory=dict)

    def times(self, *names: str, unit: str = "ms") -> list[tuple[Column, Cell]]:
        """Two cells for each name: the median, and the distance between the fastest and the slowest call."""
        cells = []
        for name in names:
            timing, scale = self.timings.get(name), {"ms": 1e3, "us": 1e6}[unit]
            cells.append(cell(name, timing and timing.median_s, unit, ".3f", scale))
            cells.append(cell(f"{name} spread", timing and timing.spread, "%", ".0f", 100))
        return cells

    def alone(self, name: str, unit: str = "ms") -> list[tuple[Column, Cell]]:
        """The two cells of one call, in columns that are called "time"."""
        return self.renamed({name: "time"}).times("time", unit=unit)

    def renamed(self, names: Mapping[str, str]) -> Measured:
        """The calls that are keys of `names`, under the names that are its values."""
        kept = ({new: of[old] for old, new in names.items() if old in of} for of in (self.timings, self.failures))
        return Measured(*kept)

    def ratio(self, slower: str, faster: str) -> float | None:
        return divided(self._seconds(slower), self._seconds(faster))

    def rate(self, work: float, name: str) -> float | None:
        """`work` per second."""
        return divided(work, self._seconds(name))

    def _seconds(self, name: str) -> float | None:
        return self.timings[name].median_s if name in self.timings else None

    def remark(self, *names: str) -> tuple[Column, Cell]:
        """Why calls (of these names, or all) have no time."""
        chosen = {name: self.failures[name] for name in names or self.failures if name in self.failures}
        return cell("remark", "; ".join(f"{name}: {reason}" for name, reason in chosen.items()))


@dataclass
class Context:
    """One run of experiments. `track` shows how far along a sequence of steps is; `out` is the directory for traces."""

    device: torch.device
    quick: bool
    out: Path | None = None
    track: Callable[[Iterable[Any]], Iterable[Any]] = iter
    _products: dict[tuple[str, int], Measured] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def command(self, name: str) -> str:
        """The command that repeats an experiment; --out is the reader's choice."""
        quick = " --quick" if self.quick else ""
        threads = f" --threads {torch.get_num_threads()}" if self.on_cpu else ""
        return f"flashattn-ext experiments {name} --device {self.device}{quick}{threads}"

    def steps(self, *factors: Iterable[Any]) -> Iterable[Any]:
        """All combinations, under a progress bar."""
        return self.track(list(itertools.product(*factors)))

    def randn(self, *shape: int, dtype: str) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPES[dtype])

    def inputs(self, sizes: Sizes, **changes: Any) -> Inputs:
        """Random inputs of the sizes B, H, S, D and dtype, some of which may be changed."""
        return Inputs.random(self.device, sizes.replace(**changes))

    def measure(
        self, calls: Mapping[str, Call], inputs: Sequence[Tensor], failures: dict[str, str] | None = None, rounds: int = 0
    ) -> Measured:  # fmt: skip
        """Times interleaved calls, with new random numbers in `inputs` every round.

        A call that raises has its reason in `failures`, which may already name others. `rounds`: of time_on().
        """
        failures = {} if failures is None else failures

        def refresh() -> None:
            with torch.no_grad():
                for t in inputs:
                    t.copy_(torch.randn(t.shape, device=t.device)) if t.dtype == DTYPES["fp8"] else t.normal_()
            synchronize(self.device)

        def waiting(call: Call) -> Call:
            return lambda: (call(), synchronize(self.device))  # with the work that the call leaves in the queue

        if self.device.type == "npu":
            calls = {name: waiting(call) for name, call in calls.items()}
        options: dict[str, Any] = {"rounds": rounds, "failures": failures, "refresh": refresh}
        return Measured(timing.time_on(self.device.type, calls, self.quick, **options), failures)

    def measure_attentions(self, inputs: Inputs, names: Iterable[str], direction: str, **options: Any) -> Measured:
        """Times calls as Inputs.call() makes them."""
        failures: dict[str, str] = {}
        calls: dict[str, Call] = {}
        for name in names:
            with reported(name, failures):
                calls[name] = inputs.call(name, direction, **options)
        return self.measure(calls, inputs, failures)

    def matmul(self, dtype: str, n: int) -> Measured:
        """torch.matmul of two n x n matrices, as "time", measured once per run."""
        if (dtype, n) not in self._products:
            a, b = (self.randn(n, n, dtype=dtype) for _ in range(2))
            self._products[dtype, n] = self.measure({"time": lambda: a @ b}, (a, b))
        return self._products[dtype, n]

    def matmul_rate(self, dtype: str) -> float | None:
        """FLOP/s of the fastest torch.matmul so far, of the dtype or of fp32: CPUs may lack the former.

        It is a reference, not a limit: it was measured at another time, and torch's product need not be the fastest.
        """
        n = (512 if self.quick else 1024) if self.on_cpu else 8192
        dtypes = (dtype, "fp32")
        for name in dtypes:
            self.matmul(name, n)
        timed = ((n, of.timings["time"]) for (name, n), of in self._products.items() if of.timings and name in dtypes)
        return max((2 * n**3 / timing.fastest_s for n, timing in timed), default=None)

    def rate_cells(self, rate: float | None, dtype: str | None) -> list[tuple[Column, Cell]]:
        """A rate in FLOP/s, and relative to matrix products of a dtype."""
        relative = divided(rate, self.matmul_rate(dtype) if dtype else None)
        return [cell("rate", rate, "TFLOP/s", ".3f", 1e-12), cell("of matmul", relative, "%", ".0f", 100)]

    def peaks(
        self, names: Iterable[str], failures: dict[str, str], sizes: Sizes, direction: str, **options: Any
    ) -> dict[str, int]:
        """Peak memory of calls as Inputs.call() makes them, in bytes; `failures` receives the reasons of the others."""
        measured: dict[str, int] = {}
        for name in names:
            with reported(f"memory of {name}", failures):
                measured[name] = self.peak_bytes(make_call, sizes, name, direction, options)
        return measured

    def peak_bytes(self, prepare: Callable[..., Call], *arguments: Any) -> int:
        """Peak memory of the call that `prepare(device, *arguments)` returns."""
        if self.on_cpu:
            return growth_in_own_process(prepare, self.device, *arguments)
        if not self.on_cuda:
            raise NotImplementedError(f"allocator statistics of {self.device.type} are not read yet")
        run = prepare(self.device, *arguments)
        run()  # libraries allocate their persistent workspaces
        torch.cuda.empty_cache()
        return peak_extra_bytes(run)

    @property
    def memory_note(self) -> str:
        if self.on_cpu:
            return (
                "measured as the growth of the resident memory of a separate process for each call, high-water mark; includes the "
                "results, and what the C library keeps; a few tenths of a MiB are noise"
            )
        return "measured by PyTorch's allocator; includes the results"


def memory_cell(heading: str, size: int | None) -> tuple[Column, Cell]:
    return cell(heading, size, "MiB", ".2f", 1 / MIB)


class Inputs(NamedTuple):
    """q, k, v and the gradient of the output, all [B, S, H, D], as views of memory in PyTorch's order."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, device: torch.device, sizes: Sizes) -> Inputs:
        backward = sizes.dtype != "fp8"
        case = Case(sizes.B, sizes.H, sizes.H, sizes.S, sizes.D, True, sizes.dtype, backward=backward)
        return cls(*draw_inputs(case, device, heads_first=True))

    def case(self, direction: str, causal: bool = True, **options: str) -> Case:
        """A row of the benchmarks with these sizes."""
        (B, S, H, D), dtype = self.q.shape, next(name for name, of in DTYPES.items() if of == self.q.dtype)
        return Case(B, H, H, S, D, causal, dtype, backward=direction == BOTH, **options)

    def flop(self, direction: str, causal: bool = True, **options: str) -> float:
        """Products of visible scores, of the forward and, with BOTH, of the backward."""
        case = self.case(direction, causal, **options)
        return replace(case, backward=False).flop + (case.flop if case.backward else 0)

    def call(
        self, name: str, direction: str, causal: bool = True, **options: str
    ) -> Callable[[], Tensor | Sequence[Tensor]]:
        """An attention, or a key of BESIDE: out, or with the backward (dq, dk, dv) and the gradients of other trained inputs."""
        case = self.case(direction, causal, **options)
        if name in BESIDE:
            case, name = case.beside()[BESIDE[name]], OURS
        if name == UNFUSED and case.causal:
            hidden_scores(case.S, self.q.device)  # made beforehand
        # Packed sequences make up the only batch entry.
        tensors = [t[0].detach().requires_grad_(t.requires_grad) for t in self] if case.lengths else self
        call = timed_call(case, name, *tensors, with_forward=True)
        return call if case.backward else torch.no_grad()(call)


# Peak memory of one call beyond its inputs: on CUDA by PyTorch's allocator; on the CPU by the growth of a fresh process, the
# high-water mark of its resident memory.


def make_call(device: torch.device, sizes: Sizes, name: str, direction: str, options: dict[str, Any]) -> Call:
    """A call of Inputs.call(), after a shorter one that loads libraries and starts threads; one with a mask makes it each time."""

    def of(sizes: Sizes) -> Call:
        call = Inputs.random(device, sizes).call(name, direction, **options)
        return (lambda: (extras.cache_clear(), call())) if "pattern" in options else call

    of(sizes.replace(S=min(sizes.S, WARM_UP_S)))()
    return of(sizes)


def growth_in_own_process(prepare: Callable[..., Call], *arguments: Any) -> int:
    """The growth in bytes of a fresh process during the call that `prepare(*arguments)` returns there.

    The process is forked off a server that has imported PyTorch and computed nothing; `prepare` is a module-level function.
    """
    processes = multiprocessing.get_context("forkserver")
    # The first backward of each process would import the last of these, which takes 0.3 seconds.
    processes.set_forkserver_preload([__name__, prepare.__module__, "torch.fx.experimental.symbolic_shapes"])
    with ProcessPoolExecutor(1, processes) as pool:
        return pool.submit(_growth, torch.get_num_threads(), prepare, arguments).result()


def _growth(threads: int, prepare: Callable[..., Call], arguments: tuple[object, ...]) -> int:
    torch.set_num_threads(threads)
    call = prepare(*arguments)
    # The call would reuse memory that `prepare` has freed, and the process would not grow: glibc gives it back to the system first. The
    # high-water mark then begins anew, which some containers forbid; there it includes what `prepare` needed.
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    call()
    return max(0, peak_memory_bytes(torch.device("cpu")) - before)
