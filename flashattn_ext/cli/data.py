"""Text as bytes: its source, the held-out split, batches in an order that can be resumed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .console import CommandError

VALIDATION_SHARE = 0.1
MAX_VALIDATION_WINDOWS = 256


@dataclass(frozen=True)
class Corpus:
    """A text, split once. Both parts are uint8 `[bytes]`; `sha256` is of the whole text, in hexadecimal digits."""

    name: str
    sha256: str
    train: Tensor
    validation: Tensor


def load_corpus(path: str | None, context: int) -> Corpus:
    """Reads the file, or by default CPython's own documentation topics, and holds out the last
    tenth.
    """
    text = _read_file(path) if path else _python_topics()
    name = path or "pydoc_data.topics"
    held_out = int(len(text) * VALIDATION_SHARE)
    if held_out < context + 1:
        need = int((context + 1) / VALIDATION_SHARE) + 1
        raise CommandError(
            f"--text {name} has {len(text)} bytes; --context {context} needs at least {need} "
            f"(a tenth is held out): give a longer text or a smaller --context"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(name, hashlib.sha256(text).hexdigest(), data[:-held_out], data[-held_out:])


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"--text {path}: {error.strerror}") from None


def _python_topics() -> bytes:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise CommandError("this Python has no pydoc_data.topics; give a text with --text FILE") from None
    # Topics come sorted by name; shuffled, the held-out tenth is a fair sample of them. The order
    # is always the same.
    names = sorted(topics)
    random.Random(0).shuffle(names)
    return "\n".join(topics[name] for name in names).encode()


class BatchSampler:
    """Random windows of the training text, in an order that depends on the seed and the number of
    batches drawn.
    """

    def __init__(self, data: Tensor, batch_size: int, context: int, seed: int) -> None:
        self.data = data
        self.batch_size = batch_size
        self.context = context
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 `[batch_size, context]`: the targets are the inputs moved on by
        one byte.
        """
        last = len(self.data) - self.context
        starts = torch.randint(last, (self.batch_size, 1), generator=self.generator)
        windows = self.data[starts + torch.arange(self.context + 1)].long().to(device)
        return windows[:, :-1], windows[:, 1:]

    def state(self) -> Tensor:
        return self.generator.get_state()

    def restore(self, state: Tensor) -> None:
        self.generator.set_state(state)


def validation_batches(data: Tensor, batch_size: int, context: int) -> list[Tensor]:
    """Windows int64 `[<= batch_size, context + 1]` spread evenly over the held-out text, always the
    same ones.
    """
    available = (len(data) - 1) // context
    count = min(available, MAX_VALIDATION_WINDOWS)
    starts = torch.arange(count) * available // count * context
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return list(windows.split(batch_size))
