"""One pool of ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_pool import RANKS, RankPool

import flashattn_ext

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

HAS_GPUS = torch.cuda.device_count() >= 2 and "cuda" in str(flashattn_ext.build_info()["backends"])


@pytest.fixture(scope="session", params=["cpu", *(["cuda"] if HAS_GPUS else [])])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Four processes on the CPU; on GPUs as many as there are, up to four."""
    if request.param not in (request.config.getoption("--device") or [request.param]):
        pytest.skip(f"--device without {request.param}")
    ranks = RANKS if request.param == "cpu" else min(RANKS, torch.cuda.device_count())
    started = RankPool(request.param, ranks)
    yield started
    started.close()
