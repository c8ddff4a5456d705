"""bench distributed: its counts of bytes, without timing."""

from __future__ import annotations

import pytest

from flashattn_ext_lab.bench_distributed import cases_of, measure, sent_bytes
from flashattn_ext_lab.console import CommandError


def test_bytes_of_two_ranks() -> None:
    """By hand: 256 positions, 4 query heads, 2 KV heads, D = 8, float32; a rank has 128 positions."""
    (case, _), position = cases_of(256, (4, 2), 8, 60, "fp32"), 8 * 4
    # q of 2 heads, k and v of 1 each, out of 2; backward: dout of 2, dq of 2, dk and dv of 1 each
    assert sent_bytes(case, "ulysses", 0, 2) == 128 * (2 + 2 + 2 + 2 + 2 + 2) * position
    # Zigzag: rank 0 has chunks 0 and 3 of 64 positions, rank 1 has 1 and 2; chunk 3 is masked for all rows of rank 1.
    # Keys and values go twice, their gradients back once.
    assert sent_bytes(case, "ring", 0, 2) == (2 * 64 + 128) * 2 * 2 * position
    assert sent_bytes(case, "ring", 1, 2) == (2 * 128 + 64) * 2 * 2 * position
    assert sent_bytes(case, "allgather", 1, 2) == sent_bytes(case, "ring", 1, 2)


def test_fully_masked_keys_are_not_sent() -> None:
    whole, documents = cases_of(1024, (4, 2), 8, 60, "fp32")
    assert whole.tokens == documents.tokens == sum(documents.lengths) == 1024 and max(documents.lengths) <= 90
    for rank in range(4):
        assert sent_bytes(documents, "ring", rank, 4) < sent_bytes(whole, "ring", rank, 4) / 4


def test_it_is_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CommandError, match="torchrun --nproc-per-node 2 -m flashattn_ext bench distributed"):
        measure(quick=True)
