"""Checkpoints: everything that the next step depends on, in one file that is never half written."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any

import torch

from .console import CommandError
from .files import atomic_path


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes the state and waits until the disk has it.

    It serialises in memory first: on a full disk PyTorch's own writer reports only an unexpected file position.
    """
    serialised = io.BytesIO()
    torch.save(state, serialised)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        file.write(serialised.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The saved state with its tensors on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises any of many unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CommandError(f"{path} is not a readable checkpoint ({reason}); --restart starts over") from None


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators that training draws from: Python's, CPU's and device's."""
    state: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[device.type], device)
