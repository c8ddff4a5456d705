"""DistributedAttention: distributed.attention as an nn.Module."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from .. import names
from ..block_mask import BlockMask
from ..mask import Mask
from ..module import FlashAttention
from . import groups
from .api import MODES, attention
from .groups import Group
from .sharding import checked_kind


class DistributedAttention(FlashAttention):
    """FlashAttention over q, k, v [B, s, H, head_dim] that are this rank's part of a sequence (of two in cross attention), as shard() gives it.

    The gradients of a learnable sink, of slopes and of a relative bias are partial: their sum over the group is the gradient. DDP and
    FSDP reduce them like the gradients of other parameters.

    Args:
        args: head_dim, dropout, causal and use_smooth_softmax, as in FlashAttention.
        group: the ranks that share the sequence, as in distributed.attention; torch.distributed must be initialised.
        mode: what the ranks exchange, as in distributed.attention.
        sharding: "zigzag" or "contiguous", as passed to shard().
        options: the keyword arguments of FlashAttention.

    Raises:
        ValueError: a value is not as described.
        TypeError: a type is not as described.
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(
        self, *args: Any, group: Group = None, mode: str = "auto", sharding: str = "zigzag", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}")
        self.mode = mode
        self.sharding = checked_kind(sharding)
        self.group = groups.resolved(group)

    @names.shown
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *more: Any,
        bias: Tensor | None = None,
        mask: Mask | BlockMask | None = None,
        cu_seqlens: Tensor | None = None,
        seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqlen_k: int | None = None,
        return_max_logits: bool = False,
        **unknown: NoReturn,
    ) -> Any:
        """Calls distributed.attention with the options of this module.

        Args:
            q: this rank's queries [B, s, Hq, head_dim], packed ones [s, Hq, head_dim].
            k: this rank's keys [B, sk, Hk, head_dim].
            v: this rank's values [B, sk, Hk, Dv].
            bias: as in distributed.attention.
            mask: as in distributed.attention.
            cu_seqlens: as in distributed.attention.
            seqlen: as in distributed.attention.
            cu_seqlens_k: as in distributed.attention.
            seqlen_k: as in distributed.attention.
            return_max_logits: as in distributed.attention.

        Returns:
            out [B, s, Hq, Dv] of this rank's queries, in the dtype of q, or (out, max_logits).

        Raises:
            ValueError: the last dimension of q is not head_dim; or as in distributed.attention.
            TypeError: as in distributed.attention.
            NotImplementedError: as in distributed.attention.
            RuntimeError: as in distributed.attention.
        """
        if more or unknown:
            raise names.not_an_argument("DistributedAttention.forward", unknown, more)
        return attention(
            q, k, v, group=self.group, mode=self.mode, sharding=self.sharding, cu_seqlens=cu_seqlens, seqlen=seqlen,
            cu_seqlens_k=cu_seqlens_k, seqlen_k=seqlen_k, bias=bias, mask=mask, return_max_logits=return_max_logits, **self.call_options(q),
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.group.size()}, mode={self.mode!r}, sharding={self.sharding!r}"
