"""Other tilings of the Ascend C forward, as `make emulator-tilings` compiles them for the experiment `tiles`: that each computes the
same as the CPU's reference without breaking a rule of the hardware. Collected where they are as new as the sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers import Case, assert_same_bits, call, check, make_inputs

pytest.importorskip("rich")

import flashattn_ext
from flashattn_ext.cli.bench_ascend import Case as ModelledCase
from flashattn_ext.cli.bench_ascend import load_library, model
from flashattn_ext.cli.experiments import ascend, tiles
from flashattn_ext.cli.experiments.context import Context

BUILT = [shape for shape in ascend.TILINGS if ascend.library_of(*shape).exists()]
NAMES = ["x".join(map(str, shape)) for shape in BUILT]
FORWARD = Case(dtype=torch.float16, B=1, D=64, Dv=64, needs_grad=())
CASES = {
    "one row": replace(FORWARD, Sq=1, Sk=1, D=1, Dv=1),
    "several steps": replace(FORWARD, Sq=130, Sk=1100),
    "causal": replace(FORWARD, Sq=200, Sk=200, D=128, Dv=128, causal=True),
    "largest heads": replace(FORWARD, Sq=70, Sk=300, Hq=1, Hk=1, D=256, Dv=256),
    "smooth, no visible key": replace(FORWARD, Sq=150, Sk=10, D=40, Dv=24, causal=True, smooth_softmax=True),
    "packed": replace(FORWARD, lengths_q=(5, 0, 140, 20), lengths_k=(9, 30, 0, 300), causal=True),
}


@pytest.fixture(params=BUILT, ids=NAMES)
def shape(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """A tiling, whose library is the backend."""
    name = f"ascend-emulator-{request.param[0]}x{request.param[1]}"
    if name not in flashattn_ext.build_info()["backends"]:
        flashattn_ext._C.load_backend(str(ascend.library_of(*request.param)))
    with flashattn_ext.use_backend(name):
        yield request.param


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_the_reference(shape: tuple[int, int], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(case, "cpu")
    out, lse = call(case, inputs)
    for mode in ("mode=late,cores=3", "mode=random,seed=1,cores=2"):
        monkeypatch.setenv("FLASHATTN_EXT_ASCEND_EMULATOR", mode)
        again = call(case, inputs)
        assert_same_bits(again[0], out, mode)
        assert_same_bits(again[1], lse, mode)
    check(case, "cpu")


@pytest.mark.parametrize(
    "change", [{"dtype": torch.bfloat16}, {"dropout_p": 0.5}, {"alibi": "heads"}, {"mask": "documents"}]
)
def test_what_a_tiling_leaves_out(shape: tuple[int, int], change: dict[str, object]) -> None:
    case = replace(FORWARD, **change)
    with pytest.raises(
        NotImplementedError,
        match="nothing but the forward in fp16 without dropout, biases and masks; use the backend asc",
    ):
        call(case, make_inputs(case, "cpu"))


def test_a_tiling_has_no_backward(shape: tuple[int, int]) -> None:
    case = replace(FORWARD, needs_grad=("q",))
    out, _ = call(case, make_inputs(case, "cpu"))
    with pytest.raises(NotImplementedError, match="nothing but the forward"):
        out.sum().backward()


@pytest.mark.parametrize("D", [16, 64, 129, 256])
@pytest.mark.parametrize("shape", BUILT, ids=NAMES)
def test_memories_hold_what_is_said(shape: tuple[int, int], D: int) -> None:
    """The emulator counts what the kernel takes; tiles.h says it for tilings that do not compile, too."""
    said = ascend.tiling(D, *shape)
    counted = model(load_library(ascend.library_of(*shape)), ModelledCase(300, D))
    assert tuple(map(int, counted["core_bytes"].values())) == said.taken
    assert not said.overflows and shape == (said.rows, said.keys)


def test_rows_of_the_experiment() -> None:
    result = tiles.measure(Context(torch.device("cpu"), quick=True), tiles.Sizes(1, 3, 512, 64, "fp16", (64,)))
    rows = {row[0]: row for row in result.rows}
    default = rows["Ascend 128 x 512 (default)"]
    for shape in BUILT:
        row = rows[f"Ascend {shape[0]} x {shape[1]}"]
        found = {column.name: cell for column, cell in zip(result.columns, row, strict=True)}
        assert found["tiles"] == 3 * (512 // shape[0]) * -(-512 // shape[1])
        assert found["k and v read"] == 3 * (512 // shape[0]) * 512 * 2 * 64 * 2 / 2**20
        # Scores and probabilities, and for each step a product.
        moved = 3 * 512 * (512 * 6 + -(-512 // shape[1]) * 64 * 4)
        assert found["workspace moved"] == 2 * moved / 2**20
        assert found[tiles.TO_DEFAULT] == pytest.approx(found[tiles.MODELLED] / default[-4]) and found["remark"] == ""
        assert found["time"] is None
