"""The public functions: they put arguments into one form and hand them on. No numerics here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from . import _C, _build, arguments, jagged, ops
from .autograd import CallOptions, CallTensors
from .mask import Mask, checked_mask

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _options(
    q: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    smooth_softmax: bool,
    layout: str,
    deterministic: bool,
    origin: tuple[int, ...] | None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> CallOptions:
    left, right = arguments.window(window_size)
    return CallOptions(  # in the order of its fields: names would cost every call a quarter of a microsecond
        arguments.integer("max_seqlen_q", max_seqlen_q),
        arguments.integer("max_seqlen_k", max_seqlen_k),
        arguments.is_bhsd(layout),
        arguments.scale(softmax_scale, q),
        arguments.number("softcap", softcap),
        arguments.flag("causal", causal),
        left,
        right,
        arguments.number("dropout_p", dropout_p),
        arguments.flag("smooth_softmax", smooth_softmax),
        arguments.flag("deterministic", deterministic) or torch.are_deterministic_algorithms_enabled(),
        arguments.origin(origin),
    )


def _tensors(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *,
    sink: Tensor | None, alibi_slopes: Tensor | None, relative_bias: Tensor | None, bias: Tensor | None,
    mask: Mask | None,
) -> CallTensors:  # fmt: skip
    is_plain = type(q) is Tensor and type(k) is Tensor and type(v) is Tensor
    if not is_plain:
        arguments.tensors(q=q, k=k, v=v)
    if not (sink is None and alibi_slopes is None and relative_bias is None and bias is None):
        arguments.optional_tensors(sink=sink, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias)
    tensors = CallTensors(q, k, v, cu_seqlens_q, cu_seqlens_k, sink, alibi_slopes, relative_bias, bias, None, None)
    if mask is not None:
        checked = checked_mask(mask)
        tensors = tensors._replace(mask_intervals=checked.intervals, mask_extremes=checked.extremes())
    return tensors if is_plain else _with_dtensors(tensors)


def _with_dtensors(tensors: CallTensors) -> CallTensors:
    """The tensors of a call; where one of them is a DTensor, all are."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not any(isinstance(t, distributed.DTensor) for t in tensors):
        return tensors
    from .integrations import dtensor

    return CallTensors(*dtensor.together(*tensors))  # type: ignore[arg-type]


def _autocast(tensors: CallTensors) -> CallTensors:
    """Casts as scaled_dot_product_attention does inside torch.autocast, all but float64.

    A bias in float32 stays what it is, and so does what is read in the dtype of the statistics.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors.q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    bias = tensors.bias
    return tensors._replace(
        q=cast(tensors.q), k=cast(tensors.k), v=cast(tensors.v),
        bias=bias if bias is None or bias.dtype == torch.float32 else cast(bias),
    )  # fmt: skip


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ..., return_lse: Literal[False] = ...,
    **options: Unpack[arguments.AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ..., return_lse: Literal[True],
    **options: Unpack[arguments.AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    smooth_softmax: bool = False,
    sink: Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    rng_seed: int | None = None,
    origin: tuple[int, ...] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with memory linear in the sequence length; differentiable.

    Args:
        q: queries [B, Sq, Hq, D] (layout "bhsd": [B, Hq, Sq, D]); D from 1 to 512 (256 on Ascend). float16,
            bfloat16, float32, and float64 on the CPU. Any strides; only the last dimension is
            wanted contiguous (and copied if it is not).
        k: keys [B, Sk, Hk, D]; Hq is a multiple of Hk, query head h reads key head h // (Hq // Hk).
        v: values [B, Sk, Hk, Dv]; Dv from 1 to 512.
        causal: query i sees the keys j <= i + Sk - Sq (aligned at the bottom right).
        window_size: (left, right), keys seen to either side of i + Sk - Sq; -1 is unbounded.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off.
        alibi_slopes: float32 [Hq] or [B, Hq] (float64 too where the inputs are), adds
            -slope * |i + Sk - Sq - j|; differentiable.
        relative_bias: [Hq, 2 L + 1] of any float dtype, adds
            relative_bias[h, clamp(j - (i + Sk - Sq), -L, L) + L]; differentiable. t5_relative_bias
            makes one of T5's table.
        bias: [B or 1, Hq or 1, Sq or 1, Sk], float32 or the dtype of q, is added last; -inf hides.
            Read by its strides; only the last dimension is wanted contiguous. Differentiable, with
            a gradient in its own shape.
        mask: a Mask: which rows see which key, beside what causal and window_size say.
        dropout_p: probability in [0, 1) of dropping an attention weight. The mask is a function of
            the seed and the position alone, the same on every device; weights are rescaled by the
            probability of keeping that the generator really has (a multiple of 1/256).
        smooth_softmax: adds a logit 0 that owns no value to every softmax ("softmax off by one").
        sink: [Hq], a learnable logit per head instead; any float dtype, differentiable.
        layout: "bshd" or "bhsd", of all tensors. Nested tensors of layout torch.jagged, ragged in the sequence, are calls of
            varlen_forward: out is nested like q, lse is [Hq, total_q].
        deterministic: gradients have the same bits run after run (on the CPU they always have).
        rng_seed: 64-bit seed of the dropout mask; None draws from the device's default generator.
        origin: the place of this call in a larger one that was cut up, over devices for example; numbers from 0. (batch, head):
            dropout draws what the larger call draws for these batch entries and heads. (batch, head, row, key): also its rows and
            keys are counted from there, for dropout, causal, windows, alibi_slopes, relative_bias and mask, and row i of this
            call is at the position of key row + i, whatever the lengths: causal means key + j <= row + i.
        return_lse: also return lse [B, Hq, Sq] (float32; float64 for float64 inputs), the natural
            logarithm of the softmax denominator, sink included; differentiable.

    Returns:
        out [B, Sq, Hq, Dv] in the layout and dtype of q, or (out, lse). A query that sees no key
        gives 0, and an lse of -inf (or of its sink).

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: naming the argument, what came
        and what is accepted; nothing has run then.

    Source: FlashAttention-2 (Dao 2023, algorithms 1 and 2).
    """
    if getattr(q, "is_nested", False):
        (values_q, values_k, values_v), lengths = jagged.packed(layout, q=q, k=k, v=v)
        packed_out, packed_lse = varlen_forward(
            values_q, values_k, values_v, **lengths, causal=causal, window_size=window_size, softmax_scale=softmax_scale,
            softcap=softcap, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias, mask=mask,
            dropout_p=dropout_p, smooth_softmax=smooth_softmax, sink=sink, deterministic=deterministic, rng_seed=rng_seed,
            origin=origin, return_lse=True,
        )  # fmt: skip
        out = jagged.nested(packed_out, q, layout)
        return (out, packed_lse) if arguments.flag("return_lse", return_lse) else out
    tensors = _tensors(
        q, k, v, None, None, sink=sink, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias, mask=mask
    )
    rng_seed = arguments.seed(rng_seed)
    options = _options(
        q, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, smooth_softmax=smooth_softmax, layout=layout,
        deterministic=deterministic, origin=origin,
    )  # fmt: skip
    out, lse = ops.forward(*_autocast(tensors), *options, rng_seed)
    return (out, lse) if arguments.flag("return_lse", return_lse) else out


@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = ..., **options: Unpack[arguments.AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], **options: Unpack[arguments.AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    smooth_softmax: bool = False,
    sink: Tensor | None = None,
    deterministic: bool = False,
    rng_seed: int | None = None,
    origin: tuple[int, ...] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """forward() for sequences of different lengths, packed one after the other.

    Args:
        q: [total_q, Hq, D]; k: [total_k, Hk, D]; v: [total_k, Hk, Dv].
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] on the device of q: sequence b is the rows
            cu_seqlens[b] to cu_seqlens[b + 1]. Empty sequences are fine.
        max_seqlen_q, max_seqlen_k: an upper bound of the lengths.
        alibi_slopes: [Hq] or [B, Hq]; mask: a Mask of packed keys, with intervals [Hm, total_k, 2].
        bias: None; packed sequences have none.
        Everything else as in forward(). Sequence b has the dropout mask of batch entry b.

    Returns:
        out [total_q, Hq, Dv], or (out, lse) with lse [Hq, total_q].
    """
    arguments.tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    tensors = _tensors(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        sink=sink, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias, mask=mask,
    )  # fmt: skip
    rng_seed = arguments.seed(rng_seed)
    options = _options(
        q, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, smooth_softmax=smooth_softmax, layout="bshd",
        deterministic=deterministic, origin=origin, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    out, lse = ops.forward(*_autocast(tensors), *options, rng_seed)
    return (out, lse) if arguments.flag("return_lse", return_lse) else out


@overload
def backward(
    dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    alibi_slopes: None = ..., relative_bias: None = ..., bias: None = ...,
    **options: Unpack[arguments.BackwardOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...  # fmt: skip
@overload
def backward(
    dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    alibi_slopes: Tensor | None = ..., relative_bias: Tensor | None = ..., bias: Tensor | None = ...,
    **options: Unpack[arguments.BackwardOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...  # fmt: skip
def backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    relative_bias: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    smooth_softmax: bool = False,
    sink: Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    rng_seed: int | None = None,
    origin: tuple[int, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """The raw backward of forward() and, with cu_seqlens, of varlen_forward().

    Args:
        dout: gradient of out, in its shape and dtype; None counts as zeros.
        q, k, v, out, lse: as the forward took and returned them.
        dlse: gradient of lse, in its shape and dtype.
        rng_seed: the seed that the forward was given; needed when dropout_p drops anything.
        Everything else as in the forward.

    Returns:
        (dq, dk, dv, dsink), dsink being None without a sink tensor. If alibi_slopes, relative_bias
        or bias is given, (dq, dk, dv, dsink, dalibi_slopes, drelative_bias, dbias), with None for
        what is not given.
    """
    arguments.tensors(out=out, lse=lse)
    arguments.optional_tensors(dout=dout, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    tensors = _tensors(
        q, k, v, cu_seqlens_q, cu_seqlens_k,
        sink=sink, alibi_slopes=alibi_slopes, relative_bias=relative_bias, bias=bias, mask=mask,
    )  # fmt: skip
    rng_seed = arguments.seed(rng_seed)
    options = _options(
        q, causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
        dropout_p=dropout_p, smooth_softmax=smooth_softmax, layout=layout,
        deterministic=deterministic, origin=origin, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    if rng_seed is None and 0 < options.dropout_p < 1:
        raise ValueError(
            "rng_seed: the backward of a call with dropout needs the rng_seed that its forward was given, got None"
        )
    rng_state = None if rng_seed is None else ops.dropout_state(q, options.dropout_p, rng_seed)
    biases = [given is not None for given in tensors.biases()]
    dq, dk, dv, dsink, *dbiases = ops.backward(*tensors, *options, dout, dlse, out, lse, None, *biases, rng_state)
    gradients = (dq, dk, dv, None if sink is None else dsink)
    if not any(biases):
        return gradients
    return *gradients, *(gradient if given else None for gradient, given in zip(dbiases, biases, strict=True))


def dropout_mask(
    B: int,
    H: int,
    Sq: int,
    Sk: int,
    dropout_p: float,
    rng_seed: int,
    device: torch.device | str = "cpu",
    origin: tuple[int, ...] | None = None,
) -> Tensor:
    """The mask that forward() applies: bool [B, H, Sq, Sk], True where a weight is kept.

    Args:
        B, H, Sq, Sk: batch size, query heads, query and key length; packed sequence b is entry b.
        dropout_p: probability of dropping, in [0, 1).
        rng_seed: the seed given to forward().
        device: where the mask is made; the bits are the same everywhere.
        origin: the place of this mask in a larger one, as in forward().
    """
    seed = arguments.integer("rng_seed", rng_seed)
    sizes = [arguments.integer(name, size) for name, size in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk))]
    p = arguments.number("dropout_p", dropout_p)
    mask: Tensor = ops.dropout_mask(
        ops.rng_state(torch.empty(0, device=device), seed), *sizes, p, arguments.origin(origin)
    )
    return mask


class _BackendChoice:
    """Result of use_backend(): already in force, and undone at the end of a with block."""

    def __init__(self, previous: str) -> None:
        self._previous = previous

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_error: Any) -> None:
        _C.force_backend(self._previous)


def use_backend(name: str | None) -> _BackendChoice:
    """Forces a backend for the whole process: use_backend("cpu"), or `with use_backend("cpu"): ...`.

    Args:
        name: one of build_info()["backends"], or "ascend-emulator", which runs CPU tensors through the Ascend C kernels;
            both Ascend backends are loaded on demand. None chooses by the device of the tensors again.

    Raises:
        ValueError: no such backend in this build; names the choices.
        RuntimeError: an Ascend backend was not built, or cannot run here; names the command that builds it.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"backend: expected a name or None, got {type(name).__name__}")
    if name == "ascend-emulator":
        _build.load_ascend_emulator()
    if name == "ascend":
        _build.load_ascend()
    previous = _C.forced_backend()
    _C.force_backend(name or "")
    return _BackendChoice(previous)
