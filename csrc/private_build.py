"""CUDA backends with tiles that the package does not have, for `flashattn-ext bench tune`, which compiles them when it measures them.

Tile sizes are constants of the CUDA kernels. A private build is a library of one backend's kernels, without torch, with other
tile sizes; it is in the folder build/tiles of the checkout and is compiled again when a source is newer.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import sources
import torch

from flashattn_ext import _C

TILES = sources.CSRC.parent / "build" / "tiles"


@dataclass(frozen=True)
class PrivateBuild:
    """A backend to be compiled: `name` is its name for use_backend(), unique to its sources and options."""

    name: str
    compiler: Sequence[str]  # the command that makes an object, without files
    linker: Sequence[str]
    sources: Sequence[Path]  # besides private_build.cpp
    defines: dict[str, str]  # names without the prefix FLASHATTN_EXT_

    @property
    def library(self) -> Path:
        return TILES / f"{self.name}.so"


def cuda(backend: str, choice: int, dtype: str) -> PrivateBuild:
    """The kernels of a CUDA backend with the tiles of that column of its tables, for the GPU of this machine.

    It has only the sources with a row of `dtype` that has such a tile, and raises in other calls.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    family, (major, minor) = backend.removeprefix("cuda-"), torch.cuda.get_device_capability()
    # On Hopper the kernels of sm_80 are those that the driver makes of the package's PTX for 8.0.
    target = (
        "arch=compute_80,code=sm_90"
        if (major, minor) == (9, 0)
        else f"arch=compute_{major}{minor},code=sm_{major}{minor}"
    )
    target = "arch=compute_90a,code=sm_90a" if family == "sm90" else target
    name = f"{backend}-tile{choice}-{dtype}"
    nvcc = [str(Path(CUDA_HOME or "", "bin", "nvcc")), f"-gencode={target}"]
    hidden = ["-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden"]
    only = sources.tuned_sources(family, choice, dtype)
    defines = {"CUDA": "1", "TILE_CHOICE": str(choice), "PRIVATE_BACKEND": f"cuda_{family}_backend"}
    return PrivateBuild(
        name,
        compiler=[*nvcc, *sources.NVCC_FLAGS, *hidden],
        linker=[*nvcc, "-shared", "-cudart", "shared"],
        sources=sources.cuda_sources(TILES / "instances" / name, sm90=family == "sm90", only=only),
        defines={**defines, "SM90": "1"} if family == "sm90" else defines,
    )


def load(builds: Iterable[PrivateBuild]) -> None:
    """Compiles the builds that are missing or older than the sources, and registers each with use_backend().

    Raises RuntimeError with the reason if one cannot be compiled or loaded.
    """
    wanted = list({build.name: build for build in builds if build.name not in _C.backends()}.values())
    files = (path for path in sources.CSRC.rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu", ".def", ".py"))
    newest = max(path.stat().st_mtime for path in files)
    outdated = [b for b in wanted if not b.library.exists() or b.library.stat().st_mtime < newest]
    if outdated:
        print(f"compiling {len(outdated)} backends with other tiles into {TILES}", file=sys.stderr)
        compile_builds(outdated)
    for build in wanted:
        _C.load_backend(str(build.library))


def compile_builds(builds: Iterable[PrivateBuild]) -> None:
    """Compiles all sources in parallel. Replaces each library atomically: another process may be using it."""
    TILES.mkdir(parents=True, exist_ok=True)
    jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1
    with contextlib.ExitStack() as folders, ThreadPoolExecutor(jobs) as pool:
        started: list[tuple[PrivateBuild, Path, dict[str, Future[None]]]] = []
        for build in builds:
            folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix=f"{build.name}-", dir=TILES)))
            commands = {command[-1]: command for command in _commands(build, folder)}
            started.append((build, folder, {made: pool.submit(_run, build, of) for made, of in commands.items()}))
        for build, folder, objects in started:
            for compiled in objects.values():
                compiled.result()
            _run(build, [*build.linker, *objects, "-o", str(folder / "library.so")])
            os.replace(folder / "library.so", build.library)


def _commands(build: PrivateBuild, folder: Path) -> Iterable[list[str]]:
    """The commands that compile a build's sources; the last word of each is the object."""
    defines = {**build.defines, "PRIVATE_NAME": f'"{build.name}"'}
    words = [
        *build.compiler,
        f"-I{sources.CSRC}",
        *(f"-DFLASHATTN_EXT_{name}={value}" for name, value in defines.items()),
    ]
    words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-c"]
    for index, source in enumerate([sources.CSRC / "backend" / "private_build.cpp", *build.sources]):
        yield [*words, str(source), "-o", str(folder / f"{index}.o")]


def _run(build: PrivateBuild, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        fix = "install the compiler; nvcc comes with the CUDA toolkit, which CUDA_HOME names"
        raise RuntimeError(f"{build.name} cannot be compiled: {error}; {fix}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise RuntimeError(f"{build.name} does not compile: {errors[0]}")
