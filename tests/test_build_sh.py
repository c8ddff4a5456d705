"""build.sh: which architectures it takes, which it refuses and why, and how it looks for CANN."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = "910, 910b, 910pro, 910_93"


def build(*arguments: str, cann: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HOME": "/nonexistent", "ASCEND_TOOLKIT_HOME": "", "ASCEND_HOME_PATH": str(cann or "")}
    command = ["bash", ROOT / "build.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def make_cann(folder: Path, version: str, *, compiler: bool = True) -> Path:
    (folder / "compiler").mkdir(parents=True)
    (folder / "compiler" / "version.info").write_text(f"Version={version}\nversion_dir=x\n")
    if compiler:
        (folder / "compiler" / "bisheng").touch()
    return folder


def test_help_prints_the_table() -> None:
    done = build("-help")
    assert done.returncode == 0
    assert "910_93   Atlas A3: Ascend910_9391" in done.stdout and "910b     Atlas A2: Ascend910B1, " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"-arch is missing; accepted are {NAMES}"),
        (["-arch", "920"], f"-arch: '920' is unknown; accepted are {NAMES}"),
        (["-arch"], "-arch needs a value"),
        (["-arch", "910", "-fast"], "unknown option '-fast'"),
        (["-arch", "910", "-mode", "gpu"], "-mode: 'gpu' is unknown; accepted are npu, emulator, check"),
        (["-arch", "910", "-tilings"], "-tilings goes with -mode emulator, got -mode npu"),
        (["-arch", "910", "-j", "0"], "-j: expected a whole number from 1, got '0'"),
        (
            ["-arch", "910_93", "-soc", "Ascend910B1"],
            "-soc: 'Ascend910B1' is not of Atlas A3; accepted are Ascend910_93",
        ),
        (["-arch", "Ascend910A"], "Ascend910A is a first-generation chip"),
        (["-arch", "910proa"], "Ascend910ProA is a first-generation chip"),
        (["-arch", "910b", "-soc", "Ascend910B"], "Ascend910B is a first-generation chip"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = build(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("mode", ["npu", "check"])
def test_without_cann(mode: str, tmp_path: Path) -> None:
    done = build("-arch", "910b", "-mode", mode, cann=tmp_path / "nothing")
    assert done.returncode == 2
    assert f"CANN was not found: looked in {tmp_path / 'nothing'}, /usr/local/Ascend" in done.stderr
    assert "bash build.sh -arch 910b -mode emulator" in done.stderr


def test_old_cann(tmp_path: Path) -> None:
    done = build("-arch", "910", "-mode", "check", cann=make_cann(tmp_path, "7.0.RC1"))
    assert done.returncode == 2 and "CANN 7.0 in" in done.stderr and "8.0 or newer is needed" in done.stderr


def test_cann_without_its_compiler(tmp_path: Path) -> None:
    done = build("-arch", "910", "-mode", "check", cann=make_cann(tmp_path, "8.5.0", compiler=False))
    assert done.returncode == 2 and "the compiler bisheng is missing" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "soc"),
    [
        (["-arch", "910"], "Atlas A2, built for Ascend910B1"),
        (["-arch", "910B", "-soc", "Ascend910B3"], "Atlas A2, built for Ascend910B3"),
        (["-arch", "910pro"], "Atlas A3, built for Ascend910_9391"),
    ],
)
def test_check_says_what_would_be_built(arguments: list[str], soc: str, tmp_path: Path) -> None:
    done = build(*arguments, "-mode", "check", cann=make_cann(tmp_path, "9.0.1"))
    assert done.returncode == 0 and soc in done.stdout and f"CANN 9.0.1 in {tmp_path}" in done.stdout
