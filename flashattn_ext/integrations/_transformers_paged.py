"""Continuous batching of transformers, model.generate_batch(): requests of any length in one row, with their keys in a paged cache.

transformers runs it with a fixed list of attention implementations, and reads keys in place (its "decode fast path") with flash-attn
alone. accept_continuous_batching() adds the names that register() was called with to both.

A layer is called in one of two ways. A step in which every request has one new token gets the pages of the layer and a block table:
flash_attn_with_kvcache reads the keys where they lie. Any other step, and every step of a model with sliding windows, gets the keys of all
requests gathered into one row: varlen_forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

import flashattn_ext
from flashattn_ext.decode import has_decoding
from flashattn_ext.tensor_cache import TensorCache

from ._transformers_layers import SAYS_NOTHING, layer_name, unsupported

# Arguments of continuous batching that transformers passes on to the layers, and that only its caches or the sampling read.
_OF_CACHES = {"cache", "logits_indices", "logits_processor_args", "read_index", "write_index"}
_PAGE_MULTIPLE = 16  # keys: pages of flash_attn_with_kvcache

_lengths = TensorCache()  # by cu_seq_lens_k: keys of each request before and after a step, for all of its layers


def accept_continuous_batching(names: AbstractSet[str]) -> None:
    """Lets generate_batch() run models whose attn_implementation is one of `names`, which may grow later. Called once.

    In versions of transformers that choose the implementation in another way, nothing is changed: they raise their own error.
    """
    try:
        from transformers.generation.continuous_batching import cache, continuous_api, initialization

        manager = continuous_api.ContinuousBatchingManager
        choose = manager.switch_to_cb_friendly_attn
        limit = initialization.ensure_decode_fast_path_is_available
    except (ImportError, AttributeError):
        return

    # Older versions have none: their pages are not read in place.
    allocators = getattr(cache, "ATTN_TYPE_TO_ALLOCATOR", None)

    @functools.wraps(choose)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **options: Any) -> None:
        if model.config._attn_implementation not in names:
            choose(self, model, *args, **options)

    @functools.wraps(limit)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, *args: Any, **options: Any) -> None:
        wanted = cb_config.max_blocks_per_request
        limit(config, cb_config, *args, **options)
        if allocators is None or not wanted or config._attn_implementation not in names:
            return
        kinds = cache.group_layers_by_attn_type(config)
        if _can_read_pages_of(cb_config.page_size) and all(allocators[kind].supports_block_table for kind in kinds):
            cb_config.max_blocks_per_request = wanted

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn  # type: ignore[method-assign]
    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available


def _can_read_pages_of(keys: int) -> bool:
    """Whether the kernels of decoding run on the device of the models of this process, with pages of so many keys."""
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return keys % _PAGE_MULTIPLE == 0 and has_decoding(device or torch.device("cpu"))


def step_of_requests(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, refused: dict[str, Tensor | None], shown: dict[str, Any],
    of_step: dict[str, Any],
) -> Tensor:  # fmt: skip
    """One layer of a step, out [1, T, Hq, Dv].

    Args:
        module: the layer; errors name it.
        query: as in attention().
        key: as in attention().
        value: as in attention().
        refused: arguments that continuous batching does not have, by name.
        shown: options of both varlen_forward and flash_attn_with_kvcache.
        of_step: what transformers passes for the step, by name.
    """
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{layer_name(module)}: {name}: expected None in continuous batching, whose requests share one row, got a tensor; use "
                'model.generate(), or attn_implementation="sdpa"'
            )
    for name, given in of_step.items():
        known = name in _TAKEN or name in SAYS_NOTHING or name in _OF_CACHES
        if not known and given is not None and given is not False:
            raise unsupported(module, name, given)
    steps = {name: given for name, given in of_step.items() if name in _TAKEN}
    return attention(query, key, value, **steps, **shown)


def attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: int, max_length_k: int,
    block_table: Tensor | None = None, k_cache: Tensor | None = None, v_cache: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """One layer of a step.

    Args:
        query: [1, Hq, T, D], the new tokens of all requests.
        key: [1, Hk, keys, D], of all requests, one after the other; with a block table those of the T new tokens alone.
        value: the same, [1, Hk, keys, Dv].
        cu_seq_lens_q: int [requests + 1], where the new tokens of each request begin.
        cu_seq_lens_k: int32 [requests + 1], where its keys begin, or would begin if they were gathered.
        max_length_q: the largest number of new tokens of a request.
        max_length_k: the largest number of keys of a request.
        block_table: int32 [requests, pages of a request], the pages of each request, -1 after the last.
        k_cache: [pages, page_size, Hk, D], with a block table.
        v_cache: [pages, page_size, Hk, Dv].
        options: of both varlen_forward and flash_attn_with_kvcache.

    Returns:
        out [1, T, Hq, Dv]; rows of padding after the last request are 0 or without a meaning.
    """
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if block_table is None or k_cache is None or v_cache is None:
        starts = cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32)
        out: Tensor = flashattn_ext.varlen_forward(q, k, v, *starts, max_length_q, max_length_k, **options)
        return out[None]
    before, after = _lengths.get([cu_seq_lens_k], lambda: _lengths_of(cu_seq_lens_k))
    _append(k_cache, k, block_table, before)
    _append(v_cache, v, block_table, before)
    out = flashattn_ext.flash_attn_with_kvcache(
        q[:, None], k_cache, v_cache, cache_seqlens=after, block_table=block_table, **options
    )
    return out[None, :, 0]


_TAKEN = set(inspect.signature(attention).parameters) - {"options"}


def _lengths_of(cu_seq_lens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of each request before and after the step, int32 [requests]. Requests that pad the batch have one key after it."""
    after = cu_seq_lens_k.diff().clamp(min=1).to(torch.int32)
    return after - 1, after


def _append(pages: Tensor, new: Tensor, block_table: Tensor, lengths: Tensor) -> None:
    """Writes one new row [requests, Hk, D] of each request after its last.

    Not by flash_attn_with_kvcache: transformers alternates pages of keys and values in one tensor, and gives each as a view of all of it,
    so that the views share memory, where that function refuses to write. Requests of padding write to page 0, which nothing else uses.
    """
    size = pages.shape[1]
    page = block_table.gather(1, (lengths // size)[:, None].long())[:, 0].clamp(min=0).long()
    pages[page, (lengths % size).long()] = new.to(pages.dtype)
