"""The signatures of other packages, so that users only change the import line.

The flash_attn_* functions have the signatures of flash-attn 2; flash_attn_with_kvcache is in decode.py. flash_attention_npu has the
signature that Ascend users know.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from . import arguments, names
from .api import forward, varlen_forward
from .arguments import flash_attn_window
from .decode import paged_varlen_forward


def _result(results: tuple[Tensor, Tensor], return_attn_probs: bool) -> Any:
    """flash-attn returns (out, softmax_lse, S_dmask); there is no S x S matrix to return here."""
    out, lse = results
    return (out, lse, None) if return_attn_probs else out


def _expect(name: str, tensor: Any, shape: tuple[int | str, ...]) -> None:
    """Checks a shape; integers in `shape` are required sizes, strings only name a dimension."""
    arguments.tensors(**{name: tensor})
    fits = tensor.dim() == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {tuple(tensor.shape)}")


@names.shown
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_func: forward() in its signature; differentiable like forward().

    Args:
        q: queries [B, Sq, Hq, D]; float16, bfloat16, float32, and float64 on the CPU; D from 1 to 512 (256 on Ascend).
        k: keys [B, Sk, Hk, D]; Hq is a multiple of Hk.
        v: values [B, Sk, Hk, Dv].
        dropout_p: probability in [0, 1) of dropping an attention weight; pass 0 in evaluation.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        causal: query i sees the keys j <= i + Sk - Sq (aligned at the bottom right).
        window_size: (left, right), numbers of keys seen to either side of i + Sk - Sq; negative is unbounded.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq], adds -slope * |i + Sk - Sq - j|; differentiable (in flash-attn it is not).
        deterministic: gradients have the same bits in every run.
        return_attn_probs: also return softmax_lse [B, Hq, Sq] (natural logarithm; float32, float64 for float64 inputs), and None
            in place of flash-attn's S_dmask, the weights after dropout, which are never materialised.

    Returns:
        out [B, Sq, Hq, Dv], or (out, softmax_lse, None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_func", unknown)
    if return_attn_probs is not False and return_attn_probs is not True:
        return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    results = forward(
        q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=flash_attn_window(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return _result(results, return_attn_probs)


@names.shown
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_qkvpacked_func. The other arguments are those of flash_attn_func.

    Args:
        qkv: queries, keys and values [B, S, 3, H, D]; the slices are read in place.

    Returns:
        out [B, S, H, D], or (out, softmax_lse, None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_qkvpacked_func", unknown)
    _expect("qkv", qkv, ("batch", "seqlen", 3, "heads", "head_dim"))
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@names.shown
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_kvpacked_func. The other arguments are those of flash_attn_func.

    Args:
        q: queries [B, Sq, Hq, D].
        kv: keys and values [B, Sk, 2, Hk, D]; the slices are read in place.

    Returns:
        out [B, Sq, Hq, D], or (out, softmax_lse, None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_kvpacked_func", unknown)
    _expect("kv", kv, ("batch", "seqlen", 2, "heads", "head_dim"))
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@names.shown
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_varlen_func. The other arguments are those of flash_attn_func.

    Args:
        q: queries [total_q, Hq, D] of packed sequences.
        k: keys [total_k, Hk, D]; with a block_table [pages, page_size, Hk, D], page_size a multiple of 16.
        v: values [total_k, Hk, Dv]; with a block_table [pages, page_size, Hk, Dv].
        cu_seqlens_q: int32 [B + 1] on the device of q: sequence b is the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: int32 [B + 1], the same for keys and values; with a block_table it only gives the lengths.
        max_seqlen_q: an upper bound of the lengths of queries, in rows.
        max_seqlen_k: the same for keys.
        block_table: int32 [B, pages of a sequence], the page of each run of page_size keys. Forward only, without dropout.

    Returns:
        out [total_q, Hq, Dv], or (out, softmax_lse [Hq, total_q], None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward; dropout with a block_table.
        RuntimeError: in the backward of a call with a block_table.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_varlen_func", unknown)
    if return_attn_probs is not False and return_attn_probs is not True:
        return_attn_probs = arguments.flag("return_attn_probs", return_attn_probs)
    if block_table is not None:
        arguments.flag("deterministic", deterministic)
        if arguments.number("dropout_p", dropout_p) != 0:
            raise NotImplementedError(
                f"dropout_p: expected 0 with a block_table, got {dropout_p}; pass dropout_p=0, or packed k and v without a block_table"
            )
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


@names.shown
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_varlen_qkvpacked_func. The other arguments are those of flash_attn_func.

    Args:
        qkv: queries, keys and values [total, 3, H, D] of packed sequences; the slices are read in place.
        cu_seqlens: int32 [B + 1] on the device of qkv: sequence b is the rows cu_seqlens[b] to cu_seqlens[b + 1].
        max_seqlen: an upper bound of the lengths, in rows.

    Returns:
        out [total, H, D], or (out, softmax_lse, None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_varlen_qkvpacked_func", unknown)
    _expect("qkv", qkv, ("total", 3, "heads", "head_dim"))
    arguments.tensors(cu_seqlens=cu_seqlens)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@names.shown
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """flash-attn 2's flash_attn_varlen_kvpacked_func. The other arguments are those of flash_attn_varlen_func.

    Args:
        q: queries [total_q, Hq, D] of packed sequences.
        kv: keys and values [total_k, 2, Hk, D]; the slices are read in place.

    Returns:
        out [total_q, Hq, D], or (out, softmax_lse, None) with return_attn_probs.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attn_varlen_kvpacked_func", unknown)
    _expect("kv", kv, ("total", 2, "heads", "head_dim"))
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@names.shown
def flash_attention_npu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None, **unknown: NoReturn
) -> Tensor:
    """forward() in the signature that Ascend users know. It runs on the device of the tensors, not only on NPUs.

    Args:
        q: queries [B, Hq, Sq, D].
        k: keys [B, Hk, Sk, D]; Hq is a multiple of Hk.
        v: values [B, Hk, Sk, Dv].
        causal: query i sees the keys j <= i + Sk - Sq.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.

    Returns:
        out [B, Hq, Sq, Dv] in the dtype of q; differentiable like forward().

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in flashattn_ext.forward.
    """
    if unknown:
        raise names.not_an_argument("flash_attention_npu", unknown)
    return forward(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bhsd")
