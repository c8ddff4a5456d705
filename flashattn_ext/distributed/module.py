"""DistributedAttention: distributed.attention as an nn.Module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..mask import Mask
from ..module import FlashAttention
from . import groups
from .api import MODES, attention
from .groups import Group
from .sharding import checked_kind


class DistributedAttention(FlashAttention):
    """FlashAttention over q, k, v [B, s, H, head_dim] that are this rank's part of a sequence, as shard() gives it.

    Args:
        group: the ranks that share the sequence, as in distributed.attention; torch.distributed must be initialised.
        mode, sharding: as in distributed.attention.
        Everything else as in FlashAttention. The gradients of a learnable sink, of slopes and of a relative bias are this rank's share,
        which DDP and FSDP add up as they do those of other parameters.
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

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        seqlen: int | None = None,
    ) -> Tensor:
        """q [B, s, Hq, head_dim], k and v [B, s, Hk, head_dim] -> out [B, s, Hq, head_dim], packed ones without the B.

        `bias`, `mask`, `cu_seqlens` and `seqlen` are those of distributed.attention.
        """
        out: Tensor = attention(
            q, k, v, group=self.group, mode=self.mode, sharding=self.sharding, cu_seqlens=cu_seqlens, seqlen=seqlen,
            bias=bias, mask=mask, **self.call_options(q),
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ranks={self.group.size()}, mode={self.mode!r}, sharding={self.sharding!r}"
