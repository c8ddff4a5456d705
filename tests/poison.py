"""Uninitialised memory from torch's allocators holds NaN in the tests, on every device.

Fresh memory is often zero, so that results that a kernel leaves unset look right. The package allocates results and workspaces with
at::empty alone, in C++, also for the Ascend kernels on the emulator. In the processes of the tests, and nowhere else, the kernels of
that operator are replaced by one that fills its result with NaN, the largest integer or True.
Bytes become 255, so that workspaces are NaN in every floating-point type and -1 in every integer.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")
allocated: list[tuple[torch.dtype, tuple[int, ...]]] = []  # of every poisoned tensor since it was last cleared
_LONGEST = 1000  # of that list


def poisoned(t: Tensor) -> Tensor:
    if t.is_floating_point() or t.is_complex():
        return t.fill_(torch.nan)
    return t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)


def _empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Tensor:
    like = torch.empty(size, device="meta", dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    t = torch.empty_strided(
        size, like.stride(), dtype=like.dtype, layout=layout, device=device, pin_memory=bool(pin_memory)
    )
    if len(allocated) < _LONGEST:
        allocated.append((t.dtype, tuple(size)))
    return poisoned(t)


def poison_empty_tensors() -> None:
    """Replaces the kernels of at::empty for the rest of the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*operators may also be overridden", category=UserWarning)
        for key in ("CPU", *(["CUDA"] if torch.cuda.is_available() else [])):
            _library.impl("empty.memory_format", _empty, key)
