"""The list of CUDA instances that the build expands: what is in it, and that a source which has not changed is not written again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))

import sources  # noqa: E402


def test_every_stage_has_every_type_and_class_of_head_dims() -> None:
    texts = sources.cuda_instances(sm90=True)
    narrow = len(sources.NARROW_VALUES) * len(sources.ENTRY_POINTS) * len(sources.CUDA_TYPES["sm90"])
    rows = [
        sources.cuda_kinds(architecture, stage, dtype, head_dim)
        for architecture, dtypes in sources.CUDA_TYPES.items()
        for stage in sources.ENTRY_POINTS
        for dtype in dtypes
        for head_dim in sources.HEAD_DIMS
    ]
    assert len(texts) == sum(map(len, rows)) + narrow
    assert all("" in row or "_general" in row for row in rows)
    for architecture, dtypes in sources.CUDA_TYPES.items():
        header = (ROOT / "csrc" / "cuda" / architecture / "kernels.h").read_text()
        declared = sorted(re.findall(r"^(?:void|size_t) (\w+)\(", header, re.M))
        for dtype in dtypes:
            for head_dim in sources.HEAD_DIMS:
                for suffix in sources.cuda_kinds(architecture, "forward", dtype, head_dim):
                    left_to_sm80 = head_dim in sources.LEFT_TO_SM80.get(suffix, ())
                    stages = ["forward"] if architecture == "sm90" and left_to_sm80 else [*sources.ENTRY_POINTS]
                    names = [f"{architecture}_{stage}_{dtype}_{head_dim}{suffix}.cu" for stage in stages]
                    defined = re.findall(
                        rf"^template (?:void|size_t) flashattn_ext::{architecture}::(\w+)(<.*>)\(",
                        "".join(texts[name] for name in names),
                        re.M,
                    )
                    wanted = [
                        (name, f"<{sources.CUDA_NAMES[dtype]}, {head_dim}, flashattn_ext::Kind::{kind}>")
                        for name in declared
                        if (stage := name.split("_")[0]) in stages
                        for kind in sources.cuda_kinds(architecture, stage, dtype, head_dim)[suffix]
                    ]
                    assert sorted(defined) == sorted(wanted)


def test_narrow_values_have_the_plain_kernels_of_hopper() -> None:
    """Those that dispatch.cuh chooses, in both directions."""
    dispatch = (ROOT / "csrc" / "cuda" / "common" / "dispatch.cuh").read_text()
    chosen = re.findall(r"kKernels<T, (\d+), kKind, (\d+)>", dispatch)
    assert [*sources.NARROW_VALUES.items()] == [(f"{qk}x{v}", (int(qk), int(v))) for qk, v in chosen]
    texts = sources.cuda_instances(sm90=True)
    for dtype in sources.CUDA_TYPES["sm90"]:
        for name, (qk, v) in sources.NARROW_VALUES.items():
            text = "".join(texts[f"sm90_{stage}_{dtype}_{name}.cu"] for stage in sources.ENTRY_POINTS)
            defined = re.findall(r"^template (?:void|size_t) flashattn_ext::sm90::(\w+)(<.*>)\(", text, re.M)
            arguments = f"<{sources.CUDA_NAMES[dtype]}, {qk}, flashattn_ext::Kind::kPlain, {v}>"
            assert defined == [(function, arguments) for function in ("forward", "backward_bytes", "backward")]


def test_decoding_has_every_type_and_class_of_head_dims() -> None:
    """decode.cu names the classes of head dims that it calls, and kernels.h the functions."""
    folder = ROOT / "csrc" / "cuda" / "decode"
    called = re.findall(r"kernels<T, (\d+)>\(\)", (folder / "decode.cu").read_text())
    assert tuple(map(int, called)) == sources.DECODE_HEAD_DIMS
    header = (folder / "kernels.h").read_text()
    declared = re.findall(r"^template <class T, int kHeadDim, bool kWide>\n\w+ (\w+)\(", header, re.M)
    texts = sources.decode_instances()
    assert len(texts) == len(sources.CUDA_NAMES) * len(called)
    for name, text in texts.items():
        functions = re.findall(r"^template [\w:]+ flashattn_ext::decode::(\w+)<", text, re.M)
        assert sorted(functions) == sorted(declared if "_512" in name else 2 * declared)


def test_every_kind_is_compiled_once() -> None:
    header = (ROOT / "csrc" / "cuda" / "common" / "kind.h").read_text()
    known = re.findall(r"^  (k\w+),", header, re.M)
    for rows in sources.CUDA_KINDS.values():
        kinds = [kind for row in rows.values() for kind in row]
        assert len(kinds) == len({*kinds}) and {*kinds} <= {*known}


@pytest.mark.parametrize(
    "dtype,head_dim,kinds",
    [("bf16", 384, ["kPlain"]), ("bf16", 512, ["kPlain", "kGeneral"])]
    + [("fp32", d, ["kGeneral"]) for d in (384, 512)],
)
def test_head_dims_above_256_have_few_kinds(dtype: str, head_dim: int, kinds: list[str]) -> None:
    """Those that Instance in csrc/cuda/sm80/kernels.h names; on Hopper plain ones of 16-bit types, and a forward with dropout."""
    for stage in sources.ENTRY_POINTS:
        assert [kind for row in sources.cuda_kinds("sm80", stage, dtype, head_dim).values() for kind in row] == kinds
        if dtype in sources.CUDA_TYPES["sm90"]:
            own = ("kPlain", "kDropout") if stage == "forward" else ("kPlain",)
            assert sources.cuda_kinds("sm90", stage, dtype, head_dim) == {"": own}


@pytest.mark.parametrize("head_dim", [96, 144, 192])
def test_rare_kinds_have_few_classes_of_head_dims(head_dim: int) -> None:
    """Others run those of rare_class() in csrc/cuda/common/kind.h."""
    assert [*sources.cuda_kinds("sm80", "forward", "fp16", head_dim)] == [""]
    assert [*sources.cuda_kinds("sm90", "forward", "fp16", head_dim)] == ["", "_masks", "_scores"]
    assert "_general" in sources.cuda_kinds("sm80", "backward", "fp16", 256)


def test_without_hopper() -> None:
    assert not [name for name in sources.cuda_instances(sm90=False) if "sm90" in name]


def test_sources_are_written_once(tmp_path: Path) -> None:
    """A build compiles what is newer than its object."""
    found = sources.cuda_sources(tmp_path, sm90=True)
    times = {path: path.stat().st_mtime_ns for path in found}
    changed = tmp_path / "sm80_forward_fp16_64.cu"
    changed.write_text("")
    assert sources.cuda_sources(tmp_path, sm90=True) == found
    assert {path for path in found if path.stat().st_mtime_ns != times[path]} == {changed}
    assert changed.read_text().startswith('#include "cuda/sm80/forward.cuh"')


def test_a_measurement_compiles_what_it_calls(tmp_path: Path) -> None:
    """The functions of other instances are there, so that the library loads, and throw."""
    found = sources.cuda_sources(tmp_path, sm90=True, only=["sm90_forward_bf16_128"])
    assert [path.name for path in found if path.parent == tmp_path] == ["left_out.cu", "sm90_forward_bf16_128.cu"]
    stubs = (tmp_path / "left_out.cu").read_text().count("template <>")
    instances = sources.cuda_instances(sm90=True) | sources.decode_instances()
    functions = sum(text.count("template ") for text in instances.values())
    assert stubs == functions - len(sources.CUDA_KINDS["sm90"][""])


def test_the_list_needs_no_package(tmp_path: Path) -> None:
    """tools/check_cuda_sources.sh runs it with any Python."""
    command = [sys.executable, "-I", "-S", ROOT / "csrc" / "sources.py", tmp_path]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert {*map(Path, filter(None, lines))} == {*sources.cuda_sources(tmp_path, sm90=True)}
