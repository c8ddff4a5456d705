"""transformers models whose rows are shared by several ranks: register(cp_group=...).

Each rank runs the model on its part of every row, as flashattn_ext.distributed.shard splits it, with the position_ids of that part. A mask
must therefore be causal, a window, or follow from the position_ids of the whole row, because a rank has no mask tensor of other positions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from flashattn_ext import Mask, distributed
from flashattn_ext.distributed.groups import Group, resolved
from flashattn_ext.tensor_cache import TensorCache

from . import _mask_tensors
from ._transformers_masks import _AND, _CAUSAL, _KNOWN, _REMAP, MaskFunction, _packed, _plain_window

# By position_ids: the Mask of packed documents of the whole rows, gathered from all ranks; None without documents.
_wholes = TensorCache()


_READ_OUTSIDE = (
    "attention_mask: expected a mask that only attention reads where ranks share rows (cp_group), but this model reads it elsewhere, and a "
    "rank has no mask of other ranks' tokens; register the model without cp_group"
)


class SharedRows:
    """The attention and mask functions that register() installs in transformers for one group."""

    def __init__(self, group: Group, mode: str, sharding: str) -> None:
        self.group = resolved(group)
        self.mode = mode
        self.sharding = sharding

    def attention_mask(
        self, batch_size: int, q_length: Any = None, kv_length: int = 0, q_offset: Any = 0, kv_offset: Any = 0,
        mask_function: MaskFunction = _CAUSAL, attention_mask: Tensor | None = None, cache_position: Tensor | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype = torch.float32, **_hints: Any,
    ) -> Tensor:  # fmt: skip
        """A LayerMask of a window (_mask_tensors.py). Packed documents are found later by the layers, from position_ids.

        Eager's mask of one rank's queries and the keys of all ranks is not known here; reading it raises NotImplementedError.

        Raises:
            NotImplementedError: the batch is padded, or the mask is not made of causal, windows and packed documents.
        """
        if attention_mask is not None and (attention_mask.dim() != 2 or not bool(attention_mask.all())):
            raise NotImplementedError(
                "attention_mask: expected None or ones where ranks share rows (cp_group), got padding or a mask of scores; pack documents "
                "into rows instead, with position_ids that restart at 0 in each document"
            )
        window = _plain_window(_without_documents(mask_function))
        if window is None:
            raise NotImplementedError(
                "mask_function: expected causal or bidirectional attention, with sliding windows and packed documents, where ranks share "
                f"rows (cp_group), got {getattr(mask_function, '__qualname__', mask_function)}; register the model without cp_group"
            )
        if isinstance(q_length, Tensor):  # transformers 4
            cache_position = q_length
        queries = q_length if cache_position is None else cache_position.shape[0]
        code = _mask_tensors.window_code(*window, "cpu" if device is None else device)
        return _mask_tensors.layer_mask(code, batch_size, queries, kv_length, dtype, _READ_OUTSIDE)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, window: tuple[int, int], position_ids: Tensor | None, **options: Any
    ) -> Tensor:  # fmt: skip
        """query [B, Hq, s, D], key and value [B, Hk, s, ...] of this rank -> [B, s, Hq, Dv]; options as in distributed.attention."""
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError(
                f"query: expected as many queries as keys where ranks share rows (cp_group), got {query.shape[2]} and {key.shape[2]}; "
                "generate() runs on one rank"
            )
        out: Tensor = distributed.attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), group=self.group, mode=self.mode, sharding=self.sharding,
            causal=window[1] == 0, window_size=window, mask=self._documents(position_ids), **options,
        )  # fmt: skip
        return out

    def _documents(self, position_ids: Tensor | None) -> Mask | None:
        """The Mask of packed documents, which begin at position 0. The ranks communicate once for all layers of a forward pass."""
        if position_ids is None or position_ids.dim() != 2:
            raise ValueError(
                "position_ids: expected the positions of this rank's part of each row, [batch, positions], where ranks share rows (cp_group), "
                f"got {'None' if position_ids is None else f'shape {list(position_ids.shape)}'}; pass "
                "distributed.shard(torch.arange(S)[None], group=cp_group)"
            )
        return _wholes.get([position_ids], lambda: self._told(position_ids), (self.group, self.sharding))

    def _told(self, position_ids: Tensor) -> Mask | None:
        """The Mask of the documents in the whole rows, from the position_ids of all ranks; None without packed documents."""
        whole = distributed.unshard(position_ids, group=self.group, sharding=self.sharding)
        begins = whole == 0
        if not bool((begins[:, 1:] | (whole.diff(dim=1) == 1)).all()):
            raise ValueError(
                f"position_ids: expected positions that rise by 1 or restart at 0 in the whole rows, got {whole[0].tolist()[:8]}... "
                f"from all ranks together; shard them like the tokens ({self.sharding})"
            )
        return Mask.documents(begins.cumsum(1)) if bool(begins[:, 1:].any()) else None


def _without_documents(function: MaskFunction) -> MaskFunction:
    """The mask function without the part that separates packed documents.

    transformers mistakes the gaps between the chunks of a row on one rank for document boundaries.
    """
    if getattr(function, "__code__", None) is not _AND:
        return function
    rest: list[MaskFunction] = []
    for part in inspect.getclosurevars(function).nonlocals["mask_functions"]:
        code = getattr(part, "__code__", None)
        if code is _REMAP:  # its positions within documents have the same distances as positions in the row
            rest.append(inspect.getclosurevars(part).nonlocals["mask_function"])
        elif _KNOWN.get(code) is not _packed:
            rest.append(_without_documents(part))
    if len(rest) == 1:
        return rest[0]
    from transformers import masking_utils

    joined: MaskFunction = masking_utils.and_masks(*rest)
    return joined
