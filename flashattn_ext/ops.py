"""The ops of csrc/ops.cpp as Python calls them, and the one of them that is written in Python."""

from __future__ import annotations

import torch
from torch import Tensor

forward = torch.ops.flashattn_ext.forward.call
backward = torch.ops.flashattn_ext.backward.call
dropout_mask = torch.ops.flashattn_ext.dropout_mask.call
rng_state = torch.ops.flashattn_ext.rng_state.default

_library = torch.library.Library("flashattn_ext", "FRAGMENT")


def _as_tensor(value: float) -> Tensor:
    """A number that torch.compile keeps symbolic, as a float64 on the CPU; a product is what its compilers understand."""
    return torch.ones((), dtype=torch.float64) * value


_library.impl("as_tensor", _as_tensor, "CompositeImplicitAutograd")
