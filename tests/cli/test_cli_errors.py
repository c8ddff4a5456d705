"""Errors from outside the command line (options, files, memory, locale, machine) are reported in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from flashattn_ext_lab import bench_cpu, devices, trainer
from flashattn_ext_lab.experiments import render
from flashattn_ext_lab.experiments.result import Column, Result
from flashattn_ext_lab.main import main

SMALL = [
    "--device",
    "cpu",
    "--steps",
    "2",
    "--batch-size",
    "1",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--sample-bytes",
    "64",
]
FILE_LIMIT = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000));"
    "from flashattn_ext_lab.main import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(autouse=True)
def _threads(restore_threads: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(200)))
    return path


def command(out: Path, text: Path, *options: str) -> list[str]:
    return ["train", "--out", str(out), "--text", str(text), *SMALL, *options]


def run_process(*command: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([warm_python.interpreter(), *command], capture_output=True, timeout=120, **options)


def assert_one_line(error: str, *parts: str) -> None:
    assert error.startswith("flashattn-ext ") and error.count("\n") == 1
    assert all(part in error for part in parts), error


# Options


@pytest.mark.parametrize("seed", ["99999999999999999999", "-1", "1.5", "9" * 5000])
def test_seed_that_generators_do_not_accept(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], seed: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(command(tmp_path, text, f"--seed={seed}"))
    assert stopped.value.code == 2
    assert_one_line(capsys.readouterr().err, "--seed", "accepted are whole numbers from 0 to 2**64 - 1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["fly"], "invalid choice: 'fly'"),
        (["train", "--steps", "0"], "argument --steps: got '0'; accepted are whole numbers from 1 to 2**31 - 1"),
        (
            ["train", "--dropout", "1"],
            "argument --dropout: got '1'; accepted are numbers from 0 up to, not including, 1",
        ),
        (["train", "--learning-rate", "nan"], "argument --learning-rate: got 'nan'; accepted are positive numbers"),
        (["train", "--weight-decay", "-1"], "argument --weight-decay: got '-1'; accepted are numbers from 0 on"),
        (["train", "--speed", "9"], "unrecognized arguments: --speed 9"),
        (["experiments"], "the following arguments are required: NAME"),
        (["bench", "gpu"], "invalid choice: 'gpu'"),
        (["report"], "the following arguments are required: DIR"),
        (["doctor", "now"], "unrecognized arguments: now"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("flashattn-ext") and error.count("\n") == 1 and message in error


def test_largest_seed_resumes(tmp_path: Path, text: Path) -> None:
    options = ("--seed", str(2**64 - 1))
    assert main(command(tmp_path, text, *options)) == 0
    assert main(command(tmp_path, text, *options)) == 0


@pytest.mark.parametrize("name", ["train", "bench cpu", "experiments matmul"])
def test_far_more_threads_than_cpus_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*name.split(), "--threads", str(2**31 - 1)]) == 2
    assert_one_line(
        capsys.readouterr().err,
        "--threads got 2147483647; accepted are 1 to",
        f"this machine has {os.cpu_count()} CPUs",
    )
    assert torch.get_num_threads() == 1
    with pytest.raises(SystemExit):
        main([*name.split(), "--threads", "99999999999"])
    assert_one_line(capsys.readouterr().err, "argument --threads: got '99999999999'")


def test_more_threads_than_cpus_are_used() -> None:
    count = os.cpu_count() + 1
    devices.use_threads(count)
    assert torch.get_num_threads() == count


def test_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["train", "--device", "cuda:2"]) == 2
    assert_one_line(capsys.readouterr().err, "--device got 'cuda:2'", "cuda:0 to cuda:1")


# Checkpoints


@pytest.mark.parametrize("content", [None, [1], {"a": 1}, {"config": {"model": 1}}, {"config": {}}, torch.ones(3)])
def test_checkpoint_of_something_else(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], content: object
) -> None:
    torch.save(content, tmp_path / "checkpoint.pt")
    assert main(command(tmp_path, text)) == 2
    assert_one_line(capsys.readouterr().err, "checkpoint.pt", "--restart")


@pytest.mark.parametrize("name", ["model", "optimiser", "sampler", "random", "train_losses", "validation_losses"])
def test_checkpoint_with_a_part_of_something_else(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(command(tmp_path, text)) == 0
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.save({**state, name: {"layer": torch.ones(1)}}, tmp_path / "checkpoint.pt")
    capsys.readouterr()
    assert main(command(tmp_path, text)) == 2
    assert_one_line(capsys.readouterr().err, "contains no run of this version of train", "--restart starts over")


def test_text_that_changed_does_not_resume(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, text)) == 0
    text.write_bytes(text.read_bytes().replace(b"squared", b"doubled"))
    assert main(command(tmp_path, text)) == 2
    assert_one_line(capsys.readouterr().err, "other contents of", str(text), "--restart")
    assert main(command(tmp_path, text, "--restart")) == 0


# Locale


def test_files_are_utf8_in_every_locale(tmp_path: Path, text: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = run_process("-m", "flashattn_ext", *command(tmp_path, text), env=environment)
    assert done.returncode == 0, done.stderr
    sample = (tmp_path / "sample.txt").read_text(encoding="utf-8")
    assert "\ufffd" in sample and rb"\ufffd" in done.stdout  # an untrained model writes bytes that are not UTF-8

    render.write_json(Result("matmul", "Größe in µm", [Column("µ")], [["größer"]]), tmp_path / "matmul.json")
    done = run_process("-m", "flashattn_ext", "report", str(tmp_path), env=environment)
    assert done.returncode == 0, done.stderr
    for name in ("report.html", "report.md"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert "Größe in µm" in page and "größer" in page


def test_file_names_that_are_not_text(tmp_path: Path, text: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    done = run_process("-m", "flashattn_ext", *command(Path(os.fsdecode(name)), text))
    assert done.returncode == 0, done.stderr
    assert os.path.exists(name + b"/metrics.json") and rb"caf\udce9" in done.stdout


# Memory, disk, pipes


def test_no_memory_is_reported_in_one_line(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer.Training, "one_step", lambda self: torch.empty(2**60, dtype=torch.uint8))
    assert main(command(tmp_path, text)) == 1
    assert_one_line(capsys.readouterr().err, "not enough memory", "smaller sizes need less")


def test_other_errors_of_pytorch_keep_their_traceback(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.Training, "one_step", lambda self: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        main(command(tmp_path, text))


def test_full_disk_is_reported_in_one_line(tmp_path: Path, text: Path) -> None:
    done = run_process("-c", FILE_LIMIT, *command(tmp_path, text))
    assert done.returncode == 1
    assert_one_line(done.stderr.decode(), "checkpoint.pt", "File too large")
    assert list(tmp_path.iterdir()) == [text]


def test_json_that_cannot_be_written_is_reported_before_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_cpu, "measure", lambda **options: pytest.fail("measured before it was reported"))
    for path in (tmp_path, tmp_path / "none" / "bench.json"):
        assert main(["bench", "cpu", "--quick", "--json", str(path)]) == 2
        assert_one_line(capsys.readouterr().err, f"--json {path}: cannot write there")


def test_reader_that_closes_the_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    doctor = [sys.executable, "-m", "flashattn_ext", "doctor"]
    done = subprocess.run(doctor, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
