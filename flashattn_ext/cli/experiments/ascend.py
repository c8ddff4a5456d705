"""What the Ascend emulator counts of a forward, without computing it: bytes exactly, time by its model."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import flashattn_ext

LIBRARY = Path(flashattn_ext.__file__).with_name("_ascend_emulator.so")
CORES = 24  # cube cores, each with two vector cores; bytes do not depend on them
RESULTS = 5 + 14  # the busy cycles of the pipes are not shown


@dataclass(frozen=True)
class Counts:
    """Cycles of the slowest core, and bytes in global memory: of the tensors, and of the workspace between cores."""

    cycles: float
    read: int
    written: int
    workspace_read: int
    workspace_written: int


def count_forward(B: int, H: int, S: int, D: int, *, causal: bool) -> Counts:
    """Of a 16-bit forward.

    Raises:
        FileNotFoundError: the emulator was not built; names the command that builds it.
    """
    if not LIBRARY.exists():
        raise FileNotFoundError(
            "only the Ascend emulator counts this, and it was not built; in a checkout: make emulator"
        )
    model = ctypes.CDLL(str(LIBRARY)).flashattn_ext_model
    model.restype = None
    results = (ctypes.c_double * RESULTS)()
    model((ctypes.c_int64 * 12)(B, S, S, H, H, D, D, causal, 256, False, False, CORES), results)
    return Counts(results[0], *map(int, results[1:5]))
