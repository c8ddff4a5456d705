"""J and H, the two products behind every derivative of order two, as explicit formulas in plain PyTorch (docs/derivatives.md).

They take what the ops `jvp` and `second` take, and build the matrices [Hq, Sq, Sk]. tests/kernels/test_derivative_formulas.py compares
them with autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashattn_ext import reference
from flashattn_ext.options import CallOptions, CallTensors, differentiable


class Tangents(NamedTuple):
    """Tangents of the tensors of a call, or cotangents of their gradients; None stands for zeros."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    sink: Tensor | None = None
    alibi_slopes: Tensor | None = None
    relative_bias: Tensor | None = None
    bias: Tensor | None = None


class Slices(NamedTuple):
    """Where one batch entry or packed sequence is: [heads, rows, ...] views of every tensor of the call."""

    b: int
    rows: slice
    keys: slice


def _sequences(t: CallTensors, options: CallOptions) -> Iterator[Slices]:
    if t.cu_seqlens_q is None or t.cu_seqlens_k is None:
        yield from (Slices(b, slice(None), slice(None)) for b in range(t.q.shape[0]))
        return
    starts_q, starts_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    for b in range(len(starts_q) - 1):
        yield Slices(b, slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2]))


def _rows_of(t: Tensor, b: int, part: slice, options: CallOptions, packed: bool) -> Tensor:
    """The view [heads, rows, D] of q, k, v, out, dout or their like."""
    if packed:
        return t[part].transpose(0, 1)
    return t[b] if options.bhsd else t[b].transpose(0, 1)


def _statistics_of(t: Tensor, at: Slices, packed: bool) -> Tensor:
    """The view [heads, rows] of lse or its like."""
    return t[:, at.rows] if packed else t[at.b]


def _of_entry(t: Tensor, b: int) -> Tensor:
    return t[b if t.shape[0] > 1 else 0]


class _Weights:
    """One sequence of a call: its logits as functions of the products, its weights, and the tangents A of its logits."""

    def __init__(
        self, t: CallTensors, options: CallOptions, rng_state: Tensor | None, tangents: Tangents, at: Slices
    ) -> None:
        packed = t.cu_seqlens_q is not None
        self.t, self.options, self.tangents, self.at, self.packed = t, options, tangents, at, packed
        self.q = _rows_of(t.q, at.b, at.rows, options, packed)
        heads, Sq = self.q.shape[:2]
        self.k, self.v = (self._shared(x) for x in (t.k, t.v))
        self.u = None if tangents.q is None else _rows_of(tangents.q, at.b, at.rows, options, packed)
        self.w, self.x = (None if x is None else self._shared(x) for x in (tangents.k, tangents.v))
        Sk = self.k.shape[1]
        self.positions = positions = reference._Positions.of(
            None if options.origin is None else tuple(options.origin), Sq, Sk, self.q.device
        )
        self.distance = positions.distance()
        visible = reference._in_window(positions, options.causal, (options.window_left, options.window_right))
        visible = visible.expand(heads, Sq, Sk)
        if t.mask_intervals is not None:
            intervals = t.mask_intervals if packed else _of_entry(t.mask_intervals, at.b)
            visible = visible & reference._in_intervals(positions, intervals[:, at.keys], heads)
        product = options.softmax_scale * self.q @ self.k.mT
        bent = torch.tanh(product / options.softcap) if options.softcap else torch.zeros_like(product)
        self.slope = 1 - bent**2
        self.bend = -2 * bent * self.slope / options.softcap if options.softcap else bent  # derivative of the slope
        logits = options.softcap * bent if options.softcap else product
        logits = logits + self._biases(t.alibi_slopes, t.relative_bias, t.bias, logits)
        logits = logits.masked_fill(~visible, -torch.inf)
        sink = t.sink if t.sink is not None else self.q.new_zeros(heads) if options.smooth_softmax else None
        column = self.q.new_full((heads, Sq, 1), -torch.inf) if sink is None else sink[:, None, None].expand(-1, Sq, 1)
        p = torch.cat([logits, column.to(logits)], -1).softmax(-1).nan_to_num()  # rows that see nothing are NaN
        self.p, self.p_sink = p[..., :-1], p[..., -1]
        self.m = torch.ones_like(self.p)  # keep / p_keep
        if rng_state is not None and options.dropout_p > 0:
            threshold = reference.dropout_threshold(options.dropout_p)
            keep = reference._keep_mask(positions, at.b, heads, threshold, int(rng_state[0]))
            self.m = keep.to(self.p) * (256 / threshold)
        # Tangents of the products, of the logits and of lse.
        self.products = torch.zeros_like(product)
        if self.u is not None:
            self.products = self.products + options.softmax_scale * self.u @ self.k.mT
        if self.w is not None:
            self.products = self.products + options.softmax_scale * self.q @ self.w.mT
        self.A = self.slope * self.products
        self.A = self.A + self._biases(tangents.alibi_slopes, tangents.relative_bias, tangents.bias, self.A)
        self.A = self.A.masked_fill(self.p == 0, 0)
        self.ts = self.q.new_zeros(heads) if tangents.sink is None else tangents.sink.to(self.q)
        self.a = (self.p * self.A).sum(-1) + self.p_sink * self.ts[:, None]

    def _shared(self, t: Tensor) -> Tensor:
        """Keys or values [Hk, Sk, D], repeated for every query head."""
        rows = _rows_of(t, self.at.b, self.at.keys, self.options, self.packed)
        return rows.repeat_interleave(self.q.shape[0] // rows.shape[0], 0)

    def _biases(self, slopes: Tensor | None, relative: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor:
        """What slopes, relative bias and bias, or their tangents, add to the logits."""
        added = torch.zeros_like(like)
        if slopes is not None:
            of_entry = slopes[self.at.b] if slopes.dim() == 2 else slopes
            added = added - of_entry.to(like)[:, None, None] * self.distance.abs()
        if relative is not None:
            added = added + relative.to(like)[:, self._reach(relative)]
        return added if bias is None else added + _of_entry(bias, self.at.b).to(like)

    def _reach(self, relative: Tensor) -> Tensor:
        L = relative.shape[-1] // 2
        return self.distance.clamp(-L, L) + L

    def tangents_of_results(self) -> tuple[Tensor, Tensor]:
        """(tout [Hq, Sq, Dv], tlse [Hq, Sq])"""
        weights = self.p * self.m
        tout = weights * (self.A - self.a[..., None]) @ self.v
        return (tout if self.x is None else tout + weights @ self.x), self.a

    def add_second(self, into: Tangents, dout: Tensor, dlse: Tensor | None) -> None:
        """Adds the derivative of <dout, tout> + <dlse, tlse> with respect to every tensor of the call to `into`."""
        options, at = self.options, self.at
        dout = _rows_of(dout, at.b, at.rows, options, self.packed)
        weights = self.p * self.m
        tout, a = self.tangents_of_results()
        delta = (dout * (weights @ self.v)).sum(-1)
        if dlse is not None:
            delta = delta - _statistics_of(dlse, at, self.packed)
        r = (dout * tout).sum(-1)
        D = self.m * (dout @ self.v.mT) - delta[..., None]  # gradient of the logits of out and lse, per weight
        from_values = self.m * (dout @ self.x.mT) if self.x is not None else torch.zeros_like(D)
        dS = self.p * D
        E = self.p * (D * (self.A - a[..., None]) + from_values - r[..., None])
        of_products = options.softmax_scale * (E * self.slope + dS * self.bend * self.products)
        of_tangents = options.softmax_scale * dS * self.slope
        dq, dk = of_products @ self.k, of_products.mT @ self.q
        if self.w is not None:
            dq = dq + of_tangents @ self.w
        if self.u is not None:
            dk = dk + of_tangents.mT @ self.u
        dv = (weights * (self.A - a[..., None])).mT @ dout
        for total, part, rows in ((into.q, dq, at.rows), (into.k, dk, at.keys), (into.v, dv, at.keys)):
            assert total is not None
            of_group = _rows_of(total, at.b, rows, options, self.packed)
            of_group += part.unflatten(0, (of_group.shape[0], -1)).sum(1)
        if into.sink is not None:
            into.sink.add_((self.p_sink * (-delta * (self.ts[:, None] - a) - r)).sum(-1))
        if into.alibi_slopes is not None:
            slopes = into.alibi_slopes[at.b] if into.alibi_slopes.dim() == 2 else into.alibi_slopes
            slopes.sub_((E * self.distance.abs()).sum((-1, -2)))
        if into.relative_bias is not None:
            into.relative_bias.index_add_(
                1, self._reach(into.relative_bias).flatten(), E.flatten(1).to(into.relative_bias)
            )
        if into.bias is not None:
            entry = _of_entry(into.bias, at.b)
            entry += E.sum_to_size(entry.shape)


def jvp(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor | None, tangents: Tangents
) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse."""
    packed = tensors.cu_seqlens_q is not None
    q, v = tensors.q, tensors.v
    tout = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    heads = q.shape[1] if packed or options.bhsd else q.shape[2]
    tlse = q.new_zeros((heads, q.shape[0]) if packed else (q.shape[0], heads, q.shape[2 if options.bhsd else 1]))
    for at in _sequences(tensors, options):
        of_rows, of_lse = _Weights(tensors, options, rng_state, tangents, at).tangents_of_results()
        _rows_of(tout, at.b, at.rows, options, packed)[:] = of_rows
        _statistics_of(tlse, at, packed)[:] = of_lse
    return tout, tlse


def second(
    tensors: CallTensors, options: CallOptions, rng_state: Tensor | None, dout: Tensor, dlse: Tensor | None,
    tangents: Tangents,
) -> Tangents:  # fmt: skip
    """The derivative of <dout, tout> + <dlse, tlse> with respect to the tensors of the call; None for those that are not given."""
    sums = Tangents(*(None if t is None else torch.zeros_like(t) for t in differentiable(tensors)))
    for at in _sequences(tensors, options):
        _Weights(tensors, options, rng_state, tangents, at).add_second(sums, dout, dlse)
    return sums
