"""Attention with a KV cache: flash_attn_with_kvcache in flash-attn 2's signature, and packed calls with a paged cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _C, arguments, names, ops, tensor_cache
from .calls import DENSE, intervals_of, lengths_of, results
from .fp8 import FP8
from .mask import Mask
from .options import OPTIONS


class BlockTableError(ValueError, RuntimeError):
    """A sequence has more keys than its row of the block table can hold. A RuntimeError too, because flash-attn raises one."""


_largest = tensor_cache.TensorCache()  # the maximum of each tensor of lengths that came with a block table

# The tensors of a decoding call that forward() does not have, in the order of the op's schema (csrc/call/decode_call.cpp).
_CACHE_TENSORS = (
    "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
)  # fmt: skip
_CHOSEN = 0  # num_splits by the backend; Python has one object for it
_OUT_DTYPE = [option.name for option in OPTIONS if option.decodes].index("out_dtype")


def _convert(
    q: Tensor, lengths: tuple[Any, ...], *, softmax_scale: Any = None, causal: Any = False, window_size: Any = (-1, -1),
    softcap: Any = 0.0, alibi_slopes: Any = None, sink: Any = None, smooth_softmax: Any = False, mask: Any = None, descale_q: Any = None, descale_k: Any = None,
    descale_v: Any = None, out_dtype: Any = None, invariant: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Checks keyword arguments, and converts them to the arguments of the decoding ops that csrc/call/options.def describes.

    As in calls.convert(), a value of the usual type costs no call of a function. lengths: those of lengths_of(), or DENSE.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    if not (sink is None and alibi_slopes is None and descale_q is None and descale_k is None and descale_v is None):
        arguments.optional_tensors(
            sink=sink, alibi_slopes=alibi_slopes, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v
        )
    intervals, extremes = (None, None) if mask is None else intervals_of(mask)
    left, right = arguments.flash_attn_window(window_size)
    return (
        cu_seqlens_q,
        cu_seqlens_k,
        sink,
        alibi_slopes,
        intervals,
        extremes,
        descale_q,
        descale_k,
        descale_v,
        max_seqlen_q,
        max_seqlen_k,
        arguments.scale(softmax_scale, q),
        softcap if type(softcap) is float else arguments.number("softcap", softcap),
        causal if causal is True or causal is False else arguments.flag("causal", causal),
        left,
        right,
        smooth_softmax
        if smooth_softmax is True or smooth_softmax is False
        else arguments.flag("smooth_softmax", smooth_softmax),
        invariant if invariant is True or invariant is False else arguments.flag("invariant", invariant),
        None if out_dtype is None else arguments.dtype("out_dtype", out_dtype),
    )


def has_decoding(device: torch.device) -> bool:
    """Whether decoding runs on tensors of this device; the Ascend backends do not have it."""
    if device.type not in ("cpu", "cuda"):
        return False
    return torch.compiler.is_compiling() or not _C.forced_backend().startswith("ascend")


def _length(cache_seqlens: Any) -> tuple[Tensor | None, int]:
    """cache_seqlens as (tensor [B], -1), or as (None, length of every sequence)."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens, -1
    length = arguments.integer("cache_seqlens", cache_seqlens)
    if torch.compiler.is_compiling():
        torch._check(length >= 0)  # at run time where the number comes from .item()
    elif length < 0:
        raise ValueError(f"cache_seqlens: expected an int of at least 0 or int32 [batch], got {length}")
    return None, length


def _check_room(lengths: Any, new_keys: Tensor | None, k_cache: Tensor, block_table: Tensor) -> None:
    """Raises BlockTableError where lengths and new keys need more pages than block_table has columns.

    Lengths on an accelerator are read, which waits for the device, once after each in-place change: once for all layers of a step.
    They are not read in a CUDA graph capture, under torch.compile, in inference mode (tensors have no version counter there), in
    transforms of torch.func, or where they have no values, as on the meta device; the op then clamps them.
    """
    if torch.compiler.is_compiling() or type(lengths) is not Tensor or lengths.dtype != torch.int32 or lengths.is_meta:
        return
    if lengths.dim() != 1 or not lengths.numel() or block_table.dim() != 2 or k_cache.dim() != 4:
        return  # the op's own checks raise where these are wrong
    if lengths.is_cpu:
        if not tensor_cache.has_values(lengths):
            return
        largest = max(lengths.tolist())
    else:
        if tensor_cache.state_of((lengths,)) is None or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        largest = _largest.get([lengths], lambda: int(lengths.max()))
    new = 0 if new_keys is None else new_keys.shape[1]
    columns, page_size = block_table.shape[1], k_cache.shape[1]
    if largest + new > columns * page_size:
        raise BlockTableError(
            f"cache_seqlens: the longest sequence has {largest} keys before the call and {new} new keys, but block_table has room for "
            f"{columns * page_size} ({columns} pages of {page_size}); give block_table more columns"
        )


def _call_op(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, of_cache: tuple[Tensor | None, ...], length: int, options: tuple[Any, ...],
    rotary_interleaved: bool = True, num_splits: int = 0, return_max_logits: bool = False, keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Checks and converts the arguments, and calls the op in the order of its schema (csrc/call/decode_call.cpp): (out, lse, max_logits).

    of_cache: the tensors that _CACHE_TENSORS names. length: of every sequence, -1 for whole caches or a tensor of lengths. options:
    what _convert returns. keeps_dtype: autocast does not cast out.
    """
    result_dtype = arguments.autocast_dtype(q)
    if result_dtype is not None:
        if k_cache.dtype == FP8 and not keeps_dtype:  # the op rounds out once
            options = (*options[:_OUT_DTYPE], result_dtype, *options[_OUT_DTYPE + 1 :])
        q, k_cache, v_cache, of_cache = _autocast(result_dtype, q, k_cache, v_cache, of_cache)
    for value in of_cache:
        if value is not None and type(value) is not Tensor:
            arguments.optional_tensors(**dict(zip(_CACHE_TENSORS, of_cache, strict=True)))
    if rotary_interleaved is not True and rotary_interleaved is not False:
        rotary_interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    if num_splits is not _CHOSEN:
        num_splits = arguments.integer("num_splits", num_splits)
    op = ops.decode if of_cache[0] is None and of_cache[1] is None else ops.decode_append
    out, lse, max_logits = op(
        q, k_cache, v_cache, *of_cache, length, rotary_interleaved, num_splits, return_max_logits, *options,
    )  # fmt: skip
    return out if result_dtype is None or keeps_dtype else arguments.cast(out, result_dtype), lse, max_logits


def _autocast(
    dtype: torch.dtype, q: Tensor, k_cache: Tensor, v_cache: Tensor, of_cache: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The tensors cast as in forward(). With new keys the caches keep their dtype, and the other tensors are cast to it.

    Caches of fp8 always keep their dtype, and the other tensors are cast to bfloat16, the one dtype that the op takes beside it.
    """
    *floats, lengths, batch_idx, leftpad, block_table = of_cache
    arguments.optional_tensors(**dict(zip(_CACHE_TENSORS, floats, strict=False)))
    if k_cache.dtype == FP8:
        dtype = torch.bfloat16
    elif floats[0] is None and floats[1] is None:
        k_cache, v_cache = arguments.cast(k_cache, dtype), arguments.cast(v_cache, dtype)
    elif k_cache.is_floating_point():
        dtype = k_cache.dtype
    cast = [None if t is None else arguments.cast(t, dtype) for t in floats]
    return arguments.cast(q, dtype), k_cache, v_cache, (*cast, lengths, batch_idx, leftpad, block_table)


@names.shown
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, *, sink: Tensor | None = None, smooth_softmax: bool = False,
    mask: Mask | None = None, return_max_logits: bool = False, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
    descale_v: Tensor | None = None, out_dtype: torch.dtype | None = None, invariant: bool = False, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """Appends new keys and values to a KV cache in place, and attends to the whole cache: decoding and prefill.

    The signature is flash-attn 2's with the additions sink, smooth_softmax, mask, return_max_logits, invariant and those of a cache in fp8:
    descale_q, descale_k, descale_v and out_dtype. Forward only: a backward through it raises.

    Inside torch.autocast q and the caches are cast as in forward(), which copies caches of another dtype at every call; where new keys
    are written, the caches keep their dtype and all other tensors are cast to it. Caches of float8_e4m3fn always keep it, and all other
    tensors are cast to bfloat16. The result has autocast's dtype, or out_dtype.

    Args:
        q: queries [B, Sq, Hq, D]; float16, bfloat16, float32, and float64 on the CPU; D from 1 to 512. On CUDA, float32 above 256
            needs a GPU with 168 KB of shared memory for a thread block. Not on Ascend. With caches of float8_e4m3fn:
            bfloat16 or float8_e4m3fn.
        k_cache: keys [cache entries, capacity, Hk, D], or with a block_table [pages, page_size, Hk, D], page_size a multiple
            of 16; in the dtype of q, or float8_e4m3fn. Any strides, but the last dimension is contiguous. Keys after a sequence's length are never read.
            Where new keys are written, a cache that requires grad raises, except under torch.no_grad(), and so does one with
            elements that share memory, with each other (an expanded cache) or with v_cache. Two parts of one tensor may alternate in
            memory. q, k and v may lie in a cache: they are read before it changes.
        v_cache: values [cache entries, capacity, Hk, Dv], or [pages, page_size, Hk, Dv].
        k: new keys [B, new keys, Hk, D], written after the cache_seqlens keys in the cache, and attended to. For a cache of
            float8_e4m3fn they are bfloat16, and k / descale_k is rounded to the nearest element (at most 448 in size), or they are
            float8_e4m3fn, and copied.
        v: new values [B, new keys, Hk, Dv], in the dtype of k; with descale_v.
        rotary_cos: [positions, R / 2] in the dtype of q, with k and v only: the first R elements of k's rows are
            rotated for the positions cache_seqlens, cache_seqlens + 1, ..., and so are q's with causal or a window; otherwise all
            rows of q are rotated for the position cache_seqlens.
        rotary_sin: [positions, R / 2], required with rotary_cos.
        cache_seqlens: number of keys of every sequence before the call appends any: an int or int32 [B]; None is the whole cache.
        cache_batch_idx: int32 [B], the cache entry of each sequence; None is 0, 1, 2, ... Where new keys are written, an entry that
            occurs twice raises on the CPU; accelerators do not read the values on the host, and such entries then hold a mixture.
        cache_leftpad: int32 [B], the first key of each sequence in its cache entry; keys before it are not part of the sequence.
        block_table: int32 [B, pages of a sequence], the page that holds the keys page_size * n to page_size * (n + 1) of each
            sequence. Entries outside the cache count as the nearest page.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        causal: as in forward(), aligned at the end of each sequence with its new keys.
        window_size: (left, right) as in forward(), aligned likewise; negative is unbounded.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off.
        rotary_interleaved: rotates the elements 2n and 2n + 1 together, otherwise n and n + R / 2.
        alibi_slopes: float32 [Hq] or [B, Hq]; adds -slope * |i + length - Sq - j|.
        num_splits: number of splits of each sequence's keys (split-KV), for all heads; up to 256. 0 lets the backend choose. With any other
            number the bits of a sequence's result do not depend on the rest of the batch; on the CPU they never do.
        return_softmax_lse: also return lse.
        sink: [Hq], a logit per head without a value, as in forward().
        smooth_softmax: adds a logit 0 without a value, as in forward().
        mask: a Mask of the last n keys of every sequence, intervals [B or 1, 1 or Hk or Hq, n, 2]; for example Mask.tree of the Sq
            keys that a step of speculative decoding appends. The keys before those are hidden by causal and window_size alone.
        return_max_logits: also return the largest logit of each head of each sequence, as in forward().
        descale_q: float32 [B or 1, Hk or 1] as in forward(), for q of float8_e4m3fn.
        descale_k: float32 [B or 1, Hk or 1], for a cache of float8_e4m3fn: the value of an element is element * descale, with the descale of
            its sequence and head, and None is 1. Sequences that share pages need the same descales.
        descale_v: float32 [B or 1, Hk or 1], the same for v_cache.
        out_dtype: with a cache of float8_e4m3fn, the dtype of out: bfloat16 (None), float16 or float32.
        invariant: a row has the bits that it has in forward(invariant=True), as described there; pages and num_splits do not change
            them. On the CPU and on CUDA.

    Returns:
        out [B, Sq, Hq, Dv], then if requested lse [B, Hq, Sq], float32 (float64 for float64 inputs), the natural logarithm of the
        softmax denominator, and max_logits [B, Hq], float32.

    Raises:
        ValueError: a shape or a value is not as described; nothing has been written by then. Lengths beyond the cache raise on the
            CPU. On accelerators they are clamped to the capacity, and new keys without room are dropped, because reading the lengths
            would wait for the device. Lengths beyond a block_table raise there too, an error that is a RuntimeError as well, as
            in flash-attn: cache_seqlens is read once after each change of it, but not while a CUDA graph is captured,
            under torch.compile, in inference mode or in transforms of torch.func.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: the backend has no decoding, or not for this call; names the nearest thing that works. Also for
            alibi_slopes with a cache of float8_e4m3fn, and for a rotation of q or k of that dtype.
        RuntimeError: in a backward through the call.

    Source: split-KV decoding after Flash-Decoding (Dao et al. 2023, "Flash-Decoding for long-context inference"); pages after
    PagedAttention (Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention").
    """
    if unknown:
        raise names.not_an_argument("flash_attn_with_kvcache", unknown)
    if return_softmax_lse is not False and return_softmax_lse is not True:
        return_softmax_lse = arguments.flag("return_softmax_lse", return_softmax_lse)
    if return_max_logits is not False and return_max_logits is not True:
        return_max_logits = arguments.flag("return_max_logits", return_max_logits)
    if block_table is not None and isinstance(k_cache, Tensor) and isinstance(block_table, Tensor):
        _check_room(cache_seqlens, k, k_cache, block_table)
    if not type(q) is type(k_cache) is type(v_cache) is Tensor:
        arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    options = _convert(
        q, DENSE, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, smooth_softmax=smooth_softmax, mask=mask,
        descale_q=descale_q, descale_k=descale_k, descale_v=descale_v, out_dtype=out_dtype, invariant=invariant,
    )  # fmt: skip
    lengths, length = (None, -1) if cache_seqlens is None else _length(cache_seqlens)
    of_cache = (k, v, rotary_cos, rotary_sin, lengths, cache_batch_idx, cache_leftpad, block_table)
    out, lse, max_logits = _call_op(
        q, k_cache, v_cache, of_cache, length, options, rotary_interleaved, num_splits, return_max_logits,
        out_dtype is not None,
    )  # fmt: skip
    return results(out, lse, max_logits, return_softmax_lse, return_max_logits)


def paged_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    block_table: Tensor, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """flash_attn_varlen_func with a paged KV cache: q [total_q, Hq, D], k and v [pages, page_size, Hk, D] -> (out, lse)."""
    arguments.tensors(
        q=q, k_cache=k, v_cache=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table
    )
    lengths = lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    converted = _convert(q, lengths, **options)
    out, lse, _ = _call_op(q, k, v, (*(None,) * (len(_CACHE_TENSORS) - 1), block_table), -1, converted)
    return out, lse
