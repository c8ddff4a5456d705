"""How a mask travels through transformers, from the mask function to the attention of every layer: as a tensor of four dimensions.

transformers hands on what the mask function returns as `attention_mask`. Hooks that move a layer's arguments to its device,
checkpointing and torch.compile treat it as a tensor, generate() clones it and some models slice its last dimension to the number of
keys. Two forms live through all of that and cannot be mistaken for a dense mask, which is bool or floating-point:

- a window, an empty int32 tensor [0, left + 1, 1, right + 1] whose shape is all that it says: every query sees `left` keys before
  its own and `right` keys after it, a size of 0 standing for all of them. (-1, 0) is causal attention.
- intervals, int32 [B or 1, 1, 2, Sk]: what flashattn_ext.Mask takes, with its last two dimensions transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_ext import Mask

_MASK = "_flashattn_ext_mask"


def window_tensor(left: int, right: int, device: torch.device | str) -> Tensor:
    """The window as a tensor; -1 is unbounded."""
    return torch.empty((0, left + 1, 1, right + 1), dtype=torch.int32, device=device)


def intervals_tensor(mask: Mask) -> Tensor:
    """A dense call's mask as a tensor. It remembers the Mask, which keeps what the kernels compute about it once for all layers."""
    tensor = mask.intervals.transpose(2, 3)
    remember(tensor, mask)
    return tensor


def as_window(tensor: Tensor) -> tuple[int, int] | None:
    """(left, right) of a window's tensor, None for anything else."""
    if tensor.dtype != torch.int32 or tensor.dim() != 4 or tensor.shape[0] != 0:
        return None
    return tensor.shape[1] - 1, tensor.shape[3] - 1


def as_mask(tensor: Tensor) -> Mask | None:
    """The Mask of an intervals' tensor, None for anything else."""
    if tensor.dtype != torch.int32 or tensor.dim() != 4 or tensor.shape[2] != 2:
        return None
    return remembered(tensor) or remember(tensor, Mask(tensor.transpose(2, 3).contiguous()))


def may_look(tensor: Tensor) -> bool:
    """Whether values can decide what happens: not in a graph that is being traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def remembered(tensor: Tensor) -> Mask | None:
    """The Mask that was made of a tensor before. A graph that is being traced knows no attributes of tensors."""
    return None if torch.compiler.is_compiling() else getattr(tensor, _MASK, None)


def remember(tensor: Tensor, mask: Mask) -> Mask:
    if not torch.compiler.is_compiling():
        setattr(tensor, _MASK, mask)
    return mask
