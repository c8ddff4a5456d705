"""Converts transformers' mask functions to windows and intervals.

transformers describes a mask by a function of (batch, head, query, key), composed of a few known ones: causal, sliding window, chunks,
blocks, packed documents, padding. They are closures. The known ones are recognised by their code objects, and their closure variables
give the queries that see each key without a dense mask. When this module is imported, each known function is compared with its
implementation here, so that a version of transformers that changed its meaning is noticed. Any other function is evaluated, a block
of rows at a time, and checked to have intervals.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from flashattn_ext import Mask
from flashattn_ext.mask_arguments import ALL_ROWS
from flashattn_ext.tensor_cache import has_values

from ._mask_tensors import layer_mask, may_look, window_code

MaskFunction = Callable[..., Any]
_ALL = ALL_ROWS  # past every query
_ELEMENTS_AT_ONCE = 2**24  # elements of a dense mask that are evaluated at a time


class _Unknown(Exception):
    """A mask function that is not composed of known ones, or whose ids are not contiguous runs."""


class _Rows(NamedTuple):
    """The queries [first, last) that see each key; int64 [B or 1, Sk], in the positions of the mask function.

    For every known function, and for `and` and `or` of them, the interval of a key is empty or contains the query at the key's
    position. Therefore the union of two intervals has no gap.
    """

    first: Tensor
    last: Tensor

    def both(self, other: _Rows) -> _Rows:
        return _Rows(torch.maximum(self.first, other.first), torch.minimum(self.last, other.last))

    def either(self, other: _Rows) -> _Rows:
        a, b = (rows.first >= rows.last for rows in (self, other))  # an empty interval adds nothing
        first = torch.minimum(torch.where(a, _ALL, self.first), torch.where(b, _ALL, other.first))
        last = torch.maximum(torch.where(a, -_ALL, self.last), torch.where(b, -_ALL, other.last))
        return _Rows(first, last)


# --- the known functions ------------------------------------------------------------------------------------------------


def _causal(keys: Tensor) -> _Rows:
    return _Rows(keys, torch.full_like(keys, _ALL))


def _bidirectional(keys: Tensor) -> _Rows:
    return _Rows(torch.full_like(keys, -_ALL), torch.full_like(keys, _ALL))


def _window(keys: Tensor, sliding_window: int) -> _Rows:
    if sliding_window < 1:  # a query would not see its own key
        raise _Unknown
    return _Rows(torch.full_like(keys, -_ALL), keys + min(sliding_window, _ALL))


def _bidirectional_window(keys: Tensor, sliding_window: int) -> _Rows:
    side = min(sliding_window, _ALL)
    return _Rows(keys - side, keys + side + 1)


def _chunks(keys: Tensor, chunk_size: int, left_padding: Tensor | int = 0) -> _Rows:
    padding = left_padding[:, None] if isinstance(left_padding, Tensor) else left_padding
    chunk_size = min(chunk_size, _ALL)
    start = (keys - padding) // chunk_size * chunk_size + padding
    return _Rows(start, start + chunk_size)


def _padding(keys: Tensor, padding_mask: Tensor) -> _Rows:
    seen = padding_mask[:, keys[0]].bool()
    return _Rows(torch.full_like(seen, -_ALL, dtype=torch.int64), torch.where(seen, _ALL, -_ALL))


def _blocks(keys: Tensor, block_sequence_ids: Tensor) -> _Rows:
    """Blocks of equal ids >= 0, whose members see each other; a negative id is outside of all blocks."""
    ids = block_sequence_ids
    before, after = ids[:, :-1], ids[:, 1:]
    # A new block must have a larger id than all blocks before it, so that every id is one contiguous run.
    largest = ids.clamp(min=-1).cummax(1).values[:, :-1]
    _require((after < 0) | (after == before) | (after > largest))
    first, last = _runs(ids)
    last = torch.where(ids < 0, first, last)
    return _Rows(first[:, keys[0]], last[:, keys[0]])


def _packed(keys: Tensor, packed_sequence_mask: Tensor) -> _Rows:
    _require(packed_sequence_mask.diff(dim=1) >= 0)
    first, last = _runs(packed_sequence_mask)
    return _Rows(first[:, keys[0]], last[:, keys[0]])


def _require(condition: Tensor) -> None:
    """Raises _Unknown unless all are True: the only place that waits for the device, as transformers does to detect packed batches."""
    if not bool(condition.all()):
        raise _Unknown


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end (exclusive) of the run of equal neighbours that each element is in; int64 [B, S] each."""
    intervals = Mask.documents(ids).intervals[:, 0].long()
    return intervals[..., 0], intervals[..., 1]


class _Known(NamedTuple):
    rows: Callable[..., _Rows]  # takes the keys, and the closure variables by name
    examples: tuple[dict[str, Any], ...]  # arguments of the factory, for queries and keys 0 to 7 of two batch entries


_EXAMPLE_IDS = torch.tensor([[-1, 0, 0, -1, 1, 1, 1, 2], [0, 0, 0, 1, 2, 2, -1, -1]])
_EXAMPLE_PACKED = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
_EXAMPLE_PADDING = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0, 0, 0]]).bool()
_FACTORIES = {
    "sliding_window_overlay": _Known(_window, ({"sliding_window": 1}, {"sliding_window": 3})),
    "sliding_window_bidirectional_overlay": _Known(_bidirectional_window, ({"sliding_window": 0}, {"sliding_window": 2})),
    "chunked_overlay": _Known(_chunks, ({"chunk_size": 3, "left_padding": torch.tensor([0, 2])},)),
    "blockwise_overlay": _Known(_blocks, ({"block_sequence_ids": _EXAMPLE_IDS},)),
    "packed_sequence_mask_function": _Known(_packed, ({"packed_sequence_mask": _EXAMPLE_PACKED},)),
    "padding_mask_function": _Known(_padding, ({"padding_mask": _EXAMPLE_PADDING},)),
}  # fmt: skip
_PLAIN = {"causal_mask_function": _causal, "bidirectional_mask_function": _bidirectional}


def _enclosed(function: MaskFunction) -> dict[str, Any]:
    """The closure variables. inspect.getclosurevars() would look up the global ones too, which takes 20 times as long."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _agrees(function: MaskFunction, rows: Callable[..., _Rows], enclosed: dict[str, Any]) -> bool:
    """Whether `rows` agrees with the mask function on 8 queries and keys of two batch entries."""
    index = torch.arange(8)
    try:
        expected = function(torch.arange(2)[:, None, None], 0, index[:, None], index).expand(2, 8, 8)
        got = rows(index[None], **enclosed)
    except Exception:  # the function has changed in some way; it will be evaluated
        return False
    visible = (index[:, None] >= got.first[:, None]) & (index[:, None] < got.last[:, None])
    return torch.equal(visible.expand(2, 8, 8), expected)


def _recognised() -> dict[Any, Callable[..., _Rows]]:
    """The known functions: from code object to interval rule."""
    known = {}
    for name, rows in _PLAIN.items():
        function = getattr(masking_utils, name, None)
        if function is not None and _agrees(function, rows, {}):
            known[function.__code__] = rows
    for name, (rows, examples) in _FACTORIES.items():
        factory = getattr(masking_utils, name, None)
        functions = [factory(**example) for example in examples] if factory is not None else []
        if functions and all(_agrees(function, rows, _enclosed(function)) for function in functions):
            known[functions[0].__code__] = rows
    return known


_KNOWN = _recognised()
_AND = masking_utils.and_masks().__code__
_OR = masking_utils.or_masks().__code__
_REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", lambda *_: lambda: None)(None, None).__code__
_CAUSAL = masking_utils.causal_mask_function
_BIDIRECTIONAL = getattr(masking_utils, "bidirectional_mask_function", None)


def _rows(function: MaskFunction, keys: Tensor) -> _Rows:
    """The queries that see each key, [B or 1, Sk].

    Raises:
        _Unknown: the function must be evaluated.
    """
    code = getattr(function, "__code__", None)
    if code in _KNOWN:
        return _KNOWN[code](keys, **_enclosed(function))
    if code is _OR:
        first, *others = (_rows(part, keys) for part in _enclosed(function)["mask_functions"])
        for other in others:
            first = first.either(other)
        return first
    if code is _AND:
        parts = _enclosed(function)["mask_functions"]
        remapped = [part for part in parts if getattr(part, "__code__", None) is _REMAP]
        intervals = [_rows(part, keys) for part in parts if part not in remapped]
        intervals += [_in_documents(_enclosed(part), parts, keys) for part in remapped]
        first, *others = intervals
        for other in others:
            first = first.both(other)
        return first
    raise _Unknown


def _in_documents(enclosed: dict[str, Any], siblings: tuple[MaskFunction, ...], keys: Tensor) -> _Rows:
    """The rows of a mask function of positions within packed documents, combined by `and` with the mask that separates the documents."""
    position_ids: Tensor = enclosed["position_ids"]
    names = [_enclosed(part) for part in siblings]
    documents: list[Tensor] = [name["packed_sequence_mask"] for name in names if "packed_sequence_mask" in name]
    if len(documents) != 1:
        raise _Unknown
    # Within a document positions rise by one, so that distances of positions equal distances in the row.
    rises = position_ids.diff(dim=1) == 1
    same = documents[0].diff(dim=1) == 0
    _require(rises | ~same)
    positions = position_ids[:, keys[0]]
    rows = _position_rows(enclosed["mask_function"], positions)
    return _Rows(rows.first + (keys - positions), rows.last + (keys - positions))


def _position_rows(function: MaskFunction, positions: Tensor) -> _Rows:
    """_rows for positions in place of keys; only for mask functions that do not index tensors by position."""
    code = getattr(function, "__code__", None)
    enclosed = _enclosed(function)
    if code is _AND:
        first, *others = (_position_rows(part, positions) for part in enclosed["mask_functions"])
        for other in others:
            first = first.both(other)
        return first
    if code not in _KNOWN or _KNOWN[code] in (_padding, _blocks, _packed):
        raise _Unknown
    return _KNOWN[code](positions, **enclosed)


# --- windows ------------------------------------------------------------------------------------------------------------


def _traced_window(function: MaskFunction) -> tuple[int, int] | None:
    """_plain_window under torch.compile, which cannot read closures: recognises plain causal and bidirectional masks only."""
    if function is _CAUSAL:
        return -1, 0
    return (-1, -1) if function is _BIDIRECTIONAL else None


def _plain_window(function: MaskFunction) -> tuple[int, int] | None:
    """(left, right) of a function that is only a window, -1 for unbounded; None for any other function."""
    code = getattr(function, "__code__", None)
    kind = _KNOWN.get(code)
    if kind is _causal:
        return -1, 0
    if kind is _bidirectional:
        return -1, -1
    if kind is _window or kind is _bidirectional_window:
        width = _enclosed(function)["sliding_window"]
        if width < 1:  # narrower than a code can say
            return None
        return (width - 1, -1) if kind is _window else (width, width)
    if code is not _AND:
        return None
    sides = [_plain_window(part) for part in _enclosed(function)["mask_functions"]]
    if not sides or None in sides:
        return None
    bounded = [[side for side in pair if side >= 0] for pair in zip(*sides, strict=True)]
    left, right = (min(pair, default=-1) for pair in bounded)
    return left, right


# --- the mask function --------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Queries are positions [q_offset, q_offset + q_length) of the sequence, keys likewise. Offsets may be tensors of one element."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: Any

    def ends_together(self) -> bool:
        """Whether the last query is at the position of the last key; False if finding out would wait for the device."""
        offsets = (self.q_offset, self.kv_offset)
        if any(isinstance(x, Tensor) and (x.device.type != "cpu" or torch.compiler.is_compiling()) for x in offsets):
            return False
        return bool(self.q_length + self.q_offset == self.kv_length + self.kv_offset)


def attention_mask(
    batch_size: int,
    q_length: Any = None,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: MaskFunction = _CAUSAL,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **_hints: Any,
) -> Tensor | None:
    """The mask function that register() installs in transformers: the mask of a model's layers, from a window or from intervals.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function: as transformers 5 passes them.
        cache_position: int64 [Sq], the positions of the queries, instead of q_length and q_offset in transformers 4.
        attention_mask: bool [B, keys seen so far], False where a key is padding.
        dtype: of eager's mask.
        allow_is_bidirectional_skip: None may be returned if no key is masked; without it some vision models add to the mask.
        config: of the model. Where layers would take None for causal attention they get a window instead.

    Returns:
        A LayerMask (_mask_tensors.py), or None as above. Of a mask that is neither a window nor intervals it holds every pair of query
        and key, and the layer whose attention gets it raises the error.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if isinstance(q_length, Tensor):  # transformers 4 may pass cache_position as a positional argument
        cache_position = q_length
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        # Without earlier keys the queries begin at 0; reading that from cache_position would wait for the device.
        q_offset = 0 if q_length == kv_length and isinstance(kv_offset, int) and kv_offset == 0 else cache_position[0]
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)
    device = torch.device("cpu" if device is None else device)
    tracing = torch.compiler.is_compiling()
    if not tracing:
        mask_function = _without_single_document(mask_function)
    window = _traced_window(mask_function) if tracing else _plain_window(mask_function)
    is_window = window is not None and (window == (-1, -1) or sizes.ends_together())
    padding = _padding_or_none(attention_mask, sizes, waits=is_window)
    if window is not None and is_window and padding is None:
        if window == (-1, -1) and allow_is_bidirectional_skip and not _is_causal_by_mistake(config):
            return None
        longest = max(q_length, kv_length) - 1  # a wider window masks nothing
        left, right = (-1 if side >= longest > 0 else side for side in window)
        # transformers separates documents only where it gets no mask; some models never look for them, and none does beside a cache.
        code = window_code(left, right, device, and_documents=attention_mask is None)
        return layer_mask(code, batch_size, q_length, kv_length, dtype)
    code = _code(mask_function, attention_mask, padding, sizes, use_vmap, device)
    return layer_mask(code, batch_size, q_length, kv_length, dtype)


def _is_causal_by_mistake(config: Any) -> bool:
    """Whether layers with bidirectional masks say is_causal=True: those of a decoder that is_causal=False has made an encoder, and of a
    vision model, which transformers' sdpa attention takes for causal, too."""
    return not getattr(config, "is_causal", True) or getattr(config, "model_type", None) == "phi4_multimodal_vision"


def _code(
    mask_function: MaskFunction, attention_mask: Tensor | None, padding: Tensor | None, sizes: _Sizes, use_vmap: bool,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Intervals, int32 [B or 1, 1, Sk, 2], or visible pairs, bool [B, 1, Sq, Sk]."""
    if torch.compiler.is_compiling():  # closures cannot be read
        return _evaluated(mask_function, attention_mask, sizes, use_vmap, device)
    try:
        rows = _rows(mask_function, torch.arange(sizes.kv_length, device=device)[None] + sizes.kv_offset)
    except _Unknown:
        return _evaluated(mask_function, attention_mask, sizes, use_vmap, device)
    first, last = rows.first - sizes.q_offset, rows.last - sizes.q_offset
    if padding is not None:
        last = torch.where(padding, last, 0)
    intervals = torch.stack(torch.broadcast_tensors(first, last), -1).clamp(0, sizes.q_length)
    return intervals.int()[:, None]


def _padding_or_none(attention_mask: Tensor | None, sizes: _Sizes, waits: bool) -> Tensor | None:
    """bool [B, Sk], True where there is a token; None if there is known to be no padding.

    waits: whether to wait for a GPU to find that out, as transformers' own mask functions do. Without gradients it is worth the wait: every
    layer of a batch without padding has a call without a mask, and generate() waits for each token anyway. Training does not wait.
    """
    if attention_mask is None:
        return None
    end = sizes.kv_length + sizes.kv_offset
    if (short := end - attention_mask.shape[-1]) > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, short))
    if isinstance(sizes.kv_offset, int):
        seen = attention_mask[:, sizes.kv_offset : end].bool()
    else:
        seen = attention_mask.bool()[:, torch.arange(sizes.kv_length, device=attention_mask.device) + sizes.kv_offset]
    if torch.compiler.is_compiling():
        return seen
    known = seen.device.type == "cpu" or (waits and not torch.is_grad_enabled() and _is_readable(seen))
    return None if known and bool(seen.all()) else seen


def _is_readable(tensor: Tensor) -> bool:
    """Whether a tensor on a GPU has values that may be read now."""
    return tensor.is_cuda and type(tensor) is Tensor and may_look(tensor) and has_values(tensor)


def _without_single_document(function: MaskFunction) -> MaskFunction:
    """The other operand of `and` if each row is one document: transformers 4 adds the packed mask to every batch."""
    if getattr(function, "__code__", None) is not _AND:
        return function
    parts = _enclosed(function)["mask_functions"]
    rest = [part for part in parts if not _is_single_document(part)]
    return rest[0] if len(rest) == 1 and getattr(rest[0], "__code__", None) is not _REMAP else function


def _is_single_document(function: MaskFunction) -> bool:
    code = getattr(function, "__code__", None)
    if _KNOWN.get(code) is not _packed:
        return False
    ids = _enclosed(function)["packed_sequence_mask"]
    return ids.device.type == "cpu" and bool((ids == ids[:, :1]).all())


def _evaluated(
    function: MaskFunction, padding: Tensor | None, sizes: _Sizes, use_vmap: bool, device: torch.device
) -> Tensor:
    """The intervals of any mask function, evaluated a block of rows at a time, so that memory stays linear in the length; all pairs if it
    has none."""

    def dense(start: int, stop: int) -> Tensor:
        """bool [B, 1, stop - start, Sk]"""
        options: dict[str, Any] = {
            "batch_size": sizes.batch, "kv_length": sizes.kv_length, "kv_offset": sizes.kv_offset,
            "mask_function": function, "attention_mask": padding, "allow_is_causal_skip": False,
        }  # fmt: skip
        if "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters:
            position = torch.arange(start, stop, device=device) + sizes.q_offset
            visible = masking_utils.sdpa_mask(cache_position=position, allow_torch_fix=False, **options)
        else:
            options |= {"allow_is_bidirectional_skip": False, "use_vmap": use_vmap, "device": device}
            visible = masking_utils.sdpa_mask(q_length=stop - start, q_offset=sizes.q_offset + start, **options)
        assert visible is not None  # nothing may be skipped
        return visible

    Sq = sizes.q_length
    shape = (sizes.batch, 1, sizes.kv_length)
    first = torch.full(shape, Sq, dtype=torch.int32, device=device)
    last, count = torch.zeros_like(first), torch.zeros_like(first)
    tracing = torch.compiler.is_compiling()
    step = max(_ELEMENTS_AT_ONCE // max(sizes.batch * sizes.kv_length, 1), 1)
    # torch.compile fuses the mask into the reductions below, so that it needs no steps.
    for start, stop in [(0, Sq)] if tracing else [(row, min(row + step, Sq)) for row in range(0, Sq, step)]:
        visible = dense(start, stop)
        rows = torch.arange(start, stop, dtype=torch.int32, device=device)[:, None]
        first = torch.minimum(first, torch.where(visible, rows, Sq).amin(2))
        last = torch.maximum(last, torch.where(visible, rows + 1, 0).amax(2))
        count = count + visible.sum(2)
    whole = ((count == 0) | (last - first == count)).all()
    if tracing:
        torch._assert_async(
            whole, "fax: the queries that see a key are not a single interval; run this model without torch.compile"
        )
    elif not bool(whole):
        return dense(0, Sq)
    return torch.stack([first, torch.maximum(first, last)], -1).int()
