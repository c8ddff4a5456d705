"""Text as bytes: its source, the held-out part, batches in an order that can be resumed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .console import CommandError

HELD_OUT = 0.1
MAX_VALIDATION_WINDOWS = 256
NOT_PREDICTED = -100  # the target that the loss leaves out


@dataclass(frozen=True)
class Corpus:
    """A text, split once. Both parts are uint8 `[bytes]`; `sha256` is of the whole text, in hexadecimal digits.

    The documents are int32 `[bytes]`, the number of each byte's document; None for a file, in which they are unknown.
    """

    name: str
    sha256: str
    train: Tensor
    validation: Tensor
    train_documents: Tensor | None = None
    validation_documents: Tensor | None = None


class Batch(NamedTuple):
    """Windows of a text, int64 `[batch_size, context]`.

    The targets are the tokens shifted by one byte; a target that begins another document is NOT_PREDICTED.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None  # int32 [batch_size, context]

    def to(self, device: torch.device) -> Batch:
        return Batch(*(None if t is None else t.to(device) for t in self))


def load_corpus(path: str | None, context: int) -> Corpus:
    """Reads the file, or by default CPython's own documentation topics, and holds out the last tenth."""
    try:
        topics = [Path(path).read_bytes()] if path else _python_topics()
    except OSError as error:
        raise CommandError(f"--text {path}: {error.strerror}") from None
    text = b"".join(topics)
    name = path or "pydoc_data.topics"
    held_out = int(len(text) * HELD_OUT)
    if held_out < context + 1:
        need = f"needs at least {int((context + 1) / HELD_OUT) + 1} (a tenth is held out)"
        sizes = f"--text {name} has {len(text)} bytes; --context {context} {need}"
        raise CommandError(f"{sizes}: give a longer text or a smaller --context")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    corpus = Corpus(name, hashlib.sha256(text).hexdigest(), data[:-held_out], data[-held_out:])
    if path:
        return corpus
    sizes = torch.tensor([len(topic) for topic in topics])
    documents = torch.arange(len(topics), dtype=torch.int32).repeat_interleave(sizes)
    return replace(corpus, train_documents=documents[:-held_out], validation_documents=documents[-held_out:])


def _python_topics() -> list[bytes]:
    """Topics, each with the line feed that separates it from the next one.

    They are sorted by name; shuffled, always in the same way, the held-out tenth is a fair sample of them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise CommandError("this Python has no pydoc_data.topics; give a text with --text FILE") from None
    names = sorted(topics)
    random.Random(0).shuffle(names)
    return [(topics[name] + "\n" * (name != names[-1])).encode() for name in names]


def _windows(data: Tensor, documents: Tensor | None, starts: Tensor, context: int) -> Batch:
    """The windows that begin at `starts` [batch_size]."""
    index = starts[:, None] + torch.arange(context + 1)
    windows = data[index].long()
    tokens, targets = windows[:, :-1], windows[:, 1:]
    if documents is None:
        return Batch(tokens, targets, None)
    of = documents[index]
    return Batch(tokens, targets.masked_fill(of[:, 1:] != of[:, :-1], NOT_PREDICTED), of[:, :-1])


class BatchSampler:
    """Random windows of the training text, in an order that depends on the seed and the number of batches drawn.

    With documents [bytes], the batches say which document each byte is of. A checkpoint saves the state of `generator`.
    """

    def __init__(self, data: Tensor, batch_size: int, context: int, seed: int, documents: Tensor | None = None) -> None:
        self.data, self.documents = data, documents
        self.batch_size, self.context = batch_size, context
        self.generator = torch.Generator().manual_seed(seed)

    def next_batch(self, device: torch.device) -> Batch:
        last = len(self.data) - self.context
        starts = torch.randint(last, (self.batch_size, 1), generator=self.generator)
        return _windows(self.data, self.documents, starts[:, 0], self.context).to(device)


def validation_batches(data: Tensor, batch_size: int, context: int, documents: Tensor | None = None) -> list[Batch]:
    """At most `batch_size` windows each, spread evenly over the held-out text, always the same ones."""
    available = (len(data) - 1) // context
    count = min(available, MAX_VALIDATION_WINDOWS)
    starts = torch.arange(count) * available // count * context
    return [_windows(data, documents, part, context) for part in starts.split(batch_size)]
