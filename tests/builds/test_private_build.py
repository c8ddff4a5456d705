"""Backends compiled for a measurement: their kernels run beside the package's own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Case, assert_same_bits, call, check, make_inputs

import flashattn_ext
from flashattn_ext import _C

CSRC = Path(__file__).resolve().parents[2] / "csrc"
sys.path.insert(0, str(CSRC))

import private_build  # noqa: E402
import sources  # noqa: E402
from private_build import PrivateBuild  # noqa: E402

CASES = {
    "causal": Case(B=2, Sq=200, Sk=330, Hq=4, D=40, Dv=24, causal=True, smooth_softmax=True),
    "dropout": Case(Sq=300, Sk=290, D=33, window_size=(70, 20), dropout_p=0.2, rng_seed=7),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# In place of the sources of a CUDA backend in a private build.
KERNELS = ("caches", "dispatch", "tile_size", "inst/generic")
TABLE = """#include "cpu/kernels.h"
namespace flashattn_ext {
const CpuKernels& cpu_kernels(DType) { return kGenericKernels; }
}  // namespace flashattn_ext
"""


def optimisation(compiler: list[str]) -> list[str]:
    """-O0 compiles in a fifth of the time. x86-64's generic kernels have no FMA, so that it changes no bit. On other processors the
    compiler fuses products and sums where it optimises, and the bits are those of the package's own flags.
    """
    if platform.machine() == "x86_64":
        return ["-O0"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    return sources.CLANG_FLAGS if "clang" in version else sources.GCC_FLAGS


@pytest.fixture(scope="module")
def other_build(tmp_path_factory: pytest.TempPathFactory) -> PrivateBuild:
    """The CPU's generic kernels, which every machine compiles and runs; it stays in build/ for later runs."""
    table = tmp_path_factory.mktemp("table") / "table.cpp"
    table.write_text(TABLE)
    named = os.environ.get("CXX", "c++").split()
    compiler = [*named, "-std=c++17", "-fPIC", *sources.CXX_FLAGS, *optimisation(named)]
    build = PrivateBuild(
        "cpu-generic-private",
        compiler=compiler,
        linker=[compiler[0], "-shared"],
        sources=[*(CSRC / "cpu" / f"{name}.cpp" for name in KERNELS), table],
        defines={"PRIVATE_BACKEND": "cpu_backend"},
    )
    private_build.load([build])
    return build


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_stay_within_the_rule(other_build: PrivateBuild, name: str, dtype: torch.dtype) -> None:
    with flashattn_ext.use_backend(other_build.name):
        check(Case(**{**CASES[name].__dict__, "dtype": dtype}), "cpu")


def test_its_kernels_are_used_and_the_package_keeps_its_own(other_build: PrivateBuild) -> None:
    case = Case(Sq=64, Sk=700, D=64, needs_grad=())
    inputs = make_inputs(case, "cpu")
    before, isa = call(case, inputs)[0], _C.cpu_isa()
    with flashattn_ext.use_backend(other_build.name):
        other, _ = call(case, inputs)
    after, _ = call(case, inputs)
    try:
        _C.set_cpu_isa("generic")
        generic, _ = call(case, inputs)
    finally:
        _C.set_cpu_isa(isa)
    assert_same_bits(other, generic)
    assert_same_bits(before, after)
    assert _C.backends()[0] != other_build.name


def test_a_library_is_compiled_again_when_a_source_is_newer(
    other_build: PrivateBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def compile_builds(builds: Iterable[PrivateBuild]) -> None:
        compiled.extend(build.name for build in builds)

    monkeypatch.setattr(private_build, "_C", _NothingLoaded())
    monkeypatch.setattr(private_build, "compile_builds", compile_builds)
    private_build.load([other_build])
    assert compiled == []
    times = other_build.library.stat()
    os.utime(other_build.library, (0, 0))
    try:
        private_build.load([other_build])
    finally:
        os.utime(other_build.library, (times.st_atime, times.st_mtime))
    assert compiled == [other_build.name]


class _NothingLoaded:
    def backends(self) -> list[str]:
        return []

    def load_backend(self, path: str) -> None:
        assert Path(path).exists()


def test_a_build_that_fails_has_its_reason(other_build: PrivateBuild) -> None:
    build = replace(other_build, name="broken", sources=(), defines={"PRIVATE_BACKEND": "no_such_backend"})
    with pytest.raises(RuntimeError, match=r"broken does not compile: .*no_such_backend"):
        private_build.load([build])
    assert not build.library.exists()
    assert not [path for path in build.library.parent.iterdir() if path.name.startswith("broken-")]


def test_without_a_compiler(other_build: PrivateBuild) -> None:
    with pytest.raises(RuntimeError, match=r"never cannot be compiled: .*no-such-compiler"):
        private_build.load([replace(other_build, name="never", compiler=["no-such-compiler"])])


def test_a_library_of_other_sources_than_the_package(
    other_build: PrivateBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(_NothingLoaded):
        def load_backend(self, path: str) -> None:
            raise RuntimeError("built from other sources")

    monkeypatch.setattr(private_build, "_C", Refusing())
    with pytest.raises(RuntimeError, match="built from other sources"):
        private_build.load([other_build])


@pytest.mark.parametrize(
    ("family", "capability", "target"),
    [("sm90", (9, 0), "90a,code=sm_90a"), ("sm80", (9, 0), "80,code=sm_90"), ("sm80", (8, 6), "86,code=sm_86")],
)
def test_other_tiles_are_compiled_for_this_gpu(
    family: str, capability: tuple[int, int], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(private_build, "TILES", tmp_path)
    build = private_build.cuda(f"cuda-{family}", 1, "bf16")
    assert f"-gencode=arch=compute_{target}" in build.compiler
    own = {path.stem for path in build.sources if tmp_path in path.parents}
    assert own == {"left_out", *sources.tuned_sources(family, 1, "bf16")}
    assert {f"{family}_forward_bf16_128{suffix}" for suffix in ("", "_masks")} < own
