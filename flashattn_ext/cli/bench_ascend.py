"""`bench ascend-emulator`: what the time model of the emulator says about the Ascend C kernels. Modelled, never measured.

A die of Atlas A2 is 24 cores of 8192 flop a cycle at 1.8 GHz. Cube use is useful flop (4 * B * H * S^2 * D forward, half
of it causal, 2.5 times that backward) over what the cubes could have done in the modelled time.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import flashattn_ext

from .console import CommandError, markdown_table, print_table

LIBRARY = Path(flashattn_ext.__file__).with_name("_ascend_emulator.so")
MEMORIES = ("UB", "L1", "L0A", "L0B", "L0C")
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES, FLOP_PER_CYCLE, GIGAHERTZ = 24, 8192, 1.8
PEAK_TFLOPS = CORES * FLOP_PER_CYCLE * GIGAHERTZ * 1e-3
L2_BYTES = 192 << 20
MODELLED_CORES = 2  # every core has the same share of bandwidth: two show what 24 do
SCORES = ("plain", "softcap", "alibi", "relative bias", "bias")  # as the library counts them
KEEP_90_PERCENT = 230  # threshold of dropout_p = 0.1


@dataclass(frozen=True)
class Case:
    """One row: fp16 self-attention over [B, H, S, D]."""

    S: int
    D: int
    causal: bool = False
    backward: bool = False
    dropout: bool = False
    smooth: bool = False
    scores: str = "plain"
    documents: bool = False
    B: int = 1
    H: int = MODELLED_CORES

    @property
    def name(self) -> str:
        words = (("dropout 0.1", self.dropout), ("smooth", self.smooth), (self.scores, self.scores != "plain"))
        mask = ("documents " if self.documents else "") + ("causal" if self.causal else "full")
        return " ".join(["backward" if self.backward else "forward", mask, *(word for word, on in words if on)])

    @property
    def lengths(self) -> list[int]:
        """Of the documents of a row: log-normal with sigma 1, a sixteenth of it on average, always the same."""
        if not self.documents:
            return [self.S]
        draw, lengths = random.Random(5), []
        while sum(lengths) < self.S:
            lengths.append(max(1, round(draw.lognormvariate(0, 1) * self.S / 16 / math.exp(0.5))))
        return [*lengths[:-1], self.S - sum(lengths[:-1])]

    @property
    def flop(self) -> float:
        pairs = sum(length**2 for length in self.lengths) * (0.5 if self.causal else 1)
        return 4.0 * self.B * self.H * pairs * self.D * (2.5 if self.backward else 1)

    def mask(self) -> flashattn_ext.Mask | None:
        if not self.documents:
            return None
        lengths = torch.tensor(self.lengths)
        return flashattn_ext.Mask.documents(torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None])


def cases(quick: bool) -> list[Case]:
    S = 1024 if quick else 8192
    forward = [Case(S, D, causal) for D in (64, 128, 256) for causal in (False, True)]
    backward = [Case(S, D, causal, backward=True) for D in (64, 128, 256) for causal in (False, True)]
    dropout = [replace(case, dropout=True) for case in forward + backward if not (case.causal and case.backward)]
    scores = [Case(S, 128, backward=way, scores=name) for name in SCORES[1:] for way in (False, True)]
    long = S if quick else 32768
    masks = [Case(long, D, True, backward=way, documents=True) for D in (64, 128) for way in (False, True)]
    return forward + backward + dropout + [Case(S, 128, smooth=True)] + scores + masks


def measure(*, quick: bool) -> dict[str, Any]:
    """Models every case. The result holds plain numbers only, ready for JSON."""
    try:
        flashattn_ext.use_backend("ascend-emulator").__exit__(None)  # built at all?
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    library = load_library()
    return {
        "peak_tflops": PEAK_TFLOPS,
        "rows": [{**asdict(case), **model(library, case)} for case in cases(quick)],
        "traffic": traffic(library, Case(256 if quick else 2048, 64, causal=True, B=1 if quick else 4, H=32)),
    }


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.flashattn_ext_model.restype = ctypes.c_char_p
    library.flashattn_ext_tiling.restype = None
    return library


def model(library: ctypes.CDLL, case: Case, cores: int = MODELLED_CORES) -> dict[str, Any]:
    """Cube use, busy share of every pipe, bytes that all cores move between GM and themselves, and that each one holds."""
    threshold = KEEP_90_PERCENT if case.dropout else 256
    sizes = [case.B, case.S, case.S, case.H, case.H, case.D, case.D, case.causal, threshold, case.smooth, case.backward]
    mask = case.mask()
    tensors = (None, None) if mask is None else (mask.intervals, mask.extremes())
    pointers = [tensor if tensor is None else ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    results = (ctypes.c_double * (5 + 2 * len(PIPES) + len(MEMORIES)))()
    error = library.flashattn_ext_model(
        (ctypes.c_int64 * 13)(*map(int, sizes), cores, SCORES.index(case.scores)), *pointers, results
    )
    if error:
        raise RuntimeError(error.decode())
    span, tensors_read, tensors_written, workspace_read, workspace_written = results[:5]
    busy, core = results[5 : -len(MEMORIES)], results[-len(MEMORIES) :]
    aic, aiv = busy[: len(PIPES)], busy[len(PIPES) :]
    cube_use = case.flop / (span * cores * FLOP_PER_CYCLE)
    return {
        "cube_use": cube_use,
        "tflops": cube_use * PEAK_TFLOPS,
        "cycles": span,
        "busy_aic": {pipe: cycles / span / cores for pipe, cycles in zip(PIPES, aic, strict=True) if cycles},
        "busy_aiv": {pipe: cycles / span / cores / 2 for pipe, cycles in zip(PIPES, aiv, strict=True) if cycles},
        "tensor_bytes": {"read": tensors_read, "written": tensors_written},
        "workspace_bytes": {"read": workspace_read, "written": workspace_written},
        "core_bytes": dict(zip(MEMORIES, core, strict=True)),
    }


def traffic(library: ctypes.CDLL, case: Case) -> dict[str, Any]:
    """GM bytes of one forward, beside those of the unfused operators: product, scale, mask, softmax, product.

    HBM: L2 holds the workspace and the keys and values of the heads in flight, so that every tensor comes in once.
    """
    tokens = case.B * case.H * case.S
    tensor, scores = tokens * case.D * 2, tokens * case.S * 2
    in_flight = CORES * 2 * case.S * case.D * 2
    ours = model(library, case, CORES)
    hbm = {"read": 3 * tensor, "written": tensor + tokens * 4}
    unfused = {"read": 3 * tensor + 4 * scores, "written": tensor + 4 * scores}
    workspace = CORES * 4 * (512 << 10)
    return {
        **asdict(case),
        "tensor_bytes": ours["tensor_bytes"],
        "workspace_bytes": ours["workspace_bytes"],
        "hbm_bytes": hbm,
        "unfused_hbm_bytes": unfused,
        "saved": {way: 1 - hbm[way] / unfused[way] for way in hbm},
        "l2_bytes": workspace + in_flight,
        "fits_l2": workspace + in_flight < L2_BYTES,
    }


HEADER = ("pass", "S", "D", "cube use", "TFLOP/s", "AIC busy", "AIV busy", "tensors r / w", "workspace r / w")


def show(results: dict[str, Any], *, markdown: bool) -> None:
    """Prints the table, and the traffic of one call beside the unfused operators."""
    about = (
        f"Modelled, not measured: one die of Atlas A2, fp16, peak {results['peak_tflops']:.1f} TFLOP/s; GM bytes in MB"
    )
    cells = [_cells(row) for row in results["rows"]]
    if markdown:
        print(markdown_table(about, HEADER, cells), end="")
    else:
        print_table(about, HEADER, cells, left=(0, 5, 6), width=160)
    print(_traffic_text(results["traffic"]))


def _cells(row: Mapping[str, Any]) -> list[str]:
    case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
    pipes = [_busy(row["busy_aic"], ("M", "MTE1", "MTE2", "FIX")), _busy(row["busy_aiv"], ("V", "MTE2", "MTE3"))]
    moved = [_megabytes(row["tensor_bytes"]), _megabytes(row["workspace_bytes"])]
    return [case.name, str(case.S), str(case.D), f"{row['cube_use']:.1%}", f"{row['tflops']:.0f}", *pipes, *moved]


def _busy(busy: Mapping[str, float], pipes: tuple[str, ...]) -> str:
    return " ".join(f"{pipe} {busy.get(pipe, 0):.0%}" for pipe in pipes)


def _megabytes(moved: Mapping[str, float]) -> str:
    return f"{moved['read'] / 1e6:.0f} / {moved['written'] / 1e6:.0f}"


def _traffic_text(row: Mapping[str, Any]) -> str:
    shape = f"B={row['B']} H={row['H']} S={row['S']} D={row['D']} causal fp16 forward"
    return (
        f"\n{shape}: HBM {_megabytes(row['hbm_bytes'])} MB read / written, unfused operators "
        f"{_megabytes(row['unfused_hbm_bytes'])}: {row['saved']['read']:.1%} and {row['saved']['written']:.1%} fewer. "
        f"Through L2: tensors {_megabytes(row['tensor_bytes'])}, workspace {_megabytes(row['workspace_bytes'])}; "
        f"{row['l2_bytes'] / 1e6:.0f} MB in use at a time, L2 has {L2_BYTES / 1e6:.0f}: "
        + ("it fits." if row["fits_l2"] else "it does not fit.")
    )
