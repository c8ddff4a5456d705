"""A cache of values computed from the contents of tensors, invalidated when a tensor is replaced or written to in place.

A tensor counts the in-place operations on it in `_version`. Writes that torch does not see (through `.numpy()`, `.data`, another
library) are not counted, and do not invalidate the cache.

A cached value outlives the modes that the call which computes it happens to run in: inference mode, a transform of torch.func, a mode of
torch's dispatcher. It is therefore computed outside of them, and while a graph is traced nothing is cached or read from the cache.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from . import ops

Value = TypeVar("Value")


# The modes in which operators have no values to read, or become part of a graph.
_TRACING = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))


def has_values(tensor: Tensor) -> bool:
    """Whether the values of this tensor can be read and belong to it alone: not while a graph is traced, nor under torch.func."""
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(key) for key in _TRACING):
        return False
    return not is_functorch_wrapped_tensor(tensor)


def state_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """A value that changes whenever one of these tensors is written to in place or gets other memory; None if nothing may be cached.

    It includes the current stream and graph capture of a CUDA device: a captured graph computes cached values itself, so that a replay
    uses the contents that the tensors have then. It is None

    - while torch.compile, make_fx or a FakeTensorMode traces: what is computed there belongs to the graph;
    - for tensors of inference mode, which have no version counter, and for those that a transform of torch.func has wrapped, which end
      with the transform.
    """
    if torch.compiler.is_compiling():
        return None
    state: list[int] = []
    for tensor in tensors:
        if tensor.is_inference() or not has_values(tensor):
            return None
        # torch.utils.swap_tensors changes _cdata, and an assignment to .data the address; subclasses may have no address.
        address = tensor.data_ptr() if type(tensor) is Tensor else 0
        state += (tensor._version, tensor._cdata, address)
    return (*state, *ops.place_of_work(tensors[0].device))


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Values that are computed here are plain tensors, also inside of torch.inference_mode and the transforms of torch.func.

    Modes that see every operator, such as selective checkpointing, do not see these, which run once for many calls.
    """
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableFuncTorch(), _disable_current_modes():
        yield


class _Entry(NamedTuple):
    state: tuple[int, ...]
    others: tuple[weakref.ref[Tensor], ...]  # the tensors after the first
    settings: Hashable
    value: Any


class TensorCache:
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
        with outside_of_modes():
            made = make()
        latest = entries[1 - self._most :] if self._most > 1 else ()
        self._entries[first] = (*latest, _Entry(state, tuple(weakref.ref(t) for t in others), settings, made))
        return made
