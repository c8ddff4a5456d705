"""DTensors: the checks of ranks.py on two ranks, on the CPU through gloo and on two GPUs through NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing

import flashattn_ext

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import ranks


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """{check: the message of each rank}, empty strings for success. All checks of a device run on one start of the ranks."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        arguments = (str(folder / "rendezvous"), request.param, results)
        torch.multiprocessing.start_processes(ranks.run_all, arguments, ranks.RANKS, start_method="spawn")
        return {name: [results[rank][name] for rank in range(ranks.RANKS)] for name in ranks.CHECKS}


HAS_GPUS = torch.cuda.device_count() >= ranks.RANKS and "cuda" in str(flashattn_ext.build_info()["backends"])
DEVICES = ["cpu"] + (["cuda"] if HAS_GPUS else [])


@pytest.mark.parametrize("outcomes", DEVICES, indirect=True)
@pytest.mark.parametrize("name", ranks.CHECKS)
def test_on_two_ranks(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == [""] * ranks.RANKS, "\n".join(outcomes[name])
