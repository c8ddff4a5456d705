"""Report what works here, what is missing, and the command that fixes it.

Runs without the optional packages. The exit status is 1 if attention cannot run here.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import flashattn_ext
from flashattn_ext import _build
from flashattn_ext._build import BUILD_NPU, REBUILD, build_info, load_ascend, why_not_ascend

from .console import INSTALL_EXTRAS

MIN_TORCH = (2, 6)


@dataclass(frozen=True)
class Finding:
    """One line of the report. Without `ok` something is missing; `needed` says whether attention requires it."""

    subject: str
    text: str
    ok: bool = True
    fix: str = ""
    needed: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no options: the report is always complete."""


def run(arguments: argparse.Namespace) -> int:
    return report(flashattn_ext._import_error)


def report(import_error: Exception | None) -> int:
    """Prints the findings and returns the exit status; `import_error`: why the package could not be imported."""
    findings = [*_environment(), *_extension(import_error)]
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        mark = "ok  " if finding.ok else "FAIL" if finding.needed else "miss"
        print(f"{mark}  {finding.subject:{width}}  {finding.text}")
        if finding.fix:
            print(f"      {'':{width}}  fix: {finding.fix}")
    broken = any(not finding.ok and finding.needed for finding in findings)
    print("attention cannot run here" if broken else "attention works here")
    return int(broken)


def _missing(subject: str, text: str, fix: str) -> Finding:
    return Finding(subject, text, False, fix, needed=False)


def _environment() -> list[Finding]:
    python = Finding("python", f"{platform.python_version()} ({sys.executable})")
    machine = Finding("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    findings = [machine, python, _torch(), _compiler()]
    for package in ("rich", "matplotlib", "jinja2"):
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            without = "not installed: no train, bench, experiments and report"
            findings.append(_missing(package, without, INSTALL_EXTRAS))
    return findings


def _torch() -> Finding:
    fix = f'pip install "torch>={".".join(map(str, MIN_TORCH))}"'
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", f"cannot be imported ({error})", False, fix)
    text = f"{torch.__version__}, {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'not included'}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        return Finding("torch", f"{text}; too old", False, fix)
    return Finding("torch", text)


def _compiler() -> Finding:
    """The compiler is needed to build, not to run."""
    known = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    command = os.environ.get("CXX", "").split() or known[:1]
    try:
        output = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    except (IndexError, OSError, ValueError, subprocess.SubprocessError):
        name = " ".join(command) or "c++, g++ or clang++"
        return _missing("compiler", f"{name} not found", "apt-get install g++ (to rebuild)")
    return Finding("compiler", output.splitlines()[0])


def _extension(import_error: Exception | None) -> list[Finding]:
    if import_error:
        # The messages of _build.py and _package_folder.py end with what to do.
        problem, _, fix = str(import_error).rpartition("; ")
        return [Finding("extension", problem or fix, False, fix if problem else REBUILD)]
    # _package_folder.py lets these differ.
    found, running = Path(flashattn_ext.__file__).parent, flashattn_ext.__path__[0]
    elsewhere = "" if found == Path(running) else f", the installed one: the sources in {found} are not built in place"
    info, ascend = flashattn_ext.build_info(), _ascend()
    findings = [Finding("package", f"{running}{elsewhere}")]
    for name, value in info.items():
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        findings.append(Finding(f"build: {name}", text or "none"))
    findings += [_cuda(info["backends"]), ascend]
    if ascend.ok:
        # The kernels on the NPU, from the smallest: the first failure is where to look; those after it are not tried.
        from . import npu_ladder

        findings.append(_saturation())
        fix = "docs/ascend_first_run.md says what to send"
        for name, holds, text in npu_ladder.climb():
            findings.append(Finding(f"npu: {name}", text, holds, "" if holds else fix))
            fix = fix if holds else ""
    if Path(flashattn_ext._build.__file__).with_name("_ascend_emulator.so").exists():
        findings.append(Finding("emulator: ascend", 'use_backend("ascend-emulator") loads it'))
    else:
        findings.append(_missing("emulator: ascend", "not built", "in a checkout: make emulator"))
    return [*findings, _self_check(), _refused_call()]


def _cuda(backends: list[str]) -> Finding:
    """Whether the CUDA kernels can run; if not, what is missing in the build or on the machine."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    missing = functools.partial(_missing, "backend: cuda")
    cuda, built = torch.version.cuda, ", ".join(name for name in backends if name.startswith("cuda"))
    if not built and cuda is None:
        fix = f"for an NVIDIA GPU, install a CUDA build of torch and the CUDA toolkit, then {REBUILD}"
        return missing(f"not built: torch {torch.__version__} has no CUDA", fix)
    if not built and (CUDA_HOME is None or not shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin"))):
        return missing("not built: nvcc not found", f"install the CUDA toolkit {cuda}, then {REBUILD}")
    if not built:
        return missing("not built, though torch and nvcc are there", f"FLASHATTN_EXT_CUDA=1 {REBUILD}")
    if not torch.cuda.is_available():
        return missing(f"{built} built, but torch sees no GPU", "see whether nvidia-smi lists one; install its driver")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if torch.cuda.get_device_capability() < (8, 0):
        return missing(f"{built} built; {names[0]} is too old", "a GPU of compute capability 8.0 or newer is needed")
    return Finding("backend: cuda", f"{built} on {', '.join(names)}")


def _ascend() -> Finding:
    """Whether the kernels for NPUs can run; if not, what is missing in the build or on the machine."""
    import torch

    missing = functools.partial(_missing, "backend: ascend")
    if reason := why_not_ascend():
        places = (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), "/usr/local/Ascend")
        has_cann = any(place and Path(place).exists() for place in places)
        needs = [name for name, there in (("CANN", has_cann), ("torch_npu", find_spec("torch_npu"))) if not there]
        lacks = f", and {' and '.join(needs)} not found" if needs else ""
        return missing(f"{reason}{lacks}", f"for an NPU, in a checkout, with CANN and torch_npu: {BUILD_NPU}")
    soc = build_info()["ascend_soc"]
    try:
        load_ascend()
    except RuntimeError as error:
        return missing(f"built for {soc}; {error}", "see the message")
    if not torch.npu.is_available():
        return missing(f"built for {soc}, but torch_npu sees no NPU", "see whether npu-smi info lists one")
    slow = "rows more than 65535 elements apart (stride of the sequence) are copied one by one, which is slow"
    return Finding("backend: ascend", f"built for {soc}, on {torch.npu.get_device_name()}; {slow}")


def _saturation() -> Finding:
    """What the device does with infinities and NaN. The kernels set the mode that keeps them for themselves."""
    mode = ctypes.CDLL(str(_build._npu_library())).flashattn_ext_ascend_saturates()
    if mode == 0:
        return Finding("device: inf, NaN", "INF/NAN mode: they stay what they are")
    if mode == 1:
        text = (
            "saturation mode: other operators make them finite in half and bfloat16, so that results with them differ from ours, "
            "which keep them"
        )
        return _missing("device: inf, NaN", text, "unset INF_NAN_MODE_FORCE_DISABLE and INF_NAN_MODE_ENABLE")
    return _missing("device: inf, NaN", "the runtime does not tell its mode", "expected is INF/NAN mode")


def _self_check() -> Finding:
    """A small causal attention, forward and backward, compared with the reference."""
    import torch

    try:
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(2, 33, 4, 24, generator=generator).requires_grad_() for _ in range(3)]
        results = []
        for attention in (flashattn_ext.forward, flashattn_ext.attention_reference):
            out = attention(*inputs, causal=True, smooth_softmax=True)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        error = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    except Exception as problem:  # the report shows any error
        return Finding("self-check", f"{type(problem).__name__}: {problem}", False, REBUILD)
    text = f"largest difference from attention_reference {error:.1e}"
    return Finding("self-check", text, error < 1e-5, "" if error < 1e-5 else REBUILD)


# Prints the message of a call that C++ refuses.
REFUSED_CALL = """
import torch, flashattn_ext
q = torch.zeros(1, 1, 1, 8)
try:
    flashattn_ext.forward(q, q, q, softcap=-1.5)
except ValueError as error:
    print(error)
"""


def _refused_call() -> Finding:
    """Whether an error arrives, with the number that its message names.

    A library with another libstdc++ than torch's loses the number, or ends the process, which is therefore another one.
    """
    command = [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path!r}{REFUSED_CALL}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    except (OSError, subprocess.SubprocessError) as problem:
        return _missing("refused call", f"not tried: {problem}", "start doctor where it can start another Python")
    says = (done.stdout.strip() or "nothing").splitlines()[-1]
    if done.returncode == 0 and "-1.5" in says:
        return Finding("refused call", "its error names what it got")
    ended = f"ends the process with status {done.returncode}" if done.returncode else f"says only: {says}"
    problem = f"{ended}; the compiled module has another libstdc++ than torch"
    return Finding("refused call", problem, False, REBUILD)
