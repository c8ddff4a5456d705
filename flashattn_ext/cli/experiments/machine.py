"""What a result says about where it was measured, and how to measure it again."""

from __future__ import annotations

import datetime
import platform
from typing import TYPE_CHECKING

import torch

import flashattn_ext

from ..._build import describe_cpu

if TYPE_CHECKING:
    from .context import Context


def machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions, in the order in which they are shown."""
    about = {
        "device": device_name(device),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "flashattn_ext": flashattn_ext.__version__,
        "backends": ", ".join(flashattn_ext.build_info()["backends"]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "measured on": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if device.type == "cpu":
        return {**about, "instruction set": flashattn_ext._C.cpu_isa()}
    return {**about, "CUDA": str(torch.version.cuda), "fp32 products": torch.get_float32_matmul_precision()}


def device_name(device: torch.device) -> str:
    if device.type != "cpu":
        return getattr(torch, device.type).get_device_name(device)
    return describe_cpu()


def command_of(name: str, context: Context) -> str:
    """The command that repeats an experiment; --out is the reader's choice."""
    quick = " --quick" if context.quick else ""
    threads = f" --threads {torch.get_num_threads()}" if context.device.type == "cpu" else ""
    return f"flashattn-ext experiments {name} --device {context.device}{quick}{threads}"
