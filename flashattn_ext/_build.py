"""Loads the compiled module, or raises one error that says why it cannot be loaded and which command fixes that."""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ._package_folder import same_series

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."
BUILD_NPU = "bash build.sh -arch 910b (Atlas A2), or bash build.sh -arch 910_93 (Atlas A3)"


def load() -> Any:
    """Returns flashattn_ext._C.

    Raises:
        RuntimeError: the extension was not built, or was built for another torch; names the fix.
    """
    import torch

    folder = Path(__file__).parent
    try:
        built_for = _config("_build_config").BUILT_FOR_TORCH
    except ImportError:
        raise RuntimeError(
            f"flashattn_ext was imported from {folder}, which has no compiled module (sources that were never built?); "
            f"build it, in the checkout, with: {REBUILD}"
        ) from None
    if not same_series(built_for, torch.__version__):
        raise RuntimeError(
            f"flashattn_ext in {folder} was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed; install the wheel for that torch, or rebuild it, in the checkout, with: {REBUILD}"
        )
    try:
        from . import _C
    except ImportError as error:
        raise RuntimeError(
            f"the compiled module of flashattn_ext in {folder} cannot be loaded by Python {platform.python_version()} "
            f"({error}); rebuild it, in the checkout, with: {REBUILD}"
        ) from error
    try:
        _C.cpu_isa()  # reads FLASHATTN_EXT_ISA
        _C.check_cuda_path()
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(str(error)) from None
    if not why_not_ascend():
        _C.announce_backend("npu", str(_npu_library()))
    return _C


def _config(name: str) -> Any:
    """A module that a build generated: `_build_config` (setup.py) or `_ascend_config` (build.sh)."""
    return import_module(f".{name}", __package__)


def _npu_library() -> Path:
    return Path(__file__).with_name("_ascend_npu.so")


def why_not_ascend() -> str:
    """Why this package has no loadable backend "ascend"; empty if it has one.

    Checks the files only: loading the library needs torch_npu in the process, which is imported before the first NPU tensor.
    """
    import torch

    try:
        built_for = _config("_ascend_config").BUILT_FOR_TORCH
    except ImportError:
        return "not built"
    if not _npu_library().exists():
        return f"not built ({_npu_library()} is missing)"
    if not same_series(built_for, torch.__version__):
        return f"built for torch {built_for}, but torch {torch.__version__} is installed"
    return ""


def load_ascend() -> None:
    """Loads the backend "ascend", unless it is already loaded.

    Raises:
        RuntimeError: it was not built, or cannot run here; names the fix.
    """
    from . import _C

    if reason := why_not_ascend():
        raise RuntimeError(
            f"the backend 'ascend': {reason}; build it from the checkout, on a machine with CANN and torch_npu: {BUILD_NPU}"
        )
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"the backend 'ascend' needs torch_npu, which cannot be imported ({error}); install the torch-npu of this torch "
            "(the same version) and source CANN's set_env.sh"
        ) from error
    _C.load_announced_backend("npu")


def load_ascend_emulator() -> None:
    """Loads the backend "ascend-emulator", unless it is already loaded.

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


def is_command_line() -> bool:
    """Whether this process is the console script or `python -m flashattn_ext`."""
    if sys.argv[0] == "-m":  # the interpreter is still looking for the module to run
        return sys.orig_argv[-len(sys.argv)] == "flashattn_ext"
    return Path(sys.argv[0]).stem == "flashattn-ext"


# An arm64 kernel identifies a core in /proc/cpuinfo by two fields of MIDR_EL1: the implementer, and its number of the part.
ARM_IMPLEMENTERS = {
    0x41: "Arm", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft", 0xC0: "Ampere",
}  # fmt: skip
ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD05): "Cortex-A55", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse N1", (0x41, 0xD40): "Neoverse V1", (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD49): "Neoverse N2", (0x41, 0xD4F): "Neoverse V2", (0x41, 0xD83): "Neoverse V3AE", (0x41, 0xD84): "Neoverse V3",
    (0x41, 0xD8E): "Neoverse N3", (0x46, 0x001): "A64FX", (0x48, 0xD01): "TaiShan V110", (0x48, 0xD02): "TaiShan V120", (0x4E, 0x004): "Carmel",
    (0x6D, 0xD49): "Azure Cobalt 100", (0xC0, 0xAC3): "Ampere-1", (0xC0, 0xAC4): "Ampere-1A",
}  # fmt: skip


def cpu_name(cpuinfo: str) -> str:
    """The name of the CPU in a text like /proc/cpuinfo: its model, or on arm64 the implementer and the part of each kind of core.

    Empty if the text has neither.
    """
    fields = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())]
    if models := [value for key, value in fields if key == "model name"]:
        return models[0]
    implementers, parts = (
        [int(value, 0) for key, value in fields if key == name] for name in ("CPU implementer", "CPU part")
    )
    names = []
    for implementer, part in dict.fromkeys(zip(implementers, parts, strict=False)):
        maker = ARM_IMPLEMENTERS.get(implementer, f"implementer {implementer:#04x}")
        names.append(f"{maker} {ARM_PARTS.get((implementer, part), f'part {part:#05x}')}")
    return " and ".join(names)


def describe_cpu() -> str:
    """The name of this machine's CPU, as reports of measurements give it; on Linux with the cache sizes of one core."""
    from . import _C

    try:
        name = cpu_name(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # not on Linux
        name = ""
    name = name or platform.processor() or platform.machine()
    caches = [f"L{level} {size >> 10}K" for level, size in _C.cpu_caches()]
    return f"{name} ({', '.join(caches)})" if caches else name


def build_info() -> dict[str, Any]:
    """How this package was compiled, and what it uses on this machine.

    Returns:
        A dict with `version` (of this package), `backends` (names for use_backend), `torch` (the version built for),
        `compiler`, `cpu` (this machine's, with its caches), `cpu_isas` (usable here, fastest first), `cpu_isa` (in use),
        `cpu_tile` (queries and keys of a tile for each head dim, fp32, chosen by the caches),
        `cuda_architectures` (compute capabilities, empty without CUDA) and `ascend_soc` (the chip
        that "ascend" was built for, or "").
    """
    from . import _C, __version__

    config = _config("_build_config")
    backends, ascend_soc = _C.backends(), ""
    if not why_not_ascend():
        ascend_soc = _config("_ascend_config").SOC
        if "ascend" not in backends:  # loaded on demand
            backends.append("ascend")
    return {
        "version": __version__,
        "backends": backends,
        "torch": config.BUILT_FOR_TORCH,
        "compiler": _C.compiler(),
        "cpu": describe_cpu(),
        "cpu_isas": _C.cpu_isas(),
        "cpu_isa": _C.cpu_isa(),
        "cpu_tile": {head_dim: _C.cpu_tile("fp32", head_dim) for head_dim in (64, 128, 256, 512)},
        "cuda_architectures": list(config.CUDA_ARCHITECTURES),
        "ascend_soc": ascend_soc,
    }
