"""distributed.attention: what ranks compute together is what one device computes alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exchange_jobs import DistributedCase, compare
from rank_pool import RankPool

MODES = ("ulysses", "allgather", "ring")
SHARDINGS = ("zigzag", "contiguous")


def _agrees(pool: RankPool, case: DistributedCase) -> None:
    if case.ranks > pool.ranks:
        pytest.skip(f"{case.ranks} ranks wanted")
    if pool.device != "cpu":
        case = replace(case, device=pool.device, dtype=torch.float32)
    pool.run(compare, case)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_computes(pool: RankPool, ranks: int, mode: str, sharding: str) -> None:
    case = DistributedCase(ranks=ranks, mode=mode, sharding=sharding, S=512, options={"causal": True})
    _agrees(pool, case)
    _agrees(pool, replace(case, options={}, use_lse=False))
