"""Text for the examples: the documentation topics that come with Python, as documents of bytes. No tokenizer, no network."""

from __future__ import annotations

from pydoc_data.topics import topics

END = 256  # the token after a document's last byte
VOCABULARY = 257


def documents(longest: int) -> list[list[int]]:
    """Every topic in pieces of at most `longest` tokens; the last piece of a topic ends with END."""
    pieces = []
    for name in sorted(topics):
        tokens = [*topics[name].encode(), END]
        pieces += [tokens[start : start + longest] for start in range(0, len(tokens), longest)]
    return pieces


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < END).decode(errors="replace")
