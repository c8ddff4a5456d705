"""The warning for tensors [B, H, S, D] that are passed as [B, S, H, D]. csrc/ops/ops.cpp recognises such calls (looks_like_heads_first)."""

from __future__ import annotations

import sys
import warnings

from . import _C

_told_in: object = None  # the list of filters when the warning was told; catch_warnings makes a new one


def warn(rows: int, keys: int) -> None:
    """Says once, at the line of the user's call, that the layout is probably another one; again inside warnings.catch_warnings.

    Args:
        rows: dimension 1 of q, which the call takes as the number of queries.
        keys: dimension 1 of k, which it takes as the number of keys.
    """
    global _told_in
    if _told_in is warnings.filters:
        return
    _told_in = warnings.filters
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("flashattn_ext", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"flashattn_ext: with causal=True the first {rows - keys} of {rows} queries see none of the {keys} keys, so their rows of out "
        f"are 0. Dimension 1 of q and k is read as the sequence: for tensors [batch, heads, seqlen, head_dim] pass "
        f'layout="bhsd" to flashattn_ext.forward, or transpose(1, 2). (Told once.)',
        UserWarning,
        stacklevel=level,
    )


_C.set_layout_warning(warn)
