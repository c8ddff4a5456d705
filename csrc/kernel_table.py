"""The table of CUDA kernels (csrc/cuda/table/kernel_table.h) and the list of their stages (stages.def beside it), for sources.py.
Needs only the Python standard library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent / "cuda" / "table"
TABLE = FOLDER / "kernel_table.h"
STAGES = FOLDER / "stages.def"

CUDA_NAMES = {"fp16": "__half", "bf16": "__nv_bfloat16", "fp32": "float", "fp8": "flashattn_ext::Float8"}
TYPES = {"k16Bit": ("fp16", "bf16"), "kFp16": ("fp16",), "kBf16": ("bf16",), "kFp32": ("fp32",), "kE4m3": ("fp8",)}
# Rows share a source with the rows whose options have the same suffix.
SUFFIXES = {
    "kPlain": "",
    "kGroups": "",
    "kBrief": "_brief",
    "kFewTiles": "_small",
    "kBriefFewTiles": "_brief",
    "kDropout": "",
    "kIntervals": "_masks",
    "kMasks": "_masks",
    "kBlocks": "_blocks",
    "kUnlisted": "_general",
    "kGeneral": "_general",
    "kScores": "_scores",
    "kBias": "_bias",
    "kAnyBias": "_bias",
    "kFp8Scores": "_fp8",
    "kFp8General": "_fp8",
}


class Stage(NamedTuple):
    """A stage of csrc/cuda/table/stages.def."""

    architecture: str  # sm80 or sm90; decode for both
    name: str  # forward, backward, jvp, second or split, say
    header: str  # path from csrc
    large: tuple[int, str]  # the header of rows of more columns
    functions: tuple[str, ...]  # that a row instantiates. {}: its template arguments


@functools.cache
def stages() -> dict[str, Stage]:
    """The stages, by the names of their arrays in the table. A line that is neither a part of a stage nor a comment is an error."""
    text = re.sub(r"//.*|^#.*", "", STAGES.read_text(), flags=re.M)
    large, found = {}, {}
    for array, columns, header in re.findall(r'^LARGE_ROWS\((\w+), (\d+), "([^"]+)"\)$', text, re.M):
        large[array] = int(columns), f"cuda/{header}"
    text = re.sub(r"^LARGE_ROWS\(.*\)$", "", text, flags=re.M)
    one = r'\s*STAGE\((\w+), (\w+), (\w+), "([^"]+)",((?:\s*\w+_ENTRY\((?:[^()]|\([^()]*\))*\))+)\)\s*'
    while stage := re.match(one, text):
        text = text[stage.end() :]
        architecture, array, name, header, entries = stage.groups()
        functions = tuple(
            f"{result} flashattn_ext::{architecture}::{function}<{{}}>({_qualified(parameters)})"
            for result, function, parameters in re.findall(r"_ENTRY\(([^,]+), (\w+), \((.*?)\)\)", entries)
        )
        header = f"cuda/{header}"
        found[array] = Stage(architecture, name, header, large.get(array, (0, header)), functions)
    if text.strip():
        raise ValueError(f"{STAGES.name}: not a stage: {text.split()[0]}")
    return found


def _qualified(parameters: str) -> str:
    """Parameter types as they are called outside of the namespace."""
    return re.sub(r"(?<![\w:])((?:\w+::)?[A-Z])", r"flashattn_ext::\1", parameters)


class Row(NamedTuple):
    """A row of the table of kernels: see csrc/cuda/table/rows.h."""

    array: str  # name of the array in the table; stages() says which stage it has
    dtypes: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    options: str  # kPlain, say; empty in the rows of decode
    gpus: str
    spill: int  # bytes that ptxas may spill with the first tile
    tiles: tuple[tuple[str, ...], ...]  # sizes as in the table; the build has the first tile
    note: str  # the figures that chose the tile, or what decided otherwise
    group: str  # the note above several rows, which they share

    @property
    def architecture(self) -> str:
        return stages()[self.array].architecture

    @property
    def stage(self) -> str:
        return stages()[self.array].name

    @property
    def header(self) -> str:
        """The header with the functions of the row."""
        stage = stages()[self.array]
        return stage.large[1] if self.head_dim > stage.large[0] else stage.header

    @property
    def competing(self) -> tuple[tuple[str, ...], ...]:
        """The tiles among which speed decided. The shared memory of the GPU chooses among those of the backward of sm_80, of its second derivatives
        and of its forward with warps along the columns.
        """
        by_memory = self.architecture == "sm80" and (self.stage in ("backward", "second") or len(self.tiles[0]) == 6)
        return self.tiles[:1] if by_memory else self.tiles

    @property
    def tile_rows(self) -> int:
        """The rows of a tile of decoding, of one KV head."""
        sizes = [int(size) for size in self.tiles[0]]
        heads = sizes[5] if len(sizes) > 5 else 1
        return 16 * sizes[0] * (sizes[1] if self.stage == "split" else 1) // heads

    def source(self, dtype: str) -> str:
        """The name of the source, such as sm90_forward_bf16_128: stages, types, classes and groups of options have their own."""
        dims = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}x{self.head_dim_v}"
        return f"{self.architecture}_{self.stage}_{dtype}_{dims}{SUFFIXES.get(self.options, '')}"

    def functions(self, dtype: str) -> list[str]:
        arguments = [CUDA_NAMES[dtype], str(self.head_dim)]
        if self.stage == "split":
            arguments.append(str(self.tile_rows))
        elif self.architecture == "decode":
            arguments.append(self.tiles[0][0])
        else:
            arguments.append(f"flashattn_ext::{self.options}")
        if self.architecture == "sm90":
            arguments.append(str(self.head_dim_v))
        return [function.format(", ".join(arguments)) for function in stages()[self.array].functions]

    def mangled_class(self, dtype: str) -> str:
        """The type and the head dim in the mangled name of a kernel."""
        mangled_type = {"fp16": "6__half", "bf16": "13__nv_bfloat16", "fp32": "f", "fp8": "NS_6Float8E"}[dtype]
        return f"I{mangled_type}Li{self.head_dim}E"

    def mangled(self, dtype: str) -> re.Pattern[str]:
        """Finds the template arguments of this row in the mangled name of a kernel."""
        if self.architecture == "decode":
            last = f"Li{self.tile_rows if self.stage == 'split' else self.tiles[0][0]}E"
        else:
            last = f".*OptionsE{option_bits()[self.options]}E"
        values = rf"Li{self.head_dim_v}E" if self.architecture == "sm90" else ""
        return re.compile(rf"{self.mangled_class(dtype)}{last}{values}")


def option_bits() -> dict[str, int]:
    """The sets of options that rows name, as numbers."""
    text = (FOLDER / "options.h").read_text()
    return {name: int(bits) for name, bits in re.findall(r"^  (k\w+) = (\d+),", text, re.M)}


@functools.cache
def table() -> tuple[Row, ...]:
    """The rows of kernel_table.h, which has one row in a line. A line that is neither a row nor a comment is an error."""
    rows, array, above, group = [], None, "", ""
    for line in TABLE.read_text().splitlines():
        if begins := re.match(r"inline constexpr \w+(?:<[\w:]+>)? (\w+)\[\] = \{$", line):
            array, group = begins[1], ""
        elif line == "};":
            array = None
        elif array is None:
            continue
        elif comment := re.match(r"    // (.*)$", line):
            above = f"{above} {comment[1]}".lstrip()
            if above.endswith(":"):
                group, above = above[:-1], ""
        elif row := re.match(r"    \{(.*)\},(?:  // (.*))?$", line):
            rows.append(_row(array, _cells(row[1]), row[2] or above, group))
            above = ""
        else:
            raise ValueError(f"{TABLE.name}: not a row of {array}: {line.strip()}")
    return tuple(rows)


def _cells(text: str) -> list[str]:
    """The parts between the commas that no brace encloses."""
    cells, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            cells.append("")
        else:
            cells[-1] += character
    return [cell.strip() for cell in cells]


def _row(array: str, cells: Sequence[str], note: str, group: str) -> Row:
    architecture, stage = stages()[array][:2]
    dims = _cells(cells[1].strip("{}"))
    if architecture == "decode":
        options, gpus, (spill, tile) = "", "kEveryGpu", cells[-2:] if stage == "split" else (cells[3], cells[2])
        tiles = (tuple(_cells(tile.strip("{}"))),)
    else:
        options, gpus, spill, all_tiles = cells[2:]
        tiles = tuple(tuple(_cells(tile[1:-1])) for tile in _cells(all_tiles[1:-1]))
    return Row(
        array,
        TYPES[cells[0]],
        int(dims[0]),
        int(dims[-1]),
        options,
        gpus,
        int(spill),
        tiles,
        note,
        group,
    )
