"""Exact, memory-linear attention with smooth softmax, learnable sinks and exact dropout."""

from importlib import metadata as _metadata
from typing import Any as _Any

try:
    __version__ = _metadata.version("flashattn_ext")
except _metadata.PackageNotFoundError:  # a checkout that was built in place
    from pathlib import Path as _Path

    __version__ = (_Path(__file__).parent.parent / "VERSION").read_text().strip()

from ._package_folder import running_folder as _running_folder

try:
    __path__ = [_running_folder(__path__[0])]
    from . import _build

    _C: _Any = _build.load()
except (ImportError, RuntimeError) as _error:
    from ._build import is_command_line as _is_command_line

    if not _is_command_line():
        raise
    _import_error: Exception | None = _error  # the command line reports it: `doctor` must run without a working build
else:
    _import_error = None
    from . import calls as _calls
    from . import flops as _flops  # noqa: F401 - registers the ops with torch's FLOP counter
    from . import layout as _layout  # noqa: F401 - gives the ops the warning for tensors in another layout
    from . import vmap as _vmap  # noqa: F401 - registers the ops with torch.vmap
    from ._build import build_info
    from .api import backward, dropout_mask, forward, use_backend, varlen_forward
    from .autograd import FlashAttentionFunction
    from .block_mask import BlockMask
    from .cache_reference import kvcache_reference
    from .compat import (
        flash_attention_npu,
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from .decode import flash_attn_with_kvcache
    from .fp8 import quantize_fp8
    from .mask import Mask
    from .module import FlashAttention
    from .reference import attention_reference, attention_weights
    from .relative_bias import t5_relative_bias
    from .support import supports

    def _dtensors_together(*tensors: _Any) -> list[_Any]:
        """Imports the integration at the first DTensor: it imports torch.distributed.tensor, which takes a second."""
        from .integrations.dtensor import together

        return together(*tensors)

    _calls.dtensors_together = _dtensors_together


def __getattr__(name: str) -> object:
    """Imports flashattn_ext.distributed at the first access."""
    if name == "distributed":
        from importlib import import_module

        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BlockMask",
    "FlashAttention",
    "FlashAttentionFunction",
    "Mask",
    "attention_reference",
    "attention_weights",
    "backward",
    "build_info",
    "dropout_mask",
    "flash_attention_npu",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "forward",
    "kvcache_reference",
    "quantize_fp8",
    "supports",
    "t5_relative_bias",
    "use_backend",
    "varlen_forward",
]
