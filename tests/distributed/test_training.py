"""train --context-parallel: the losses of one process, checkpoints that resume in another layout, a rank that dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import training_jobs
from rank_pool import RankPool

from flashattn_ext_lab import ranks
from flashattn_ext_lab.console import CommandError
from flashattn_ext_lab.main import main
from flashattn_ext_lab.ranks import Layout


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(32, 127)) * 60)
    return str(path)


def _losses_of_one_process(directory: Path, text: str, packing: str) -> torch.Tensor:
    trainer = training_jobs.new_trainer(directory, text, packing, Layout())
    trainer.train(checkpoint_every=100)
    return torch.tensor([*trainer.train_losses, *(loss for _, loss in trainer.validation_losses)])


def _saved_losses(directory: Path) -> torch.Tensor:
    state = torch.load(directory / "checkpoint.pt", weights_only=True)
    return torch.tensor([*state["train_losses"], *(loss for _, loss in state["validation_losses"])])


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_ranks_have_the_losses_of_one_process_and_resume_in_another_layout(
    pool: RankPool, tmp_path: Path, text: str, packing: str
) -> None:
    if pool.device != "cpu":
        pytest.skip("ranks on the CPU")
    text = text if packing == "windows" else ""
    expected = _losses_of_one_process(tmp_path / "one", text, packing)
    run = tmp_path / "ranks"
    pool.run(training_jobs.train, str(run), text, packing, 2, 3)  # 2 x 2
    pool.run(training_jobs.train, str(run), text, packing, 4, 5)  # 1 x 4
    trainer = training_jobs.new_trainer(run, text, packing, Layout())  # and alone
    assert trainer.resume(restart=False) and trainer.step == 5
    trainer.train(checkpoint_every=100)
    torch.testing.assert_close(_saved_losses(run), expected, rtol=1e-4, atol=1e-4)


def test_layouts_are_checked(pool: RankPool) -> None:
    if pool.ranks == 4:
        pool.run(training_jobs.layouts_are_checked, pool.device)


def test_dropout_differs_between_ranks(pool: RankPool, tmp_path: Path, text: str) -> None:
    if pool.device == "cpu":
        pool.run(training_jobs.dropout_differs_between_ranks, str(tmp_path), text)


def test_one_process_says_how_to_start_more(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    options = ["--device", "cpu", "--text", text, "--out", str(tmp_path / "run"), "--context", "32"]
    assert main(["train", *options, "--context-parallel", "2"]) == 2
    assert "torchrun --nproc-per-node 2 -m flashattn_ext train" in capsys.readouterr().err
    assert main(["train", *options, "--context-parallel", "2", "--attention", "sdpa"]) == 2
    assert "requires --attention flashattn" in capsys.readouterr().err


def test_sigterm_between_steps_prints_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """When one rank fails, torchrun may end the other ranks before they notice."""
    monkeypatch.setattr(ranks, "start", lambda device: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            pytest.raises(CommandError, match=r"this rank stops: another rank has ended or is late.*SIGTERM"),
            ranks.joined(torch.device("cpu")),
        ):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        # Signals that arrive before the message is printed do not end the process.
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    with ranks.joined(torch.device("cpu")):
        assert signal.getsignal(signal.SIGTERM) not in (before, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_that_dies_ends_all_and_the_run_resumes(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "train", "--device", "cpu", "--text", text, "--out", str(tmp_path / "run"), "--context", "128", "--layers", "1", "--width", "32",
        "--batch-size", "2", "--validate-every", "1000", "--dropout", "0", "--sample-bytes", "5", "--steps", "100",
    ]  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flashattn_ext", *options,
        "--context-parallel", "2", "--checkpoint-every", "1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoint.pt").exists():
            assert time.monotonic() < deadline and running.poll() is None, running.communicate()[0]
            time.sleep(0.05)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        output, _ = running.communicate(timeout=120)
    assert running.returncode != 0
    assert re.search(
        r"flashattn-ext train: rank 0 of 2 stops: another rank has ended or is late; the same command resumes", output
    ), output
    steps = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"]
    assert 0 < steps < 100
    assert main(options) == 0
    assert f"at step {steps} of 100" in capsys.readouterr().out
