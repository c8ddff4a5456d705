"""The signatures of other packages, so that changing the import line is all that a user does.

The flash_attn_* functions are those of flash-attn 2; what that package has and this one does not raises
NotImplementedError. flash_attention_npu is the spelling of Ascend users.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import arguments
from .api import forward, varlen_forward


def _reject(**unsupported: Any) -> None:
    for name, (value, accepted) in unsupported.items():
        if value is not accepted and (accepted is None or value != accepted):
            raise NotImplementedError(
                f"{name}: flashattn_ext does not have it, got {value!r}; leave it at {accepted!r} "
                "or keep flash-attn for this call"
            )


def _window(window_size: Any) -> tuple[int, int]:
    """flash-attn takes every negative side as unbounded."""
    left, right = arguments.window(window_size)
    return max(left, -1), max(right, -1)


def _result(results: tuple[Tensor, Tensor], return_attn_probs: bool) -> Any:
    """flash-attn returns (out, softmax_lse, S_dmask); there is no S x S matrix to return here."""
    out, lse = results
    return (out, lse, None) if arguments.flag("return_attn_probs", return_attn_probs) else out


def _expect(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """Numbers in `shape` are sizes, words only name a dimension."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {tuple(tensor.shape)}")


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [B, Sq, Hq, D], k and v [B, Sk, Hk, D] -> out [B, Sq, Hq, D], or (out, softmax_lse, None).

    alibi_slopes: float32 [Hq] or [B, Hq], with a gradient where they require one (flash-attn has none).
    """
    results = forward(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return _result(results, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv [B, S, 3, H, D] -> out [B, S, H, D]; the slices are read in place."""
    _expect("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [B, Sq, Hq, D], kv [B, Sk, 2, Hk, D] -> out [B, Sq, Hq, D]."""
    _expect("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q [total_q, Hq, D], k and v [total_k, Hk, D] -> out [total_q, Hq, D]."""
    _reject(block_table=(block_table, None))
    results = varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, window_size=_window(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return _result(results, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv [total, 3, H, D] -> out [total, H, D]."""
    _expect("qkv", qkv, ("total", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [total_q, Hq, D], kv [total_k, 2, Hk, D] -> out [total_q, Hq, D]."""
    _expect("kv", kv, ("total", 2, "heads", "head_dim"))
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attention_npu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None
) -> Tensor:
    """q [B, Hq, S, D], k and v [B, Hk, S, D] -> out [B, Hq, S, D], on the device of the tensors."""
    return forward(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bhsd")
