"""Which kernels run the calls of a test on the GPU of this machine."""

from __future__ import annotations

import os

import torch

import flashattn_ext


def cuda_backends() -> list[str]:
    """The CUDA backends that the GPU runs."""
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    names = [name for name in flashattn_ext.build_info()["backends"] if name.startswith("cuda-")]
    return names if is_hopper else [name for name in names if name != "cuda-sm90"]


def has_hoppers_kernels() -> bool:
    """Whether use_backend("cuda-sm90") runs calls here."""
    return torch.cuda.is_available() and "cuda-sm90" in cuda_backends()


def runs_hoppers_kernels() -> bool:
    """Whether CUDA calls run on cuda-sm90, with what use_backend() and FLASHATTN_EXT_CUDA_PATH choose."""
    chosen = flashattn_ext._C.forced_backend() or f"cuda-{os.environ.get('FLASHATTN_EXT_CUDA_PATH', 'sm90')}"
    return chosen == "cuda-sm90" and has_hoppers_kernels()
