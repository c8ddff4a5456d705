"""What is compiled, and with which flags. setup.py, tools/check_cuda_sources.sh and the builds of the command line for other tiles
read it; it needs nothing but Python.

    python3 csrc/sources.py FOLDER      writes the instances of the CUDA kernels to FOLDER and prints every CUDA source
"""

from __future__ import annotations

import sys
from collections.abc import Container
from pathlib import Path

CSRC = Path(__file__).resolve().parent

CXX_FLAGS = [
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",  # at::parallel_for is inline: without it, it runs everything on one thread
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
]
NVCC_FLAGS = ["-std=c++17", "-O3"]

# One CUDA source for each architecture, stage, element type, class of head dims and row of kinds, so that they compile side by
# side. A row of kinds (csrc/cuda/common/kind.h) has the suffix of its sources' names.
CUDA_TYPES = {"sm80": ("fp16", "bf16", "fp32"), "sm90": ("fp16", "bf16")}
CUDA_NAMES = {"fp16": "__half", "bf16": "__nv_bfloat16", "fp32": "float"}
HEAD_DIMS = (64, 96, 128, 144, 192, 256, 384, 512)
CUDA_KINDS = {
    "sm80": {"": ("kPlain", "kDropout"), "_masks": ("kIntervals",), "_general": ("kGeneral",)},
    "sm90": {
        "": ("kPlain", "kDropout"),
        "_masks": ("kIntervals",),
        "_general": ("kGeneral",),
        "_scores": ("kScores",),
        "_bias": ("kBias",),
    },
}
# Classes whose v has fewer columns than q and k, by the names that they have in those of sources. Hopper's plain kernels have them:
# value_class() in csrc/cuda/sm90/kernels.h.
NARROW_VALUES = {"192x128": (192, 128)}
# Classes of head dims that have no kernels of rare kinds: rare_class() in csrc/cuda/common/kind.h says which run them.
NOT_RARE = (96, 144, 192)
RARE_KINDS = {"sm80": ("_masks", "_general"), "sm90": ("_general", "_bias")}
# Head dims whose backward of these kinds Hopper leaves to the kernels of sm80: has_backward() in csrc/cuda/sm90/kernels.h.
LEFT_TO_SM80 = {
    "_general": (64, 96, 128, 144, 192, 256),
    "_bias": (64, 96, 144, 192, 256),
    "_scores": (144, 192, 256),
}
ENTRY_POINTS = {
    "forward": ["void {}::forward<{}>(const flashattn_ext::AttnParams&)"],
    "backward": [
        "size_t {}::backward_bytes<{}>(const flashattn_ext::AttnGradParams&)",
        "void {}::backward<{}>(const flashattn_ext::AttnGradParams&)",
    ],
}

# The kernels of calls with a cache are the same for every architecture.
DECODE_HEAD_DIMS = (64, 96, 128, 192, 256, 512)
DECODE_ENTRY_POINTS = [
    "flashattn_ext::decode::TileSizes flashattn_ext::decode::tile_sizes<{}>()",
    "void flashattn_ext::decode::split<{}>(const flashattn_ext::DecodeParams&, const flashattn_ext::decode::Plan&, int, int, bool)",
]

LEFT_OUT = """#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/decode/kernels.h"
#include "cuda/sm80/kernels.h"
#include "cuda/{}/kernels.h"

"""


def cuda_instances(*, sm90: bool) -> dict[str, str]:
    """Names and texts of the sources that instantiate the kernels; without `sm90` those of every GPU alone."""
    return _texts(_functions(sm90))


def decode_instances() -> dict[str, str]:
    """The same for the kernels of calls with a cache."""
    return _texts(_decode_functions())


def _texts(functions_of: dict[str, list[str]]) -> dict[str, str]:
    return {
        f"{name}.cu": '#include "cuda/{}/{}.cuh"\n\n'.format(*name.split("_"))
        + "".join(f"template {function};\n" for function in functions)
        for name, functions in functions_of.items()
    }


def _functions(sm90: bool) -> dict[str, list[str]]:
    """The functions of each instance, whose name is like sm90_forward_bf16_128, and then the suffix of its kinds."""
    narrow = {
        f"sm90_{stage}_{dtype}_{name}": [
            function.format("flashattn_ext::sm90", f"{CUDA_NAMES[dtype]}, {qk}, flashattn_ext::Kind::kPlain, {v}")
            for function in functions
        ]
        for stage, functions in ENTRY_POINTS.items()
        for dtype in CUDA_TYPES["sm90"]
        for name, (qk, v) in NARROW_VALUES.items()
    }
    return (narrow if sm90 else {}) | {
        f"{architecture}_{stage}_{dtype}_{head_dim}{suffix}": [
            function.format(
                f"flashattn_ext::{architecture}", f"{CUDA_NAMES[dtype]}, {head_dim}, flashattn_ext::Kind::{kind}"
            )
            for kind in kinds
            for function in functions
        ]
        for architecture in (("sm80", "sm90") if sm90 else ("sm80",))
        for stage, functions in ENTRY_POINTS.items()
        for dtype in CUDA_TYPES[architecture]
        for head_dim in HEAD_DIMS
        for suffix, kinds in cuda_kinds(architecture, stage, dtype, head_dim).items()
    }


def _decode_functions() -> dict[str, list[str]]:
    """The functions of each instance, whose name is like decode_split_bf16_128: those of narrow tiles and, where there are any, of wide ones."""
    return {
        f"decode_split_{dtype}_{head_dim}": [
            function.format(f"{name}, {head_dim}, {is_wide}")
            for is_wide in (("false", "true") if head_dim <= 256 else ("false",))
            for function in DECODE_ENTRY_POINTS
        ]
        for dtype, name in CUDA_NAMES.items()
        for head_dim in DECODE_HEAD_DIMS
    }


def cuda_kinds(architecture: str, stage: str, dtype: str, head_dim: int) -> dict[str, tuple[str, ...]]:
    """The rows of kinds that have instances. Head dims above 256 have few: Instance in csrc/cuda/sm80/kernels.h."""
    rare = RARE_KINDS[architecture] if head_dim in NOT_RARE else ()
    rows = {suffix: kinds for suffix, kinds in CUDA_KINDS[architecture].items() if suffix not in rare}
    if head_dim > 256:
        has_plain = dtype != "fp32"
        has_general = architecture == "sm80" and (dtype == "fp32" or head_dim == max(HEAD_DIMS))
        has_dropout = (architecture, stage) == ("sm90", "forward")
        plain, general = {"": ("kPlain", "kDropout") if has_dropout else ("kPlain",)}, {"_general": ("kGeneral",)}
        return {**(plain if has_plain else {}), **(general if has_general else {})}
    if (architecture, stage) != ("sm90", "backward"):
        return rows
    return {suffix: kinds for suffix, kinds in rows.items() if head_dim not in LEFT_TO_SM80.get(suffix, ())}


def cuda_sources(folder: Path, *, sm90: bool, only: Container[str] | None = None) -> list[Path]:
    """Every CUDA source, to be compiled with this file's folder among those of headers.

    The instances are written to `folder`; one that is there with the same text keeps its time, so that it is not compiled again.
    `only` names instances (sm90_forward_bf16_128) for a measurement: the others become functions that throw.
    """
    instances = cuda_instances(sm90=sm90) | decode_instances()
    if only is not None:
        known = _functions(sm90) | _decode_functions()
        left_out = [functions for name, functions in known.items() if name not in only]
        instances = {name: text for name, text in instances.items() if name.removesuffix(".cu") in only}
        instances["left_out.cu"] = LEFT_OUT.format("sm90" if sm90 else "sm80") + "".join(
            f'template <> {function} {{ throw std::runtime_error("not in this private build"); }}\n'
            for functions in left_out
            for function in functions
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in instances.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    others = (path for path in (CSRC / "cuda").rglob("*.cu") if sm90 or "sm90" not in path.parts)
    return [*sorted(others), *(folder / name for name in sorted(instances))]


if __name__ == "__main__":
    print(*cuda_sources(Path(sys.argv[1]), sm90=True), sep="\n")
