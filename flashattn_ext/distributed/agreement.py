"""Whether all ranks of a group make the same call: asked once for each kind of call, and remembered."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from .communication import guarded

_agreed: weakref.WeakKeyDictionary[Any, set[tuple[Any, ...]]] = weakref.WeakKeyDictionary()  # descriptions, by group


def agree(group: Any, description: dict[str, Any], checked: Any) -> None:
    """Compares this rank's description of a call with those of the others, at the first call that has it.

    Later calls that are described alike ask nobody. Ranks must therefore differ in what they call for the first time only.

    Args:
        group: the ranks.
        description: names and values, which compare by their text.
        checked: a function that raises if this rank's arguments are not accepted. All ranks then raise.

    Raises:
        what `checked` raises, on the rank where it does; on the others ValueError, which says whose call is wrong and why.
        ValueError: calls differ; on every rank, with what differs.
        RuntimeError: another rank did not come within the timeout of the group.
    """
    texts = {name: str(value) for name, value in description.items()}
    key, agreed = tuple(texts.items()), _agreed.setdefault(group, set())
    if key in agreed:
        return
    error: Exception | None = None
    try:
        checked()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as raised:
        error = raised
    answers: list[Any] = [None] * dist.get_world_size(group)
    with guarded(group, "comparing this call with those of the other ranks"):
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
            "flashattn_ext.distributed: every rank of the group must make the same call, and they differ: "
            + "; ".join(different)
            + (
                "; give seqlen: parts need not be equally long"
                if any(t.startswith("seqlen ") for t in different)
                else ""
            )
        )
    agreed.add(key)


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
