"""The public functions: they convert their arguments and call the ops. No numerics here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from . import _C, _build, arguments, dropout_padding, jagged, names, ops
from .calls import DENSE, autocast, convert, lengths_of, lists, results
from .options import AttentionOptions, BackwardOptions, BiasOptions, CallOptions, CallTensors, biases, differentiable

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _forward(
    tensors: CallTensors, options: CallOptions, rng_seed: Any, return_lse: Any, return_max_logits: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits); max_logits is empty unless requested. All arguments are checked before a seed is drawn."""
    if rng_seed is not None:
        rng_seed = arguments.seed(rng_seed)
    if return_lse is not False and return_lse is not True:
        arguments.flag("return_lse", return_lse)
    if return_max_logits is not False and return_max_logits is not True:
        return_max_logits = arguments.flag("return_max_logits", return_max_logits)
    tensors = autocast(tensors)
    if options.origin is not None and dropout_padding.is_needed(tensors, options):
        return dropout_padding.forward(tensors, options, rng_seed, return_max_logits)
    out, lse, max_logits = ops.forward(*tensors, *options, rng_seed, return_max_logits)
    return out, lse, max_logits


@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ...,
    return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ...,
    return_lse: Literal[True], return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ...,
    return_lse: Literal[False] = ..., return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ...,
    return_lse: Literal[True], return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = ...,
    return_lse: bool = ..., return_max_logits: bool = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@lists(AttentionOptions)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    layout: str = "bshd",
    rng_seed: int | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention with memory linear in the sequence length; differentiable, on the CPU and CUDA also twice and in forward mode.

    Args:
        q: queries [B, Sq, Hq, D] (layout "bhsd": [B, Hq, Sq, D]); D from 1 to 512 (256 on Ascend). float16,
            bfloat16, float32, float8_e4m3fn (not on Ascend), on the CPU float64. Read in place, except that a tensor is copied once
            if its last dimension is not contiguous; on GPUs and NPUs also if its rows overlap, and on CUDA
            if its rows are not aligned to 16 bytes.
        k: keys [B, Sk, Hk, D], in the dtype of q; Hq is a multiple of Hk, and query head h reads KV head
            h // (Hq // Hk).
        v: values [B, Sk, Hk, Dv], in the dtype of q; Dv from 1 to 512 (256 on Ascend).
        causal: query i sees the keys j <= i + Sk - Sq (aligned at the bottom right).
        window_size: (left, right), numbers of keys seen to either side of i + Sk - Sq; -1 is unbounded.
        softmax_scale: factor of the scores, 1 / sqrt(D) by default.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off, and so is 2**60 (1.2e18) and above, where the
            result equals s in every dtype.
        alibi_slopes: float32 [Hq] or [B, Hq] (float64 too where the inputs are), adds
            -slope * |i + Sk - Sq - j|; differentiable.
        relative_bias: [Hq, 2 L + 1] of any float dtype, adds
            relative_bias[h, clamp(j - (i + Sk - Sq), -L, L) + L]; differentiable. t5_relative_bias
            computes it from T5's table.
        bias: [B or 1, Hq or 1, Sq or 1, Sk], float32 or the dtype of q, added last; -inf hides a key.
            Read by its strides; copied if its last dimension is not contiguous. Differentiable, with
            a gradient in its own shape.
        mask: a Mask, or on the CPU and CUDA a BlockMask of Sq rows and Sk keys: which rows see which key. A key is visible if mask, causal and
            window_size all allow it.
        dropout_p: probability in [0, 1) of dropping an attention weight. The mask is a function of
            the seed and the position alone, the same on every device; weights are rescaled by the
            exact keep probability of the generator (a multiple of 1/256).
        smooth_softmax: adds a logit 0 without a value to every softmax ("softmax off by one").
        sink: [Hq], a learnable logit per head instead of the 0 of smooth_softmax; any float dtype, differentiable.
        layout: "bshd" or "bhsd", of all tensors. Nested tensors of layout torch.jagged, ragged in the sequence, are passed to
            varlen_forward: out is nested like q, lse is [Hq, total_q].
        deterministic: gradients have the same bits in every run (on the CPU they always do). Also on after
            torch.use_deterministic_algorithms(True).
        invariant: a row of out and lse has the same bits in every call in which it has the same query and sees the same keys and values
            under the same options: in every batch, for every Sq, in a prefill in chunks and in flash_attn_with_kvcache. On the
            CPU and on CUDA; other backends refuse it. Gradients are those of a call without it.
        rng_seed: 64-bit signed seed of the dropout mask; None draws one from the device's default generator.
        origin: the position of this call in a larger one that was split, over devices for example; numbers from 0. (batch, head):
            dropout draws what the larger call draws for these batch entries and heads. (batch, head, row, key): its rows and keys
            are also counted from there, for dropout, causal, windows, alibi_slopes, relative_bias and mask, and row i of this
            call is aligned with key row + i, whatever the lengths: causal means key + j <= row + i. (batch, head, row, key, shift):
            as a part of a call with `shift` more keys than rows (fewer where it is negative): causal means key + j <= row + i + shift.
        descale_q: float32 [B or 1, Hk or 1], for q of float8_e4m3fn: the value of an element is element * descale, with the descale of
            its batch entry (packed: sequence) and KV head, and None is 1. quantize_fp8 makes elements and descales. Calls in
            float8_e4m3fn have no gradient, no dropout and no biases.
        descale_k: float32 [B or 1, Hk or 1], the same for k.
        descale_v: float32 [B or 1, Hk or 1], the same for v.
        out_dtype: of calls in float8_e4m3fn, the dtype of out: bfloat16 (None), float16 or float32.
        return_lse: also return lse [B, Hq, Sq] (float32; float64 for float64 inputs), the natural
            logarithm of the softmax denominator, sink included; differentiable.
        return_max_logits: also return, as the last result, the largest visible logit of each head, after softcap and biases, before
            sink and dropout: float32 [B, Hq], without a gradient; -inf for a head that is fully masked.

    Returns:
        out [B, Sq, Hq, Dv] in the layout and dtype of q (of float8_e4m3fn: in out_dtype), (out, lse), (out, max_logits) or (out, lse, max_logits). A query that
        sees no key gives 0, and an lse of -inf (or of its sink).

    Raises:
        ValueError: a shape or a value is not as described. Every message names the argument, what was passed and what is
            accepted; no kernel has run.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: the backend does not support the call, or the device has no backend; names the nearest thing that works.
            Also for second derivatives and forward mode (jvp) on Ascend and, for head dims above 256, on CUDA, for third
            derivatives, and for gradients, dropout and biases of calls in float8_e4m3fn.

    Source: FlashAttention-2 (Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    algorithms 1 and 2).
    """
    if more:
        raise names.not_an_argument("forward", {}, more)
    is_nested, like = getattr(q, "is_nested", False), q
    lengths: tuple[Any, ...] = DENSE
    if is_nested:
        (q, k, v), lengths = jagged.packed(layout, q=q, k=k, v=v)
    tensors, numbers = convert("forward", q, k, v, lengths, "bshd" if is_nested else layout, **options)
    out, lse, max_logits = _forward(tensors, numbers, rng_seed, return_lse, return_max_logits)
    if is_nested:
        out = jagged.nested(out, like, layout)
    return results(out, lse, max_logits, return_lse, return_max_logits)


@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = ..., return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...  # fmt: skip
@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], return_max_logits: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[False] = ..., return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: Literal[True], return_max_logits: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, *,
    return_lse: bool = ..., return_max_logits: bool = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
@lists(AttentionOptions)
def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *more: Any,
    rng_seed: int | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """forward() for B sequences of different lengths, packed one after the other; differentiable like forward().

    The other arguments are those of forward. `bias` must be None; `mask` is a Mask of packed keys, with intervals [Hm, total_k, 2] and
    rows counted within their sequence. Sequence b has the dropout mask of batch entry b.

    Args:
        q: queries [total_q, Hq, D].
        k: keys [total_k, Hk, D].
        v: values [total_k, Hk, Dv].
        cu_seqlens_q: int32 [B + 1] on the device of q: the queries of sequence b are the rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1], the last one excluded. Sequences may be empty.
        cu_seqlens_k: int32 [B + 1], the same for keys and values.
        max_seqlen_q: an upper bound of the lengths of queries, in rows. On CUDA a bound that is too small costs speed, not results.
        max_seqlen_k: the same for keys.

    Returns:
        out [total_q, Hq, Dv], then lse [Hq, total_q] and max_logits [B, Hq] if requested, in this order.

    Raises:
        ValueError: a shape or a value is not as described, or a bias was passed.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in forward().

    Source: as for forward().
    """
    if more:
        raise names.not_an_argument("varlen_forward", {}, more)
    arguments.tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths = lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tensors, numbers = convert("varlen_forward", q, k, v, lengths, "bshd", **options)
    out, lse, max_logits = _forward(tensors, numbers, rng_seed, return_lse, return_max_logits)
    return results(out, lse, max_logits, return_lse, return_max_logits)


@overload
def backward(
    dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    alibi_slopes: None = ..., relative_bias: None = ..., bias: None = ...,
    **options: Unpack[BackwardOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]: ...  # fmt: skip
@overload
def backward(
    dout: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
    alibi_slopes: Tensor | None = ..., relative_bias: Tensor | None = ..., bias: Tensor | None = ...,
    **options: Unpack[BackwardOptions],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...  # fmt: skip
@lists(BackwardOptions, BiasOptions)
def backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *more: Any,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    layout: str = "bshd",
    rng_seed: int | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """The raw backward of forward() and, with cu_seqlens, of varlen_forward(), for code that has its own autograd.

    The other arguments are those of varlen_forward. float8_e4m3fn has no backward.

    Args:
        dout: gradient of out, in its shape and dtype; None counts as zeros.
        q: queries, as the forward took them.
        k: keys, as the forward took them.
        v: values, as the forward took them.
        out: the out that the forward returned.
        lse: the lse that the forward returned with return_lse=True.
        dlse: gradient of lse, in its shape and dtype; None counts as zeros.
        layout: "bshd" or "bhsd", as in the forward.
        rng_seed: the rng_seed of the forward; required with dropout_p > 0.

    Returns:
        (dq, dk, dv, dsink), where dsink is None without a sink tensor. If alibi_slopes, relative_bias
        or bias is given, (dq, dk, dv, dsink, dalibi_slopes, drelative_bias, dbias), with None for
        tensors that are not given. Each has the shape and dtype of its tensor.

    Raises:
        ValueError: a shape or a value is not as described, or dropout without rng_seed.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: as in forward(); derivatives of this function, which Ascend does not support, are those of a function that
            computes out and lse from q, k and v.

    Source: FlashAttention-2 (Dao 2023), algorithm 2.
    """
    if more:
        raise names.not_an_argument("backward", {}, more)
    arguments.tensors(out=out, lse=lse)
    arguments.optional_tensors(dout=dout, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    lengths = lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tensors, numbers = convert("backward", q, k, v, lengths, layout, **options)
    rng_seed = arguments.seed(rng_seed)
    if rng_seed is None and 0 < numbers.dropout_p < 1:
        raise ValueError(
            "rng_seed: the backward of a call with dropout needs the rng_seed of its forward, got None; pass the same rng_seed to both"
        )
    rng_state = None if rng_seed is None else ops.dropout_state(q, numbers.dropout_p, rng_seed)
    needs = [given is not None for given in biases(tensors)]
    if dropout_padding.is_needed(tensors, numbers):
        gradients = dropout_padding.backward(tensors, numbers, dout, dlse, out, lse, needs, rng_state)
    else:
        gradients = ops.backward(*tensors, *numbers, dout, dlse, out, lse, None, None, *needs, rng_state)
    computed = [
        None if given is None else gradient for gradient, given in zip(gradients, differentiable(tensors), strict=True)
    ]
    return tuple(computed if any(needs) else computed[: len(computed) - len(needs)])


@names.shown
def dropout_mask(
    B: int,
    H: int,
    Sq: int,
    Sk: int,
    dropout_p: float,
    rng_seed: int,
    device: torch.device | str = "cpu",
    origin: tuple[int, ...] | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """The dropout mask that forward() applies, as a matrix: for tests and for comparisons with other implementations.

    Args:
        B: batch size; packed sequence b of varlen_forward() has the mask of entry b.
        H: number of query heads.
        Sq: number of queries.
        Sk: number of keys.
        dropout_p: probability of dropping, in [0, 1).
        rng_seed: the seed given to forward(), a 64-bit signed integer.
        device: where the mask is made; the bits are the same on every device.
        origin: the position of this mask in a larger one, as in forward().

    Returns:
        bool [B, H, Sq, Sk], True where a weight is kept.

    Raises:
        ValueError: a size, dropout_p, rng_seed or origin is out of range.
        TypeError: an argument is of another type.
        NotImplementedError: no backend of this build makes masks on that device, or it does not support the origin.

    Source: Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"); docs/dropout.md has the mapping.
    """
    if unknown:
        raise names.not_an_argument("dropout_mask", unknown)
    seed = arguments.integer("rng_seed", rng_seed)
    sizes = [arguments.integer(name, size) for name, size in (("B", B), ("H", H), ("Sq", Sq), ("Sk", Sk))]
    p, state = arguments.number("dropout_p", dropout_p), ops.rng_state(torch.empty(0, device=device), seed)
    return dropout_padding.dropout_mask(state, sizes, p, arguments.origin(origin))


class _BackendChoice:
    """Result of use_backend(): already in force, and restores the previous choice at the end of a with block."""

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

    Returns:
        A context manager that restores the previous choice at the end of a with block. The backend is in force at once.

    Raises:
        TypeError: name is neither a string nor None.
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
