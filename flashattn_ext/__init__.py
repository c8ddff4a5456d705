"""Exact, memory-linear attention with smooth softmax, learnable sinks and exact dropout."""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("flashattn_ext")
except _metadata.PackageNotFoundError:  # a checkout that was built in place
    from pathlib import Path as _Path

    __version__ = (_Path(__file__).parent.parent / "VERSION").read_text().strip()

from ._place import running_folder as _running_folder

try:
    __path__ = [_running_folder(__path__[0])]
    from . import _build

    _C = _build.load()
except (ImportError, RuntimeError) as _error:
    from ._build import is_command_line as _is_command_line

    if not _is_command_line():
        raise
    _import_error: Exception | None = _error  # the command line reports it: `doctor` must run just then
else:
    _import_error = None
    from . import flops as _flops  # noqa: F401 - torch's FLOP counter then knows the ops
    from . import vmap as _vmap  # noqa: F401 - and so does torch.vmap
    from ._build import build_info
    from .api import backward, dropout_mask, forward, use_backend, varlen_forward
    from .autograd import FlashAttentionFunction
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
    from .mask import Mask
    from .module import FlashAttention
    from .reference import attention_reference, kvcache_reference
    from .relative_bias import t5_relative_bias


def __getattr__(name: str) -> object:
    """flashattn_ext.distributed, which is imported when it is first asked for."""
    if name == "distributed":
        from importlib import import_module

        return import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FlashAttention",
    "FlashAttentionFunction",
    "Mask",
    "attention_reference",
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
    "t5_relative_bias",
    "use_backend",
    "varlen_forward",
]
