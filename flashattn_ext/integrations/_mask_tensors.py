"""The mask that transformers passes from the mask function to the layers of a model: eager's mask, not formed until it is read.

transformers passes the result of the mask function to every layer as `attention_mask`, and not only attention reads it: convolutions
zero padded frames with it, routers skip padding, indexers add it to their scores. LayerMask is therefore the tensor that eager attention
would get, [B, 1, Sq, Sk] of 0 where a query sees a key and the lowest finite number elsewhere, to whatever reads or writes it. It holds
a code in its place, from which attention knows the mask in memory linear in the number of keys:

- a window, an empty int32 tensor [0, left + 1, right + 1, 0 or 1] that encodes the window in its shape: every query sees `left` keys
  before its own and `right` keys after it, where a size of 0 means unbounded. (-1, 0) is causal attention. The last size is 1 if
  position_ids may separate documents that the mask does not.
- intervals, int32 [B or 1, 1, Sk, 2]: the intervals of flashattn_ext.Mask.
- visible pairs, bool [B or 1, 1, Sq, Sk], of a mask that is neither.

Moves to another device, casts, copies and slices of a LayerMask are LayerMasks. Any other operation runs on eager's mask, which is then
formed, once. Writes go to that one, too; it is then the code, floating-point, and attention adds it to the scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from flashattn_ext import Mask
from flashattn_ext.mask_arguments import ALL_ROWS
from flashattn_ext.tensor_cache import outside_of_modes

Operation = Callable[..., Any]

_aten = torch.ops.aten


# --- codes --------------------------------------------------------------------------------------------------------------


def window_code(left: int, right: int, device: torch.device | str, and_documents: bool = False) -> Tensor:
    """Encodes a window; a side of -1 is unbounded, and so is a side past every key.

    Args:
        left: number of keys before the query's own.
        right: number of keys after it.
        device: of the tensor.
        and_documents: whether position_ids may separate documents that the mask does not.
    """
    left, right = (-1 if side >= ALL_ROWS else side for side in (left, right))
    return torch.empty((0, left + 1, right + 1, int(and_documents)), dtype=torch.int32, device=device)


def as_window(code: Tensor) -> tuple[int, int] | None:
    """(left, right) of a window, None for any other code."""
    if code.dtype != torch.int32 or code.shape[3] == 2:
        return None
    return code.shape[1] - 1, code.shape[2] - 1


def and_documents(code: Tensor) -> bool:
    """Whether position_ids may separate documents beside this mask."""
    return code.dtype == torch.int32 and code.shape[3] == 1


def _visible(code: Tensor, Sq: int, Sk: int) -> Tensor:
    """bool, broadcastable to [B, 1, Sq, Sk]: which query sees which key."""
    if code.dtype == torch.bool:
        return code
    window = as_window(code)
    if window is None:
        return Mask(code).dense(Sq)
    left, right = window
    distance = torch.arange(Sk, device=code.device) - torch.arange(Sk - Sq, Sk, device=code.device)[:, None]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible = visible & (distance >= -left)
    if right >= 0:
        visible = visible & (distance <= right)
    return visible[None, None]


def _intervals(code: Tensor, Sq: int, Sk: int) -> Tensor:
    """The same mask as intervals, int32 [B or 1, 1, Sk, 2], of a window or intervals."""
    window = as_window(code)
    return code if window is None else Mask.window(*window, Sq, Sk, device=code.device).intervals.clamp(0, Sq)


# --- the mask -----------------------------------------------------------------------------------------------------------


class LayerMask(Tensor):
    """Eager's mask [B, 1, Sq, Sk], represented by a code. Made by layer_mask(); see the top of this file.

    Attributes:
        formed_in: the dtype whose lowest number hides a key; a cast of the mask rounds that number.
        refusal: why eager's mask cannot be formed, if it cannot: the message of the error.
    """

    formed_in: torch.dtype
    refusal: str | None
    _code: Tensor
    _formed: Tensor | None  # eager's mask, once something has read this one
    _source: tuple[LayerMask, Operation, tuple[Any, ...]] | None  # set for a view: the mask, and the operation on it
    _shown: bool  # a view of eager's mask was given away, or it was written to, where torch counts no writes
    _kept: Mask | None
    # What attention has made of this mask for a number of queries and keys, as long as it is untouched().
    known: tuple[int, int, Any] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[LayerMask], code: Tensor, size: Any, dtype: torch.dtype, formed_in: torch.dtype, refusal: str | None = None,
        strides: Any = None, source: Any = None,
    ) -> LayerMask:  # fmt: skip
        made: LayerMask = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=code.device)
        made._code, made.formed_in, made.refusal, made._source = code, formed_in, refusal, source
        made._formed, made._shown, made._kept, made.known = None, False, None, None
        return made

    @property
    def code(self) -> Tensor:
        """A window, intervals or visible pairs; eager's mask, floating-point, once something may have written to it."""
        self._follow_writes()
        return self._code

    def _follow_writes(self) -> bool:
        """Makes eager's mask the code if something may have written to it, and says whether it is."""
        is_written = self.is_written()
        if is_written:
            self._code = self.eager()
        return is_written

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_code"], (self.dtype, self.formed_in, self.refusal, self._follow_writes())

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, strides: Any) -> LayerMask:
        dtype, formed_in, refusal, _is_written = context
        return LayerMask(inner["_code"], size, dtype, formed_in, refusal, strides)

    def __repr__(self) -> str:  # type: ignore[override]
        window = as_window(self.code)
        kind = self.code.dtype if window is None else f"window {window}"
        return f"LayerMask({list(self.shape)}, {self.dtype}, {kind}, on {self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file or another process gets eager's mask."""
        return self.eager().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.eager().numpy(force=force)

    def tolist(self) -> Any:
        return self.eager().tolist()

    def eager(self) -> Tensor:
        """Eager's mask, of this size and dtype, formed once; a view of another one if this is a view.

        Raises:
            NotImplementedError: `refusal`.
        """
        if self.refusal is not None:
            raise NotImplementedError(self.refusal)
        if self._formed is not None:
            return self._formed
        # Code that is no plain tensor is part of a graph, and so is the mask that is formed from it.
        with outside_of_modes() if type(self._code) is Tensor else contextlib.nullcontext():
            self._formed = self._form()
        return self._formed

    def _form(self) -> Tensor:
        if self._source is not None:
            mask, function, arguments = self._source
            view: Tensor = function(mask.eager(), *arguments)
            return view
        if self._code.is_floating_point():  # the code of a mask that was written to, as the input of a graph
            return self._code.to(self.dtype)
        visible = _visible(self._code, *self.shape[2:]).expand(self.shape)
        seen = torch.zeros((), dtype=self.formed_in, device=self._code.device)
        return torch.where(visible, seen, torch.finfo(self.formed_in).min).to(self.dtype).contiguous()

    def untouched(self) -> bool:
        """Whether nothing has read or written to this mask, which is no view: a faster answer than is_written(), for every layer."""
        return self._formed is None and self._source is None

    def is_written(self) -> bool:
        """Whether eager's mask may differ from the code, because something wrote to it or, where torch counts no writes, could have."""
        first = self._first()
        return first._shown or first._code.is_floating_point() or (_counts_writes(self) and self._version != 0)

    def _first(self) -> LayerMask:
        """The mask that this one is a view of, or itself."""
        return self if self._source is None else self._source[0]._first()

    def mask(self) -> Mask:
        """The Mask of intervals, made once, so that all layers share the extremes that it caches."""
        if self._source is not None and self._source[0]._code is self._code:
            return self._source[0].mask()
        if self._kept is None:
            self._kept = Mask(self._code)
        return self._kept

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        compact = _COMPACT.get(function)
        if compact is not None and isinstance(args[0], LayerMask) and not args[0].is_written():
            made = compact(*args, **kwargs)
            if made is not None:
                return made
        masks = [each for each in _pytree.tree_leaves((args, kwargs)) if isinstance(each, LayerMask)]
        args, kwargs = _pytree.tree_map_only(LayerMask, LayerMask.eager, (args, kwargs))
        out = function(*args, **kwargs)
        if any(each.alias_info is not None for each in function._schema.returns):
            for mask in masks:
                mask._first()._shown |= not _counts_writes(mask)
        # An operation in place returns the tensor that it was given.
        return next((mask for mask in masks if function._schema.is_mutable and out is mask._formed), out)


def _counts_writes(mask: LayerMask) -> bool:
    """Whether torch counts writes to the mask and to its views in `_version`: not in inference mode, nor while a graph is traced."""
    return type(mask._code) is Tensor and not mask.is_inference()


def contents(mask: LayerMask) -> Tensor:
    """LayerMask.code, also in functions that torch.compile compiles."""
    if not torch.compiler.is_compiling():
        return mask.code
    return _eager(mask) if _is_written(mask).shape[0] else _unwritten(mask)


Function = TypeVar("Function", bound=Callable[..., Tensor])


def _as_it_is(function: Function) -> Function:
    """A function that torch.compile does not look into, but calls with tensors that have no values: once to find out what the tensors
    around it are, and again when it traces the graph."""
    marked: Function = torch.compiler.allow_in_graph(function)
    return marked


@_as_it_is
def layer_mask(
    code: Tensor, batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float32, refusal: str | None = None
) -> Tensor:
    """The LayerMask [batch, 1, queries, keys] of a code, in the dtype of eager's mask."""
    return LayerMask(code, (batch, 1, queries, keys), dtype, dtype, refusal)


@_as_it_is
def _is_written(mask: Tensor) -> Tensor:
    """LayerMask.is_written() as the size of a tensor."""
    return torch.empty(int(not isinstance(mask, LayerMask) or mask.is_written()))


@_as_it_is
def _eager(mask: Tensor) -> Tensor:
    return mask.eager() if isinstance(mask, LayerMask) else mask.clone()


@_as_it_is
def _unwritten(mask: Tensor) -> Tensor:
    # torch 2.10, for example, runs `mask[...] = x` only when it traces the graph; views of the mask are plain tensors after that.
    if not isinstance(mask, LayerMask) or mask.is_written():
        raise NotImplementedError(
            "attention_mask: this model writes to its mask, which this version of torch.compile tells too late; run the model without "
            "torch.compile"
        )
    return mask._code


# --- operations on codes ------------------------------------------------------------------------------------------------
# Each returns None where it would need eager's mask.


def _view(mask: LayerMask, code: Tensor, size: Any, function: Any, *arguments: Any) -> Tensor:
    """A view with the strides of the view of eager's mask; only those of an expanded dimension differ from the mask's."""
    before = zip(mask.shape, mask.stride(), strict=True)
    strides = [0 if new != old == 1 else stride for new, (old, stride) in zip(size, before, strict=True)]
    source = (mask, function, arguments)
    return LayerMask(code, size, mask.dtype, mask.formed_in, mask.refusal, strides, source)


def _alias(mask: LayerMask) -> Tensor:
    return _view(mask, mask._code, mask.shape, _aten.alias.default)


def _clone(mask: LayerMask, *, memory_format: Any = None) -> Tensor:
    return LayerMask(mask._code, mask.shape, mask.dtype, mask.formed_in, mask.refusal)


def _to_copy(mask: LayerMask, *, dtype: torch.dtype | None = None, device: Any = None, **layout: Any) -> Tensor | None:
    dtype = mask.dtype if dtype is None else dtype
    if not dtype.is_floating_point or (mask.dtype != mask.formed_in and dtype != mask.dtype):
        return None  # a second cast rounds what the first one has rounded
    code = mask._code if device is None else mask._code.to(device, non_blocking=bool(layout.get("non_blocking")))
    return LayerMask(code, mask.shape, dtype, mask.formed_in, mask.refusal)


def _expand(mask: LayerMask, size: Any, *, implicit: bool = False) -> Tensor | None:
    """To more batch entries or heads, and to more queries from one."""
    if len(size) != 4:
        return None
    size = [old if new == -1 else new for old, new in zip(mask.shape, size, strict=True)]
    if size[3] != mask.shape[3]:
        return None
    code = mask._code
    if size[2] != mask.shape[2]:
        code = code.expand(-1, -1, size[2], -1) if code.dtype == torch.bool else _intervals(code, 1, size[3]) * size[2]
    return _view(mask, code, size, _aten.expand.default, size)


def _slice(mask: LayerMask, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Tensor | None:
    if step != 1:
        return None
    dim, length = dim % 4, mask.shape[dim % 4]
    sides = (0 if start is None else start, length if end is None else end)
    start, end = (min(max(side + length if side < 0 else side, 0), length) for side in sides)
    size = [*mask.shape]
    size[dim] = max(end - start, 0)
    # Windows are aligned at the last query and the last key.
    stays = dim == 1 or (as_window(mask._code) is not None and (dim == 0 or end == length))
    code = mask._code if stays else _sliced(mask._code, mask.shape, dim, start, size[dim])
    return _view(mask, code, size, _aten.slice.Tensor, dim, start, end)


def _sliced(code: Tensor, shape: Any, dim: int, start: Any, count: Any) -> Tensor:
    if code.dtype == torch.bool:
        return code if code.shape[dim] == 1 else code.narrow(dim, start, count)
    code = _intervals(code, *shape[2:])
    if dim == 0:
        return code if code.shape[0] == 1 else code.narrow(0, start, count)
    return code.narrow(2, start, count) if dim == 3 else (code - start).clamp(0, count)


_COMPACT: dict[Any, Callable[..., Tensor | None]] = {
    _aten.alias.default: _alias,
    _aten.detach.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.expand.default: _expand,
    _aten.slice.Tensor: _slice,
}


def may_look(tensor: Tensor) -> bool:
    """Whether the values of a tensor may be read: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
