"""Builds flashattn_ext._C against the torch of the environment that it is installed into.

Environment variables:
  FLASHATTN_EXT_CUDA   1 demands the CUDA backend, 0 leaves it out; unset builds it when a CUDA torch and nvcc are there
  TORCH_CUDA_ARCH_LIST GPU architectures, as in torch; unset: 8.0 with PTX for newer ones, and 9.0a. Hopper's own kernels
                       need 9.0a; with plain 9.0 an H100 runs those for 8.0
  CUDA_HOME            the CUDA toolkit, as in torch; unset: that of the nvcc on the PATH, else /usr/local/cuda
  MAX_JOBS             compiler processes at once (torch.utils.cpp_extension)

A source distribution, `python -m build --sdist`, is made without torch.
"""

import os
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

SOURCES = [
    "csrc/ops.cpp",
    "csrc/autograd.cpp",
    "csrc/eager_op.cpp",
    "csrc/op_device.cpp",
    "csrc/validate.cpp",
    "csrc/decode_op.cpp",
    "csrc/decode_call.cpp",
    "csrc/call_params.cpp",
    "csrc/mask_extremes.cpp",
    "csrc/backend.cpp",
    "csrc/module.cpp",
    "csrc/cpu/caches.cpp",
    "csrc/cpu/dispatch.cpp",
    "csrc/cpu/dropout_mask.cpp",
    "csrc/cpu/isa.cpp",
    "csrc/cpu/peak.cpp",
    "csrc/cpu/tile_size.cpp",
    # One source per instruction set; those of another architecture compile to nothing.
    "csrc/cpu/inst/generic.cpp",
    "csrc/cpu/inst/avx2.cpp",
    "csrc/cpu/inst/avx512.cpp",
    "csrc/cpu/inst/avx512_bf16.cpp",
]


def stop(message: str) -> None:
    sys.exit(f"flashattn_ext: {message}")


def import_torch():
    """The torch of the target environment, also from inside pip's isolated build environment.

    pip isolates a build through PYTHONPATH, but runs the environment's own interpreter: started without PYTHONPATH, that
    one tells where its packages are. They go to the end of the path: build requirements win.
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


def openmp_library(torch) -> list[str]:
    """Link arguments for the OpenMP runtime that torch itself uses: its wheels may carry one, under a name of their own.

    A second runtime in the process has threads of its own beside torch's. Clang's code needs one all the same: libomp.
    """
    is_clang = "clang" in subprocess.getoutput(f"{COMPILER} --version")
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled and not is_clang else ["-fopenmp"]


def check_compiler() -> None:
    """One clear line instead of a page of compiler output."""
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
        command = [*COMPILER.split(), "-std=c++17", "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            stop(f"the C++ compiler '{COMPILER}' is too old or broken; GCC 9, Clang 10 or newer is needed")
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n")
        if subprocess.run([*command, "-fopenmp"], capture_output=True, check=False).returncode:
            stop(
                f"the C++ compiler '{COMPILER}' has no OpenMP, which torch's threads are made of; "
                "install it (Debian, for Clang: apt install libomp-dev) or set CXX=g++"
            )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        stop("Python.h was not found; install Python's headers (Debian: apt install python3-dev)")


def builds_cuda(torch) -> bool:
    """Whether to build the CUDA backend; stops when it is demanded, or wanted and begun by an nvcc, and cannot be."""
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
    check_cuda_toolkit(torch.version.cuda, Path(CUDA_HOME))
    return True


def check_cuda_toolkit(version: str, home: Path) -> None:
    """Stops in one line where an nvcc is all that there is of a CUDA toolkit, before minutes of compiling end there."""
    from torch.utils.cpp_extension import include_paths, library_paths

    lacks = lacks_of_toolkit(include_paths("cuda", False), library_paths("cuda", False))
    if not lacks:
        return
    places = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True), Path("/opt/cuda")]
    places.insert(0, (home / "bin" / "nvcc").resolve().parent.parent)
    whole = [place for place in places if (place / "bin" / "nvcc").exists() and not lacks_of_toolkit(*paths_of(place))]
    if whole:
        advice = f"set CUDA_HOME={whole[0]}"
    else:
        advice = f"install the whole CUDA toolkit {version} and set CUDA_HOME to its folder"
    stop(
        f"found {home / 'bin' / 'nvcc'}, but no {lacks} for it (CUDA_HOME {home}); {advice}, or set FLASHATTN_EXT_CUDA=0 "
        "to build for the CPU"
    )


def paths_of(home: Path) -> tuple[list[str], list[str]]:
    """Folders of headers and of libraries of a CUDA toolkit, where the compiler does not look by itself."""
    return [str(home / "include")], [str(home / "lib64"), str(home / "lib")]


def lacks_of_toolkit(includes: list[str], libraries: list[str]) -> str:
    """What a small program of the CUDA runtime does not find, in words; empty when it compiles and links."""
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
    """Readable without loading the library, which may be unloadable under another torch."""
    architectures = tuple(cuda_architectures()) if with_cuda else ()
    (ROOT / "flashattn_ext" / "_build_config.py").write_text(
        '"""Written by setup.py."""\n\n'
        f'BUILT_FOR_TORCH = "{torch.__version__}"\n'
        f"CUDA_ARCHITECTURES: tuple[str, ...] = {architectures}\n"
    )


def extension(torch, with_cuda: bool):
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sys.path.insert(0, str(ROOT / "csrc"))
    import sources

    has_sm90 = with_cuda and "9.0a" in cuda_architectures()
    present = {"CUDA": with_cuda, "SM90": has_sm90}
    defines = [f"-DFLASHATTN_EXT_{name}" for name, is_there in present.items() if is_there]
    flags = {
        "cxx": sources.CXX_FLAGS + defines,
        "nvcc": [*sources.NVCC_FLAGS, *defines, f"-I{ROOT / 'csrc'}"],
    }
    cuda = sources.cuda_sources(ROOT / "build" / "cuda_instances", sm90=has_sm90) if with_cuda else []
    build = CUDAExtension if with_cuda else CppExtension
    return build(
        "flashattn_ext._C",
        # setuptools sorts sources by name, and they are compiled in that order. "./" puts the kernels of the CPU, which take
        # longest, before build/cuda_instances.
        [f"./{source}" for source in SOURCES] + [str(path.relative_to(ROOT)) for path in cuda],
        extra_compile_args=flags,
        extra_link_args=openmp_library(torch),
    )


def compiled_parts() -> dict:
    """The arguments of setup() that need torch; none for commands that compile nothing."""
    if {"egg_info", "sdist", "clean"} & set(sys.argv):
        return {}
    torch = import_torch()
    # pip asks for dist_info before it fetches a torch of its own choice: the user hears of a missing one now.
    if "dist_info" in sys.argv:
        return {}
    check_compiler()
    with_cuda = builds_cuda(torch)
    write_build_config(torch, with_cuda)  # before build_py collects the modules
    from torch.utils.cpp_extension import BuildExtension

    os.environ.setdefault("NINJA_STATUS", "[compiled %f of %t] ")
    return {"ext_modules": [extension(torch, with_cuda)], "cmdclass": {"build_ext": BuildExtension}}


setup(**compiled_parts())
