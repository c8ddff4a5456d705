"""Instruction sets: chosen by the environment or by hand, and in agreement with each other."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import Case, assert_same_bits, assert_within_rule, make_inputs, run, run_python, run_reference

import flashattn_ext
from flashattn_ext import _C

KERNELS = next(parent / "csrc/cpu/inst" for parent in Path(__file__).parents if (parent / "csrc").is_dir())
PRINT_ISA = "import flashattn_ext; print(flashattn_ext.build_info()['cpu_isa'])"


@pytest.fixture
def restore_isa():
    before = _C.cpu_isa()
    yield
    _C.set_cpu_isa(before)


def test_the_list_ends_with_the_one_that_always_works() -> None:
    names = _C.cpu_isas()
    assert names[-1] == "generic" and len(set(names)) == len(names)
    others = ["neon_bf16", "neon"] if platform.machine() == "aarch64" else ["avx512_bf16", "avx512", "avx2"]
    assert set(names) <= {*others, "generic"}


def test_the_fastest_is_the_default() -> None:
    done = run_python(PRINT_ISA, FLASHATTN_EXT_ISA="")
    assert done.stdout.strip() == _C.cpu_isas()[0], done.stderr


@pytest.mark.parametrize("name", _C.cpu_isas()[1:][-2:])
def test_the_environment_forces_one(name: str) -> None:
    done = run_python(PRINT_ISA, FLASHATTN_EXT_ISA=name)
    assert done.returncode == 0 and done.stdout.strip() == name, done.stderr


@pytest.mark.parametrize("name", ["AVX2"])
def test_an_unknown_one_is_explained(name: str) -> None:
    done = run_python(PRINT_ISA, FLASHATTN_EXT_ISA=name)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "FLASHATTN_EXT_ISA" in last and name in last and "generic" in last


def test_unknown_cuda_kernels_are_refused_by_calls_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable would be ignored until a tensor on a GPU comes."""
    q = torch.ones(1, 3, 1, 8)
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "bogus")
    with pytest.raises(RuntimeError, match=r"FLASHATTN_EXT_CUDA_PATH: 'bogus'.*'sm80', 'sm90'"):
        flashattn_ext.forward(q, q, q)
    done = run_python("import flashattn_ext")
    assert "FLASHATTN_EXT_CUDA_PATH: 'bogus'" in done.stderr and "'sm80', 'sm90'" in done.stderr


@pytest.mark.parametrize("name", ["", "sm80", "sm90"])
def test_cuda_kernels_of_any_build_are_accepted_by_calls_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", name)
    q = torch.ones(1, 3, 1, 8)
    torch.testing.assert_close(flashattn_ext.forward(q, q, q), q)


def test_set_cpu_isa(restore_isa: None) -> None:
    for name in _C.cpu_isas():
        _C.set_cpu_isa(name)
        assert _C.cpu_isa() == name
    with pytest.raises(ValueError, match=r"sse9.*generic"):
        _C.set_cpu_isa("sse9")
    assert _C.cpu_isa() == _C.cpu_isas()[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_instruction_sets_agree(dtype: torch.dtype, restore_isa: None) -> None:
    """Each one is within its bound of the tolerance rule; those for bf16 have kernels of their own for bf16 alone."""
    case = Case(dtype=dtype, Sq=130, Sk=150, Hq=4, D=72, Dv=40, causal=True, smooth_softmax=True)
    inputs = make_inputs(case, "cpu")
    ref, plain = (run_reference(case, inputs, d) for d in (torch.float64, dtype))
    results = {}
    for name in _C.cpu_isas():
        _C.set_cpu_isa(name)
        results[name] = run(case, inputs)
    for name, result in results.items():
        assert_within_rule(f"out of {name}", result.out, ref.out, plain.out)
        for key, grad in result.grads.items():
            assert_within_rule(f"d{key} of {name}", grad, ref.grads[key], plain.grads[key])
    for name in {"avx512_bf16", "neon_bf16"} & set(results) if dtype != torch.bfloat16 else ():
        other = results[name.removesuffix("_bf16")]
        assert_same_bits(results[name].out, other.out, "out")
        for key, grad in results[name].grads.items():
            assert_same_bits(grad, other.grads[key], f"d{key}")


def test_isa_and_bits_of_dropout(restore_isa: None) -> None:
    """The mask is the same on every instruction set; test_dropout holds each against forward."""
    masks = []
    for name in _C.cpu_isas():
        _C.set_cpu_isa(name)
        masks.append(flashattn_ext.dropout_mask(2, 2, 70, 140, 0.4, 6))
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("name", [next(x for x in ("avx2", "neon", "generic") if x in _C.cpu_isas())])
def test_what_is_compiled_for_one_is_in_its_namespace(name: str, tmp_path: Path) -> None:
    """Of two definitions of an inline function the linker keeps either, even the copy compiled for a newer CPU."""
    compiler, compiled = os.environ.get("CXX", "c++").split(), tmp_path / "kernels.o"
    # Without optimisation nothing is inlined, so that every function has a symbol.
    command = [
        *compiler,
        "-std=c++17",
        "-O0",
        "-w",
        f"-I{KERNELS.parents[1]}",
        "-c",
        str(KERNELS / f"{name}.cpp"),
        "-o",
        str(compiled),
    ]
    subprocess.run(command, check=True)
    table = subprocess.run(["nm", "-C", "--defined-only", str(compiled)], capture_output=True, text=True, check=True)
    functions = [line.split(" ", 2)[2] for line in table.stdout.splitlines() if line.split()[1] in "TWu"]
    ours = [function for function in functions if "flashattn_ext::" in function]
    assert len(ours) > 100
    assert [function for function in ours if f"flashattn_ext::{name}::" not in function] == []
