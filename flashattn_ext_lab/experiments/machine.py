"""The description of the machine in a result, and the command that repeats the experiment."""

from __future__ import annotations

import datetime
import platform
from typing import TYPE_CHECKING

import torch

import flashattn_ext
from flashattn_ext._build import describe_cpu

if TYPE_CHECKING:
    from .harness import Context


def machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions, in the order in which they are shown."""
    on_cpu = device.type == "cpu"
    about = {
        "device": describe_cpu() if on_cpu else getattr(torch, device.type).get_device_name(device),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "flashattn_ext": flashattn_ext.__version__,
        "backends": ", ".join(flashattn_ext.build_info()["backends"]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "measured on": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if on_cpu:
        return {**about, "instruction set": flashattn_ext._C.cpu_isa()}
    return {**about, "CUDA": str(torch.version.cuda), "fp32 products": torch.get_float32_matmul_precision()}


def command_of(name: str, context: Context) -> str:
    """The command that repeats an experiment; --out is the reader's choice."""
    quick = " --quick" if context.quick else ""
    threads = f" --threads {torch.get_num_threads()}" if context.on_cpu else ""
    return f"flashattn-ext experiments {name} --device {context.device}{quick}{threads}"
