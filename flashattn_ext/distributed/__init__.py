"""Attention over a sequence that is split over several devices: context parallelism on torch.distributed.

from flashattn_ext import distributed

q, k, v = (distributed.shard(t, group=group) for t in (q, k, v))      # this rank's part of the sequence
out = distributed.attention(q, k, v, group=group, causal=True)        # its part of the result
out = distributed.unshard(out, group=group)                           # the whole result, if needed
"""

from . import flops as _flops  # noqa: F401 - registers the ops with torch's FLOP counter
from .api import attention
from .module import DistributedAttention
from .sharding import shard, shard_lengths, unshard

__all__ = ["DistributedAttention", "attention", "shard", "shard_lengths", "unshard"]
