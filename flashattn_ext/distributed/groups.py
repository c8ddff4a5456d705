"""The group of ranks that make a call."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

# A process group, a DeviceMesh of one dimension, or None for all ranks.
Group = Any


def resolved(group: Group) -> Any:
    """The process group that `group` stands for.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        TypeError, ValueError: `group` is not a group, or this process is not in it.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed is not initialised; start the ranks with torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a DeviceMesh of one dimension, got {group.ndim} dimensions "
                f"({group.mesh_dim_names or 'without names'}); index it by the name of the one that shares the sequence"
            )
        group = group.get_group()
    elif group is None:
        group = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not one of its ranks; only its ranks may make the call")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a process group, a DeviceMesh or None, got {type(group).__name__}")
    return group


def name_of(group: Any) -> str:
    """The name that the ops take in place of the group, because op schemas have no type for groups."""
    return str(group.group_name)


def named(name: str) -> Any:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
