"""Attention to a key-value cache: flash_attn_with_kvcache in flash-attn 2's signature, and what packed calls with pages share with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _C, arguments, ops
from .mask import Mask, checked_mask


class BlockTableError(ValueError, RuntimeError):
    """A sequence has more keys than its row of the block table has room for; flash-attn raises RuntimeError for it."""


# The largest number of each tensor of lengths that a call with pages has looked at, and the version of its contents then.
_largest: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

# Tensors that a call may have beside q and the caches, in the order of the op's schema.
_TENSORS = (
    "k", "v", "cu_seqlens_q", "cu_seqlens_k", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad",
    "block_table", "sink", "alibi_slopes",
)  # fmt: skip


def has_decoding(device: torch.device) -> bool:
    """Whether calls with a cache run on tensors of this device: Ascend's backends have none."""
    if device.type not in ("cpu", "cuda"):
        return False
    return torch.compiler.is_compiling() or not _C.forced_backend().startswith("ascend")


def flash_attn_window(window_size: Any) -> tuple[int, int]:
    """flash-attn takes every negative side as unbounded."""
    left, right = arguments.window(window_size)
    return max(left, -1), max(right, -1)


def _length(cache_seqlens: Any) -> tuple[Tensor | None, int]:
    """cache_seqlens as a tensor [B], or as the length of every sequence; (None, -1) for whole caches."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        return cache_seqlens, -1
    length = arguments.integer("cache_seqlens", cache_seqlens)
    if length < 0:
        raise ValueError(f"cache_seqlens: expected an int of at least 0 or int32 [batch], got {length}")
    return None, length


def _check_room(lengths: Any, new_keys: Tensor | None, k_cache: Tensor, block_table: Tensor) -> None:
    """Raises BlockTableError where lengths and new keys need more pages than block_table has columns.

    Lengths on an accelerator are waited for once after each change that torch knows of: once for all layers of a step. They
    are not looked at in a CUDA graph, under torch.compile or in inference mode, which counts no changes: there the op clamps them.
    """
    if (
        torch.compiler.is_compiling()
        or type(lengths) is not Tensor
        or lengths.dtype != torch.int32
        or lengths.is_inference()
    ):
        return
    if not lengths.numel() or block_table.dim() != 2 or k_cache.dim() != 4:
        return  # the op says what is wrong, if anything is
    version, largest = _largest.get(lengths, (-1, 0))
    if version != lengths._version:
        if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        largest = int(lengths.max())
        _largest[lengths] = lengths._version, largest
    new = 0 if new_keys is None else new_keys.shape[1]
    columns, page_size = block_table.shape[1], k_cache.shape[1]
    if largest + new > columns * page_size:
        raise BlockTableError(
            f"cache_seqlens: the longest sequence has {largest} keys before the call and {new} new ones, and block_table has room for "
            f"{columns * page_size} ({columns} pages of {page_size}); give block_table more columns"
        )


def _call_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, *,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, max_seqlen_q: int = 0, max_seqlen_k: int = 0,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, rotary_interleaved: bool = True,
    cache_seqlens: Any = None, cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None, smooth_softmax: bool = False, mask: Mask | None = None, num_splits: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of the op; its arguments in one form and in the order of its schema (csrc/decode_call.cpp)."""
    arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    lengths, length = _length(cache_seqlens)
    given = (
        k, v, cu_seqlens_q, cu_seqlens_k, rotary_cos, rotary_sin, lengths, cache_batch_idx, cache_leftpad, block_table, sink,
        alibi_slopes,
    )  # fmt: skip
    for value in given:
        if value is not None and type(value) is not Tensor:
            arguments.optional_tensors(**dict(zip(_TENSORS, given, strict=True)))
    checked = None if mask is None else checked_mask(mask)
    intervals, extremes = (None, None) if checked is None else (checked.intervals, checked.extremes())
    left, right = flash_attn_window(window_size)
    op = ops.decode if k is None and v is None else ops.decode_append
    out, lse = op(
        q, k_cache, v_cache, *given, intervals, extremes,
        arguments.integer("max_seqlen_q", max_seqlen_q), arguments.integer("max_seqlen_k", max_seqlen_k), length,
        arguments.flag("rotary_interleaved", rotary_interleaved), arguments.scale(softmax_scale, q),
        arguments.number("softcap", softcap), arguments.flag("causal", causal), left, right,
        arguments.flag("smooth_softmax", smooth_softmax), arguments.integer("num_splits", num_splits),
    )  # fmt: skip
    return out, lse


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, sink: Tensor | None = None, smooth_softmax: bool = False,
    mask: Mask | None = None,
) -> Any:  # fmt: skip
    """Appends new keys and values to a cache, in place, and attends to what it then holds. Forward only: a backward through it raises.

    Args:
        q: [B, Sq, Hq, D]. float16, bfloat16, float32, and float64 on the CPU.
        k_cache, v_cache: [cache entries, room, Hk, D] and [.., Dv], or with a block_table [pages, page_size, Hk, D], page_size
            a multiple of 16. Any strides, but the last dimension is contiguous. Keys after a sequence's length are never read.
            Where new keys are written, a cache that requires grad raises, except under torch.no_grad().
        k, v: [B, new keys, Hk, D] and [.., Dv], written after the cache_seqlens keys that are there, and attended to.
        rotary_cos, rotary_sin: [positions, R / 2] in the dtype of q, with k and v only: the first R elements of k's rows are
            rotated for the positions cache_seqlens, cache_seqlens + 1, ..., and so are q's with causal or a window; otherwise all
            rows of q for the position cache_seqlens.
        cache_seqlens: keys of every sequence before the call appends any: an int or int32 [B]; None is the whole cache.
        cache_batch_idx: int32 [B], the cache entry of each sequence; None is 0, 1, 2, ...
        cache_leftpad: int32 [B], where in its room each sequence begins; what is before is no key of it.
        block_table: int32 [B, pages of a sequence], the page that holds the keys page_size * n to page_size * (n + 1) of each
            sequence. Entries outside the cache count as the nearest page.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        causal, window_size: as in forward(), aligned at the end of each sequence with its new keys.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off.
        rotary_interleaved: rotates the elements 2n and 2n + 1 together, otherwise n and n + R / 2.
        alibi_slopes: float32 [Hq] or [B, Hq]; adds -slope * |i + length - Sq - j|.
        num_splits: into how many parts the keys of a sequence are split, for all heads; up to 256. 0 chooses. With any other number
            the bits of a sequence's result do not depend on the batch around it; on the CPU they never do.
        return_softmax_lse: also return lse.
        sink, smooth_softmax: as in forward().
        mask: a Mask of the last n keys of every sequence, intervals [B or 1, 1 or Hk or Hq, n, 2]: Mask.tree of the Sq keys that a
            step of speculative decoding appends, say. The keys before those are hidden by causal and window_size alone.

    Returns:
        out [B, Sq, Hq, Dv], or (out, lse) with lse [B, Hq, Sq], float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError, NotImplementedError: naming the argument; nothing has been written then. On the CPU lengths beyond the
            cache are among them. Accelerators are not waited for: there lengths are clamped to the room that there is, and new
            keys without room are left out. Only lengths beyond a block_table raise there too, a ValueError that is a
            RuntimeError as well, as in flash-attn: cache_seqlens is read once after each change of it, though not while a CUDA
            graph is captured, under torch.compile or in inference mode.
    """
    if block_table is not None and isinstance(k_cache, Tensor) and isinstance(block_table, Tensor):
        _check_room(cache_seqlens, k, k_cache, block_table)
    out, lse = _call_op(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        sink=sink, smooth_softmax=smooth_softmax, mask=mask, num_splits=num_splits,
    )  # fmt: skip
    return (out, lse) if arguments.flag("return_softmax_lse", return_softmax_lse) else out


def paged_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    block_table: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """flash_attn_varlen_func with pages: q [total_q, Hq, D], k and v [pages, page_size, Hk, D] -> (out, lse)."""
    arguments.tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table)
    return _call_op(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        block_table=block_table, **options,
    )  # fmt: skip
