"""What the Ascend emulator counts of a forward, without computing it: bytes exactly, time by its model."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench_ascend import CORES, LIBRARY, Case, load_library, model


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
    modelled = model(load_library(), Case(S, D, causal, B=B, H=H), CORES)
    tensors, workspace = modelled["tensor_bytes"], modelled["workspace_bytes"]
    moved = (tensors["read"], tensors["written"], workspace["read"], workspace["written"])
    return Counts(modelled["cycles"], *map(int, moved))
