"""The command line: a tiny training run resumes to the same bits, errors are one line, `bench` and `doctor` run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import warm_python

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import flashattn_ext
import flashattn_ext_lab
from flashattn_ext._build import cpu_name, describe_cpu
from flashattn_ext_lab import data, model, trainer
from flashattn_ext_lab.console import atomic_path
from flashattn_ext_lab.main import main
from flashattn_ext_lab.model import GPT, ModelConfig
from flashattn_ext_lab.options import PATTERNS, SCORE_OPTIONS
from flashattn_ext_lab.timing import time_interleaved

TINY = {
    "device": "cpu",
    "steps": 6,
    "batch-size": 2,
    "context": 32,
    "layers": 2,
    "width": 32,
    "heads": 4,
    "kv-heads": 2,
    "warmup": 0.4,
    "validate-every": 3,
    "checkpoint-every": 4,
    "sample-bytes": 8,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(300)))
    return str(path)


def train(out: Path, text: str, *options: str) -> int:
    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    return main(["train", "--out", str(out), "--text", text, *tiny, *options])


def checkpoint(out: Path) -> dict:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def assert_same_state(a: object, b: object) -> None:
    """Bit for bit, through nested containers."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds"}:
            assert_same_state(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


def interrupt_after(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Delivers the signal in the middle of the step that follows `step` finished ones."""
    original = trainer.Trainer.one_step

    def one_step(self: trainer.Trainer) -> None:
        if self.step == step:
            signal.raise_signal(number)
        original(self)

    monkeypatch.setattr(trainer.Trainer, "one_step", one_step)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    options = ("--dropout", "0.2", "--softmax", "sink")
    assert train(tmp_path / "whole", text, *options) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2, number)
        assert train(tmp_path / "parts", text, *options) == 128 + number
    assert checkpoint(tmp_path / "parts")["step"] == 3
    torch.manual_seed(12345)  # as in another process
    assert train(tmp_path / "parts", text, *options) == 0
    assert_same_state(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))
    samples = [(tmp_path / name / "sample.txt").read_text() for name in ("whole", "parts")]
    assert samples[0] == samples[1]


def test_run_leaves_its_outputs(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, text) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint.pt",
        "loss.png",
        "metrics.json",
        "sample.txt",
    ]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["train_losses"]) == 6
    assert [step for step, _ in metrics["validation_losses"]] == [3, 6]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    final = metrics["final_validation_loss"]
    assert capsys.readouterr().out.strip().endswith(f"final validation loss: {final:.4f} nats/byte")


def test_the_largest_logits_are_logged(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Logging does not change the run; a resumed run also keeps the values of the earlier steps."""
    assert train(tmp_path / "without", text) == 0
    assert "max_logits" not in json.loads((tmp_path / "without" / "metrics.json").read_text())
    assert train(tmp_path / "with", text, "--log-max-logits") == 0
    logged = json.loads((tmp_path / "with" / "metrics.json").read_text())["max_logits"]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5, 6] and all(logit > 0 for _, logit in logged)
    with_them, without = (checkpoint(tmp_path / name)["train_losses"] for name in ("with", "without"))
    assert with_them == without
    assert checkpoint(tmp_path / "with")["max_logits"] == [tuple(pair) for pair in logged]
    assert train(tmp_path / "other", text, "--log-max-logits", "--attention", "sdpa") == 2
    assert "--log-max-logits got --attention sdpa" in capsys.readouterr().err


def test_other_options_do_not_resume(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path, text) == 0
    assert train(tmp_path, text, "--learning-rate", "0.5") == 2
    assert "learning-rate 0.004 -> 0.5" in capsys.readouterr().err
    assert train(tmp_path, text, "--learning-rate", "0.5", "--restart") == 0


@pytest.mark.parametrize("softmax", model.SOFTMAX)
def test_curves_of_the_attentions_agree(tmp_path: Path, text: str, softmax: str) -> None:
    losses = {}
    for attention in model.ATTENTION:
        out = tmp_path / attention
        assert train(out, text, "--attention", attention, "--softmax", softmax, "--dropout", "0") == 0
        losses[attention] = torch.tensor(checkpoint(out)["train_losses"])
    torch.testing.assert_close(losses["flashattn"], losses["reference"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses["flashattn"], losses["sdpa"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses["flashattn"], losses["unfused"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "4096"], "smaller --context"),
        (["--heads", "3"], "--width 32 must be an even multiple of --heads 3"),
        (["--width", "2048", "--heads", "2"], "makes heads of 1024; accepted by --attention flashattn are up to 512"),
        (["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        (["--device", "tpu"], "accepted are auto, cpu, cuda, npu"),
        (["--text", "missing.txt"], "--text missing.txt: No such file"),
    ],
)
def test_bad_options_get_one_line(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert train(tmp_path, text, *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("flashattn-ext train: ") and error.count("\n") == 1


def test_unwritable_directory_and_damaged_checkpoint(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file" / "run", text) == 2
    assert "choose another directory" in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"not a checkpoint")
    assert train(tmp_path, text) == 2
    assert "--restart starts over" in capsys.readouterr().err


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="half way"), atomic_path(path) as temporary:
        temporary.write_text("ne")
        raise RuntimeError("half way")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_validation_text_is_held_out(text: str) -> None:
    corpus = data.load_corpus(text, context=32)
    whole = Path(text).read_bytes()
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == whole
    sampler = data.BatchSampler(corpus.train, 4, 32, seed=1)
    inputs, targets, documents = sampler.next_batch(torch.device("cpu"))
    assert documents is None
    assert inputs.shape == targets.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_timed_calls_are_interleaved() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = time_interleaved(calls, budget_s=0, min_rounds=2)
    assert "".join(order) == "abc" + "abc" + "bca"
    assert all(
        timing.rounds == 2 and timing.fastest_s <= timing.median_s <= timing.slowest_s for timing in timings.values()
    )


def test_bench_cpu_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cpu", "--quick", "--markdown", "--json", str(tmp_path / "bench.json")]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    rows = capsys.readouterr().out.count("\n| ") - 4  # less the headers of two tables and their rules
    assert len(results["rows"]) == 24 and rows == 24 + len(results["options"])
    assert all(row["ratio_best"] > 0 for row in results["rows"])
    named = {row["score"] or row["pattern"] or "invariant" for row in results["options"]}
    assert named == {*SCORE_OPTIONS, *PATTERNS, "invariant"}
    invariant = [row for row in results["options"] if row["invariant"]]
    assert len(invariant) == 6 and len(results["options"]) == 2 * (len(named) - 1) + len(invariant)
    for row in results["options"]:
        cost = row["beside"]["causal" if row["pattern"] else "plain"]
        assert row["tflops"]["ours"] > 0 and cost["ratio"] > 0
        assert (row["ratio_best"] is None) == (row["score"] == "softcap")  # PyTorch's own has none


def test_bench_decode_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--quick", "--markdown", "--json", str(tmp_path / "bench.json")]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    rows = capsys.readouterr().out.count("\n| ") - 4  # less the headers of two tables and their rules
    assert rows == len(results["rows"]) + len(results["few_queries"]) and len(results["rows"]) == 3
    assert results["memory_bytes_per_s"] > 0 and all(row["bytes_per_s"]["ours"] > 0 for row in results["rows"])
    assert ["torch sdpa" in row["bytes_per_s"] for row in results["rows"]] == [True, False, False]
    for row in results["few_queries"]:
        assert {*row["bytes_per_s"]} >= {"forward", "with a cache", "torch sdpa", "backward", "torch sdpa backward"}
        assert all(rate > 0 for rate in row["bytes_per_s"].values())


def test_a_sample_goes_on_beyond_the_context() -> None:
    """Also from a prompt that is longer; the same seed writes the same bytes."""
    config = ModelConfig(layers=1, width=32, heads=4, kv_heads=2, dropout=0.1, softmax="smooth", attention="flashattn")
    torch.manual_seed(0)
    model = GPT(config, context=24).eval()
    for prompt in (b"begin", b"a prompt that is longer than the context"):
        samples = [model.generate(prompt, 60, 0.8, torch.Generator().manual_seed(1)) for _ in range(2)]
        assert samples[0] == samples[1] and samples[0].startswith(prompt) and len(samples[0]) == len(prompt) + 60


def test_the_library_does_not_know_its_command_line() -> None:
    package = Path(flashattn_ext.__file__).parent
    naming = [path.name for path in package.rglob("*.py") if "flashattn_ext_lab" in path.read_text(encoding="utf-8")]
    assert naming == ["__main__.py"]  # the command line's own module


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"flashattn_ext {flashattn_ext.__version__}\n"


def test_doctor_finds_a_working_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "self-check" in out and out.endswith("attention works here\n")
    assert re.search(r"^ok +refused call +its error names what it got$", out, re.M)
    assert "backend: cuda" in out and "backend: ascend" in out


ARM_CORE = """processor\t: {}
BogoMIPS\t: 2000.00
Features\t: fp asimd
CPU implementer\t: {}
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {}
CPU revision\t: 1

"""


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        ([("0x41", "0xd4f")] * 2, "Arm Neoverse V2"),
        ([("0x48", "0xd01")], "HiSilicon TaiShan V110"),
        ([("0x41", "0xd05"), ("0x41", "0xd0b")] * 2, "Arm Cortex-A55 and Arm Cortex-A76"),
        ([("0x41", "0xfff")], "Arm part 0xfff"),
        ([("0x99", "0x00a")], "implementer 0x99 part 0x00a"),
    ],
)
def test_the_name_of_an_arm_cpu(cores: list[tuple[str, str]], name: str) -> None:
    """Its /proc/cpuinfo has no model name."""
    assert cpu_name("".join(ARM_CORE.format(n, *core) for n, core in enumerate(cores))) == name


def test_the_name_of_another_cpu() -> None:
    assert cpu_name("processor\t: 0\nmodel\t\t: 1\nmodel name\t: A CPU : fast\nflags\t\t: x\n") == "A CPU : fast"
    assert cpu_name("processor\t: 0\nhart\t\t: 1\n") == "" and cpu_name("") == ""
    assert describe_cpu()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os.kill(os.getpid(), 11)", "ends the process with status -11"),
        ("print('softcap: expected a number above 0, got ')", "says only: softcap: expected a number above 0, got"),
        ("pass", "says only: nothing"),
    ],
)
def test_doctor_finds_errors_that_do_not_arrive(code: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashattn_ext_lab import doctor

    monkeypatch.setattr(doctor, "REFUSED_CALL", f"\nimport os\n{code}\n")
    finding = doctor._refused_call()
    assert not finding.ok and finding.needed and says in finding.text and "libstdc++" in finding.text
    assert "pip install" in finding.fix


@pytest.mark.parametrize(
    ("backends", "cuda", "toolkit", "capability", "text", "fix"),
    [
        (["cpu"], None, None, None, "torch .* has no CUDA", "install a CUDA build of torch"),
        (["cpu"], "13.0", None, None, "nvcc not found", "install the CUDA toolkit 13.0"),
        (["cpu"], "13.0", "here", None, "though torch and nvcc are there", "FLASHATTN_EXT_CUDA=1 pip install"),
        (["cuda-sm80"], "13.0", "here", None, "cuda-sm80 built, but torch sees no GPU", "nvidia-smi"),
        (["cuda-sm80"], "13.0", "here", (7, 5), "A GPU is too old", "8.0 or newer"),
        (["cuda-sm90", "cuda-sm80"], "13.0", "here", (9, 0), "cuda-sm90, cuda-sm80 on A GPU", ""),
    ],
)
def test_doctor_says_why_cuda_is_missing(
    backends: list[str],
    cuda: str | None,
    toolkit: str | None,
    capability: tuple[int, int] | None,
    text: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils import cpp_extension

    from flashattn_ext_lab import doctor

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", toolkit)
    monkeypatch.setattr(shutil, "which", lambda *_arguments, **_options: toolkit)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index=0: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    finding = doctor._cuda(backends)
    assert finding.ok is finding.needed is (not fix)
    assert re.search(text, finding.text) and fix in finding.fix


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A directory with a copy of the package that was built for another torch."""
    for package in (flashattn_ext, flashattn_ext_lab):
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("_C*", "__pycache__"))
    copy = tmp_path / "flashattn_ext"
    (copy / "_build_config.py").write_text('BUILT_FOR_TORCH = "1.0.0"\nCUDA_ARCHITECTURES = ()\n')
    (tmp_path / "VERSION").write_text("0")
    return tmp_path


def test_doctor_explains_a_mismatched_extension(broken_package: Path) -> None:
    command = ["-m", "flashattn_ext"]
    # A package that PYTHONPATH leads to would be used in place of the broken one.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, cwd=broken_package, env=environment, capture_output=True, text=True)
    version = run([sys.executable, *command, "--version"])
    assert version.returncode == 0 and version.stdout.startswith("flashattn_ext ")
    doctor = run([warm_python.interpreter(), *command, "doctor"])
    assert doctor.returncode == 1
    assert "FAIL  extension" in doctor.stdout
    assert "fix: install the wheel for that torch, or rebuild it, in the checkout, with: pip install" in doctor.stdout
    train = run([warm_python.interpreter(), *command, "train"])
    assert train.returncode == 1
    assert train.stderr.startswith("flashattn-ext train: ") and train.stderr.count("\n") == 1
