"""Errors of builds and imports that cannot work: one line that names the fix. Also running out of memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python
from helpers import run_python

import flashattn_ext

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(flashattn_ext.__file__).resolve().parent


BUILD_EXTENSION = ["setup.py", "build_ext", "--inplace"]


def build(
    tmp_path: Path, command: list[str] = BUILD_EXTENSION, *, python: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """setup.py as pip runs it, in a copy that holds no sources: it must stop before it needs them. python: another interpreter."""
    for name in ("setup.py", "pyproject.toml", "VERSION", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "flashattn_ext").mkdir(exist_ok=True)
    return subprocess.run(
        [python or warm_python.interpreter(), *command],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_stops_with_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for word in ("flashattn_ext", *words):
        assert word in lines[0], done.stderr


def fake_torch(tmp_path: Path, code: str) -> str:
    """A PYTHONPATH whose torch is `code`."""
    folder = tmp_path / "fake"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(code)
    return str(folder)


def test_a_build_without_torch_says_what_to_install(tmp_path: Path) -> None:
    path = fake_torch(tmp_path, "raise ImportError('no torch here')")
    words = ("torch is not installed", "pip install torch", "--no-build-isolation", "build --no-isolation")
    assert_stops_with_one_line(build(tmp_path, python=sys.executable, PYTHONPATH=path), *words)


@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124"])
def test_a_build_with_an_old_torch_says_which_is_needed(tmp_path: Path, version: str) -> None:
    path = fake_torch(tmp_path, f"__version__ = '{version}'")
    assert_stops_with_one_line(build(tmp_path, python=sys.executable, PYTHONPATH=path), version, "2.6", "pip install")


def test_a_build_without_a_compiler_says_what_to_install(tmp_path: Path) -> None:
    done = build(tmp_path, CXX="no-such-compiler")
    assert_stops_with_one_line(done, "no-such-compiler", "not found", "CXX")


def test_a_build_with_an_old_compiler_says_which_is_needed(tmp_path: Path) -> None:
    compiler = tmp_path / "old-compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    assert_stops_with_one_line(build(tmp_path, CXX=str(compiler)), "old-compiler", "GCC 9")


def copy_list_of_sources(tmp_path: Path) -> None:
    """What setup.py imports of csrc."""
    for name in ("sources.py", "kernel_page.py", "kernel_table.py"):
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc")


def make_sources(tmp_path: Path, code: str = "") -> None:
    """Files in place of all sources: one has `code`, the others are empty."""
    names = re.findall(r'"(csrc/[\w/]+\.cpp)"', (ROOT / "setup.py").read_text())
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code if name == names[0] else "")
    copy_list_of_sources(tmp_path)


def test_the_probe_compiles_with_the_standard_of_this_torch(tmp_path: Path) -> None:
    """GCC 9 passed the probe for C++17 and failed at the first source, because newer versions of torch compile C++20."""
    make_sources(tmp_path)
    compiler = tmp_path / "recording-compiler"
    compiler.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/log\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    done = build(tmp_path, CXX=str(compiler), FLASHATTN_EXT_CUDA="0")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    standards = {
        is_probe: {
            word
            for line in lines
            for word in line.split()
            if word.startswith("-std=") and ("probe.cpp" in line) == is_probe
        }
        for is_probe in (False, True)
    }
    assert len(standards[True]) == 1 and standards[True] == standards[False]


def test_an_editable_installation_keeps_its_objects(tmp_path: Path) -> None:
    """They were in a folder that setuptools removes, so that the first build after `make develop` compiled everything again."""
    make_sources(tmp_path)
    packages = re.search(r"^packages = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.M)[1]
    for package in json.loads(packages):
        (tmp_path / package.replace(".", "/")).mkdir(parents=True, exist_ok=True)
    done = build(tmp_path, ["setup.py", "editable_wheel", "-d", "wheel"], FLASHATTN_EXT_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("build/temp.*/csrc/module/*.o")] == ["torch.o"]
    done = build(tmp_path, FLASHATTN_EXT_CUDA="0")
    assert done.returncode == 0 and "ninja: no work to do" in done.stdout, done.stdout + done.stderr


def test_a_compiler_without_the_standard_of_this_torch_is_too_old(tmp_path: Path) -> None:
    compiler = tmp_path / "older-compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-std=c++17*) exec c++ "$@" ;; *-std=*) exit 1 ;; esac\n')
    compiler.chmod(0o755)
    is_newer = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
    done = build(tmp_path, CXX=str(compiler), FLASHATTN_EXT_CUDA="0")
    if is_newer:
        assert_stops_with_one_line(done, "older-compiler", f"torch {torch.__version__} needs -std=c++20", "GCC 10")
    else:
        assert "too old" not in done.stderr


def check_clang_build(path: Path) -> subprocess.CompletedProcess[str]:
    """The script of .ci/run on a machine without Clang, whose programs are those of the folder `path`."""
    command = [shutil.which("bash"), ROOT / "tools" / "check_clang_build.sh"]
    env = {"PATH": str(path), "CLANG": "no-such-clang"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def test_a_machine_that_cannot_have_clang_says_that_nothing_was_checked(tmp_path: Path) -> None:
    """.ci/run goes on after status 2."""
    done = check_clang_build(tmp_path)
    assert done.returncode == 2
    assert "not checked: no no-such-clang with OpenMP, and neither apt-get nor dnf" in done.stderr


def test_clang_comes_from_the_packages_of_the_distribution(tmp_path: Path) -> None:
    """With stand-ins that install nothing."""
    env = shutil.which("env")
    scripts = {"apt-get": f'echo "$*" >>{tmp_path}/log', "sudo": 'shift; exec "$@"', "env": f'exec {env} "$@"'}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = check_clang_build(tmp_path)
    update, install = (tmp_path / "log").read_text().splitlines()
    assert update.startswith("update") and install.startswith("install") and install.endswith("clang libomp-dev")
    assert done.returncode == 1 and "no-such-clang does not compile with OpenMP" in done.stderr


STREAM = """
#include <locale>
#include <sstream>

extern "C" __attribute__((visibility("default"))) void* of_the_library() {
  std::ostringstream stream;
  stream << 1.5;
  return reinterpret_cast<void*>(&std::locale::classic);
}
"""


def test_the_library_has_the_libstdcxx_of_torch(tmp_path: Path) -> None:
    """Also if the compiler links libstdc++ statically: with two of them a refused call crashed, or its message lacked numbers."""
    make_sources(tmp_path, STREAM)
    done = build(tmp_path, LDFLAGS="-static-libstdc++", FLASHATTN_EXT_CUDA="0")
    assert done.returncode == 0, done.stderr
    [library] = (tmp_path / "flashattn_ext").glob("_C*.so")
    found = run_python(f"""
        import ctypes, torch
        library = ctypes.CDLL({str(library)!r})
        library.of_the_library.restype = ctypes.c_void_p
        address = library.of_the_library()
        for line in open("/proc/self/maps"):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                print(line.split()[-1])
    """)
    assert "/libstdc++.so" in found.stdout, found.stdout + found.stderr


def test_cuda_demanded_without_a_toolkit(tmp_path: Path) -> None:
    done = build(tmp_path, FLASHATTN_EXT_CUDA="1", CUDA_HOME="/nonexistent", PATH="/usr/bin:/bin")
    assert_stops_with_one_line(done, "FLASHATTN_EXT_CUDA=1")


SETUP_WITH_CUDA_TORCH = """
import os, runpy, sys, torch
from torch.utils import cpp_extension
torch.version.cuda = "13.0"
on_path = os.environ.pop("NVCC_ON_PATH", None)
if on_path:
    os.environ.pop("CUDA_HOME", None)
    os.environ.pop("CUDA_PATH", None)
cpp_extension.CUDA_HOME = on_path or os.environ["CUDA_HOME"]
sys.argv = ["setup.py", "build_ext", "--inplace"]
try:
    runpy.run_path("setup.py", run_name="__main__")
finally:
    print("include folders:", *cpp_extension.include_paths("cuda"))
"""


def make_toolkit(folder: Path, *parts: str, version: str = "13.0") -> Path:
    """A CUDA toolkit with no more than these of compiler, headers and library."""
    (folder / "bin").mkdir(parents=True)
    if "compiler" in parts:
        says = f"Cuda compilation tools, release {version}, V{version}.1"
        (folder / "bin" / "nvcc").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{says}" || exit 1\n')
        (folder / "bin" / "nvcc").chmod(0o755)
    if "headers" in parts:
        (folder / "include").mkdir()
        (folder / "include" / "cuda_runtime_api.h").write_text('extern "C" int cudaDeviceSynchronize();\n')
    if "library" in parts:
        (folder / "lib64").mkdir()
        source = 'extern "C" int cudaDeviceSynchronize() { return 0; }'
        command = ["c++", "-shared", "-fPIC", "-x", "c++", "-", "-o", folder / "lib64" / "libcudart.so"]
        subprocess.run(command, input=source, text=True, check=True)
    return folder


@pytest.mark.parametrize(
    ("parts", "lacks"),
    [(("compiler",), "cuda_runtime_api.h"), (("compiler", "headers"), "libcudart")],
    ids=["headers", "library"],
)
@pytest.mark.parametrize("request_cuda", ["", "1"])
def test_compiler_without_the_rest_of_its_toolkit(
    tmp_path: Path, parts: tuple[str, ...], lacks: str, request_cuda: str
) -> None:
    """It used to fail after minutes of compiling kernels, at the first source that includes torch's headers of CUDA."""
    home = make_toolkit(tmp_path / "partial", *parts)
    command = ["-c", SETUP_WITH_CUDA_TORCH]
    done = build(tmp_path, command, CUDA_HOME=str(home), FLASHATTN_EXT_CUDA=request_cuda)
    assert_stops_with_one_line(done, str(home / "bin" / "nvcc"), lacks, "CUDA_HOME", "FLASHATTN_EXT_CUDA=0")


def test_compiler_that_is_a_link_into_a_whole_toolkit(tmp_path: Path) -> None:
    """The folder of the link is not the toolkit; the message names the toolkit's folder."""
    whole = make_toolkit(tmp_path / "whole", "compiler", "headers", "library")
    links = make_toolkit(tmp_path / "links")
    (links / "bin" / "nvcc").symlink_to(whole / "bin" / "nvcc")
    done = build(tmp_path, ["-c", SETUP_WITH_CUDA_TORCH], CUDA_HOME=str(links))
    assert_stops_with_one_line(done, f"set CUDA_HOME={whole}")


def test_link_on_the_path_into_a_whole_toolkit_builds_with_that(tmp_path: Path) -> None:
    """CUDA_HOME is not set, so the build takes the toolkit that the link leads to, and says so."""
    whole = make_toolkit(tmp_path / "whole", "compiler", "headers", "library")
    links = make_toolkit(tmp_path / "links")
    (links / "bin" / "nvcc").symlink_to(whole / "bin" / "nvcc")
    done = build(tmp_path, ["-c", SETUP_WITH_CUDA_TORCH], NVCC_ON_PATH=str(links))
    assert "FLASHATTN_EXT_CUDA=0" not in done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("flashattn_ext:")]
    assert len(said) == 1 and f"builds with CUDA_HOME={whole}" in said[0] and str(links / "bin" / "nvcc") in said[0]
    assert str(whole / "include") in done.stdout.splitlines()[-1].split()


def test_whole_toolkit_of_another_major_version_is_not_taken(tmp_path: Path) -> None:
    """torch itself refuses another major version only after a minute of the build."""
    whole = make_toolkit(tmp_path / "whole", "compiler", "headers", "library", version="11.8")
    links = make_toolkit(tmp_path / "links")
    (links / "bin" / "nvcc").symlink_to(whole / "bin" / "nvcc")
    done = build(tmp_path, ["-c", SETUP_WITH_CUDA_TORCH], NVCC_ON_PATH=str(links))
    assert f"CUDA_HOME={whole}" not in done.stdout + done.stderr


def test_whole_toolkit_is_accepted(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "whole", "compiler", "headers", "library")
    done = build(tmp_path, ["-c", SETUP_WITH_CUDA_TORCH], CUDA_HOME=str(home))
    assert done.returncode != 0  # this compiler cannot compile
    assert "FLASHATTN_EXT_CUDA=0" not in done.stderr


SETUP_THAT_PRINTS_FLAGS = """
import runpy, setuptools, sys
setuptools.setup = lambda **given: [print(*e.extra_compile_args["cxx"]) for e in given["ext_modules"]]
sys.argv = ["setup.py", "build_ext", "--inplace"]
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.parametrize(("given", "flag"), [("", "-g0"), ("0", "-g0"), ("1", "-g")])
def test_debug_information_is_kept_on_demand(tmp_path: Path, given: str, flag: str) -> None:
    """Python's own flags include -g, which made nine tenths of the library. A compiler takes the last of several -g flags."""
    (tmp_path / "csrc").mkdir()
    copy_list_of_sources(tmp_path)
    command = ["-c", SETUP_THAT_PRINTS_FLAGS]
    done = build(tmp_path, command, FLASHATTN_EXT_DEBUG=given, FLASHATTN_EXT_CUDA="0")
    assert done.returncode == 0, done.stderr
    flags = [word for word in done.stdout.split() if word.startswith("-g")]
    assert flags[-1] == flag


def test_debug_information_that_is_neither_asked_for_nor_refused(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    copy_list_of_sources(tmp_path)
    assert_stops_with_one_line(
        build(tmp_path, FLASHATTN_EXT_DEBUG="yes", FLASHATTN_EXT_CUDA="0"), "FLASHATTN_EXT_DEBUG", "'yes'"
    )


def test_wheel_gets_the_file_that_the_build_writes(tmp_path: Path) -> None:
    """pip builds in a checkout that was never built: the build configuration must exist when the modules are collected."""
    for name in ("setup.py", "pyproject.toml", "VERSION", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc").mkdir()
    copy_list_of_sources(tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_build_config.py")
    for package in ("flashattn_ext", "flashattn_ext_lab"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    command = [warm_python.interpreter(), "setup.py", "-q", "build_py", "--build-lib", "out"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    written = (tmp_path / "out" / "flashattn_ext" / "_build_config.py").read_text()
    assert f'BUILT_FOR_TORCH = "{torch.__version__}"' in written
    assert (tmp_path / "out" / "flashattn_ext_lab" / "report.html.j2").exists()


def broken_package(tmp_path: Path) -> Path:
    """A copy of the installed package, to be damaged by the test."""
    copy = tmp_path / "flashattn_ext"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"), symlinks=True)
    if (ROOT / "VERSION").exists():
        shutil.copy(ROOT / "VERSION", tmp_path / "VERSION")
    return copy


def import_message(folder: Path) -> str:
    # The finder of an editable installation comes before every path and would supply the missing files.
    code = """
        import sys
        sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
        import flashattn_ext
    """
    done = run_python(code, PYTHONPATH=str(folder), PYTHONSAFEPATH="1")
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


def test_built_for_another_torch(tmp_path: Path) -> None:
    config = broken_package(tmp_path) / "_build_config.py"
    lines = config.read_text().splitlines()
    changed = ['BUILT_FOR_TORCH = "2.4.1"' if "BUILT_FOR_TORCH" in line else line for line in lines]
    config.write_text("\n".join(changed))
    message = import_message(tmp_path)
    assert message.startswith("RuntimeError") and "2.4.1" in message and "pip install" in message


def test_an_import_without_the_library_says_how_to_build_it(tmp_path: Path) -> None:
    broken_package(tmp_path)
    message = import_message(tmp_path)
    assert message.startswith("RuntimeError") and "pip install --no-build-isolation" in message


def test_an_import_from_unbuilt_sources_says_how_to_build_them(tmp_path: Path) -> None:
    (broken_package(tmp_path) / "_build_config.py").unlink()
    message = import_message(tmp_path)
    assert message.startswith("RuntimeError") and "pip install --no-build-isolation" in message


LIMITED = """
    import resource, torch, flashattn_ext
    flashattn_ext.forward(*[torch.ones(1, 64, 1, 8, requires_grad=True)] * 3).sum().backward()  # threads are up
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    row, key = torch.randn(1, 1, 1, 256), torch.randn(1, 2, 1, 256)
    value = torch.randn(1, 2, 1, 1)
    saved = [t.clone() for t in (row, key, value)]

    def fails(function):
        try:
            function()
        except (RuntimeError, MemoryError) as error:
            assert "memory" in str(error).lower(), error
        else:
            raise SystemExit("did not run out of memory")
"""


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_out_of_memory(stage: str) -> None:
    """An expanded query takes no memory, but its result is huge. After the error, calls work as before."""
    code = {
        # out alone is 8 GiB
        "forward": "fails(lambda: flashattn_ext.forward(row.expand(1, 1 << 23, 1, 256), key, key))",
        # out is 16 MiB, dq is 4 GiB
        "backward": """
    q = row.expand(1, 1 << 22, 1, 256)
    out, lse = flashattn_ext.forward(q, key, value, return_lse=True)
    fails(lambda: flashattn_ext.backward(out, q, key, value, out, lse))
""",
    }[stage]
    done = run_python(LIMITED + "    " + code.strip() + """
    for t, copy in zip((row, key, value), saved):
        assert torch.equal(t, copy)
    q = torch.ones(1, 9, 1, 8)
    torch.testing.assert_close(flashattn_ext.forward(q, q, q), q)
    print("fine")
""")  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr
