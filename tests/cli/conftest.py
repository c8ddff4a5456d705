"""Common fixtures of the command line's tests: one thread, and the files of `experiments all` with tiny sizes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_experiments import module_of, tiny_sizes

from flashattn_ext_lab import bench_contestants, bench_cuda, timing
from flashattn_ext_lab.experiments import EXPERIMENTS
from flashattn_ext_lab.experiments.harness import Context
from flashattn_ext_lab.experiments.result import Result
from flashattn_ext_lab.main import main


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: these calls are small, and threads that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def tiny_everywhere() -> Iterator[None]:
    """Every experiment takes its tiny sizes, and no time for the reference rates of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in EXPERIMENTS:
            tiny = dict.fromkeys([("cpu", False), ("cpu", True)], tiny_sizes(name))
            patch.setattr(module_of(name), "SIZES", {**module_of(name).SIZES, **tiny})
        patch.setattr(Context, "matmul_rate", lambda self, dtype: 1e12)
        patch.setattr(timing, "QUICK_SECONDS", 0.02)
        patch.setattr(timing, "QUICK_MIN_ROUNDS", 1)  # after the uncounted one; test_timing.py has several
        yield


@pytest.fixture
def small() -> Iterator[None]:
    with tiny_everywhere():
        yield


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `experiments all`, with its reports. No test may write there: parallel test processes share it, and the first
    that needs it fills it.
    """
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    directory, done = place / "experiments", place / "experiments.done"
    with open(place / "experiments.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            command = ["experiments", "all", "--device", "cpu", "--quick", "--threads", "1", "--out", str(directory)]
            with tiny_everywhere():
                assert main(command) == 0
            assert main(["report", str(directory)]) == 0
            done.touch()
    return directory


@pytest.fixture
def results(out: Path) -> dict[str, Result]:
    return {
        name: Result.from_json(json.loads((out / f"{name}.json").read_text(encoding="utf-8"))) for name in EXPERIMENTS
    }


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins on the CPU for the CUDA functions of `bench cuda`."""

    def burst_ms(call: Callable[[], object], launches: int) -> float:
        begin = time.perf_counter()
        for _ in range(launches):
            call()
        return (time.perf_counter() - begin) * 1e3

    def peak_extra_bytes(call: Callable[[], object]) -> int:
        call()
        return 3 << 20

    monkeypatch.setattr(bench_contestants, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "MAX_LAUNCHES", 1)
    monkeypatch.setattr(timing, "burst_ms", burst_ms)
    monkeypatch.setattr(bench_cuda, "peak_extra_bytes", peak_extra_bytes)
    monkeypatch.setattr(bench_cuda, "running_backend", lambda backend: "cuda-none")
    monkeypatch.setattr(
        bench_cuda, "describe_machine", lambda _device: {"machine": "a GPU", "torch": "2", "cuda": "12", "cudnn": 9}
    )
