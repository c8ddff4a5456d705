"""kvcache_reference: calls with a KV cache in plain PyTorch, for tests and users to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import arguments, fp8, names
from .block_mask import checked_intervals
from .mask import Mask
from .reference import _lse_dtype, _rotated, attention_reference

_OPTIONS = (
    "softmax_scale",
    "softcap",
    "sink",
    "smooth_softmax",
    "out_dtype",
)  # what `options` of kvcache_reference may hold


@names.shown
def kvcache_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *more: Any,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    return_max_logits: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """flash_attn_with_kvcache in plain PyTorch, sequence by sequence; it also appends k and v to the caches.

    Lengths and block table entries beyond the cache are clamped, on every device. Waits for the device. The other arguments are those of
    flash_attn_with_kvcache.

    Args:
        q: queries [B, Sq, Hq, D].
        k_cache: keys [cache entries, capacity, Hk, D], or [pages, page_size, Hk, D] with a block_table.
        v_cache: values [cache entries, capacity, Hk, Dv], or [pages, page_size, Hk, Dv].
        return_max_logits: also return the largest logits, as flash_attn_with_kvcache does.
        options: softmax_scale, softcap, sink, smooth_softmax and out_dtype.

    Returns:
        (out [B, Sq, Hq, Dv], lse [B, Hq, Sq]), and with return_max_logits (out, lse, max_logits [B, Hq]).

    Raises:
        TypeError: an option is unknown, or its type is not as described; nothing has been written by then.
        ValueError: k without v, or rotary_cos without rotary_sin.
    """
    if more or options.keys() - {*_OPTIONS}:
        unknown = {name: value for name, value in options.items() if name not in _OPTIONS}
        raise names.not_an_argument("kvcache_reference", unknown, more)
    arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    arguments.optional_tensors(
        k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table, alibi_slopes=alibi_slopes, sink=options.get("sink"), descale_q=descale_q, descale_k=descale_k,
        descale_v=descale_v,
    )  # fmt: skip
    for names_of_pair, pair in (("k and v", (k, v)), ("rotary_cos and rotary_sin", (rotary_cos, rotary_sin))):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(f"{names_of_pair} must be given together")
    causal, window_size = arguments.flag("causal", causal), arguments.flash_attn_window(window_size)
    rotary_interleaved = arguments.flag("rotary_interleaved", rotary_interleaved)
    returns_max_logits = arguments.flag("return_max_logits", return_max_logits)
    smooth = arguments.flag("smooth_softmax", options.get("smooth_softmax", False))
    options["smooth_softmax"] = smooth
    B, Sq = q.shape[:2]
    entries, page_size = k_cache.shape[:2]
    capacity = page_size * (1 if block_table is None else block_table.shape[1]) if entries else 0
    new = 0 if k is None else k.shape[1]
    results = []

    def descale_of(given: Tensor | None, b: int) -> Tensor | None:
        """[1, Hk or 1]"""
        return None if given is None else given[b if given.shape[0] > 1 else 0][None]

    def number_of(given: int | Tensor | None, b: int, otherwise: int) -> int:
        return otherwise if given is None else given if isinstance(given, int) else int(given[b])

    for b in range(B):
        rows = torch.arange(capacity, device=q.device)
        entry = torch.full_like(rows, number_of(cache_batch_idx, b, b))
        if block_table is not None:
            entry = block_table[b].long()[rows // max(page_size, 1)]
        place = entry.clamp(0, max(entries - 1, 0)), rows % max(page_size, 1)
        cached = min(max(number_of(cache_seqlens, b, capacity), 0), capacity)
        end = min(cached + new, capacity)
        start = min(max(number_of(cache_leftpad, b, 0), 0), end)
        q_b, positions = q[b], torch.arange(Sq, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            each = causal or max(window_size) >= 0
            q_b = _rotated(q_b, rotary_cos, rotary_sin, cached + positions * each, rotary_interleaved)
        if k is not None and v is not None:
            k_b, v_b = k[b, : end - cached], v[b, : end - cached]
            quantises = k_cache.dtype == fp8.FP8 != k.dtype
            if quantises:  # once, from the rotated keys in float32
                k_b, v_b = k_b.float(), v_b.float()
            if rotary_cos is not None and rotary_sin is not None:
                k_b = _rotated(k_b, rotary_cos, rotary_sin, rows[cached:end], rotary_interleaved)
            if quantises:
                k_b = fp8.quantised(k_b, _of_rows(descale_of(descale_k, b)))
                v_b = fp8.quantised(v_b, _of_rows(descale_of(descale_v, b)))
            appended = tuple(t[cached:end] for t in place)
            _bytes(k_cache)[appended], _bytes(v_cache)[appended] = _bytes(k_b), _bytes(v_b)
        used = tuple(t[start:end] for t in place)
        k_b, v_b = (_bytes(cache)[used].view(cache.dtype) for cache in (k_cache, v_cache))
        of_sequence = attention_reference(
            q_b[None], k_b[None], v_b[None], causal=causal, window_size=window_size,
            descale_q=descale_of(descale_q, b), descale_k=descale_of(descale_k, b), descale_v=descale_of(descale_v, b),
            alibi_slopes=alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes,
            mask=None if mask is None else _of_last_keys(mask, b, Sq, end - start), return_lse=True,
            return_max_logits=True, **options,
        )  # fmt: skip
        results.append(of_sequence)
    if not results:
        lse = q.new_zeros(0, q.shape[2], Sq, dtype=_lse_dtype(q))
        dtype = fp8.dtype_of_out(q, options.get("out_dtype"))
        results = [
            (
                q.new_zeros(*q.shape[:-1], v_cache.shape[-1], dtype=dtype),
                lse,
                q.new_zeros(0, q.shape[2], dtype=torch.float32),
            )
        ]
    out, lse, max_logits = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    return (out, lse, max_logits) if returns_max_logits else (out, lse)


names.known(kvcache_reference, _OPTIONS)


def _of_rows(descale: Tensor | None) -> Tensor | float:
    """A descale [1, Hk or 1] as a factor of rows [rows, Hk, D]."""
    return 1.0 if descale is None else descale[:, :, None]


def _bytes(t: Tensor) -> Tensor:
    """The bytes of an fp8 tensor, for indexing, which torch has for few devices in that dtype; other tensors as they are."""
    return t.view(torch.uint8) if t.dtype == fp8.FP8 else t


def _of_last_keys(mask: Mask, b: int, Sq: int, keys: int) -> Mask:
    """A Mask of the last keys of sequence b, extended to all of its keys: every row sees the keys before them."""
    given = checked_intervals(mask, "a call with a KV cache").intervals
    given = given[b if given.shape[0] > 1 else 0][None, :, max(given.shape[2] - keys, 0) :]
    seen = given.new_tensor([0, Sq]).expand(1, given.shape[1], keys - given.shape[2], 2)
    return Mask(torch.cat([seen, given], 2))
