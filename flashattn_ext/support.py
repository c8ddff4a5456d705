"""What a call would run on, and whether slowly. No call is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import arguments, dropout_padding, jagged, names, ops
from .calls import autocast, convert, lengths_of, lists
from .options import ConvertedOptions, differentiable, keeps_centres

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Support(NamedTuple):
    """The answer of supports(); true if the call can run."""

    backend: str  # that runs the call, as in build_info()["backends"]; empty if none does, and for tensors on the meta device
    refusal: str  # why the call cannot run; empty if it can
    slow: str  # why few queries for many keys run the kernels of long sequences; empty if they do not

    def __bool__(self) -> bool:
        return not self.refusal


@lists(ConvertedOptions)
def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Any,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    layout: str = "bshd",
    return_lse: bool = False,
    rng_seed: int | None = None,
    return_max_logits: bool = False,
    **options: Unpack[ConvertedOptions],
) -> Support:
    """Whether forward() or, with cu_seqlens, varlen_forward() can run a call, and whether slowly; runs nothing.

    The other arguments are those of varlen_forward.

    Args:
        layout: "bshd" or "bhsd", as in forward().
        rng_seed: as in forward(); changes nothing.
        return_lse: as in forward(); changes nothing.

    Returns:
        A named tuple, which is true if the call can run. `backend` names what runs it, as in build_info(). `refusal` is the message
        of the NotImplementedError that the call, or its backward if a tensor requires a gradient, would raise, and empty if
        it can run. `slow` is empty, or says why a call with few queries for many keys runs the kernels of long sequences in place of those
        that divide the keys (as in decoding), and what to do about it.

    Raises:
        ValueError: as in forward().
        TypeError: as in forward().
        RuntimeError: as in forward(): the device has no backend.

    Source: the backends' own dispatch (csrc/backend/backend.h).
    """
    if more:
        raise names.not_an_argument("supports", {}, more)
    lengths: tuple[Any, ...] = lengths_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    arguments.optional_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.seed(rng_seed)
    arguments.flag("return_lse", return_lse)
    return_max_logits = arguments.flag("return_max_logits", return_max_logits)
    if getattr(q, "is_nested", False):
        for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if starts is not None:
                raise ValueError(
                    f"{name}: expected None with nested tensors, which have their own offsets, got a tensor"
                )
        (q, k, v), lengths = jagged.packed(layout, q=q, k=k, v=v)
        layout = "bshd"
    try:
        tensors, numbers = convert("supports", q, k, v, lengths, layout, **options)
        tensors = autocast(tensors)
        described = None
        if dropout_padding.is_needed(tensors, numbers):
            assert numbers.origin is not None
            described = tensors, numbers._replace(origin=[*numbers.origin[:2], 0, 0, *numbers.origin[4:]])
            tensors, numbers = dropout_padding.padded(tensors, numbers)
        given = [t for t in differentiable(tensors) if t is not None]
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        tangents = any(arguments.has_tangent(t) for t in given)
        centres = gradients and keeps_centres(tensors, lambda t: t.requires_grad)
        needs = gradients, tangents, centres, return_max_logits
        backend, slow = ops.supports(*tensors, *numbers, *needs)
        if slow and described:  # the text has the caller's queries and options, not those of the padded call
            _, slow = ops.supports(*described[0], *described[1], *needs)
    except NotImplementedError as refusal:
        return Support("", str(refusal), "")
    return Support(backend, "", slow)
