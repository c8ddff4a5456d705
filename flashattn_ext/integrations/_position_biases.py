"""Position biases of transformers' models, [1, H, Sq, Sk] tensors that are added to the scores, as relative biases where they are ones.

A relative bias has an entry for every distance, and its gradient is the sum over all pairs at that distance. A position bias can take its
place only if its entries at one distance are one number of the model, as T5's are: rows of a table, looked up by distance. Equal values do
not tell: a bias that is zero at its initialisation has an entry for each pair all the same, and each needs its own gradient. Where a
gradient is computed the graph decides, which knows the rows that were looked up; elsewhere the values do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashattn_ext.tensor_cache import TensorCache

from . import _mask_tensors

_decisions = TensorCache()  # by position bias; every layer of T5 gets the same tensor

# Nodes of a graph that change neither the order of elements nor which of them are equal.
_KEEPS_ELEMENTS = ("ToCopyBackward0", "CloneBackward0", "AliasBackward0")


def is_of_distance(position_bias: Tensor) -> bool:
    """Whether a bias [1, H, Sq, Sk] is a function of the distance of key and query alone, in its values and for its gradient.

    False where that is unknown. On an accelerator the first layer waits for the device.
    """
    if position_bias.shape[0] != 1 or type(position_bias) is not Tensor or not _mask_tensors.may_look(position_bias):
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return False  # derivatives that the graph does not show
    if not (position_bias.requires_grad and torch.is_grad_enabled()):
        return _decisions.get([position_bias], lambda: _is_diagonal(position_bias.detach()), False)
    return _decisions.get([position_bias], lambda: _is_looked_up_by_distance(position_bias), True)


def relative_bias(position_bias: Tensor) -> Tensor:
    """The bias of every distance, [H, 2 L + 1] with L one less than the longer of Sq and Sk, from the first column and row.

    The gradient of a diagonal flows to the one element that was read. That is correct: the whole diagonal is one entry of the table.
    """
    Sq, Sk = position_bias.shape[2:]
    distance = torch.arange(1 - Sq, Sk, device=position_bias.device)
    distances = position_bias[0, :, (-distance).clamp(min=0), distance.clamp(min=0)]
    # relative_bias counts distances from the key that the query is aligned with, which is Sk - Sq further on.
    return torch.nn.functional.pad(distances, (max(Sq - Sk, 0), max(Sk - Sq, 0)))


def _is_diagonal(matrix: Tensor) -> bool:
    """Whether [..., Sq, Sk] has one value on each diagonal."""
    return bool(torch.equal(matrix[..., 1:, 1:], matrix[..., :-1, :-1]))


def _is_looked_up_by_distance(position_bias: Tensor) -> bool:
    """Whether the graph of a bias is table[rows].permute(2, 0, 1).unsqueeze(0), with rows [Sq, Sk] that depend on the distance alone."""
    node = _node(position_bias.grad_fn)
    if node is None or node.name() != "UnsqueezeBackward0" or node._saved_dim != 0:
        return False
    node = _node(node.next_functions[0][0])
    if node is None or node.name() != "PermuteBackward0" or tuple(node._saved_dims) != (2, 0, 1):
        return False
    node = _node(node.next_functions[0][0])
    if node is None or node.name() not in ("EmbeddingBackward0", "IndexBackward0"):
        return False
    saved = node._raw_saved_indices
    saved = saved if isinstance(saved, (tuple, list)) else (saved,)
    # Checkpointing replaces saved tensors, and computes them again if they are read.
    if len(saved) != 1 or _has_hooks(saved[0]):
        return False
    rows = node._saved_indices
    rows = rows[0] if isinstance(rows, (tuple, list)) else rows
    return isinstance(rows, Tensor) and rows.shape == position_bias.shape[2:] and _is_diagonal(rows)


def _has_hooks(saved: Any) -> bool:
    """Whether a tensor that a graph has saved was replaced by something else. An older torch tells by refusing other hooks."""
    if hasattr(saved, "unpack_hook"):
        return saved.unpack_hook is not None
    try:
        saved.register_hooks(_itself, _itself)
    except RuntimeError:
        return True
    return False


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _node(node: Any) -> Any:
    while node is not None and node.name() in _KEEPS_ELEMENTS:
        node = node.next_functions[0][0]
    return node
