"""build.sh: the architectures that it accepts or refuses, its search for CANN and torch_npu, and the commands that it runs.

These tests need no CANN. A stand-in has the files that build.sh and CMake look for, and a compiler that does not compile the
project's sources. tools/check_npu_binding.sh checks that the sources fit torch_npu.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python

ROOT = Path(__file__).parents[2]
NAMES = "910, 910b, 910pro, 910c, 910_93"
RELEASE = torch.__version__.split("+")[0]


def build(
    *arguments: str, cann: Path | None = None, packages: Path | None = None, root: Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    """packages: a folder for PYTHONPATH."""
    environment = {
        **os.environ,
        "HOME": "/nonexistent",
        "ASCEND_TOOLKIT_HOME": "",
        "ASCEND_HOME_PATH": str(cann or ""),
        "PYTHON": warm_python.interpreter(),
        "PYTHONPATH": str(packages or ""),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **env,
    }
    command = ["bash", root / "build.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def make_torch_npu(folder: Path, version: str = RELEASE) -> Path:
    """An installed torch_npu that raises when it is imported."""
    for path, text in {
        "torch_npu/__init__.py": "raise RuntimeError('build.sh imported it')",
        f"torch_npu-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def make_cann(folder: Path, version: str, *, compiler: bool = True) -> Path:
    (folder / "compiler").mkdir(parents=True)
    (folder / "compiler" / "version.info").write_text(f"Version={version}\nversion_dir=x\n")
    if compiler:
        (folder / "compiler" / "bisheng").touch()
    return folder


def test_help_prints_the_table() -> None:
    done = build("-help")
    assert done.returncode == 0
    assert "910_93   Atlas A3: Ascend910_9391" in done.stdout and "910b     Atlas A2: Ascend910B1, " in done.stdout
    # Users of a 910B3 read the last line: it must not seem to exclude them.
    refused = done.stdout.splitlines()[-1]
    assert "not supported is the first generation" in refused and "no digit after the letter" in refused
    assert "one of its chips as npu-smi prints it: 910B3" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"-arch is missing; accepted are {NAMES}"),
        (["-arch", "920"], f"-arch: '920' is unknown; accepted are {NAMES}"),
        (["-arch"], "-arch needs a value"),
        (["-arch", "910", "-fast"], "unknown option '-fast'"),
        (["-arch", "910", "-mode", "gpu"], "-mode: 'gpu' is unknown; accepted are npu, emulator, check"),
        (["-arch", "910", "-j", "0"], "-j: expected a whole number from 1, got '0'"),
        (
            ["-arch", "910_93", "-soc", "Ascend910B1"],
            "-soc: 'Ascend910B1' is not of Atlas A3; accepted are Ascend910_93",
        ),
        (["-arch", "910B3", "-soc", "Ascend910B1"], "-arch names the chip Ascend910B3 and -soc names Ascend910B1"),
        (
            ["-arch", "910B3", "-soc", "Ascend910_9391"],
            "-soc: 'Ascend910_9391' is not of Atlas A2; accepted are Ascend910B",
        ),
        (["-arch", "910B7"], "-arch: '910B7' is unknown; accepted are"),
        (["-arch", "Ascend910A"], "Ascend910A is a first-generation chip"),
        (["-arch", "Ascend910B"], "use -arch 910b, or that name"),
        (["-arch", "910proa"], "Ascend910ProA is a first-generation chip"),
        (["-arch", "910b", "-soc", "Ascend910B"], "Ascend910B is a first-generation chip"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    done = build(*arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("mode", ["npu", "check"])
def test_without_cann(mode: str, tmp_path: Path) -> None:
    done = build("-arch", "910b", "-mode", mode, cann=tmp_path / "nothing")
    assert done.returncode == 2
    assert f"CANN was not found: looked in {tmp_path / 'nothing'}, /usr/local/Ascend" in done.stderr
    assert "bash build.sh -arch 910b -mode emulator" in done.stderr


def test_old_cann(tmp_path: Path) -> None:
    done = build("-arch", "910", "-mode", "check", cann=make_cann(tmp_path, "8.0.RC1"))
    assert done.returncode == 2 and "CANN 8.0 in" in done.stderr and "8.5 or newer is needed" in done.stderr


def test_cann_without_its_compiler(tmp_path: Path) -> None:
    done = build("-arch", "910", "-mode", "check", cann=make_cann(tmp_path, "8.5.0", compiler=False))
    assert done.returncode == 2 and "the compiler bisheng is missing" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "soc"),
    [
        (["-arch", "910"], "Atlas A2, built for Ascend910B1"),
        (["-arch", "910B", "-soc", "Ascend910B3"], "Atlas A2, built for Ascend910B3"),
        (["-arch", "910b", "-soc", "910b3"], "Atlas A2, built for Ascend910B3"),
        (["-arch", "910pro"], "Atlas A3, built for Ascend910_9391"),
        # What npu-smi prints.
        (["-arch", "910B1"], "-arch 910B1: Atlas A2, built for Ascend910B1"),
        (["-arch", "910B3"], "-arch 910B3: Atlas A2, built for Ascend910B3"),
        (["-arch", "910b4"], "-arch 910b4: Atlas A2, built for Ascend910B4"),
        (["-arch", "910B4-1"], "-arch 910B4-1: Atlas A2, built for Ascend910B4-1"),
        (["-arch", "ascend910b2c", "-soc", "Ascend910B2C"], "Atlas A2, built for Ascend910B2C"),
        (["-arch", "910_9392"], "-arch 910_9392: Atlas A3, built for Ascend910_9392"),
        (["-arch", "Ascend910_9372"], "Atlas A3, built for Ascend910_9372"),
        (["-arch", "910C"], "Atlas A3, built for Ascend910_9391"),
    ],
)
def test_check_says_what_would_be_built(arguments: list[str], soc: str, tmp_path: Path) -> None:
    packages = make_torch_npu(tmp_path / "packages")
    done = build(*arguments, "-mode", "check", cann=make_cann(tmp_path / "cann", "9.0.1"), packages=packages)
    assert done.returncode == 0 and soc in done.stdout and f"CANN 9.0.1 in {tmp_path / 'cann'}" in done.stdout
    assert f"torch {torch.__version__} and its torch_npu {RELEASE}" in done.stdout
    assert "CMake " in done.stdout and ", compiler " in done.stdout


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "torch_npu is not installed for"),
        ("1.11.0.post1", f"torch_npu 1.11.0.post1 does not match torch {RELEASE}"),
    ],
)
def test_without_the_right_torch_npu(version: str, message: str, tmp_path: Path) -> None:
    packages = make_torch_npu(tmp_path / "packages", version) if version else None
    done = build("-arch", "910", "-mode", "check", cann=make_cann(tmp_path / "cann", "8.5.0"), packages=packages)
    assert done.returncode == 2 and message in done.stderr and f"pip install torch-npu=={RELEASE}" in done.stderr


# The real compiler, except for sources of the project: it logs their options and writes an empty object. The ASC compiler
# takes bisheng's options, and logs its links, too.
COMPILER = """#!/bin/bash
case "$*" in *" -c "*"{project}"*)
  echo "$0 $*" >>{log}
  case "$*" in *"$TEST_BROKEN_SOURCE") echo "error: {project} is broken"; exit 1 ;; esac
  for argument; do [[ "$last" != -o ]] || object="$argument"; last="$argument"; done
  exec {compiler} -x c++ -c /dev/null -o "$object" ;;
esac
arguments=("$@")
if [[ "$0" == */bisheng ]]; then
  echo "$0 $*" >>{log}
  arguments=()
  for argument; do
    case "$argument" in --gcc-toolchain=* | --npu-arch=* | --asc-aicore-lang) ;; *) arguments+=("$argument") ;; esac
  done
fi
exec {compiler} "${{arguments[@]}}"
"""

# CANN 8: ascendc_library() makes launchers of kernels.
ASCENDC = """
function(ascendc_library name kind)
  file(WRITE ${{CMAKE_BINARY_DIR}}/empty.cpp "")
  add_library(${{name}} ${{kind}} ${{CMAKE_BINARY_DIR}}/empty.cpp)
  file(APPEND {log} "ascendc_library ${{name}} ${{kind}} ${{SOC_VERSION}} ${{ARGN}}\n")
endfunction()
function(ascendc_include_directories name)
  file(APPEND {log} "ascendc_include_directories ${{name}} ${{ARGN}}\n")
endfunction()
function(ascendc_compile_definitions name)
  file(APPEND {log} "ascendc_compile_definitions ${{name}} ${{ARGN}}\n")
endfunction()
function(ascendc_compile_options name)
  file(APPEND {log} "ascendc_compile_options ${{name}} ${{ARGN}}\n")
endfunction()
"""

# CANN 9: a language. Like CANN's modules, it sets no linker preference. Of the options that bisheng needs, the modules of 9.0 pass
# none but those of a debug build; those of 9.1 pass the architecture, a standard and an optimisation.
ASC = {
    "asc-config.cmake": "list(APPEND CMAKE_MODULE_PATH ${{CMAKE_CURRENT_LIST_DIR}}/asc_modules)",
    "asc_modules/CMakeDetermineASCCompiler.cmake": """
set(CMAKE_ASC_COMPILER {bisheng})
set(CMAKE_ASC_COMPILER_ENV_VAR ASC)
configure_file(${{CMAKE_CURRENT_LIST_DIR}}/CMakeASCCompiler.cmake.in ${{CMAKE_PLATFORM_INFO_DIR}}/CMakeASCCompiler.cmake @ONLY)
""",
    "asc_modules/CMakeASCCompiler.cmake.in": """
set(CMAKE_ASC_COMPILER "@CMAKE_ASC_COMPILER@")
set(CMAKE_ASC_COMPILER_LOADED 1)
""",
    "asc_modules/CMakeTestASCCompiler.cmake": "set(CMAKE_ASC_COMPILER_WORKS 1)",
}
ASC_INFORMATION = "asc_modules/CMakeASCInformation.cmake"
ASC_RULES = """
set(CMAKE_ASC_OUTPUT_EXTENSION .o)
set(CMAKE_INCLUDE_FLAG_ASC -I)
set(CMAKE_SHARED_LIBRARY_CREATE_ASC_FLAGS -shared)
set(CMAKE_ASC_COMPILE_OBJECT
  "<CMAKE_ASC_COMPILER> <DEFINES> <INCLUDES> ${{of_the_modules}} <FLAGS> -o <OBJECT> -c --asc-aicore-lang <SOURCE>")
set(CMAKE_ASC_CREATE_SHARED_LIBRARY
  "<CMAKE_ASC_COMPILER> <LANGUAGE_COMPILE_FLAGS> <LINK_FLAGS> -shared -o <TARGET> <OBJECTS> <LINK_LIBRARIES>")
"""
ASC_OF_9_0 = """
set(of_the_modules -fPIC)
if(CMAKE_BUILD_TYPE STREQUAL Debug)
  string(APPEND of_the_modules " -O0 -g")
endif()
"""
ASC_OF_9_1 = """
set(of_the_modules -std=c++17)
set(CMAKE_ASC_COMPILE_OPTIONS_PIC -fPIC)
set(CMAKE_ASC_FLAGS_DEBUG_INIT "-O0 -g")
set(CMAKE_ASC_FLAGS_RELEASE_INIT "-O3 -DNDEBUG")
cmake_initialize_per_config_variable(CMAKE_ASC_FLAGS "Options of the ASC compiler")
string(APPEND CMAKE_ASC_FLAGS " --npu-arch=${{CMAKE_ASC_ARCHITECTURES}}")
"""


def asc_modules(version: str) -> dict[str, str]:
    return {**ASC, ASC_INFORMATION: (ASC_OF_9_0 if version.startswith("9.0") else ASC_OF_9_1) + ASC_RULES}


def make_building_cann(folder: Path, version: str, project: Path, log: Path, host: str = "") -> Path:
    """A CANN that can be built with. Its libraries are empty; the compiler writes its arguments to `log`.

    host: a folder such as aarch64-linux that has the files, to which links at the top point. One of its own links goes back up.
    """
    if host:
        for path in ("ccec_compiler/bin", "include", "lib64"):
            (folder / host / path).mkdir(parents=True)
        (folder / host / "ascend_toolkit_install.info").write_text(
            f"package_name=Ascend-cann-toolkit\nversion={version}\n"
        )
        (folder / host / "latest").symlink_to("..")
        for name in ("include", "lib64"):
            (folder / name).symlink_to(f"{host}/{name}")
    else:
        make_cann(folder, version)
        (folder / "lib64").mkdir()
    names = {
        "log": log,
        "project": project / "ascend_c",
        "compiler": os.environ.get("CXX", "c++"),
        "bisheng": folder / (f"{host}/ccec_compiler/bin" if host else "compiler") / "bisheng",
    }
    cmake = folder / (host or "compiler") / "tikcpp" / "ascendc_kernel_cmake"
    files = {"ascendc.cmake": ASCENDC} if version.startswith("8") else asc_modules(version)
    compilers = {folder / "cxx": COMPILER, names["bisheng"]: COMPILER}
    for path, text in {**{cmake / path: text for path, text in files.items()}, **compilers}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**names))
    for path in compilers:
        path.chmod(0o755)
    libraries = [names["compiler"], "-shared", "-x", "c++", "/dev/null", "-o"]
    subprocess.run([*libraries, folder / "lib64" / "libascendcl.so"], check=True)
    return folder


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], ["-j", "2", "emulator", "CXX=a c++"]),
        (["-debug"], ["-j", "2", "emulator", "CXX=a c++", "-B", "EMULATOR_OPTIMISE=-O0 -g"]),
    ],
)
def test_make_is_told_how_to_build_the_emulator(arguments: list[str], told: list[str], tmp_path: Path) -> None:
    make, log = tmp_path / "make", tmp_path / "log"
    make.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{log}\n')
    make.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = build("-arch", "910", "-mode", "emulator", "-j", "2", *arguments, PATH=path, CXX="a c++")
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == told


KERNELS = sorted(path.stem for path in (ROOT / "ascend_c" / "inst").glob("*.cpp"))


@pytest.fixture
def make_project(tmp_path: Path):
    """A copy of the project with a CANN of that version, the compiler's log, and the arguments of build()."""

    def make(version: str, host: str = "") -> tuple[Path, Path, dict]:
        project, log = tmp_path / "project", tmp_path / "log"
        for name in ("ascend_c", "csrc", "tools"):
            shutil.copytree(ROOT / name, project / name)
        for name in ("build.sh", "VERSION"):
            shutil.copy(ROOT / name, project)
        (project / "flashattn_ext").mkdir()
        packages = make_torch_npu(tmp_path / "packages")
        (packages / "torch_npu" / "lib").mkdir()
        cann = make_building_cann(tmp_path / "cann", version, project, log, host)
        shutil.copy(cann / "lib64" / "libascendcl.so", packages / "torch_npu" / "lib" / "libtorch_npu.so")
        options = dict(cann=cann, packages=packages, root=project, CXX=str(cann / "cxx"), TEST_BROKEN_SOURCE="none")
        return project, log, options

    return make


@pytest.mark.parametrize(
    ("version", "debug", "host"),
    [
        *((version, debug, "") for version in ("8.5.0", "9.0.1", "9.1.0") for debug in (False, True)),
        ("8.5.0", False, "aarch64-linux"),
        ("9.1.0", False, "aarch64-linux"),
    ],
)
def test_build_for_an_npu(version: str, debug: bool, host: str, make_project) -> None:
    project, log, options = make_project(version, host)
    cann, packages = options["cann"], options["packages"]
    done = build("-arch", "910_93", "-soc", "Ascend910_9382", "-j", "2", *["-debug"] * debug, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "built flashattn_ext/_ascend_npu.so" in done.stdout
    assert (project / "flashattn_ext" / "_ascend_npu.so").exists()
    assert not (project / "build" / "npu_report.txt").exists()
    config: dict[str, str] = {}
    exec((project / "flashattn_ext" / "_ascend_config.py").read_text(), config)
    recorded = [config[name] for name in ("BUILT_FOR_TORCH", "SOC", "CANN")]
    assert recorded == [torch.__version__, "Ascend910_9382", version]

    told = log.read_text().splitlines()
    (binding,) = (line for line in told if line.endswith("npu/binding.cpp"))
    assert ("-g" in binding.split()) == debug and ("-O3" in binding.split()) != debug
    assert 'FLASHATTN_SOC="Ascend910_9382"' in binding.replace("\\", "") and "-fvisibility=hidden" in binding
    for headers in (packages / "torch_npu" / "include", Path(torch.__file__).parent / "include", cann / "include"):
        assert str(headers) in binding
    (launch,) = (line for line in told if line.endswith("npu/launch.cpp"))
    csrc = project / "ascend_c" / ".." / "csrc"
    assert f"-I{csrc}" in launch.split() and f"-I{csrc}" in binding.split()
    assert str(cann / "include") in launch and "torch" not in launch.replace(str(project), "")
    assert "-fPIC" in launch.split()
    if version.startswith("8"):
        (library,) = (line.split() for line in told if line.startswith("ascendc_library"))
        assert library[1:4] == ["flashattn_ext_kernels", "STATIC", "Ascend910_9382"]
        assert sorted(Path(source).stem for source in library[4].split(";")) == KERNELS
        definition = "ASCENDC_DEBUG" if debug else "ASCENDC_DUMP=0"  # without memory for printf the checks say nothing
        assert f"ascendc_compile_definitions flashattn_ext_kernels PRIVATE;{definition}" in told
        assert f"ascendc_include_directories flashattn_ext_kernels PRIVATE;{csrc}" in told
        assert "ascendc_compile_options flashattn_ext_kernels PRIVATE;--cce-auto-sync=off" in told
        assert "FLASHATTN_ASC" not in launch and "--cce-auto-sync" not in launch
    else:  # bisheng compiles the sources with kernels and links, with the C++ compiler's libraries
        (link,) = (line for line in told if "-o _ascend_npu.so" in line)
        libgcc = subprocess.run([options["CXX"], "-print-file-name=libgcc.a"], capture_output=True, text=True).stdout
        toolchain = f"--gcc-toolchain={os.path.realpath(libgcc.strip()).split('/lib/gcc/')[0]}"
        for line in (launch, link):
            words = line.split()
            assert words[0] == str(cann / (f"{host}/ccec_compiler/bin" if host else "compiler") / "bisheng")
            assert {toolchain, "--npu-arch=dav-2201", "-std=c++17"} <= set(words)
            assert [word for word in words if word.startswith("-O")][-1] == ("-O0" if debug else "-O3")
        definitions = {word for word in launch.split() if word.startswith("-DASCENDC")}
        assert "-DFLASHATTN_ASC" in launch.split()
        assert definitions == {"-DASCENDC_DEBUG" if debug else "-DASCENDC_DUMP=0"}
        assert "--cce-auto-sync=off" in launch.split() and "--cce-auto-sync" not in binding
        assert all(part in link for part in ("launch.cpp.o", "binding.cpp.o", "-ltorch_npu"))

    assert build("-clean", **options).returncode == 0
    assert list((project / "flashattn_ext").iterdir()) == []


@pytest.mark.parametrize("version", ["8.5.0", "9.0.1"])
def test_a_failed_build_leaves_a_report(version: str, make_project) -> None:
    project, _, options = make_project(version)
    report = project / "build" / "npu_report.txt"
    done = build("-arch", "910b", **{**options, "TEST_BROKEN_SOURCE": "npu/launch.cpp"})
    assert done.returncode != 0 and not (project / "flashattn_ext" / "_ascend_npu.so").exists()
    assert (
        "failed at: compiling and linking. Attach build/npu_report.txt to a bug report; docs/ascend_first_run.md"
        in done.stderr
    )
    text = report.read_text()
    for part in (
        "build.sh -arch 910b: failed at: compiling and linking",
        f"CANN {version} in {options['cann']}",
        f"Version={version}",
        "ascend_c is broken",
        "CMAKE_BUILD_TYPE:STRING=Release",
        "torch-npu",
        "--- npu-smi",
    ):
        assert part in text, text
    assert build("-clean", **options).returncode == 0 and not report.exists()


def test_what_is_missing_is_in_the_report_too(make_project) -> None:
    project, _, options = make_project("9.0.1")
    done = build("-arch", "910b", **{**options, "CXX": "no-such-compiler"})
    assert done.returncode == 2 and "no-such-compiler does not compile C++20" in done.stderr
    assert "failed at: looking for what the build needs" in (project / "build" / "npu_report.txt").read_text()


def test_old_cmake(tmp_path: Path) -> None:
    (tmp_path / "cmake").write_text("#!/bin/sh\necho cmake version 3.14.7\n")
    (tmp_path / "cmake").chmod(0o755)
    cann = make_cann(tmp_path / "cann", "9.0.1")
    done = build("-arch", "910", "-mode", "check", cann=cann, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2 and "cmake 3.14.7 is too old; 3.16 or newer is needed" in done.stderr
