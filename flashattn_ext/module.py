"""FlashAttention: attention as an nn.Module."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import arguments, names
from .api import forward
from .block_mask import BlockMask
from .mask import Mask


class FlashAttention(nn.Module):
    """Attention over q, k, v of shape [B, S, H, head_dim] as an nn.Module; dropout in training mode only.

    Args:
        head_dim: head dim of q and k, from 1 to 512; also sets the scale 1 / sqrt(head_dim).
        dropout: probability of dropping an attention weight, in [0, 1).
        causal: query i sees the keys j <= i + Sk - Sq.
        use_smooth_softmax: adds a logit 0 without a value to every softmax.
        learnable_sink: makes that logit a parameter `sink` [num_heads], starting at 0; replaces
            use_smooth_softmax.
        num_heads: number of query heads; required for learnable_sink only.
        window_size: (left, right), numbers of keys seen to either side of i + Sk - Sq; -1 is unbounded.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c); 0 is off, and so is 2**60 and above, as in forward.
        alibi_slopes: [num_heads], adds -slope * |i + Sk - Sq - j|. Learned if it is an nn.Parameter, otherwise a buffer.
        relative_bias: [num_heads, 2 L + 1], adds the entry of the distance j - (i + Sk - Sq), clamped
            to -L..L. Learned if it is an nn.Parameter, otherwise a buffer.
        invariant: as in flashattn_ext.forward.

    Raises:
        ValueError: a value is not as described.
        TypeError: a type is not as described.
    """

    @names.shown
    def __init__(
        self,
        head_dim: int = 64,
        dropout: float = 0.0,
        causal: bool = False,
        use_smooth_softmax: bool = False,
        *,
        learnable_sink: bool = False,
        num_heads: int | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        relative_bias: Tensor | None = None,
        invariant: bool = False,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            raise names.not_an_argument("FlashAttention", unknown)
        super().__init__()
        self.head_dim = arguments.integer("head_dim", head_dim)
        if not 1 <= self.head_dim <= 512:
            raise ValueError(f"head_dim: expected 1..512, got {head_dim}")
        self.dropout = arguments.number("dropout", dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")
        self.causal = arguments.flag("causal", causal)
        self.use_smooth_softmax = arguments.flag("use_smooth_softmax", use_smooth_softmax)
        self.window_size = arguments.window(window_size)
        if min(self.window_size) < -1:
            raise ValueError(f"window_size: both sides must be -1 (unbounded) or at least 0, got {self.window_size}")
        self.softcap = arguments.number("softcap", softcap)
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap: expected a finite number above 0, or 0 for none, got {softcap}")
        arguments.optional_tensors(alibi_slopes=alibi_slopes, relative_bias=relative_bias)
        self._given = {}
        self._keep("alibi_slopes", alibi_slopes)
        self._keep("relative_bias", relative_bias)
        self.invariant = arguments.flag("invariant", invariant)
        if num_heads is not None and arguments.integer("num_heads", num_heads) < 1:
            raise ValueError(f"num_heads: expected at least 1, got {num_heads}")
        if arguments.flag("learnable_sink", learnable_sink):
            if num_heads is None:
                raise ValueError("num_heads: learnable_sink=True needs the number of query heads, got None")
            self.sink = nn.Parameter(torch.zeros(int(num_heads)))
        else:
            self.register_parameter("sink", None)

    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    # What alibi_slopes and relative_bias were at first, on the CPU; None where they had no values (meta device).
    _given: dict[str, Tensor | None]

    def _keep(self, name: str, tensor: Tensor | None) -> None:
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)
        if tensor is not None:
            self._given[name] = None if tensor.is_meta else tensor.detach().to("cpu", copy=True)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises parameters and buffers as the constructor does: sink is 0, alibi_slopes and relative_bias are what it was given.

        FSDP calls it for modules that were made on the meta device; after `to_empty()` call it yourself.

        Raises:
            RuntimeError: alibi_slopes or relative_bias was given on the meta device, without values to return to.
        """
        if self.sink is not None:
            self.sink.zero_()
        for name, given in self._given.items():
            if given is None:
                raise RuntimeError(
                    f"{name}: was given on the meta device, so that reset_parameters() does not know its values; give it on the CPU "
                    f'(device="cpu" also inside torch.device("meta"))'
                )
            current = getattr(self, name)
            if isinstance(current, Tensor):
                current.copy_(_like(given, current))

    @names.shown
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *more: Any, bias: Tensor | None = None, mask: Mask | BlockMask | None = None,
        return_max_logits: bool = False, **unknown: NoReturn,
    ) -> Any:  # fmt: skip
        """Calls flashattn_ext.forward with the options of this module.

        Args:
            q: queries [B, Sq, Hq, head_dim].
            k: keys [B, Sk, Hk, head_dim]; Hq is a multiple of Hk.
            v: values [B, Sk, Hk, Dv].
            bias: as in flashattn_ext.forward.
            mask: as in flashattn_ext.forward.
            return_max_logits: as in flashattn_ext.forward.

        Returns:
            out [B, Sq, Hq, Dv] in the dtype of q, or (out, max_logits [B, Hq]).

        Raises:
            ValueError: the last dimension of q is not head_dim; or as in flashattn_ext.forward.
            TypeError: as in flashattn_ext.forward.
            NotImplementedError: as in flashattn_ext.forward.
        """
        if more or unknown:
            raise names.not_an_argument("FlashAttention.forward", unknown, more)
        return forward(q, k, v, bias=bias, mask=mask, return_max_logits=return_max_logits, **self.call_options(q))

    def call_options(self, q: Tensor) -> dict[str, Any]:
        """The options of a call, as keyword arguments of flashattn_ext.forward.

        Args:
            q: queries [..., head_dim].

        Returns:
            A dict of keyword arguments; dropout_p is 0 outside of training.

        Raises:
            ValueError: the last dimension of q is not head_dim.
            TypeError: q is not a tensor.
        """
        if not isinstance(q, Tensor):
            arguments.tensors(q=q)
        if not q.dim() or q.shape[-1] != self.head_dim:
            raise ValueError(f"q: this module was made for head_dim={self.head_dim}, got shape {tuple(q.shape)}")
        slopes = self.alibi_slopes
        if slopes is not None:  # the module may have been cast to 16 bits
            slopes = slopes.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "alibi_slopes": slopes,
            "relative_bias": self.relative_bias,
            "dropout_p": self.dropout if self.training else 0.0,
            "smooth_softmax": self.use_smooth_softmax and self.sink is None,
            "sink": self.sink,
            "invariant": self.invariant,
        }

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, dropout={self.dropout}, causal={self.causal}, "
            f"use_smooth_softmax={self.use_smooth_softmax}, learnable_sink={self.sink is not None}, "
            f"window_size={self.window_size}, softcap={self.softcap}, alibi_slopes={self.alibi_slopes is not None}, "
            f"relative_bias={self.relative_bias is not None}, invariant={self.invariant}"
        )


def _like(values: Tensor, other: Tensor) -> Tensor:
    """Values that every rank has, as what other.copy_() takes: a replicated DTensor where `other` is a DTensor (FSDP2)."""
    if not hasattr(other, "placements"):
        return values
    from torch.distributed.tensor import DTensor, Replicate

    mesh = other.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(values.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
