"""torch with the NPU of device.cpp: `import device` first of all. The backend "ascend" is that of tools/check_npu_binding.sh."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
import types
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[2] / "build/npu_binding" / f"torch_npu-{torch.__version__.split('+')[0]}"
LIBRARY = FOLDER / "_ascend_npu.so"

torch.utils.rename_privateuse1_backend("npu")
_library = ctypes.CDLL(str(FOLDER / "device.so"), ctypes.RTLD_GLOBAL)
_library.npu_ran.restype = ctypes.c_char_p
_library.npu_register()


class _Event:
    """The host's clock: everything before it has run."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _library.npu_ran()
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000 * (end.seconds - self.seconds)


def _module() -> types.ModuleType:
    """As much of torch.npu as torch itself asks for."""
    npu = types.ModuleType("torch.npu")
    npu.is_available = npu.is_initialized = lambda: True
    npu._is_in_bad_fork = lambda: False
    npu.device_count = lambda: 1
    npu.current_device = lambda: 0
    npu.get_device_name = lambda: "host memory"
    npu.manual_seed_all = lambda seed: _library.npu_manual_seed(ctypes.c_uint64(seed))
    npu.Event, npu.synchronize = _Event, _library.npu_ran
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return npu


torch._register_device_module("npu", _module())
sys.modules["torch_npu"] = types.ModuleType("torch_npu")

from flashattn_ext import _build  # noqa: E402

# What build.sh would have left in the package.
_config = types.ModuleType("flashattn_ext._ascend_config")
_config.BUILT_FOR_TORCH, _config.SOC, _config.CANN = torch.__version__, "Ascend910B1", "none"
sys.modules[_config.__name__] = _config
_build._npu_library = lambda: LIBRARY
_build.load()


def queued() -> int:
    """Launches that nothing has waited for yet."""
    return _library.npu_queued()


def ran() -> list[str]:
    """Runs what is queued; the kernels that ran since the last call, without flash_."""
    return [name.removeprefix("flash_") for name in _library.npu_ran().decode().split()]


def set_format(number: int) -> None:
    """Of every tensor, from now on: 2 is rows, 29 the fractals that its matrix products like."""
    _library.npu_set_format(ctypes.c_int64(number))


def capture(seed: int, offset: int) -> None:
    """From now on launches are recorded; the generator's memory on the device holds these."""
    _library.npu_capture(ctypes.c_int64(seed), ctypes.c_int64(offset))


def end_capture() -> None:
    _library.npu_end_capture()


def replay(seed: int, offset: int) -> None:
    """Runs what was recorded once more, with other values in the generator's memory."""
    _library.npu_replay(ctypes.c_int64(seed), ctypes.c_int64(offset))


def _write_kernels(path: str) -> None:
    """Adds a line to a file: the last argument of this process, which for a rung of `doctor` is its name, and the kernels that ran."""
    with open(path, "a") as file:
        print(sys.argv[-1], *ran(), sep="|", file=file)


if "TEST_NPU_KERNELS" in os.environ:
    atexit.register(_write_kernels, os.environ["TEST_NPU_KERNELS"])
