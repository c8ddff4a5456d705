"""Python that is started in a checkout finds its sources before the installed package: which one runs, and the messages."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import warm_python

import flashattn_ext
import flashattn_ext_lab

PACKAGE = Path(flashattn_ext.__path__[0]).resolve()
LABORATORY = Path(flashattn_ext_lab.__path__[0]).resolve()
# The finder of an editable installation comes before every path; `pip install .` installs no such finder.
WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the unbuilt sources, and a folder `installed` with the package as pip installs it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for package, place in itertools.product((PACKAGE, LABORATORY), ("checkout", "installed")):
        shutil.copytree(package, tmp_path / place / package.name, ignore=ignored)
    for library in PACKAGE.glob("_C*.so"):
        (tmp_path / "installed" / "flashattn_ext" / library.name).symlink_to(library)
    (tmp_path / "installed" / "sitecustomize.py").write_text(WITHOUT_EDITABLE)
    (tmp_path / "checkout" / "VERSION").write_text("0.1.0\n")
    (tmp_path / "checkout" / "flashattn_ext" / "_build_config.py").unlink()
    return tmp_path / "checkout"


def python(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python.interpreter(), *arguments],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout.parent / "installed"), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def build_in_place(checkout: Path, torch: str | None = None) -> None:
    """torch: the version that it was built for, this one if None."""
    for library in PACKAGE.glob("_C*.so"):
        (checkout / "flashattn_ext" / library.name).symlink_to(library)
    config = (PACKAGE / "_build_config.py").read_text()
    if torch:
        config = f'BUILT_FOR_TORCH = "{torch}"\nCUDA_ARCHITECTURES = ()\n'
    (checkout / "flashattn_ext" / "_build_config.py").write_text(config)


PRINT_FOLDER = "import flashattn_ext; from flashattn_ext import _C, api; print(_C.__file__); print(api.__file__)"


def assert_runs(checkout: Path, folder: Path) -> None:
    done = python(checkout, "-c", PRINT_FOLDER)
    assert done.returncode == 0, done.stderr
    assert [Path(line).parent for line in done.stdout.splitlines()] == [folder / "flashattn_ext"] * 2


def test_doctor_in_a_checkout_after_pip_install(checkout: Path) -> None:
    done = python(checkout, "-m", "flashattn_ext", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{checkout.parent / 'installed' / 'flashattn_ext'}, the installed one" in done.stdout
    assert f"{checkout / 'flashattn_ext'} are not built" in done.stdout


def test_installed_package_runs_where_the_sources_are_not_built(checkout: Path) -> None:
    assert_runs(checkout, checkout.parent / "installed")


def test_installed_package_runs_where_the_sources_were_built_for_another_torch(checkout: Path) -> None:
    build_in_place(checkout, torch="1.13.1")
    assert_runs(checkout, checkout.parent / "installed")


def test_sources_that_were_built_in_place_run(checkout: Path) -> None:
    build_in_place(checkout)
    assert_runs(checkout, checkout)


@pytest.mark.parametrize("name", ["api.py", "distributed/api.py"])
def test_installed_package_of_other_sources(checkout: Path, name: str) -> None:
    with open(checkout / "flashattn_ext" / name, "a") as source:
        source.write("# changed\n")
    done = python(checkout, "-c", "import flashattn_ext")
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("RuntimeError: flashattn_ext was imported from")
    for words in (checkout / "flashattn_ext", checkout.parent / "installed", name, f"pip install {checkout}"):
        assert str(words) in message
    doctor = python(checkout, "-m", "flashattn_ext", "doctor")
    assert doctor.returncode == 1 and "FAIL  extension" in doctor.stdout and name in doctor.stdout


def test_nothing_is_installed(checkout: Path) -> None:
    (checkout.parent / "installed" / "flashattn_ext").rename(checkout.parent / "removed")
    done = python(checkout, "-c", "import flashattn_ext")
    message = done.stderr.strip().splitlines()[-1]
    assert str(checkout / "flashattn_ext") in message and "pip install" in message


def test_a_broken_setting_is_not_taken_for_a_broken_build() -> None:
    """doctor used to advise a new build."""
    for name, choice in (("FLASHATTN_EXT_ISA", "generic"), ("FLASHATTN_EXT_CUDA_PATH", "sm80")):
        command = [warm_python.interpreter(), "-m", "flashattn_ext", "doctor"]
        done = subprocess.run(command, env={**os.environ, name: "bogus"}, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"{name}: 'bogus'" in done.stdout and choice in done.stdout
        assert (
            "FAIL  extension" in done.stdout and "pip install --no-build" not in done.stdout.split("FAIL  extension")[1]
        )
