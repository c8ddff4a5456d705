"""distributed.attention under checkpointing, torch.compile, autocast, DDP and FSDP2."""

from __future__ import annotations

import composition_jobs
import pytest
from rank_pool import RankPool

JOBS = [
    composition_jobs.checkpointing_computes_the_same_again,
    composition_jobs.a_drawn_seed_drops_what_one_device_drops,
    composition_jobs.compiled_functions_have_no_break,
    composition_jobs.fsdp2_on_a_mesh_has_the_losses_of_one_process,
    composition_jobs.modules_made_on_the_meta_device_are_initialised,
    composition_jobs.ddp_on_a_mesh_has_the_losses_of_one_process,
    composition_jobs.ranks_count_the_flops_of_the_whole,
    composition_jobs.second_derivatives_say_what_to_do,
    composition_jobs.tangents_are_refused,
    composition_jobs.autocast_is_followed,
    composition_jobs.a_module_without_its_group_is_no_copy,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_ranks_do(pool: RankPool, job: object) -> None:
    pool.run(job, pool.device)
