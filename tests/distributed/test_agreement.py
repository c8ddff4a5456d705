"""Ranks that make different calls, wrong calls or none at all: clear errors, never a hang."""

from __future__ import annotations

import agreement_jobs
import pytest
import torch
from rank_pool import RankPool

from flashattn_ext import distributed

JOBS = [
    agreement_jobs.ranks_that_differ_are_told,
    agreement_jobs.contents_that_differ_are_told_on_demand,
    agreement_jobs.a_bias_that_has_rows_on_some_ranks_only_is_told,
    agreement_jobs.what_is_wrong_on_one_rank_is_told_on_all,
    agreement_jobs.groups_are_checked,
    agreement_jobs.keys_that_are_not_split_alike_are_told,
    agreement_jobs.a_refused_call_draws_no_seed,
    agreement_jobs.shards_are_put_together_again,
]
# NCCL ends the process of a rank that has waited too long, with its own message.
LATE = [
    agreement_jobs.a_rank_that_does_not_come_is_waited_for_until_the_timeout,
    agreement_jobs.a_rank_that_leaves_between_calls_is_waited_for_until_the_timeout,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_every_rank_hears(pool: RankPool, job: object) -> None:
    pool.run(job, pool.device)


@pytest.mark.parametrize("job", LATE, ids=lambda job: job.__name__)
def test_late_ranks_end_in_an_error(pool: RankPool, job: object) -> None:
    if pool.device == "cpu":
        pool.run(job, pool.device)


def test_without_torch_distributed_the_error_says_how_to_start_it() -> None:
    x = torch.zeros(1, 8, 1, 8)
    for call in (
        lambda: distributed.attention(x, x, x),
        lambda: distributed.shard(x),
        distributed.DistributedAttention,
    ):
        with pytest.raises(RuntimeError, match="is not initialised; start the ranks with torchrun"):
            call()
