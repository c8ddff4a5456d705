"""Loads the compiled module, or says in one message why it cannot be loaded and which command repairs that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _same_series(a: str, b: str) -> bool:
    return a.split(".")[:2] == b.split(".")[:2]


def load() -> Any:
    """Returns flashattn_ext._C.

    Raises:
        RuntimeError: the extension was not built, or was built for another torch; names the fix.
    """
    import torch

    try:
        from . import _build_config
    except ImportError:
        raise RuntimeError(
            "flashattn_ext: the compiled module is missing (is this a source checkout that was never "
            f"built?); build it from the checkout with: {REBUILD}"
        ) from None
    if not _same_series(_build_config.BUILT_FOR_TORCH, torch.__version__):
        raise RuntimeError(
            f"flashattn_ext was built for torch {_build_config.BUILT_FOR_TORCH}, but torch "
            f"{torch.__version__} is installed; rebuild it from the checkout with: {REBUILD}"
        )
    try:
        from . import _C
    except ImportError as error:
        raise RuntimeError(
            f"flashattn_ext: the compiled module cannot be loaded ({error}); rebuild it from the "
            f"checkout with: {REBUILD}"
        ) from error
    isa = os.environ.get("FLASHATTN_EXT_ISA")
    if isa and isa not in _C.cpu_isas():
        raise RuntimeError(
            f"FLASHATTN_EXT_ISA: '{isa}' is not an instruction set of this build on this machine; "
            f"choose one of {', '.join(_C.cpu_isas())}"
        )
    return _C


def load_ascend_emulator() -> None:
    """Makes the backend "ascend-emulator" known, if it is not yet.

    Raises:
        RuntimeError: it was not built; names the command that builds it.
    """
    from . import _C

    library = Path(__file__).with_name("_ascend_emulator.so")
    if "ascend-emulator" in _C.backends():
        return
    if not library.exists():
        raise RuntimeError(
            f"the backend 'ascend-emulator' was not built ({library} is missing); build it from the checkout with: "
            "bash build.sh -arch 910 -mode emulator"
        )
    _C.load_backend(str(library))


def build_info() -> dict[str, Any]:
    """What was compiled, with what, and what is in use.

    Returns:
        A dict with `version`, `backends` (names for use_backend), `torch` (the version built for),
        `compiler`, `cpu_isas` (usable here, fastest first), `cpu_isa` (in use) and
        `cuda_architectures` (compute capabilities, empty without CUDA).
    """
    from . import _C, __version__, _build_config

    return {
        "version": __version__,
        "backends": _C.backends(),
        "torch": _build_config.BUILT_FOR_TORCH,
        "compiler": _C.compiler(),
        "cpu_isas": _C.cpu_isas(),
        "cpu_isa": _C.cpu_isa(),
        "cuda_architectures": list(_build_config.CUDA_ARCHITECTURES),
    }
