"""CUDA backends with tiles that the package does not have, compiled when a command measures them.

Tile sizes are constants of the CUDA kernels. A private build is a library of one backend's kernels, without torch, with other
tile sizes; it is in the folder build/tiles of the checkout and is compiled again when a source is newer.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from flashattn_ext import _C

from .console import CommandError


@dataclass(frozen=True)
class PrivateBuild:
    """A backend to be compiled: `name` is its name for use_backend(), unique to its sources and options."""

    name: str
    compiler: Sequence[str]  # the command that makes an object, without files
    linker: Sequence[str]
    sources: Sequence[Path]
    defines: dict[str, str]  # names without the prefix FLASHATTN_EXT_

    @property
    def library(self) -> Path:
        return checkout() / "build" / "tiles" / f"{self.name}.so"


def checkout() -> Path:
    """The folder with the sources: that of this package, or else the current one."""
    for folder in (Path(__file__).parents[1], Path.cwd()):
        if (folder / "csrc" / "sources.py").exists():
            return folder
    missing = "other tiles are compiled from the sources, which an installed package does not have"
    raise CommandError(f"{missing}; start this in a checkout")


def cuda(backend: str, choice: int, dtype: str, head_dim: int | None = None) -> PrivateBuild:
    """The kernels of a CUDA backend with the tiles of that column of its tables, for the GPU of this machine.

    It supports only `dtype`, fp16 or bf16, and this class of head dims (all if None): other calls raise.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        missing = "other tiles are compiled by nvcc, which was not found"
        raise CommandError(f"{missing}; install the CUDA toolkit or set CUDA_HOME")
    csrc, (major, minor) = checkout() / "csrc", torch.cuda.get_device_capability()
    family, architecture = backend.removeprefix("cuda-"), "90a" if (major, minor) == (9, 0) else f"{major}{minor}"
    name = f"{backend}-tile{choice}-{dtype}" + (f"-{head_dim}" if head_dim else "")
    nvcc = [str(Path(CUDA_HOME, "bin", "nvcc")), f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    hidden = ["-Xcompiler", "-fPIC", "-Xcompiler", "-fvisibility=hidden"]
    folder, only = checkout() / "build" / "tiles" / "instances" / name, sources().plain_sources(family, dtype, head_dim)
    files = sources().cuda_sources(folder, sm90=family == "sm90", only=only)
    defines = {"CUDA": "1", "TILE_CHOICE": str(choice), "PRIVATE_NAME": f'"{name}"'}
    defines |= {"PRIVATE_BACKEND": f"cuda_{family}_backend"} | ({"SM90": "1"} if family == "sm90" else {})
    return PrivateBuild(
        name,
        compiler=[*nvcc, *sources().NVCC_FLAGS, *hidden, f"-I{csrc}"],
        linker=[*nvcc, "-shared", "-cudart", "shared"],
        sources=[csrc / "private_build.cpp", *files],
        defines=defines,
    )


@functools.cache
def sources() -> ModuleType:
    """csrc/sources.py of the checkout."""
    spec = importlib.util.spec_from_file_location("flashattn_ext_sources", checkout() / "csrc" / "sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(builds: Iterable[PrivateBuild]) -> dict[str, str]:
    """Compiles the builds that are missing or older than the sources, and registers each with use_backend().

    Returns the names of those that cannot be compiled or loaded, and why.
    """
    wanted = {build.name: build for build in builds if build.name not in _C.backends()}
    if not wanted:
        return {}
    files = (path for path in (checkout() / "csrc").rglob("*") if path.suffix in (".h", ".cuh", ".cpp", ".cu", ".py"))
    newest = max(path.stat().st_mtime for path in files)
    outdated = [b for b in wanted.values() if not b.library.exists() or b.library.stat().st_mtime < newest]
    if outdated:
        print(f"compiling {len(outdated)} backends with other tiles into {outdated[0].library.parent}", file=sys.stderr)
    failures: dict[str, str] = {}
    jobs = int(os.environ.get("MAX_JOBS", "0")) or os.cpu_count() or 1
    with ThreadPoolExecutor(jobs) as pool, ThreadPoolExecutor(len(wanted)) as builders:
        started = {build.name: builders.submit(_compile, build, pool) for build in outdated}
    for build in wanted.values():
        try:
            if build.name in started:
                started[build.name].result()
            _C.load_backend(str(build.library))
        except (CommandError, RuntimeError) as error:  # RuntimeError: the package was built from other sources
            failures[build.name] = str(error)
    return failures


def _compile(build: PrivateBuild, pool: ThreadPoolExecutor) -> None:
    """Replaces the library atomically: another process may be using it."""
    build.library.parent.mkdir(parents=True, exist_ok=True)
    defines = [f"-DFLASHATTN_EXT_{name}={value}" for name, value in build.defines.items()]
    compiler = [*build.compiler, *defines, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-c"]
    with tempfile.TemporaryDirectory(prefix=f"{build.library.stem}-", dir=build.library.parent) as folder:
        objects = {str(Path(folder, f"{index}.o")): str(source) for index, source in enumerate(build.sources)}
        compiled = [pool.submit(_run, build, [*compiler, file, "-o", made]) for made, file in objects.items()]
        wait(compiled)
        for one in compiled:
            one.result()
        made = str(Path(folder, "library.so"))
        _run(build, [*build.linker, *objects, "-o", made])
        os.replace(made, build.library)


def _run(build: PrivateBuild, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CommandError(f"{build.name} cannot be compiled: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
        raise CommandError(f"{build.name} does not compile: {errors[0]}")
