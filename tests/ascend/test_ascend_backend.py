"""The Ascend C kernels on the emulator, as the backend ascend-emulator: their results, that no rule of the hardware is
broken in any scheduling mode, and that cores, modes and layouts do not change a bit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Case, call_function, check, make_inputs, run, run_python

import flashattn_ext
from flashattn_ext import _build

LIBRARY = Path(flashattn_ext.__file__).with_name("_ascend_emulator.so")
MODES = ("mode=eager,cores=1", "mode=late,cores=2", "mode=random,seed=1,cores=3", "mode=random,seed=2,cores=2")

CASES = {
    "one row": Case(B=1, Sq=1, Sk=1, Hq=1, Hk=1, D=1, Dv=1),
    "two blocks of keys": Case(B=1, Sq=130, Sk=700, D=64, Dv=64),
    "causal": Case(B=1, Sq=200, Sk=200, D=128, Dv=128, causal=True),
    "grouped, other head dims": Case(B=2, Sq=37, Sk=600, Hq=4, Hk=2, D=129, Dv=61, causal=True),
    "window": Case(B=1, Sq=150, Sk=300, D=40, Dv=40, window_size=(70, 30)),
    "sink": Case(B=1, Sq=40, Sk=50, D=256, Dv=256, sink_dtype=torch.float32),
    "sink of three entries": Case(B=3, Sq=9, Sk=20, D=32, Dv=32, sink_dtype=torch.float32),
    "smooth, no visible key": Case(B=1, Sq=150, Sk=10, D=64, Dv=64, causal=True, smooth_softmax=True),
    "dropout": Case(B=2, Sq=70, Sk=550, D=64, Dv=64, dropout_p=0.2, rng_seed=7),
    "dropout, one row": Case(B=1, Sq=1, Sk=1, D=64, Dv=64, dropout_p=0.5, rng_seed=7),
    "dropout, little memory": Case(B=1, Sq=40, Sk=300, Hq=1, Hk=1, D=256, Dv=256, dropout_p=0.5, rng_seed=7),
    "dropout, steps of several tasks": Case(
        B=1, Sq=330, Sk=1100, Hq=2, Hk=1, D=128, Dv=128, causal=True, dropout_p=0.2, rng_seed=7
    ),
    "dropout, window": Case(B=1, Sq=150, Sk=300, D=40, Dv=40, window_size=(70, 30), dropout_p=0.2, rng_seed=7),
    "dropout, rows far apart": Case(B=1, Sq=20, Sk=70, Hq=65, Hk=65, D=128, Dv=64, dropout_p=0.2, rng_seed=7),
    "dropout, packed": Case(
        lengths_q=(5, 0, 140, 20), lengths_k=(9, 30, 0, 300), D=64, Dv=64, causal=True, dropout_p=0.2, rng_seed=7
    ),
    "packed": Case(lengths_q=(5, 0, 140, 20), lengths_k=(9, 30, 0, 300), D=64, Dv=64, causal=True),
    "long steps": Case(B=1, Sq=140, Sk=2048, Hq=2, Hk=1, D=64, Dv=64, causal=True),
    "long steps, not of whole tiles": Case(
        B=1, Sq=270, Sk=2300, Hq=2, Hk=1, D=40, Dv=128, causal=True, smooth_softmax=True
    ),
    "long steps, window": Case(
        B=1, Sq=150, Sk=3000, Hq=1, Hk=1, D=128, Dv=61, window_size=(1500, 30), sink_dtype=torch.float32
    ),
    "long steps, one row": Case(B=1, Sq=1, Sk=1100, Hq=2, Hk=2, D=64, Dv=64),
    "long steps, packed": Case(lengths_q=(40, 3, 150, 0), lengths_k=(1500, 0, 2600, 1100), D=64, Dv=64, causal=True),
    "strides": Case(B=2, Sq=20, Sk=30, D=24, Dv=24, views=("packed", "transposed", "padded")),
}


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    with flashattn_ext.use_backend("ascend-emulator"):
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(replace(case, dtype=dtype, use_lse=True), "cpu")


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0, -0.0, 1e-39, -1e-39])
def test_scales(scale: float, dropout_p: float) -> None:
    """Whatever the scale is, a hidden score, which is -inf, must not become NaN."""
    case = Case(B=1, Sq=40, Sk=50, D=64, Dv=64, causal=True, softmax_scale=scale, dropout_p=dropout_p, rng_seed=7)
    for dtype in (torch.float16, torch.float32):
        check(replace(case, dtype=dtype, use_lse=True, sink_dtype=torch.float32), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_near_the_end_of_the_range(dtype: torch.dtype) -> None:
    """At 4e8 neighbouring fp32 are 32 apart: the largest logit less the maximum must be 0 and not what rounding left of it."""
    q = torch.arange(5000.0, 5800.0, 40.0).to(dtype)[:, None].expand(-1, 128).reshape(1, 20, 1, 128)
    k = (1 - torch.arange(70.0) / 100).mul(5800).to(dtype)[:, None].expand(-1, 128).reshape(1, 70, 1, 128)
    v = torch.randn(1, 70, 1, 128).to(dtype)
    out, lse = flashattn_ext.forward(q, k, v, return_lse=True)
    expected, expected_lse = flashattn_ext.attention_reference(q.double(), k.double(), v.double(), return_lse=True)
    assert expected_lse.max() > 3e8
    assert torch.equal(out, v[:, :1].expand_as(out)) and torch.equal(expected.to(dtype), out)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.usefixtures("deterministic")
def test_no_mode_and_no_number_of_cores_changes_a_bit(
    name: str, dtype: torch.dtype, exhaustive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair of case, dtype and mode, and all three together under --exhaustive: each dtype has two of the four modes."""
    case = replace(CASES[name], dtype=dtype, use_lse=True)
    inputs = make_inputs(case, "cpu")
    expected = run(case, inputs)
    first = (list(CASES).index(name) + (dtype == torch.float32)) % 2
    for mode in MODES if exhaustive else MODES[first::2]:
        monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
        got = run(case, inputs)
        assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse), mode
        for of, grad in expected.grads.items():
            assert torch.equal(got.grads[of], grad), (mode, of)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_many_cores_add_to(mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
    check(Case(dtype=dtype, B=1, Sq=520, Sk=400, Hq=2, Hk=1, D=64, Dv=80, causal=True), "cpu")


def test_a_row_that_stands_for_all_keys() -> None:
    """A row stride of 0, which no copy of several rows takes."""
    q, key, value = (torch.randn(1, rows, 2, 64).half() for rows in (20, 1, 1))
    k, v = key.expand(1, 70, 2, 64), value.expand(1, 70, 2, 64)
    out = flashattn_ext.forward(q, k, v, dropout_p=0.2, rng_seed=7)
    assert torch.equal(out, flashattn_ext.forward(q, k.contiguous(), v.contiguous(), dropout_p=0.2, rng_seed=7))


MASKS = {
    "one score": (1, 1, 1, 1, 0.3, 7),
    "odd rows": (2, 3, 21, 131, 0.1, 5),
    "two blocks of keys": (1, 2, 33, 1100, 0.5, 2**63 - 1),
    "nearly all": (2, 1, 5, 513, 0.99, -3),
    "none": (1, 2, 16, 512, 0.0, 1),
    "empty": (1, 2, 0, 9, 0.5, 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", MASKS.values(), ids=MASKS)
def test_dropout_mask_is_the_cpus(call: tuple, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
    got = flashattn_ext.dropout_mask(*call)
    with flashattn_ext.use_backend("cpu"):
        assert torch.equal(got, flashattn_ext.dropout_mask(*call))


def test_a_part_of_a_dropout_mask_is_the_cpus() -> None:
    call = (2, 3, 40, 130, 0.4, 7)
    got = flashattn_ext.dropout_mask(*call, origin=(1, 5, 48, 128))
    with flashattn_ext.use_backend("cpu"):
        assert torch.equal(got, flashattn_ext.dropout_mask(*call, origin=(1, 5, 48, 128)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_call_with_an_origin_is_the_cpus(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, length, 2, 32).to(dtype).requires_grad_() for length in (70, 150, 150))
    options = {"causal": True, "dropout_p": 0.3, "rng_seed": 3, "origin": (1, 2, 64, 0)}

    def results() -> list[torch.Tensor]:
        out = flashattn_ext.forward(q, k, v, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    got = results()
    with flashattn_ext.use_backend("cpu"):
        expected = results()
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_dropout_with_an_origin_between_tiles_is_refused_by_the_ops() -> None:
    """forward() extends such calls to the tile in front (tests/kernels/test_placed.py); the ops, and with them the Function, refuse."""
    case = Case(dtype=torch.bfloat16, Sq=2, Sk=2, dropout_p=0.1, rng_seed=1, origin=(0, 0, 5, 0))
    with pytest.raises(NotImplementedError, match=r"row is no multiple of 16.*got row 5 and key 0; cut the call"):
        call_function(case, make_inputs(case, "cpu"))


def test_mask_that_is_too_long_names_the_limit() -> None:
    with pytest.raises(NotImplementedError, match=r"backend 'ascend-emulator': sequences longer than 2\^30"):
        flashattn_ext.dropout_mask(0, 1, 2**30 + 1, 1, 0.5, 1)


def test_fp64_names_what_works() -> None:
    q = torch.zeros(1, 2, 1, 8, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"backend 'ascend-emulator': fp64 inputs .* use fp32, fp16 or bf16"):
        flashattn_ext.forward(q, q, q)


@pytest.mark.parametrize("choice", ["mode=never", "cores=0", "seed=x", "verbose"])
def test_unknown_choice_of_the_environment(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", choice)
    q = torch.zeros(1, 2, 1, 8, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=f"'{choice}' is not accepted; accepted are mode=eager"):
        flashattn_ext.forward(q, q, q)


@pytest.mark.parametrize("D,Dv", [(257, 64), (64, 512)])
def test_wider_heads_are_refused_in_words(D: int, Dv: int) -> None:
    q, v = torch.zeros(1, 2, 1, D, dtype=torch.float16), torch.zeros(1, 2, 1, Dv, dtype=torch.float16)
    words = f"head dims above 256 are not implemented by the Ascend C kernels, got {D} of q and k and {Dv} of v"
    with pytest.raises(NotImplementedError, match=words):
        flashattn_ext.forward(q, q, v)


def test_is_never_chosen_by_itself() -> None:
    program = "import flashattn_ext as f; f.use_backend('ascend-emulator'); f.use_backend(None); print(f.build_info())"
    done = run_python(program)
    assert "'backends': ['cpu'" in done.stdout and "'ascend-emulator']" in done.stdout


def test_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(_build, "__file__", str(tmp_path / "_build.py"))
    monkeypatch.setattr(flashattn_ext._C, "backends", lambda: ["cpu"])
    with pytest.raises(RuntimeError, match=r"was not built .* bash build.sh -arch 910 -mode emulator"):
        flashattn_ext.use_backend("ascend-emulator")


def test_library_of_other_sources_is_refused(tmp_path) -> None:
    source, library = tmp_path / "old.cpp", tmp_path / "old.so"
    source.write_text('extern "C" unsigned long flashattn_ext_backend_layout() { return 1; }')
    subprocess.run([os.environ.get("CXX", "c++"), "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(RuntimeError, match=r"old\.so was built from other sources than this package"):
        flashattn_ext._C.load_backend(str(library))


def test_bench_models_every_row(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    from flashattn_ext_lab.main import main

    assert main(["bench", "ascend-emulator", "--quick", "--markdown", "--json", str(tmp_path / "bench.json")]) == 0
    results = json.loads((tmp_path / "bench.json").read_text())
    out = capsys.readouterr().out
    assert out.startswith("Modelled, not measured") and out.count("\n| ") - 2 == len(results["rows"]) == 37
    assert all(0 < row["cube_use"] < 1 for row in results["rows"])
    assert all(0 < row["busy_aic"]["M"] < 1 and 0 < row["busy_aiv"]["V"] < 1 for row in results["rows"])
