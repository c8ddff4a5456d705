"""Encodes masks as tensors of four dimensions, which transformers passes from the mask function to the attention of every layer.

transformers passes the result of the mask function to the layers as `attention_mask`. Hooks that move a layer's arguments to its device,
checkpointing and torch.compile treat it as a tensor, generate() clones it, and some models slice its last dimension to the number of
keys. Two encodings survive all of that and cannot be mistaken for a dense mask, which is bool or floating-point:

- a window, an empty int32 tensor [0, left + 1, 1, right + 1] that encodes the window in its shape: every query sees `left` keys before
  its own and `right` keys after it, where a size of 0 means unbounded. (-1, 0) is causal attention.
- intervals, int32 [B or 1, 1, 2, Sk]: the intervals of flashattn_ext.Mask with the last two dimensions transposed. For two queries the
  tensor has one row more, so that a model that does not know the encoding cannot add it to scores [B, H, 2, Sk].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import Mask
from flashattn_ext.kept import KeptForTensors
from flashattn_ext.mask import ALL_ROWS

_masks = KeptForTensors()  # the Mask of each intervals tensor


def window_tensor(left: int, right: int, device: torch.device | str) -> Tensor:
    """Encodes a window; a side of -1 is unbounded, and so is a side past every key."""
    left, right = (-1 if side >= ALL_ROWS else side for side in (left, right))
    return torch.empty((0, left + 1, 1, right + 1), dtype=torch.int32, device=device)


def intervals_tensor(mask: Mask, queries: int) -> Tensor:
    """Encodes the mask of a dense call. The Mask is cached for the tensor, so that all layers share the extremes that it caches."""
    tensor = mask.intervals.transpose(2, 3)
    if queries == 2:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, 1))
    _masks.get([tensor], lambda: mask)
    return tensor


def as_window(tensor: Tensor) -> tuple[int, int] | None:
    """(left, right) of a window tensor, None for any other tensor."""
    if tensor.dtype != torch.int32 or tensor.dim() != 4 or tensor.shape[0] != 0:
        return None
    return tensor.shape[1] - 1, tensor.shape[3] - 1


def as_mask(tensor: Tensor) -> Mask | None:
    """The Mask of an intervals tensor, None for any other tensor."""
    if tensor.dtype != torch.int32 or tensor.dim() != 4 or tensor.shape[2] not in (2, 3):
        return None
    # detach: a view references its base tensor, and a cached value must not reference the tensor that it is cached for.
    return _masks.get([tensor], lambda: Mask(tensor[:, :, :2].transpose(2, 3).contiguous().detach()))


def may_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be read: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
