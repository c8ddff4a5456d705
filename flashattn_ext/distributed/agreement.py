"""Checks that all ranks of a group make the same call: once for each signature of a call, after which the result is cached.

With FLASHATTN_EXT_DISTRIBUTED_CHECK=1 in the environment of every rank, every call is checked, and the values of tensors are compared too.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communication import guarded

# Descriptions of checked calls, by group.
_agreed: weakref.WeakKeyDictionary[Any, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def checks_contents() -> bool:
    """Whether FLASHATTN_EXT_DISTRIBUTED_CHECK turns on the comparison of tensor values at every call.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get("FLASHATTN_EXT_DISTRIBUTED_CHECK", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"FLASHATTN_EXT_DISTRIBUTED_CHECK: expected 0 or 1, got {value!r}")
    return value == "1"


def agree(group: Any, description: dict[str, Any], contents: Mapping[str, Tensor], checked: Any) -> None:
    """Compares this rank's description of a call with the descriptions on the other ranks, at the first call that has it.

    Later calls with the same description skip the check. A difference is therefore detected only where the call is new on every rank;
    a rank with a new call waits for ranks that skip the check until the timeout of the group.

    Args:
        group: the ranks.
        description: names and values, which compare by their text.
        contents: tensors that must be equal on every rank. Compared at every call, with FLASHATTN_EXT_DISTRIBUTED_CHECK=1 only.
        checked: a function that raises if this rank's arguments are not accepted. All ranks then raise.

    Raises:
        The error of `checked`, on the rank where it raises; on the other ranks ValueError with the rank and its message.
        ValueError: the calls differ; raised on every rank, with what differs.
        RuntimeError: another rank did not join within the timeout of the group.
    """
    texts = {name: str(value) for name, value in description.items()}
    key, agreed = tuple(texts.items()), _agreed.setdefault(group, set())
    if checks_contents():
        texts |= {f"what {name} holds": _digest(t) for name, t in contents.items()}
    elif key in agreed:
        return
    error: Exception | None = None
    try:
        checked()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as raised:
        error = raised
    answers: list[Any] = [None] * dist.get_world_size(group)
    with guarded(group, "comparing this call with the calls of the other ranks"):
        dist.all_gather_object(answers, (texts, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    wrong = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text is not None]
    if wrong:
        raise ValueError(
            f"flashattn_ext.distributed: the arguments of another rank are not accepted; {'; '.join(wrong)}"
        )
    names = dict.fromkeys(name for other, _ in answers for name in other)
    different = [text for name in names if (text := _difference(name, [other.get(name) for other, _ in answers]))]
    if different:
        raise ValueError(
            "flashattn_ext.distributed: every rank of the group must make the same call, but the calls differ: "
            + "; ".join(different)
            + (
                "; give seqlen (and seqlen_k in cross attention): parts need not be equally long"
                if any(t.startswith(("seqlen ", "seqlen_k ")) for t in different)
                else ""
            )
        )
    agreed.add(key)


def _digest(t: Tensor) -> str:
    """A string that identifies the dtype, shape and values of a tensor (SHA-256)."""
    values = t.detach().cpu().reshape(-1).contiguous()
    hashed = hashlib.sha256(f"{t.dtype} {list(t.shape)}".encode())
    hashed.update(values.view(torch.uint8).numpy().tobytes())
    beginning = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values[:8].tolist())
    return f"[{beginning}{', ...' * (values.numel() > 8)}] (sha256 {hashed.hexdigest()[:16]})"


def _difference(name: str, values: list[str | None]) -> str:
    """Which ranks have which value; empty where all have the same."""
    if len(set(values)) == 1:
        return ""
    holders: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    told = [
        f"{'nothing' if value is None else value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for value, ranks in holders.items()
    ]
    return f"{name} is {' and '.join(told)}"
