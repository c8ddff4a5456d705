"""Backends with other tiles, compiled for a measurement: they compute the same, beside the package's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from helpers import Case, assert_same_bits, call, check, make_inputs

pytest.importorskip("rich")

import flashattn_ext
from flashattn_ext import _C
from flashattn_ext.cli import private_build
from flashattn_ext.cli.console import CommandError
from flashattn_ext.cli.private_build import PrivateBuild

CASES = {
    "causal": Case(B=2, Sq=200, Sk=330, Hq=4, D=40, Dv=24, causal=True, smooth_softmax=True),
    "dropout": Case(Sq=300, Sk=290, D=33, window_size=(70, 20), dropout_p=0.2, rng_seed=7),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def other_tile() -> PrivateBuild:
    """The CPU's kernels of the instruction set in use, with a small tile; it stays in build/ for the next time."""
    build = private_build.cpu(64, 128)
    assert private_build.load([build]) == {}
    return build


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_stay_within_the_rule(other_tile: PrivateBuild, name: str, dtype: torch.dtype) -> None:
    with flashattn_ext.use_backend(other_tile.name):
        check(Case(**{**CASES[name].__dict__, "dtype": dtype}), "cpu")


def test_its_tile_is_another_one_and_the_package_keeps_its_own(other_tile: PrivateBuild) -> None:
    case = Case(Sq=64, Sk=700, D=64, needs_grad=())
    inputs = make_inputs(case, "cpu")
    before, _ = call(case, inputs)
    with flashattn_ext.use_backend(other_tile.name):
        other, _ = call(case, inputs)
    after, _ = call(case, inputs)
    assert not torch.equal(before, other)  # another order of sums
    assert_same_bits(before, after)
    assert _C.backends()[0] != other_tile.name and _C.cpu_tile() != (64, 128)


def test_a_library_is_compiled_again_when_a_source_is_newer(
    other_tile: PrivateBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked: list[str] = []
    monkeypatch.setattr(private_build, "_C", _NothingLoaded())
    monkeypatch.setattr(private_build, "_start", lambda build, pool: (linked.append(build.name), str(Path()), [])[1:])
    monkeypatch.setattr(private_build.shutil, "rmtree", lambda folder: None)
    monkeypatch.setattr(private_build, "_link", lambda build, objects: None)
    private_build.load([other_tile])
    assert linked == []
    times = other_tile.library.stat()
    os.utime(other_tile.library, (0, 0))
    try:
        private_build.load([other_tile])
    finally:
        os.utime(other_tile.library, (times.st_atime, times.st_mtime))
    assert linked == [other_tile.name]


class _NothingLoaded:
    def backends(self) -> list[str]:
        return []

    def load_backend(self, path: str) -> None:
        assert Path(path).exists()


def test_what_does_not_compile_has_its_reason() -> None:
    build = private_build.cpu(100, 64)
    problems = private_build.load([build])
    assert list(problems) == [build.name] and "a tile is whole blocks of 64" in problems[build.name]
    assert not build.library.exists()
    assert not [path for path in build.library.parent.iterdir() if path.name.startswith(f"{build.library.stem}-")]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    build = private_build.cpu(128, 1024)
    assert "no-such-compiler" in private_build.load([build])[build.name]


def test_a_library_of_other_sources_than_the_package(other_tile: PrivateBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(_NothingLoaded):
        def load_backend(self, path: str) -> None:
            raise RuntimeError("built from other sources")

    monkeypatch.setattr(private_build, "_C", Refusing())
    assert private_build.load([other_tile]) == {other_tile.name: "built from other sources"}


def test_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_build, "__file__", str(tmp_path / "a" / "b" / "private_build.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="in a checkout"):
        private_build.cpu(64, 64)
