"""What the Ascend emulator counts of a forward, without computing it: bytes exactly, time by its model. With the tiling of
ascend_c/tiles.h, or with another one that was compiled for comparison.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .. import private_build
from ..bench_ascend import CORES, LIBRARY, MEMORIES, Case, load_library, model
from ..console import CommandError

# Query rows x keys; the Makefile compiles those that fit.
TILINGS = (
    *((64, keys) for keys in (64, 512, 1024)),
    *((128, keys) for keys in (64, 128, 256, 512, 1024)),
    (256, 256),
    (512, 512),
)


@dataclass(frozen=True)
class Counts:
    """Cycles of the slowest core, and bytes in global memory: of the tensors, and of the workspace between cores."""

    cycles: float
    read: int
    written: int
    workspace_read: int
    workspace_written: int


@dataclass(frozen=True)
class Tiling:
    """Query rows of a task and keys of a step, and the bytes that a core takes of each of MEMORIES and has there."""

    rows: int
    keys: int
    taken: tuple[int, ...]
    there: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.keys}"

    @property
    def overflows(self) -> dict[str, int]:
        """The memories that it does not fit into, and how many bytes too large it is."""
        pairs = zip(MEMORIES, self.taken, self.there, strict=True)
        return {memory: taken - there for memory, taken, there in pairs if taken > there}


def tiling(D: int, rows: int = 0, keys: int = 0) -> Tiling:
    """A tiling of the forward for heads of size D, whether it was compiled or not; by default the one of ascend_c/tiles.h.

    Raises:
        FileNotFoundError: the emulator was not built; names the command that builds it.
    """
    numbers = (ctypes.c_int64 * (2 + 2 * len(MEMORIES)))()
    load_library(_built(LIBRARY, "make emulator")).flashattn_ext_tiling((ctypes.c_int64 * 3)(rows, keys, D), numbers)
    return Tiling(*numbers[:2], tuple(numbers[2 : 2 + len(MEMORIES)]), tuple(numbers[2 + len(MEMORIES) :]))


def library_of(rows: int, keys: int) -> Path:
    """The library with a tiling other than that of ascend_c/tiles.h, in the checkout."""
    return private_build.checkout() / "build" / "tilings" / f"{LIBRARY.stem}_{rows}x{keys}.so"


def why_no_tilings(*, compiles: bool) -> str:
    """Why there are no libraries of other tilings that are as new as the sources; empty where there are.

    `compiles`: they are made first.
    """
    command = ["make", "-s" if compiles else "-q", f"-j{os.cpu_count() or 1}", "emulator-tilings"]
    try:
        done = subprocess.run(command, cwd=private_build.checkout(), capture_output=True, text=True, check=False)
    except (OSError, CommandError) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return f"make emulator-tilings failed: {done.stderr.strip()}" if compiles else "not compiled: make emulator-tilings"


def count_forward(
    B: int, H: int, S: int, D: int, *, causal: bool, of: Tiling | None = None, cores: int = CORES
) -> Counts:
    """What the emulator counts in a 16-bit forward on `cores` cores, with the tiling `of` if there is one.

    Raises:
        FileNotFoundError: the emulator was not built; names the command that builds it.
    """
    path = library_of(of.rows, of.keys) if of else _built(LIBRARY, "make emulator")
    modelled = model(load_library(path), Case(S, D, causal, B=B, H=H), cores)
    tensors, workspace = modelled["tensor_bytes"], modelled["workspace_bytes"]
    moved = (tensors["read"], tensors["written"], workspace["read"], workspace["written"])
    return Counts(modelled["cycles"], *map(int, moved))


def modelled_cycles(S: int, D: int, *, causal: bool) -> float | None:
    """Cycles of a 16-bit forward on cores that all have the same to do, for comparing calls; None without the emulator."""
    return model(load_library(), Case(S, D, causal))["cycles"] if LIBRARY.exists() else None


def _built(library: Path, command: str) -> Path:
    if not library.exists():
        raise FileNotFoundError(f"only the Ascend emulator counts this, and it was not built; in a checkout: {command}")
    return library
