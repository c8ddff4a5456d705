"""The source distribution is whole, and is made where torch is not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [
    ".ci",
    ".github",
    "ascend_c",
    "csrc",
    "docs",
    "examples",
    "flashattn_ext",
    "flashattn_ext_lab",
    "lab",
    "tests",
    "tools",
]
FILES = [
    *(
        ".clang-format",
        ".gitignore",
        ".pre-commit-config.yaml",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "Makefile",
        "SECURITY.md",
    ),
    *("README.md", "VERSION", "build.sh", "mkdocs.yml", "pyproject.toml", "setup.py"),
]
# Files that a build leaves in the source folders.
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "_build_config.py", "_ascend_config.py")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, as `git clone` makes one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=BUILT)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def names(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The files of the source distribution of a built checkout, made without torch."""
    folder = tmp_path_factory.mktemp("distribution")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('torch is not installed')")
    built = folder / "built"
    shutil.copytree(sources, built)
    for name in ("_C.so", "_ascend_emulator.so", "_build_config.py", "_ascend_config.py", "__pycache__/api.pyc"):
        (built / "flashattn_ext" / name).parent.mkdir(exist_ok=True)
        (built / "flashattn_ext" / name).touch()
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, built]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("flashattn_ext-*.tar.gz")
    with tarfile.open(archive) as files:
        return {member.name.split("/", 1)[1] for member in files.getmembers() if member.isfile()}


def test_it_has_every_file_of_the_checkout_and_nothing_that_was_built(sources: Path, names: set[str]) -> None:
    expected = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    made = {name for name in names if name.startswith("flashattn_ext.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == expected


def test_it_has_what_git_tracks(names: set[str]) -> None:
    """A new folder at the top has to be named in MANIFEST.in and above."""
    if not (ROOT / ".git").exists():
        assert (ROOT / "PKG-INFO").exists(), "neither a checkout nor an unpacked source distribution"
        return
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    present = {name for name in tracked.split("\0") if name and (ROOT / name).exists()}
    assert present <= names
