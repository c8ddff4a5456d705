"""Builds flashattn_ext._C against the torch of the environment that it is installed into.

Environment variables:
  FLASHATTN_EXT_CUDA   1 demands the CUDA backend, 0 leaves it out; unset builds it if a CUDA torch and nvcc are found
  TORCH_CUDA_ARCH_LIST GPU architectures, as in torch; unset: 8.0 with PTX for newer ones, and 9.0a. The Hopper kernels
                       need 9.0a; with plain 9.0 an H100 runs the kernels for 8.0
  CUDA_HOME            the CUDA toolkit, as in torch; unset: the toolkit of the nvcc on the PATH, or, if that has no headers or
                       libraries, a complete toolkit in /usr/local or /opt/cuda
  FLASHATTN_EXT_DEBUG  1 keeps the debug information of the C++ code, which multiplies the library's size; unset omits it
  MAX_JOBS             number of parallel compiler processes (torch.utils.cpp_extension)

A source distribution, `python -m build --sdist`, is made without torch.
"""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 6)
VERSION = (ROOT / "VERSION").read_text().strip()

COMPILER = os.environ.get("CXX", "c++")

# The sources that take longest to compile come first, by measured time, so that no core compiles alone at the end.
SOURCES = [
    "csrc/module/torch.cpp",
    # On other architectures the sources of an instruction set compile to empty objects.
    "csrc/cpu/inst/avx512.cpp",
    "csrc/cpu/inst/neon.cpp",
    "csrc/cpu/inst/generic.cpp",
    "csrc/cpu/inst/avx2.cpp",
    "csrc/cpu/inst/avx512_bf16.cpp",
    "csrc/cpu/inst/neon_bf16.cpp",
    "csrc/cpu/inst/avx512_derivatives.cpp",
    "csrc/cpu/inst/neon_derivatives.cpp",
    "csrc/cpu/inst/avx2_derivatives.cpp",
    "csrc/cpu/cpu.cpp",
    "csrc/backend/backend.cpp",
]


def stop(message: str) -> None:
    sys.exit(f"flashattn_ext: {message}")


def import_torch():
    """The torch of the target environment, also from inside pip's isolated build environment.

    pip isolates a build through PYTHONPATH, but runs the environment's own interpreter. That interpreter, started without
    PYTHONPATH, prints its package paths. They are appended to sys.path, so that build requirements take precedence.
    """
    try:
        import torch
    except ImportError:
        command = [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep='\\n')"]
        paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        sys.path += [path for path in paths if path not in sys.path]
        try:
            import torch
        except ImportError:
            stop(
                "torch is not installed in this environment; install torch 2.6 or newer first (pip install torch), then build "
                "again; if torch is there and was not found, build without isolation: pip install --no-build-isolation, or "
                "python -m build --no-isolation"
            )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MINIMUM_TORCH:
        stop(
            f"torch {torch.__version__} is too old; flashattn_ext needs torch 2.6 or newer (pip install --upgrade torch)"
        )
    return torch


def is_clang() -> bool:
    return "clang" in subprocess.getoutput(f"{COMPILER} --version")


def openmp_library(torch) -> list[str]:
    """Link arguments for torch's own OpenMP runtime, which its wheels may bundle under a mangled file name.

    A second runtime in the process would have a second thread pool. Code compiled by Clang needs libomp nevertheless.
    """
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled and not is_clang() else ["-fopenmp"]


def cxx_library() -> list[str]:
    """Link arguments for the libstdc++ that torch has loaded into this process.

    A compiler that links libstdc++ statically would give the extension a second one, and torch's library writes to streams of
    the extension when it makes the text of an error: numbers are lost, or the process crashes. The linker takes a function from
    the first library that has it, and the compiler's own comes last.
    """
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"/.*/libstdc\+\+\.so\.6[.\d]*$", maps, re.M)
    return [found[0]] if found else []


def cxx_standard() -> str:
    """The option -std= with which torch compiles extensions, because its headers need it: C++20 from torch 2.12 on."""
    from torch.utils.cpp_extension import BuildExtension

    named = re.search(r"'(c\+\+\d+)'", inspect.getsource(BuildExtension.build_extensions))
    return f"-std={named[1]}" if named else "-std=c++20"


def check_compiler(torch) -> None:
    """Stops with one line if the compiler, OpenMP or Python.h is unusable, instead of pages of compiler output."""
    standard = cxx_standard()
    if shutil.which(COMPILER.split()[0]) is None:
        stop(f"the C++ compiler '{COMPILER}' was not found; install one (Debian: apt install g++) or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(
            "#if (defined(__clang__) && __clang_major__ < 10) || (!defined(__clang__) && __GNUC__ < 9)\n"
            "#error too old\n"
            "#endif\n"
            "int main() { return 0; }\n"
        )
        command = [*COMPILER.split(), standard, "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            gcc = "GCC 9" if standard == "-std=c++17" else "GCC 10 (GCC 9 up to torch 2.11)"
            stop(
                f"the C++ compiler '{COMPILER}' is too old or broken: torch {torch.__version__} needs {standard}; set CXX to "
                f"{gcc}, Clang 10 or newer"
            )
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n")
        if subprocess.run([*command, "-fopenmp"], capture_output=True, check=False).returncode:
            stop(
                f"the C++ compiler '{COMPILER}' has no OpenMP, which torch's thread pool needs; "
                "install it (Debian, for Clang: apt install libomp-dev) or set CXX=g++"
            )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        stop("Python.h was not found; install Python's headers (Debian: apt install python3-dev)")


def builds_cuda(torch) -> bool:
    """Whether to build the CUDA backend; stops if it is requested, or if an nvcc is found, and it cannot be built."""
    request = os.environ.get("FLASHATTN_EXT_CUDA", "")
    if request == "0":
        return False
    from torch.utils.cpp_extension import CUDA_HOME

    missing = None
    if torch.version.cuda is None:
        missing = f"torch {torch.__version__} has no CUDA; install a CUDA build of torch"
    elif CUDA_HOME is None or not (Path(CUDA_HOME) / "bin" / "nvcc").exists():
        missing = f"nvcc was not found; install the CUDA toolkit {torch.version.cuda} or set CUDA_HOME"
    if missing and request:
        stop(f"FLASHATTN_EXT_CUDA={request}, but {missing}; unset it for a CPU build")
    if missing:
        print(f"flashattn_ext: builds for the CPU only: {missing}")
        return False
    choose_cuda_toolkit(torch.version.cuda, Path(CUDA_HOME))
    return True


def choose_cuda_toolkit(version: str, home: Path) -> None:
    """Makes torch build with a complete CUDA toolkit. `home` is the one that torch has found, often by the nvcc on the PATH.

    If it lacks headers or libraries, a complete toolkit for torch's CUDA version replaces it, unless the environment names
    `home`. Without a replacement the build stops with one line, before minutes of compiling.
    """
    from torch.utils import cpp_extension

    lacks = lacks_of_toolkit(cpp_extension.include_paths("cuda", False), cpp_extension.library_paths("cuda", False))
    if not lacks:
        return
    found = f"found {home / 'bin' / 'nvcc'}, but no {lacks} for it (CUDA_HOME {home})"
    whole = whole_toolkits(version, home)
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if whole and not named:
        print(f"flashattn_ext: {found}; builds with CUDA_HOME={whole[0]} instead")
        os.environ["CUDA_HOME"] = cpp_extension.CUDA_HOME = str(whole[0])
        return
    if whole:
        advice = f"set CUDA_HOME={whole[0]}"
    else:
        advice = f"install the whole CUDA toolkit {version} and set CUDA_HOME to its folder"
    stop(f"{found}; {advice}, or set FLASHATTN_EXT_CUDA=0 to build for the CPU")


def whole_toolkits(version: str, home: Path) -> list[Path]:
    """Folders of complete CUDA toolkits of torch's major CUDA version, its exact version first."""
    places = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True), Path("/opt/cuda")]
    places.insert(0, (home / "bin" / "nvcc").resolve().parent.parent)
    versions = {place: version_of_toolkit(place) for place in places if (place / "bin" / "nvcc").exists()}
    major = version.split(".")[0]
    fits = [place for place, its in versions.items() if its in ("", version) or its.split(".")[0] == major]
    fits.sort(key=lambda place: versions[place] != version)
    return [place for place in fits if not lacks_of_toolkit(*paths_of(place))]


def version_of_toolkit(home: Path) -> str:
    """The version of a toolkit by its nvcc, such as 13.0; empty if nvcc prints none."""
    says = subprocess.run([home / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", says)
    return release[1] if release else ""


def paths_of(home: Path) -> tuple[list[str], list[str]]:
    """Header and library folders of a CUDA toolkit outside the compiler's default paths."""
    return [str(home / "include")], [str(home / "lib64"), str(home / "lib")]


def lacks_of_toolkit(includes: list[str], libraries: list[str]) -> str:
    """What a small CUDA runtime program fails to find, in words; empty if it compiles and links."""
    flags = [part for name in ("CPPFLAGS", "CXXFLAGS", "LDFLAGS") for part in shlex.split(os.environ.get(name, ""))]
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "probe.cpp", str(Path(folder) / "probe")
        source.write_text("#include <cuda_runtime_api.h>\nint main() { return cudaDeviceSynchronize(); }\n")
        command = [*COMPILER.split(), str(source), "-o", result, *(f"-I{path}" for path in includes), *flags]
        if subprocess.run([*command, "-c"], capture_output=True, check=False).returncode:
            return "headers (cuda_runtime_api.h)"
        command += [*(f"-L{path}" for path in libraries), "-lcudart"]
        return "library (libcudart)" if subprocess.run(command, capture_output=True, check=False).returncode else ""


def cuda_architectures() -> list[str]:
    named = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX 9.0a")
    return [name.removesuffix("+PTX") for name in named.replace(";", " ").split()]


def write_build_config(torch, with_cuda: bool) -> None:
    """Writes the build configuration to a module that is readable without the library, which another torch may fail to load."""
    architectures = tuple(cuda_architectures()) if with_cuda else ()
    (ROOT / "flashattn_ext" / "_build_config.py").write_text(
        '"""Written by setup.py."""\n\n'
        f'BUILT_FOR_TORCH = "{torch.__version__}"\n'
        f"CUDA_ARCHITECTURES: tuple[str, ...] = {architectures}\n"
    )


def debug_information() -> str:
    """The compiler flag for debug information. It overrides the -g of Python's own flags, which makes the library 11 times as large."""
    request = os.environ.get("FLASHATTN_EXT_DEBUG", "")
    if request not in ("", "0", "1"):
        stop(
            f"FLASHATTN_EXT_DEBUG: expected 1 to keep debug information, or 0 or nothing to leave it out, got '{request}'"
        )
    return "-g" if request == "1" else "-g0"


def extension(torch, with_cuda: bool):
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sys.path.insert(0, str(ROOT / "csrc"))
    import sources

    has_sm90 = with_cuda and "9.0a" in cuda_architectures()
    present = {"CUDA": with_cuda, "SM90": has_sm90}
    defines = [f"-DFLASHATTN_EXT_{name}" for name, is_there in present.items() if is_there]
    flags = {
        "cxx": [
            *(sources.CLANG_FLAGS if is_clang() else sources.GCC_FLAGS),
            *sources.CXX_FLAGS,
            *defines,
            f"-I{ROOT / 'csrc'}",
            debug_information(),
        ],
        "nvcc": [*sources.NVCC_FLAGS, *defines, f"-I{ROOT / 'csrc'}"],
    }
    cuda = []
    if with_cuda:
        from torch.utils.cpp_extension import CUDA_HOME

        paths = sources.cuda_sources(ROOT / "build" / "cuda_instances", sm90=has_sm90, package=True)
        cuda = [str(path.relative_to(ROOT)) for path in paths]
        nvcc = os.environ.get("PYTORCH_NVCC") or shlex.quote(str(Path(CUDA_HOME, "bin", "nvcc")))
        # Each source is compiled for the architectures that it has kernels for.
        os.environ["PYTORCH_NVCC"] = f"{shlex.join([sys.executable, str(ROOT / 'csrc' / 'sources.py'), 'nvcc'])} {nvcc}"
    # The sources that take longest come first, so that no core compiles alone at the end.
    seconds = {path: sources.seconds(Path(path)) for path in cuda}
    early = [
        *SOURCES,
        *sorted((path for path in cuda if seconds[path] > sources.LONGEST / 2), key=seconds.get, reverse=True),
    ]
    build = CUDAExtension if with_cuda else CppExtension
    return build(
        "flashattn_ext._C",
        # setuptools sorts sources by name and compiles them in that order: one with more "./" in front comes earlier.
        [f"{'./' * (len(early) - n)}{source}" for n, source in enumerate(early)]
        + [path for path in cuda if path not in early],
        extra_compile_args=flags,
        extra_link_args=[*cxx_library(), *openmp_library(torch)],
    )


def compiled_parts() -> dict:
    """The arguments of setup() that need torch; empty for commands that compile nothing."""
    if {"egg_info", "sdist", "clean"} & set(sys.argv):
        return {}
    torch = import_torch()
    # pip runs dist_info before it would download a torch of its own choice: report a missing torch now.
    if "dist_info" in sys.argv:
        return {}
    check_compiler(torch)
    with_cuda = builds_cuda(torch)
    write_build_config(torch, with_cuda)  # before build_py collects the modules
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        """Keeps the objects of an editable installation, too, for which setuptools names a folder that it removes: the next build
        compiles what has changed.
        """

        def finalize_options(self) -> None:
            super().finalize_options()
            if "editable_wheel" in sys.argv:
                self.build_temp = os.path.join(
                    "build", f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
                )

    os.environ.setdefault("NINJA_STATUS", "[compiled %f of %t] ")
    return {"ext_modules": [extension(torch, with_cuda)], "cmdclass": {"build_ext": Build}}


setup(**compiled_parts())
