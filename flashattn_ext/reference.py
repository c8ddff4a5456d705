"""attention_reference: the formulas in plain PyTorch, for tests and users to compare with.

It builds the S x S matrix, runs on every device and dtype, and is differentiable any number of times. attention_weights returns
selected rows of that matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import arguments, calls, fp8, names
from .block_mask import BlockMask, checked_mask
from .mask import Mask
from .options import ReferenceOptions, WeightsOptions
from .philox import philox, philox_key

if TYPE_CHECKING:
    from typing_extensions import Unpack

# (b, q, k, v, start of the keys among packed ones) -> (out, lse, max_logits) of one batch entry, [heads, rows, head_dim], [heads, rows]
# and [heads].
Entry = Callable[[int, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def dropout_threshold(dropout_p: float) -> int:
    """Weights whose random byte is below this are kept: the keep probability is threshold / 256."""
    return min(max(math.floor(256 * (1 - dropout_p) + 0.5), 1), 256)


class _Positions(NamedTuple):
    """The position of a call's scores: the first batch entry and head, and the positions of its rows and keys."""

    batch: int
    head: int
    rows: Tensor  # [Sq], as masks and dropout count them
    keys: Tensor  # [Sk]
    shift: int  # row i is aligned with the key at i + shift

    @classmethod
    def of(cls, origin: Sequence[int] | None, Sq: int, Sk: int, device: torch.device) -> _Positions:
        batch, head, row, key, shift = (*(origin or (0, 0)), 0, 0, 0)[:5]
        rows, keys = torch.arange(Sq, device=device) + row, torch.arange(Sk, device=device) + key
        aligned_at_the_end = origin is None or len(origin) == 2
        return cls(batch, head, rows, keys, Sk - Sq if aligned_at_the_end else shift)

    def distance(self) -> Tensor:
        """Position of the key minus position of the aligned row, [Sq, Sk]."""
        return self.keys - (self.rows + self.shift)[:, None]


def _keep_mask(positions: _Positions, b: int, heads: int, threshold: int, seed: int) -> Tensor:
    """The dropout mask of batch entry b: bool [heads, Sq, Sk]."""
    device = positions.rows.device
    h = torch.arange(heads, device=device)[:, None, None] + positions.head
    i, j = positions.rows[None, :, None], positions.keys[None, None, :]
    shape = torch.broadcast_shapes(h.shape, i.shape, j.shape)
    counter = [
        torch.full(shape, positions.batch + b, device=device),
        (j // 64).expand(shape),
        (h * 64 + i % 8 * 8 + j % 8).expand(shape),
        (i // 16).expand(shape),
    ]
    words = torch.stack(philox(philox_key(seed, 0), counter))
    word = words.gather(0, (j // 16 % 4).expand(shape)[None])[0]
    byte = word >> (8 * (i // 8 % 2 + 2 * (j // 8 % 2))) & 0xFF
    return byte < threshold


def _in_window(positions: _Positions, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """bool [Sq, Sk], True where causal and window_size let a row see a key."""
    left, right = window_size
    if causal:
        right = 0
    distance = positions.distance()
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


def _in_intervals(positions: _Positions, intervals: Tensor, heads: int) -> Tensor:
    """bool [heads, Sq, Sk] of the intervals [Hm, Sk, 2] of one batch entry."""
    first, last = intervals[:, None, :, 0], intervals[:, None, :, 1]
    rows = positions.rows[:, None]
    return ((rows >= first) & (rows < last)).repeat_interleave(heads // intervals.shape[0], 0)


@dataclass(frozen=True)
class _Scores:
    """The operations on the scores of one batch entry before the softmax, in the order of the fields."""

    scale: float
    softcap: float
    alibi_slopes: Tensor | None  # [Hq]
    relative_bias: Tensor | None  # [Hq, 2 L + 1]
    bias: Tensor | None  # [Hq or 1, Sq or 1, Sk]

    def logits(self, products: Tensor, positions: _Positions) -> Tensor:
        """Products [Hq, Sq, Sk] in the dtype of the inputs -> logits in the dtype of the statistics."""
        statistics = torch.promote_types(products.dtype, torch.float32)
        scores = (products * self.scale).to(statistics)
        if 0 < self.softcap < arguments.UNCAPPED:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = positions.distance()
        if self.alibi_slopes is not None:
            scores = _sum(scores, -self.alibi_slopes.to(statistics)[:, None, None] * distance.abs())
        if self.relative_bias is not None:
            L = self.relative_bias.shape[-1] // 2
            scores = _sum(scores, self.relative_bias.to(statistics)[:, distance.clamp(-L, L) + L])
        return scores if self.bias is None else _sum(scores, self.bias.to(statistics))


def _sum(scores: Tensor, term: Tensor) -> Tensor:
    """scores + term, of which a sum that would leave the range of the dtype is its end: two finite terms hide no key.

    Differentiable as the sum also there.
    """
    total = scores + term
    overflows = torch.isinf(total) & torch.isfinite(scores) & torch.isfinite(term)
    most = torch.finfo(total.dtype).max
    at_the_end = total.detach().clamp(-most, most) + (scores - scores.detach()) + (term - term.detach())
    return torch.where(overflows, at_the_end, total)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype, also inside torch.autocast."""
    if arguments.autocast_dtype(a) is None:
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _visible_logits(q: Tensor, k: Tensor, scores_of: _Scores, positions: _Positions, visible: Tensor) -> Tensor:
    """Logits [Hq, Sq, Sk] of q [Hq, Sq, D] and k [Hq, Sk, D]; -inf for keys that are masked, also by a bias."""
    if scores_of.bias is not None:
        visible = visible & ~torch.isneginf(scores_of.bias.detach())
    # Masked products are replaced before anything is computed from them, so that their gradients are not NaN.
    products = _product(q, k.transpose(-1, -2)).masked_fill(~visible, 0)
    return scores_of.logits(products, positions).masked_fill(~visible, -math.inf)


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits [Hq, Sq, Sk] and sink [Hq] -> weights, and lse [Hq, Sq]; rows whose logits are all -inf have weights of 0 and an lse of -inf."""
    logits = scores
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        logits = torch.cat([scores, column], dim=-1)
    if logits.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    # Rows whose logits are all -inf are computed with zeros, so that neither they nor their gradients are NaN.
    empty = torch.isneginf(logits.detach()).all(-1)
    logits = logits.masked_fill(empty[..., None], 0)
    weights = torch.softmax(logits, -1)[..., : scores.shape[-1]].masked_fill(torch.isneginf(scores.detach()), 0)
    # exp(logits - lse), by which logsumexp is differentiated, is 1 for each of many logits that are so large that lse rounds to them.
    largest = logits.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(torch.isinf(largest), 0)
    lse = largest.squeeze(-1) + (logits - largest).exp().sum(-1).log()
    return weights, lse.masked_fill(empty, -math.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scores_of: _Scores, positions: _Positions, visible: Tensor, sink: Tensor | None,
    keep: Tensor | None, p_keep: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One batch entry: q [Hq, Sq, D], k [Hk, Sk, D], v [Hk, Sk, Dv] -> out [Hq, Sq, Dv], lse [Hq, Sq], max_logits [Hq]."""
    group = q.shape[0] // k.shape[0] if k.shape[0] else 1
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = _visible_logits(q, k, scores_of, positions, visible)
    weights, lse = _softmax(scores, sink)
    if keep is not None:
        weights = torch.where(keep, weights / p_keep, 0)
    out = _product(weights.to(v.dtype), v)
    if not scores.shape[-1] and sink is None:
        out = out + 0 * (q.sum() + v.sum())  # keeps out connected to q and v, so that both get a gradient
    logits = scores.detach().flatten(1).float()
    return out, lse, logits.amax(1) if logits.shape[1] else logits.new_full(logits.shape[:1], -math.inf)


def _refuse_others(function: str, taken: type, options: Any, more: tuple[Any, ...]) -> None:
    """Refuses the options that `taken`, a TypedDict, does not list, among them some that convert() takes, and more positional arguments."""
    unknown = {name: value for name, value in options.items() if name not in taken.__annotations__}
    if more or unknown:
        raise names.not_an_argument(function, unknown, more)


@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    layout: str = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
    **options: Unpack[ReferenceOptions],
) -> Tensor: ...  # fmt: skip
@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    layout: str = ..., return_lse: Literal[True], return_max_logits: Literal[False] = ...,
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    layout: str = ..., return_lse: Literal[False] = ..., return_max_logits: Literal[True],
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    layout: str = ..., return_lse: Literal[True], return_max_logits: Literal[True],
    **options: Unpack[ReferenceOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ...,
    layout: str = ..., return_lse: bool = ..., return_max_logits: bool = ...,
    **options: Unpack[ReferenceOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@calls.lists(ReferenceOptions)
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Mask | BlockMask | None = None,
    layout: str = "bshd",
    rng_seed: int | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """forward(), and with cu_seqlens varlen_forward(), in plain PyTorch; differentiable any number of times.

    Runs on every device and in every dtype. Memory grows with Sq * Sk. Computes in the dtype of the inputs (softmax statistics at
    least in float32), also inside torch.autocast: pass float64 tensors for exact results. float8_e4m3fn is computed in float32, also where k and v alone have it,
    and without a gradient. The other arguments are those of forward.

    Args:
        q: queries [B, Sq, Hq, D], with cu_seqlens [total_q, Hq, D].
        k: keys [B, Sk, Hk, D], with cu_seqlens [total_k, Hk, D].
        v: values [B, Sk, Hk, Dv], with cu_seqlens [total_k, Hk, Dv].
        cu_seqlens_q: int32 [B + 1], the starts of packed queries and the end of the last, as in varlen_forward().
        cu_seqlens_k: int32 [B + 1], the same for keys and values.
        origin: (batch, head), (batch, head, row, key) or (batch, head, row, key, shift), the position of this call in a larger one, as
            in forward(). Dropout draws what the larger call draws for these batch entries and heads. With row and key, rows and keys
            are counted from there, for dropout, windows, biases and masks, and row `row + i` is aligned with key `row + i + shift`;
            without shift it is 0.

    Returns:
        out [B, Sq, Hq, Dv] in the layout and dtype of q ([total_q, Hq, Dv] with cu_seqlens), or (out, lse) with lse [B, Hq, Sq]
        ([Hq, total_q]).

    Raises:
        ValueError: dropout without rng_seed (the reference does not draw a seed), a bias with packed sequences, or descales or an
            out_dtype without float8_e4m3fn.
        TypeError: the type of an option is not as described.
    """
    _refuse_others("attention_reference", ReferenceOptions, options, more)
    arguments.tensors(q=q, k=k, v=v)
    arguments.optional_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    call, numbers = calls.convert("attention_reference", q, k, v, calls.DENSE, layout, **options)
    q, k, v, alibi_slopes, bias, sink = call.q, call.k, call.v, call.alibi_slopes, call.bias, call.sink
    returns_lse = arguments.flag("return_lse", return_lse)
    returns_max_logits = arguments.flag("return_max_logits", return_max_logits)
    threshold, seed = dropout_threshold(numbers.dropout_p), arguments.seed(rng_seed)
    if threshold < 256 and seed is None:
        raise ValueError("rng_seed: attention_reference needs a seed when dropout_p > 0, got None")
    packed = cu_seqlens_q is not None and cu_seqlens_k is not None
    if not packed and (cu_seqlens_q is not None or cu_seqlens_k is not None):
        raise ValueError("cu_seqlens: cu_seqlens_q and cu_seqlens_k must be given together")
    result_dtype = None
    if k.dtype == fp8.FP8:
        result_dtype, axis = fp8.dtype_of_out(q, numbers.out_dtype), 1 if packed or numbers.bhsd else 2
        starts_q, starts_k = (None if cu is None else cu.tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        q = fp8.values(q, call.descale_q, axis, starts_q)
        k, v = fp8.values(k, call.descale_k, axis, starts_k), fp8.values(v, call.descale_v, axis, starts_k)
    elif any(given is not None for given in (call.descale_q, call.descale_k, call.descale_v, numbers.out_dtype)):
        raise ValueError(
            f"descale_q, descale_k, descale_v, out_dtype: expected None for keys of {k.dtype}, only float8_e4m3fn has them"
        )
    if packed and bias is not None:
        raise ValueError(f"bias: expected None with packed sequences, got shape {tuple(bias.shape)}")
    given_mask = None if mask is None else checked_mask(mask)
    if isinstance(given_mask, BlockMask):
        calls.blocks_of(given_mask, q, k, (cu_seqlens_q,), layout)
        if packed or (numbers.origin is not None and len(numbers.origin) > 2):
            call_with = "packed sequences" if packed else "an origin of four numbers or five"
            raise NotImplementedError(f"mask: {call_with} with a BlockMask is not implemented; use a Mask, or a bias")
    of_blocks = given_mask.dense() if isinstance(given_mask, BlockMask) else None
    heads = q.shape[1 if packed or numbers.bhsd else 2]
    if numbers.smooth_softmax and sink is None:
        sink = torch.zeros(heads, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)

    def entry(b: int, q_b: Tensor, k_b: Tensor, v_b: Tensor, first_key: int) -> tuple[Tensor, Tensor, Tensor]:
        Sq, Sk = q_b.shape[1], k_b.shape[1]
        positions = _Positions.of(numbers.origin, Sq, Sk, q.device)
        keep = None if seed is None else _keep_mask(positions, b, heads, threshold, seed)
        visible = _in_window(positions, numbers.causal, (numbers.window_left, numbers.window_right))
        if of_blocks is not None:
            of_heads = of_blocks[b if of_blocks.shape[0] > 1 else 0]
            visible = visible & of_heads.repeat_interleave(heads // of_heads.shape[0], 0)
        elif isinstance(given_mask, Mask):
            intervals = given_mask.intervals
            of_entry = intervals if packed else intervals[b if intervals.shape[0] > 1 else 0]
            visible = visible & _in_intervals(positions, of_entry[:, first_key : first_key + Sk], heads)
        slopes = None if alibi_slopes is None else alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
        bias_b = None if bias is None else bias[b if bias.shape[0] > 1 else 0]
        scores_of = _Scores(numbers.softmax_scale, numbers.softcap, slopes, call.relative_bias, bias_b)
        return _attend(q_b, k_b, v_b, scores_of, positions, visible, sink, keep, threshold / 256)

    if cu_seqlens_q is None or cu_seqlens_k is None:
        out, lse, max_logits = _dense(entry, q, k, v, numbers.bhsd)
    else:
        out, lse, max_logits = _packed(entry, q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist())
    out = out if result_dtype is None else out.to(result_dtype)
    others = [lse] if returns_lse else []
    others += [max_logits] if returns_max_logits else []
    return (out, *others) if others else out


_WEIGHTS_AT_ONCE = 1 << 20  # elements of the temporaries of attention_weights


@calls.lists(WeightsOptions)
@torch.no_grad()
def attention_weights(
    q: Tensor,
    k: Tensor,
    rows: Sequence[int] | Tensor,
    *more: Any,
    layout: str = "bshd",
    **options: Unpack[WeightsOptions],
) -> Tensor:
    """The attention weights of selected rows, for inspection: the weights of forward() without dropout.

    Plain PyTorch without gradients, in O(len(rows) * Sk) time and memory: a few rows are cheap even for long sequences, and all rows
    cost as much as attention_reference. Logits and weights are computed at least in float32. Inside torch.autocast q, k and bias are
    cast as in forward().

    Args:
        q: queries [B, Sq, Hq, D] (layout "bhsd": [B, Hq, Sq, D]).
        k: keys [B, Sk, Hk, D]; Hq is a multiple of Hk.
        rows: which queries, from 0 to Sq - 1: a sequence of integers or an integer tensor of one dimension, in any order.
        origin: as in forward(); batch and head have no effect here, because they only place dropout.

    The other arguments are those of forward. They are checked as there.

    Returns:
        float32 [B, Hq, len(rows), Sk]. Masked keys have a weight of 0. With a sink the weights of a row add up to less than 1: the
        rest is the weight of the sink.

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
    """
    _refuse_others("attention_weights", WeightsOptions, options, more)
    arguments.tensors(q=q, k=k)
    if fp8.FP8 in (q.dtype, k.dtype):
        raise TypeError(
            f"q: expected no float8_e4m3fn, got {q.dtype} and {k.dtype} of k; pass element * descale in float32"
        )
    tensors, numbers = calls.convert("attention_weights", q, k, k, calls.DENSE, layout, **options)
    tensors = calls.autocast(tensors)
    calls.check(tensors, numbers)
    q, k, bias, intervals = tensors.q, tensors.k, tensors.bias, tensors.mask_intervals
    mask = options.get("mask")
    blocks = mask if isinstance(mask, BlockMask) else None
    alibi_slopes, relative_bias, sink = tensors.alibi_slopes, tensors.relative_bias, tensors.sink
    q, k = (t if numbers.bhsd else t.transpose(1, 2) for t in (q, k))
    (B, heads, Sq, _), (Hk, Sk) = q.shape, k.shape[1:3]
    chosen = _row_numbers(rows, Sq, q.device)
    if numbers.smooth_softmax:
        sink = torch.zeros(heads, device=q.device)
    whole = _Positions.of(numbers.origin, Sq, Sk, q.device)
    positions = whole._replace(rows=whole.rows[chosen])
    statistics = torch.promote_types(q.dtype, torch.float32)

    def logits(b: int, h: int, rows: slice, keys: slice) -> Tensor:
        """[1, rows, keys]"""
        part = positions._replace(rows=positions.rows[rows], keys=positions.keys[keys])
        visible = _in_window(part, numbers.causal, (numbers.window_left, numbers.window_right))
        if seen is not None:
            visible = visible & seen[min(b, seen.shape[0] - 1), h * seen.shape[1] // heads, None, rows, keys]
        if intervals is not None:
            of_head = intervals[min(b, intervals.shape[0] - 1), h * intervals.shape[1] // heads, keys]
            visible = visible & _in_intervals(part, of_head[None], 1)
        slopes = (
            None if alibi_slopes is None else (alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes)[h, None]
        )
        relative = None if relative_bias is None else relative_bias[h, None]
        added = None if bias is None else bias[min(b, bias.shape[0] - 1), min(h, bias.shape[1] - 1), None, :, keys]
        if added is not None and added.shape[1] > 1:
            added = added[:, chosen[rows]]
        q_part, k_part = q[b, h, chosen[rows]].to(statistics), k[b, h * Hk // heads, keys].to(statistics)
        scores_of = _Scores(numbers.softmax_scale, numbers.softcap, slopes, relative, added)
        return _visible_logits(q_part[None], k_part[None], scores_of, part, visible)

    seen = None if blocks is None else blocks.dense(chosen)
    weights = torch.empty(B, heads, len(chosen), Sk, dtype=torch.float32, device=q.device)
    rows_at_once = max(1, _WEIGHTS_AT_ONCE // max(Sk, 1))
    keys_at_once = max(1, _WEIGHTS_AT_ONCE // (min(rows_at_once, max(len(chosen), 1)) + q.shape[-1]))
    for b, h, row in itertools.product(range(B), range(heads), range(0, len(chosen), rows_at_once)):
        some_rows = slice(row, row + rows_at_once)
        keys = [slice(key, key + keys_at_once) for key in range(0, Sk, keys_at_once)]
        if keys:
            scores = torch.cat([logits(b, h, some_rows, some_keys) for some_keys in keys], -1)
            weights[b, h, some_rows] = _softmax(scores, None if sink is None else sink[h, None])[0][0]
    return weights


def _row_numbers(rows: Sequence[int] | Tensor, Sq: int, device: torch.device) -> Tensor:
    if not isinstance(rows, Iterable):
        raise TypeError(f"rows: expected integers in one dimension, got {type(rows).__name__}")
    if isinstance(rows, Tensor) and (rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool):
        raise TypeError(f"rows: expected integers in one dimension, got {arguments.described(rows)}")
    numbers = rows.tolist() if isinstance(rows, Tensor) else [arguments.integer("rows", row) for row in rows]
    for number in numbers:
        if not 0 <= number < Sq:
            raise ValueError(f"rows: expected indices from 0 to {Sq - 1}, the rows of q, got {number}")
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [rows, heads, D] with its first 2 * cos.shape[1] elements rotated for the position of each row, at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[1]
    positions = positions.clamp(0, cos.shape[0] - 1)
    c, s = (t[positions].to(wide)[:, None] for t in (cos, sin))
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    one, other = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = one * c - other * s, one * s + other * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _dense(entry: Entry, q: Tensor, k: Tensor, v: Tensor, bhsd: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not bhsd:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if q.shape[0] == 0:
        shape = (*q.shape[:-1], v.shape[-1])
        out, lse = q.new_zeros(shape), q.new_zeros(shape[:-1], dtype=_lse_dtype(q))
        max_logits = q.new_zeros(shape[:2], dtype=torch.float32)
    else:
        results = [entry(b, q[b], k[b], v[b], 0) for b in range(q.shape[0])]
        out, lse, max_logits = (torch.stack(tensors) for tensors in zip(*results, strict=True))
    return out if bhsd else out.transpose(1, 2), lse, max_logits


def _packed(
    entry: Entry, q: Tensor, k: Tensor, v: Tensor, starts_q: list[int], starts_k: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """attention_reference for packed sequences. Rows after the last sequence get out 0 and lse -inf."""
    outs, lses, largest = [], [], [q.new_zeros(0, q.shape[1], dtype=torch.float32)]
    for b in range(len(starts_q) - 1):
        rows_q, rows_k = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        q_b, k_b, v_b = (t.transpose(0, 1) for t in (q[rows_q], k[rows_k], v[rows_k]))
        out, lse, max_logits = entry(b, q_b, k_b, v_b, starts_k[b])
        outs.append(out.transpose(0, 1))
        lses.append(lse)
        largest.append(max_logits[None])
    after = q.shape[0] - starts_q[-1]
    outs.append(q.new_zeros(after, q.shape[1], v.shape[-1]))
    lses.append(q.new_full((q.shape[1], after), -math.inf, dtype=_lse_dtype(q)))
    return torch.cat(outs), torch.cat(lses, dim=1), torch.cat(largest)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype == fp8.FP8 else torch.promote_types(q.dtype, torch.float32)
