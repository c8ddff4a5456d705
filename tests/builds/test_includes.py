"""The folders of csrc include each other in one direction: csrc/README.md lists them, and MAY_INCLUDE is the rule."""

from __future__ import annotations

import graphlib
import re
from collections import Counter
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CODE = {".h", ".cuh", ".cu", ".cpp", ".def"}
FILES = {str(path.relative_to(CSRC)): path for path in CSRC.rglob("*") if path.suffix in CODE}
MOST_FILES = 16  # of a folder: a reader sees them at a glance

GROUND = "."  # csrc itself: the structs of a call
# Folders of csrc/cuda that kernels of every GPU share. Each may also include those before it.
SHARED = ("ptx", "host", "table", "tile", "score", "passes", "stages")
CUDA = tuple(f"cuda/{name}" for name in SHARED)
SM80 = (GROUND, "rules", *CUDA, "cuda/sm80/shared")
SM90 = (GROUND, "rules", *CUDA, "cuda/sm90/shared")

# The folders that the files of a folder may include, besides their own. A folder that is not here is an error.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    GROUND: (),
    "rules": (GROUND,),
    "backend": (GROUND, "rules"),
    # The ops, which see torch.
    "tensors": (GROUND, "rules", "backend"),
    "call": (GROUND, "rules", "backend", "tensors"),
    "ops": (GROUND, "rules", "backend", "tensors", "call"),
    "autograd": (GROUND, "rules", "backend", "tensors", "call"),
    "module": (GROUND, "rules", "backend", "tensors", "call", "ops", "autograd", "cpu"),
    # The kernels for CPUs. cpu itself is compiled for no instruction set, and its dispatch calls the kernels by a table.
    "cpu": (GROUND, "rules", "backend"),
    "cpu/vectors": (GROUND, "rules", "cpu"),
    "cpu/score": (GROUND, "rules", "cpu/vectors"),
    "cpu/forward": (GROUND, "rules", "cpu", "cpu/vectors", "cpu/score"),
    "cpu/backward": (GROUND, "rules", "cpu/vectors", "cpu/score"),
    "cpu/decode": (GROUND, "rules", "backend", "cpu/vectors", "cpu/score", "cpu/forward"),
    "cpu/derivatives": (GROUND, "rules", "cpu/vectors", "cpu/score", "cpu/backward"),
    "cpu/inst": (
        *(GROUND, "rules", "backend", "cpu"),
        *(f"cpu/{name}" for name in ("vectors", "score", "forward", "backward", "decode", "derivatives")),
    ),
    # The kernels for GPUs.
    "cuda/ptx": (),
    "cuda/host": (GROUND,),
    "cuda/table": (GROUND, "cuda/host"),
    "cuda/tile": (GROUND, "rules", "cuda/ptx"),
    "cuda/score": (GROUND, "rules", *CUDA[:4]),
    "cuda/passes": (GROUND, "rules", *CUDA[:4]),
    "cuda/stages": (GROUND, "rules", *CUDA[:6]),
    "cuda/decode/split": (GROUND, "rules", "backend", *CUDA),
    "cuda/decode/few_queries": (GROUND, "rules", "backend", *CUDA, "cuda/decode/split"),
    "cuda/decode/prefill": (GROUND, "rules", "backend", *CUDA, "cuda/decode/split", "cuda/decode/few_queries"),
    "cuda": (
        *(GROUND, "rules", "backend", "cuda/host", "cuda/passes", "cuda/table"),
        *(f"cuda/decode/{name}" for name in ("split", "few_queries", "prefill")),
        *("cuda/sm80/shared", "cuda/sm80/whole_heads", "cuda/sm90/shared", "cuda/sm90/fp8", "cuda/sm90/forward_short"),
    ),
    # An architecture itself dispatches calls; of its folders none includes a sibling but shared.
    "cuda/sm80": ("cuda",),
    "cuda/sm80/shared": (GROUND, "rules", *CUDA),
    "cuda/sm80/forward": SM80,
    "cuda/sm80/backward": SM80,
    "cuda/sm80/derivatives": SM80,
    "cuda/sm80/whole_heads": SM80,
    "cuda/sm90": ("cuda", "cuda/sm90/fp8", "cuda/sm90/shared"),
    "cuda/sm90/shared": (GROUND, "rules", *CUDA),
    "cuda/sm90/fp8": (GROUND, "rules", *CUDA, "cuda/sm90/shared"),
    "cuda/sm90/forward": (*SM90, "cuda/sm90/fp8"),
    "cuda/sm90/forward_short": SM90,
    "cuda/sm90/forward_large": (*SM90, "cuda/sm90/forward"),
    "cuda/sm90/invariant": (*SM90, "cuda/sm90/forward"),
    "cuda/sm90/few_queries": (*SM90, "backend", "cuda/decode/few_queries", "cuda/sm90/forward"),
    "cuda/sm90/backward": SM90,
    "cuda/sm90/backward_wide": SM90,
    "cuda/sm90/backward_short": SM90,
    "cuda/sm90/derivatives": SM90,
}

OF_TORCH = ("tensors", "call", "ops", "autograd", "module")  # the folders that see torch's headers

# Includes that the rule forbids and that are still there: file, header, why. One that is gone is to be removed here.
EXCEPTIONS = {
    ("cuda/sm90/backward/backward.cuh", "cuda/sm90/backward_wide/backward_wide.cuh"): "chooses between the two kernels",
}


def folder_of(name: str) -> str:
    return str(Path(name).parent)


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M)


# By file: the headers of the project that it includes.
GRAPH = {name: includes(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def test_every_include_begins_in_csrc() -> None:
    assert sum(map(len, GRAPH.values())) > 500  # includes are found
    lost = [f'{name}: "{header}"' for name, headers in GRAPH.items() for header in headers if header not in FILES]
    assert not lost, "name the header by its path from csrc"


def test_every_folder_has_a_rule() -> None:
    folders = {folder_of(name) for name in FILES}
    assert folders == {*MAY_INCLUDE}, "add the folder to MAY_INCLUDE and to csrc/README.md, or remove it there"


def test_the_rule_has_one_direction() -> None:
    graph = {folder: {*others} for folder, others in MAY_INCLUDE.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these may include each other: {' <- '.join(error.args[1])}")


def test_folders_include_what_the_rule_allows() -> None:
    forbidden = {
        (name, header)
        for name, headers in GRAPH.items()
        for header in headers
        if folder_of(header) not in (folder_of(name), *MAY_INCLUDE.get(folder_of(name), ()))
    }
    assert not forbidden - {*EXCEPTIONS}, "move what both need to a folder that both may include"
    assert not {*EXCEPTIONS} - forbidden, "remove them from EXCEPTIONS"


def test_no_header_includes_itself_through_others() -> None:
    try:
        graphlib.TopologicalSorter({name: {*headers} for name, headers in GRAPH.items()}).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these include each other: {' <- '.join(error.args[1])}")


def test_kernels_see_no_torch() -> None:
    """Nor do the rules and the table of backends; and the code for CPUs sees no CUDA."""
    seen = []
    for name, path in FILES.items():
        top = name.split("/")[0]
        for header in re.findall(r"^\s*#\s*include\s+<([^>]+)>", path.read_text(encoding="utf-8"), re.M):
            of_torch = header.split("/")[0] in ("ATen", "c10", "torch", "pybind11") or header == "Python.h"
            of_cuda = header.startswith("cuda")
            if (of_torch and top not in OF_TORCH) or (of_cuda and top != "cuda"):
                seen.append(f"{name}: <{header}>")
    assert not seen


def test_a_folder_has_few_files() -> None:
    counts = Counter(folder_of(name) for name in FILES)
    assert not [f"{folder}: {count}" for folder, count in counts.items() if count > MOST_FILES]
