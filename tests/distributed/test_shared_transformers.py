"""integrations.transformers.register(cp_group=...): models whose rows two ranks share."""

from __future__ import annotations

import pytest
from rank_pool import RankPool

pytest.importorskip("transformers")

import transformers_jobs


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_ranks_have_the_results_of_one_process(pool: RankPool, name: str, packed: bool) -> None:
    pool.run(transformers_jobs.logits_and_gradients_are_those_of_one_process, pool.device, name, packed)


def test_what_ranks_cannot_share_is_refused(pool: RankPool) -> None:
    pool.run(transformers_jobs.what_ranks_cannot_share_is_refused, pool.device)
