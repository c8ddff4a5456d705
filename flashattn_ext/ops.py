"""What torch.compile and the meta device need to know of the ops: shapes and dtypes, no values."""

from __future__ import annotations

import torch
from torch import Tensor

forward = torch.ops.flashattn_ext.forward.default
backward = torch.ops.flashattn_ext.backward.default
dropout_mask = torch.ops.flashattn_ext.dropout_mask.default


def _statistics_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_devices(q: Tensor, **others: Tensor | None) -> None:
    """One meta tensor among real ones leads here instead of to the validation of the real op."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q ({q.device}), got {tensor.device}")


@torch.library.register_fake("flashattn_ext::forward")
def _forward_fake(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bhsd, softmax_scale, causal, window_left,
    window_right, dropout_p, rng_seed, smooth_softmax, sink,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sink=sink)
    if q.dim() == 3:  # packed: [total, H, D]
        lse_shape = (q.size(1), q.size(0))
    else:
        rows, heads = (2, 1) if bhsd else (1, 2)
        lse_shape = (q.size(0), q.size(heads), q.size(rows))
    out = q.new_empty((*q.shape[:-1], v.size(-1)))
    lse = q.new_empty(lse_shape, dtype=_statistics_dtype(q))
    return out, lse, q.new_empty((2 if dropout_p > 0 else 0,), dtype=torch.int64)


@torch.library.register_fake("flashattn_ext::backward")
def _backward_fake(
    dout, dlse, q, k, v, out, lse, rng_state, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, bhsd, softmax_scale, causal, window_left, window_right, dropout_p,
    smooth_softmax, sink, deterministic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sink=sink)
    if sink is None:
        dsink = q.new_empty((0,), dtype=_statistics_dtype(q))
    else:
        dsink = sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


@torch.library.register_fake("flashattn_ext::dropout_mask")
def _dropout_mask_fake(device_of, batch, heads, seqlen_q, seqlen_k, dropout_p, rng_seed, rng_offset) -> Tensor:
    return device_of.new_empty((batch, heads, seqlen_q, seqlen_k), dtype=torch.bool)
