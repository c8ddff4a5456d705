"""tools/reused_objects.py: an object of another text, or of other options, is never taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = b"the checkout's object"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkout with an object, and a tree of its source distribution."""
    checkout, tree = tmp_path / "checkout", tmp_path / "documented" / "package-1"
    for root in (checkout, tree):
        (root / "csrc").mkdir(parents=True)
        (root / "build" / "temp" / "csrc").mkdir(parents=True)
        (root / "csrc" / "a.h").write_text("inline const char* name() { return __FILE__; }\n")
        (root / "csrc" / "a.cpp").write_text('#include "a.h"\nint number() { return NUMBER + *name(); }\n')
    (checkout / "build/temp/build.ninja").write_text("flags = -DNUMBER=1 -DNUMBER=2 -O2\n")
    (checkout / "build/temp/csrc/a.o").write_bytes(BUILT)
    return checkout, tree


def compiled(folders: tuple[Path, Path], *options: str) -> bytes:
    """The object that comes out; empty if the compiler fails."""
    checkout, tree = folders
    target = tree / "build/temp/csrc/a.o"
    compiler = os.environ.get("CXX", "c++").split()
    command = [*compiler, "-MMD", "-MF", f"{target}.d", "-O2", "-c", tree / "csrc/a.cpp", "-o", target, *options]
    tool = [sys.executable, ROOT / "tools" / "reused_objects.py", checkout, tree.parent]
    done = subprocess.run([*tool, *command], capture_output=True, text=True)
    if done.returncode:
        assert "error" in done.stderr
        return b""
    headers = Path(f"{target}.d").read_text()
    assert str(target) in headers and str(tree / "csrc/a.h") in headers
    return target.read_bytes()


def test_the_same_text_with_the_same_options_is_not_compiled(folders: tuple[Path, Path]) -> None:
    assert compiled(folders, "-DNUMBER=1") == BUILT


def test_other_options_are_compiled(folders: tuple[Path, Path]) -> None:
    assert compiled(folders, "-DNUMBER=3").startswith(b"\x7fELF")
    assert compiled(folders, "-DNUMBER=1", "-fopenmp").startswith(b"\x7fELF")


def test_another_text_is_compiled(folders: tuple[Path, Path]) -> None:
    (folders[1] / "csrc" / "a.h").write_text('inline const char* name() { return "b"; }\n')
    assert compiled(folders, "-DNUMBER=1").startswith(b"\x7fELF")


def test_an_object_that_is_older_than_a_source_is_not_taken(folders: tuple[Path, Path]) -> None:
    os.utime(folders[0] / "build/temp/csrc/a.o", (1, 1))
    assert compiled(folders, "-DNUMBER=1").startswith(b"\x7fELF")


def test_a_header_that_the_distribution_lacks_is_an_error(folders: tuple[Path, Path]) -> None:
    (folders[1] / "csrc" / "a.h").unlink()
    assert compiled(folders, "-DNUMBER=1") == b""
