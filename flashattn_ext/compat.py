"""The signatures of other packages, so that changing the import line is all that a user does.

The flash_attn_* functions are those of flash-attn 2, flash_attn_with_kvcache aside (decode.py). flash_attention_npu is the spelling of Ascend users.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import arguments
from .api import forward, varlen_forward
from .decode import flash_attn_window, paged_varlen_forward


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
        window_size=flash_attn_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
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
    """q [total_q, Hq, D], k and v [total_k, Hk, D] -> out [total_q, Hq, D].

    block_table: int32 [B, pages of a sequence]; k and v are then [pages, page_size, Hk, D], page_size a multiple of 16, and
        cu_seqlens_k only says how long each sequence is. Forward only, without dropout.
    """
    if block_table is not None:
        if arguments.number("dropout_p", dropout_p) != 0:
            raise NotImplementedError(f"dropout_p: expected 0 with a block_table, got {dropout_p}")
        paged = paged_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        )  # fmt: skip
        return _result(paged, return_attn_probs)
    results = varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=dropout_p,
        softmax_scale=softmax_scale, causal=causal, window_size=flash_attn_window(window_size), softcap=softcap,
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
