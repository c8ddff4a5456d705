"""transformers' mask functions as windows and intervals.

transformers describes a mask by a function of (batch, head, query, key), put together from a few known ones: causal, sliding window,
chunks, blocks, packed documents, padding. They are closures; the known ones are recognised by their code, and what they close over
says which queries see each key without a matrix of queries and keys. What is known of each was compared with the function itself when
this module was imported, so that a version of transformers in which one means something else is noticed. Any other function is
evaluated, some rows at a time, and checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from flashattn_ext import Mask

from ._mask_tensors import intervals_tensor, window_tensor

MaskFunction = Callable[..., Any]
_ALL = 2**31 - 1  # after every query
_ELEMENTS_AT_ONCE = 2**24  # so many elements of a dense mask are evaluated at a time


class _Unknown(Exception):
    """A mask function that is not put together from known ones, or whose tensors are no runs."""


class _Rows(NamedTuple):
    """The queries that see each key, from first to before last; int64 [B or 1, Sk], counted as the mask function counts them.

    For every known function, and for `and` and `or` of such, the interval of a key holds the query at the key's own position, or it
    is empty. So the union of two of them has no gap.
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
    if sliding_window < 1:  # it leaves out the query's own key
        raise _Unknown
    return _Rows(torch.full_like(keys, -_ALL), keys + sliding_window)


def _bidirectional_window(keys: Tensor, sliding_window: int) -> _Rows:
    return _Rows(keys - sliding_window, keys + sliding_window + 1)


def _chunks(keys: Tensor, chunk_size: int, left_padding: Tensor | int = 0) -> _Rows:
    padding = left_padding[:, None] if isinstance(left_padding, Tensor) else left_padding
    start = (keys - padding) // chunk_size * chunk_size + padding
    return _Rows(start, start + chunk_size)


def _padding(keys: Tensor, padding_mask: Tensor) -> _Rows:
    seen = padding_mask[:, keys[0]].bool()
    return _Rows(torch.full_like(seen, -_ALL, dtype=torch.int64), torch.where(seen, _ALL, -_ALL))


def _blocks(keys: Tensor, block_sequence_ids: Tensor) -> _Rows:
    """Blocks of ids from 0 on that see each other; below 0 is no block."""
    ids = block_sequence_ids
    before, after = ids[:, :-1], ids[:, 1:]
    # Where a block begins, its id is larger than all before it: no block comes back.
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
    """The only look at values. transformers, too, waits for the device to see whether a batch is packed."""
    if not bool(condition.all()):
        raise _Unknown


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Where the run of equal neighbours that an element is in begins, and where the next one does; int64 [B, S] each."""
    intervals = Mask.documents(ids).intervals[:, 0].long()
    return intervals[..., 0], intervals[..., 1]


class _Known(NamedTuple):
    rows: Callable[..., _Rows]  # takes the keys, and what the function closes over by name
    examples: tuple[dict[str, Any], ...]  # arguments for the factory, for queries and keys 0 to 7 of two batch entries


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
    return dict(inspect.getclosurevars(function).nonlocals)


def _agrees(function: MaskFunction, rows: Callable[..., _Rows], enclosed: dict[str, Any]) -> bool:
    """Whether what is known of a function is what it computes, on 8 queries and keys of two batch entries."""
    index = torch.arange(8)
    try:
        expected = function(torch.arange(2)[:, None, None], 0, index[:, None], index).expand(2, 8, 8)
        got = rows(index[None], **enclosed)
    except Exception:  # whatever has become of a function, it is evaluated then
        return False
    visible = (index[:, None] >= got.first[:, None]) & (index[:, None] < got.last[:, None])
    return torch.equal(visible.expand(2, 8, 8), expected)


def _recognised() -> dict[Any, Callable[..., _Rows]]:
    """What is known of a function, by the function's code."""
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
    """The queries that see the keys, [B or 1, Sk].

    Raises:
        _Unknown: the function has to be evaluated.
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
    """A mask function of positions within packed documents, where it stands beside the mask that keeps the documents apart."""
    position_ids: Tensor = enclosed["position_ids"]
    names = [_enclosed(part) for part in siblings]
    documents: list[Tensor] = [name["packed_sequence_mask"] for name in names if "packed_sequence_mask" in name]
    if len(documents) != 1:
        raise _Unknown
    # Within a document positions rise by one: queries and keys are as far apart as their positions.
    rises = position_ids.diff(dim=1) == 1
    same = documents[0].diff(dim=1) == 0
    _require(rises | ~same)
    positions = position_ids[:, keys[0]]
    rows = _position_rows(enclosed["mask_function"], positions)
    return _Rows(rows.first + (keys - positions), rows.last + (keys - positions))


def _position_rows(function: MaskFunction, positions: Tensor) -> _Rows:
    """The mask functions that read nothing by index: only those may be asked about positions."""
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
    """_plain_window of what torch.compile traces, as far as a comparison tells: it looks into no closure."""
    if function is _CAUSAL:
        return -1, 0
    return (-1, -1) if function is _BIDIRECTIONAL else None


def _plain_window(function: MaskFunction) -> tuple[int, int] | None:
    """(left, right) of a function that is a window and nothing else, -1 for unbounded; None for any other."""
    code = getattr(function, "__code__", None)
    kind = _KNOWN.get(code)
    if kind is _causal:
        return -1, 0
    if kind is _bidirectional:
        return -1, -1
    if kind is _window or kind is _bidirectional_window:
        width = _enclosed(function)["sliding_window"]
        if width < 1:  # which sees less than a window can say
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
    """Queries are q_offset to q_offset + q_length of the sequence, keys likewise. Offsets may be tensors of one element."""

    batch: int
    q_length: int
    kv_length: int
    q_offset: Any
    kv_offset: Any

    def ends_together(self) -> bool:
        """Whether the last query stands at the last key; False where only the device knows."""
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
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **_hints: Any,
) -> Tensor | None:
    """What transformers registers as a mask function: the mask of a model's layers, as a window or as intervals.

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function: as transformers 5 passes them.
        cache_position: int64 [Sq], the positions of the queries, in the place of q_length and q_offset in transformers 4.
        attention_mask: bool [B, keys seen so far], False where a key is padding.
        allow_is_bidirectional_skip: None will do where nothing is hidden; some vision models add to the mask otherwise.
        config: of the model. A decoder that is_causal=False turned into an encoder is told that nothing is hidden: its layers do not
            know.

    Returns:
        A window or intervals (_mask_tensors.py), or None as above. A mask that is neither comes back dense, bool [B, 1, Sq, Sk]; the
        layer that uses it says so.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if isinstance(q_length, Tensor):  # transformers 4 may pass the cache position by place
        cache_position = q_length
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        # Without earlier keys the queries begin at 0, which then need not be read from the device.
        q_offset = 0 if q_length == kv_length and isinstance(kv_offset, int) and kv_offset == 0 else cache_position[0]
    sizes = _Sizes(batch_size, q_length, kv_length, q_offset, kv_offset)
    device = torch.device("cpu" if device is None else device)
    padding = _padding_or_none(attention_mask, sizes)
    tracing = torch.compiler.is_compiling()
    if not tracing:
        mask_function = _without_single_document(mask_function)
    window = _traced_window(mask_function) if tracing else _plain_window(mask_function)
    if window is not None and padding is None and (window == (-1, -1) or sizes.ends_together()):
        if window == (-1, -1) and allow_is_bidirectional_skip and getattr(config, "is_causal", True):
            return None
        longest = max(q_length, kv_length) - 1  # a window that is wider is none
        left, right = (-1 if side >= longest > 0 else side for side in window)
        return window_tensor(left, right, device)
    if tracing:  # which cannot look into closures
        return _evaluated(mask_function, attention_mask, sizes, use_vmap, device)
    try:
        rows = _rows(mask_function, torch.arange(kv_length, device=device)[None] + kv_offset)
    except _Unknown:
        return _evaluated(mask_function, attention_mask, sizes, use_vmap, device)
    first, last = rows.first - q_offset, rows.last - q_offset
    if padding is not None:
        last = torch.where(padding, last, 0)
    intervals = torch.stack(torch.broadcast_tensors(first, last), -1).clamp(0, q_length)
    return intervals_tensor(Mask(intervals.int()[:, None]))


def _padding_or_none(attention_mask: Tensor | None, sizes: _Sizes) -> Tensor | None:
    """bool [B, Sk], True where there is a token; None where every key is one, as far as that is known without waiting for a device."""
    if attention_mask is None:
        return None
    short = sizes.kv_length + sizes.kv_offset - attention_mask.shape[-1]
    if short > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, short))
    keys = torch.arange(sizes.kv_length, device=attention_mask.device) + sizes.kv_offset
    seen = attention_mask.bool()[:, keys]
    known = seen.device.type == "cpu" and not torch.compiler.is_compiling()
    return None if known and bool(seen.all()) else seen


def _without_single_document(function: MaskFunction) -> MaskFunction:
    """transformers 4 calls every batch packed: the other half of `and`, where there is but one document to a row."""
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
    """The intervals of any mask function, from its values: some rows at a time, so that memory stays linear in the length."""

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
    # A compiler fuses the reductions below with what they reduce: it needs no steps.
    for start, stop in [(0, Sq)] if tracing else [(row, min(row + step, Sq)) for row in range(0, Sq, step)]:
        visible = dense(start, stop)
        rows = torch.arange(start, stop, dtype=torch.int32, device=device)[:, None]
        first = torch.minimum(first, torch.where(visible, rows, Sq).amin(2))
        last = torch.maximum(last, torch.where(visible, rows + 1, 0).amax(2))
        count = count + visible.sum(2)
    whole = ((count == 0) | (last - first == count)).all()
    if tracing:
        torch._assert_async(
            whole, "fax: the queries that see a key are no single interval; the model runs without torch.compile"
        )
    elif not bool(whole):
        return dense(0, Sq)
    return intervals_tensor(Mask(torch.stack([first, torch.maximum(first, last)], -1).int()))
