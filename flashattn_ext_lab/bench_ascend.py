"""`bench ascend-emulator`: the emulator's time model of the Ascend C kernels. Modelled, never measured.

A die of Atlas A2 is 24 cores of 8192 flop a cycle at 1.8 GHz. Cube use is useful flop (4 * B * H * S^2 * D forward, half
of it causal, 2.5 times that backward) divided by the peak of the cubes in the modelled time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import flashattn_ext

from .bench_cases import Case
from .console import Columns, CommandError, fields, print_rows
from .options import document_lengths

LIBRARY = Path(flashattn_ext._build.__file__).with_name("_ascend_emulator.so")
MEMORIES = 5  # UB, L1, L0A, L0B and L0C, at the end of the library's results
PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES, FLOP_PER_CYCLE, GIGAHERTZ = 24, 8192, 1.8
PEAK_TFLOPS = CORES * FLOP_PER_CYCLE * GIGAHERTZ * 1e-3
MODELLED_CORES = 2  # every core gets the same bandwidth: two cores behave like 24
SCORES = ("", "softcap", "alibi", "relative bias", "bias")  # as the library counts them
PACKED, PACKED_HEADS = (
    "packed",
    4,
)  # documents as packed sequences, on all cores, which share tasks of different lengths
DROPOUT, THRESHOLD = 0.1, 230  # how many of 256 random numbers keep a weight


def _case(S: int, D: int, causal: bool = False, **options: Any) -> Case:
    """One row: fp16, one batch entry; several `lengths` are documents in it."""
    return Case(1, MODELLED_CORES, MODELLED_CORES, S, D, causal, "fp16", **options)


def cases(quick: bool) -> list[Case]:
    S, long = (1024, 1024) if quick else (8192, 32768)
    ways, lengths = (False, True), document_lengths(long, seed=5)
    plain = [_case(S, D, causal, backward=backward) for backward in ways for D in (64, 128, 256) for causal in ways]
    dropout = [replace(case, dropout=DROPOUT) for case in plain if not (case.causal and case.backward)]
    scores = [_case(S, 128, backward=backward, score=name) for name in SCORES[1:] for backward in ways]
    masks = [_case(long, D, True, backward=backward, lengths=lengths) for D in (64, 128) for backward in ways]
    heads = dict(Hq=PACKED_HEADS, Hk=PACKED_HEADS)
    return plain + dropout + scores + masks + [replace(case, set=PACKED, **heads) for case in masks]


def measure(*, quick: bool) -> dict[str, Any]:
    """Models every case. The result contains plain numbers only, ready for JSON."""
    try:
        flashattn_ext.use_backend("ascend-emulator").__exit__(None)  # raises if it was not built
    except RuntimeError as error:
        raise CommandError(str(error)) from None
    library = ctypes.CDLL(str(LIBRARY))
    library.flashattn_ext_model.restype = ctypes.c_char_p
    rows = [{**case.described(), **model(library, case)} for case in cases(quick)]
    return {"peak_tflops": PEAK_TFLOPS, "rows": rows}


def model(library: ctypes.CDLL, case: Case) -> dict[str, Any]:
    """Cube use, busy fraction of every pipe, and bytes that all cores move from and to GM."""
    threshold, heads = THRESHOLD if case.dropout else 256, (case.Hq, case.Hk)
    smooth = False
    sizes = [case.B, case.S, case.S, *heads, case.D, case.D, case.causal, threshold, smooth, case.backward]
    tensors: list[torch.Tensor] = []
    packed, cores = case.set == PACKED, CORES if case.set == PACKED else MODELLED_CORES
    starts = torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    if packed:
        sizes[1] = sizes[2] = max(case.lengths)
    elif case.lengths:
        ids = torch.arange(len(case.lengths)).repeat_interleave(torch.tensor(case.lengths))
        mask = flashattn_ext.Mask.documents(ids[None])
        tensors = [mask.intervals, mask.extremes()]
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors] or [None, None]
    pointers.append(ctypes.c_void_p(starts.data_ptr()) if packed else None)
    results = (ctypes.c_double * (5 + 2 * len(PIPES) + MEMORIES))()
    error = library.flashattn_ext_model(
        (ctypes.c_int64 * 15)(*map(int, sizes), cores, SCORES.index(case.score), len(case.lengths), case.tokens),
        *pointers,
        results,
    )
    if error:
        raise RuntimeError(error.decode())
    span, tensors_read, tensors_written, workspace_read, workspace_written = results[:5]
    aic, aiv = results[5 : 5 + len(PIPES)], results[5 + len(PIPES) : -MEMORIES]
    cube_use = case.flop / (span * cores * FLOP_PER_CYCLE)

    def busy(pipes: list[float], units: int) -> dict[str, float]:
        return {pipe: cycles / span / units for pipe, cycles in zip(PIPES, pipes, strict=True) if cycles}

    return {
        "cube_use": cube_use,
        "tflops": cube_use * PEAK_TFLOPS,
        "cycles": span,
        "busy_aic": busy(aic, cores),
        "busy_aiv": busy(aiv, 2 * cores),
        "tensor_bytes": {"read": tensors_read, "written": tensors_written},
        "workspace_bytes": {"read": workspace_read, "written": workspace_written},
    }


COLUMNS: Columns = {
    "pass": lambda row: (
        f"{row['direction']} {'packed ' if row['set'] == PACKED else ''}{'documents ' if row['lengths'] else ''}{row['option']}"
    ),
    **fields({"S": "S", "D": "D"}),
    **fields({"cube use": "cube_use"}, ".1%"),
    **fields({"TFLOP/s": "tflops"}, ".0f"),
    "AIC busy": lambda row: _busy(row["busy_aic"], ("M", "MTE1", "MTE2", "FIX")),
    "AIV busy": lambda row: _busy(row["busy_aiv"], ("V", "MTE2", "MTE3")),
    "tensors r / w": lambda row: _megabytes(row["tensor_bytes"]),
    "workspace r / w": lambda row: _megabytes(row["workspace_bytes"]),
}


def show(results: dict[str, Any], *, markdown: bool) -> None:
    peak = f"peak {results['peak_tflops']:.1f} TFLOP/s"
    about = f"Modelled, not measured: one die of Atlas A2, fp16, {peak}; GM bytes in MB"
    print_rows(about, COLUMNS, results["rows"], markdown=markdown, width=160)


def _busy(busy: Mapping[str, float], pipes: tuple[str, ...]) -> str:
    return " ".join(f"{pipe} {busy.get(pipe, 0):.0%}" for pipe in pipes)


def _megabytes(moved: Mapping[str, float]) -> str:
    return f"{moved['read'] / 1e6:.0f} / {moved['written'] / 1e6:.0f}"
