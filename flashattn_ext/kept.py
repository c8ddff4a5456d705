"""A cache of values computed from the contents of tensors, invalidated when a tensor is replaced or written to in place.

A tensor counts the in-place operations on it in `_version`. Writes that torch does not see (through `.numpy()`, `.data`, another
library) are not counted, and do not invalidate the cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops

Value = TypeVar("Value")


def state_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """A value that changes whenever one of these tensors is written to in place; None if such writes cannot be detected.

    It includes the current stream and graph capture of a CUDA device: a captured graph computes cached values itself, so that a replay
    uses the contents that the tensors have then. It is None while torch.compile traces and for tensors of inference mode, which have no
    version counter.
    """
    if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors):
        return None
    return (*(tensor._version for tensor in tensors), *ops.place_of_work(tensors[0].device))


class _Entry(NamedTuple):
    state: tuple[int, ...]
    others: tuple[weakref.ref[Tensor], ...]  # the tensors after the first
    settings: Hashable
    value: Any


class KeptForTensors:
    """Caches a value for each list of tensors and settings, for as long as the first tensor lives.

    Nothing is stored on the tensors themselves, so that copying or saving them does not include the cache.

    Args:
        most: the number of latest values that are kept for one first tensor.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[Tensor], make: Callable[[], Value], settings: Hashable = ()) -> Value:
        """The cached value for these tensors and settings, or else a new one from `make`.

        The result of `make` must not hold a reference to the first tensor, which would keep it alive forever.
        """
        state = state_of(tensors)
        if state is None:
            return make()
        first, *others = tensors
        entries: tuple[_Entry, ...] = self._entries.get(first, ())
        for entry in entries:
            same = entry.state == state and entry.settings == settings and len(entry.others) == len(others)
            if same and all(kept() is given for kept, given in zip(entry.others, others, strict=True)):
                value: Value = entry.value
                return value
        made = make()
        latest = entries[1 - self._most :] if self._most > 1 else ()
        self._entries[first] = (*latest, _Entry(state, tuple(weakref.ref(t) for t in others), settings, made))
        return made
