"""The compiled sources and their flags, for setup.py, tools/check_cuda_sources.sh and private_build.py, which compiles other tiles.
Needs only the Python standard library.

The kernels come from csrc/cuda/table/kernel_table.h: a source instantiates the rows of one architecture, stage, element type, class
of head dims and group of options, so that sources compile in parallel. The build of the package joins those that compile quickly.

    python3 csrc/sources.py write FOLDER            writes the sources of the kernels to FOLDER and prints every CUDA source;
                                                    write-checked: those that tools/check_cuda_sources.sh compiles, write-once:
                                                    the same kernels in fewer sources
    python3 csrc/sources.py nvcc NVCC... ARGUMENTS  runs nvcc for the architectures that the source of the call is for; nvcc-once:
                                                    for the first of them, without object files, the same host code once, and
                                                    with -Ofc=max, if it is there, where no machine code is read
    python3 csrc/sources.py spills LOG...           fails if a kernel in logs of `nvcc -Xptxas=-v` spills more than its row allows
    python3 csrc/sources.py page                    prints docs/cuda_kernels.md
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parent
if str(CSRC) not in sys.path:
    sys.path.insert(0, str(CSRC))  # `python -I` does not

from kernel_page import describe as describe  # noqa: E402  # bench tune finds these two here
from kernel_page import page  # noqa: E402
from kernel_page import queries_and_keys as queries_and_keys  # noqa: E402
from kernel_table import SUFFIXES, Row, table  # noqa: E402

# The optimisation of the CPU kernels. With GCC -O3 compiles for a fifth longer, and the kernels are no faster: a loop that has
# to be unrolled says so. Loops over a number of elements that is not known still become vectors, also before GCC 12, where -O2
# alone makes none, and an aligned loop takes the same time wherever the linker puts it. The passes that are left out take an eighth of
# the compile time and leave the time of the kernels as it is. -fgcse and -ftree-vrp stay for dropout, which is 3 % slower without
# both, and -ftree-slp-vectorize for the generic kernels, which decode bf16 three times as long without it.
GCC_FLAGS = [
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-funswitch-loops",
    "-falign-functions=64",
    "-falign-loops=64",
    "-fno-code-hoisting",
    "-fno-ipa-cp",
    "-fno-ipa-sra",
    "-fno-rerun-cse-after-loop",
    "-fno-thread-jumps",
    "-fno-tree-dominator-opts",
    "-fno-tree-pre",
]
CLANG_FLAGS = ["-O3"]
CXX_FLAGS = [
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",  # at::parallel_for is inline: without OpenMP it runs everything on one thread
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
]
NVCC_FLAGS = ["-std=c++17", "-O3"]
FAST = "-Ofc=max"  # nvcc's option to compile device code in the least time
PRINTS_REGISTERS = "-Xptxas=-v"

# The includes of the functions that a private build leaves out.
LEFT_OUT = """#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/table/stages.h"

"""


# Sources


def rows_of_sources(*, sm90: bool) -> dict[str, list[tuple[Row, str]]]:
    """The rows, each with its element type, that the source of a name instantiates; without `sm90` no kernels for Hopper alone."""
    found: dict[str, list[tuple[Row, str]]] = {}
    for row in table():
        for dtype in row.dtypes if sm90 or row.architecture != "sm90" else ():
            found.setdefault(row.source(dtype), []).append((row, dtype))
    return found


def cuda_instances(*, sm90: bool) -> dict[str, str]:
    """Names and texts of the sources that instantiate the kernels."""
    # The first line makes a build compile a source again when its GPUs change.
    return {
        f"{name}.cu": f"// GPUs: {rows[0][0].gpus}\n"
        + f'#include "{rows[0][0].header}"\n\n'
        + "".join(f"template {function};\n" for row, dtype in rows for function in row.functions(dtype))
        for name, rows in rows_of_sources(sm90=sm90).items()
    }


def tuned_sources(architecture: str, choice: int, dtype: str) -> list[str]:
    """The names of the sources with a row that has this choice of tiles."""
    rows = [row for row in table() if row.architecture == architecture and dtype in row.dtypes]
    return [*dict.fromkeys(row.source(dtype) for row in rows if len(row.competing) > choice)]


# What compiling a kernel of a stage takes, in processor seconds: of plain rows of a 16-bit type, one tile and one target. The estimate decides
# which sources are joined and in which order they are compiled; it is within a third of most measurements.
SECONDS = {
    ("sm80", "forward"): 0.8,
    ("sm80", "backward"): 1.5,
    ("sm80", "heads_forward"): 0.6,
    ("sm80", "heads_backward"): 0.7,
    ("sm80", "jvp"): 2,
    ("sm80", "second"): 1.8,
    ("sm90", "forward"): 1.2,
    ("sm90", "forward_short"): 0.7,
    ("sm90", "invariant"): 1.6,
    ("sm90", "pack_gqa"): 1.2,
    ("sm90", "backward"): 2.2,
    ("sm90", "heads"): 2.4,
    ("sm90", "few_queries_backward"): 1.8,
    ("sm90", "jvp"): 7.5,
    ("sm90", "second"): 15,
    ("decode", "split"): 2.2,
    ("decode", "backward"): 1,
}
LONGEST = 28  # of sources of the package's build as one
MOST_JOINED = 6  # sources in one, whose names make that of the file


def seconds(source: Path) -> float:
    """An estimate of the processor seconds that a source takes in a build for Ampere and Hopper; 0 outside the table."""
    total = 0.0
    for name in source.stem.split("+"):
        for row, dtype in rows_of(Path(name)):
            by_memory = len({*row.tiles}) if len(row.competing) < len(row.tiles) else 1
            kernels = {"kHopper": 1, "kOtherGpus": by_memory, "kEveryGpu": by_memory + 1}[row.gpus]
            by_options = {"": 1, "_brief": 1, "_small": 1, "_general": 3}.get(SUFFIXES.get(row.options, ""), 2)
            slower = min(4, by_options * (1 if dtype in ("fp16", "bf16") else 2))
            both = 2 if "_16bit_" in name else 1
            total += SECONDS[row.architecture, row.stage] * kernels * slower * both
    return total


def paired(instances: dict[str, str]) -> dict[str, str]:
    """The sources of both 16-bit types as one (sm90_forward_16bit_128): they share the front end's and the host compiler's work on the
    headers, 6 to 28 % of the time of both.
    """
    pairs = dict(instances)
    for name in instances:
        other = name.replace("_bf16_", "_fp16_")
        if other != name and other in instances:
            templates = re.findall(r"^template .*\n", pairs.pop(other), re.M)
            pairs[name.replace("_bf16_", "_16bit_")] = pairs.pop(name) + "".join(templates)
    return pairs


def is_checked(name: str) -> bool:
    """Whether tools/check_cuda_sources.sh compiles a source: fp16, which differs from bf16 in few lines, only for plain calls and dropout
    of head_dim 64 and 128.
    """
    return "_fp16_" not in name or re.fullmatch(r"sm[89]0_[a-z_]+_fp16_(64|128)", name) is not None


def joined(
    instances: dict[str, str], kind: Callable[[str], Hashable], size: Callable[[str], float], most: float
) -> dict[str, str]:
    """Sources of one header and one kind as one, named a+b+..., up to a size: they share the compilers' work on headers and functions."""
    groups: dict[Hashable, list[list[str]]] = {}
    for name in (name.removesuffix(".cu") for name in instances):
        parts = groups.setdefault((rows_of(Path(name))[0][0].header, kind(name)), [[]])
        if parts[-1] and (sum(map(size, [*parts[-1], name])) > most or len(parts[-1]) == MOST_JOINED):
            parts.append([])
        parts[-1].append(name)
    texts = {}
    for part in (part for parts in groups.values() for part in parts):
        others = (re.findall(r"^template .*\n", instances[f"{name}.cu"], re.M) for name in part[1:])
        texts[f"{'+'.join(part)}.cu"] = instances[f"{part[0]}.cu"] + "".join(line for lines in others for line in lines)
    return texts


def joined_for_build(instances: dict[str, str]) -> dict[str, str]:
    """The quick sources of Hopper as one: of what each takes, 1.2 seconds go to headers. Kernels for other GPUs stay apart: several of them get
    other registers in a source with others, because the compiler decides by all callers of a function whether it is inlined.
    """
    hoppers = {name: text for name, text in instances.items() if rows_of(Path(name))[0][0].gpus == "kHopper"}
    others = {name: text for name, text in instances.items() if name not in hoppers}
    return others | joined(hoppers, lambda _: None, lambda name: seconds(Path(name)), LONGEST)


def joined_for_check(instances: dict[str, str]) -> dict[str, str]:
    """Up to six sources as one. Their host code is compiled for all or for none, and their machine code is read for all or for none."""

    def kind(name: str) -> Hashable:
        return is_read(Path(name)), name in sources_with_host_code()

    return joined(instances, kind, lambda _: 1, MOST_JOINED)


def cuda_sources(
    folder: Path, *, sm90: bool, only: Container[str] | None = None, package: bool = False, checked: str = ""
) -> list[Path]:
    """Every CUDA source. Compile them with this file's folder on the include path.

    Writes the instances to `folder`. A file with unchanged text keeps its modification time and is not compiled again.
    `only` names the instances (sm90_forward_bf16_128) of a private build for measurements: all others become functions that throw.
    `package`: those of the package's build, with both 16-bit types and other quick ones in one source. `checked`: those of tools/check_cuda_sources.sh, "apart" or "joined".
    """
    instances = cuda_instances(sm90=sm90)
    if checked:
        instances = {name: text for name, text in instances.items() if is_checked(name.removesuffix(".cu"))}
    if checked == "joined":
        instances = joined_for_check(instances)
    if package:
        instances = joined_for_build(paired(instances))
    if only is not None:
        left_out = [rows for name, rows in rows_of_sources(sm90=sm90).items() if name not in only]
        instances = {name: text for name, text in instances.items() if name.removesuffix(".cu") in only}
        refusal = 'throw std::runtime_error("not in this private build");'
        instances["left_out.cu"] = LEFT_OUT + "".join(
            f"template <> {function} {{ {refusal} }}\n"
            for rows in left_out
            for row, dtype in rows
            for function in row.functions(dtype)
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in instances.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    others = (path for path in (CSRC / "cuda").rglob("*.cu") if sm90 or "sm90" not in path.parts)
    return [*sorted(others), *(folder / name for name in sorted(instances))]


# Architectures


def runs_on_hopper(target: str) -> bool:
    """Whether a -gencode target has code for GPUs of compute capability 9.0: machine code, or PTX that the driver compiles."""
    made = re.search(r"code=\[?(sm|compute)_(\d+)", target)
    return made is not None and (made[2] == "90" or (made[1] == "compute" and int(made[2]) < 90))


def targets_of(source: Path, targets: Sequence[str]) -> list[str]:
    """Those of the -gencode arguments for which a source has code that some dispatch picks.

    Kernels for Hopper alone are compiled for 9.0a. Kernels for all other GPUs are not, if there is another target from which
    `use_backend("cuda-sm80")` can run them on Hopper. A call with no target left is compiled for all of them.
    """
    gpus = {row.gpus for row, _ in rows_of(source)}
    if "cuda/sm90/" in source.as_posix() or gpus == {"kHopper"}:
        return [target for target in targets if "90a" in target] or [*targets]
    others = [target for target in targets if "90a" not in target]
    return others if gpus == {"kOtherGpus"} and any(map(runs_on_hopper, others)) else [*targets]


def first_name(source: Path) -> str:
    """The name of the first of the sources that `joined` has made one."""
    return source.stem.split("+")[0]


def rows_of(source: Path) -> Sequence[tuple[Row, str]]:
    """The rows that a source instantiates, with their element types: those of bf16 for both 16-bit types; none outside the table."""
    return rows_of_sources(sm90=True).get(first_name(source).replace("_16bit_", "_bf16_"), ())


def nvcc_command(arguments: Sequence[str], *, once: bool = False) -> list[str]:
    """A command of nvcc without the -gencode arguments (one word each) that its source is not for.

    nvcc's -O is for host code alone. That of a source of the table starts kernels: with -O1 it takes half a second less, of 6 to 30.
    `once`: for one target only. The host compiler checks host code and makes no object of it; if another source of the table has
    the same host code, it is not called. An argument -Ofc=max stays for sources whose machine code is not read, and -Xptxas=-v for the others.
    """
    sources = [Path(argument) for argument in arguments if argument.endswith(".cu")]
    targets = [argument for argument in arguments if argument.startswith("-gencode=")]
    kept = (targets_of(sources[0], targets) if len(sources) == 1 else targets)[: 1 if once else None]
    command = [argument for argument in arguments if argument not in targets or argument in kept]
    if len(sources) == 1 and rows_of(sources[0]):
        command = ["-O1" if argument == "-O3" else argument for argument in command]
    if once and len(sources) == 1:
        command = [argument for argument in command if argument != (FAST if is_read(sources[0]) else PRINTS_REGISTERS)]
        name = first_name(sources[0])
        repeats = name in rows_of_sources(sm90=True) and name not in sources_with_host_code()
        place = command.index("-c")
        command[place : place + 1] = ["-cubin"] if repeats else ["-c", "-Xcompiler=-fsyntax-only"]
    return command


def is_read(source: Path) -> bool:
    """Whether tools/check_cuda_sources.sh --once reads the machine code of a source: what a kernel spills, and the warnings of ptxas about
    wgmma. Other kernels become machine code without optimisation, which takes most of the time.
    """
    return not rows_of(source) or any(name in read_sources() for name in source.stem.split("+"))


@functools.cache
def read_sources() -> frozenset[str]:
    """The source of the largest head_dim, which has most values in registers, among those with the same templates. Templates depend on the
    header, options, type, whether head_dim is above 256, and how the tile divides the work: its first number, of warpgroups or keys, and
    its words (kApart). A row for which has_limit is false does not stand for one for which it is true; it is read for the warnings of
    kernels for Hopper alone. Sources of fp16, which has the registers of bf16, are not read.
    """
    groups: dict[tuple[object, ...], tuple[int, str]] = {}
    for name, rows in rows_of_sources(sm90=True).items():
        row, dtype = rows[0]
        is_limited = any(has_limit(one, dtype) for one, dtype in rows)
        if dtype != "fp16" and (row.architecture == "sm90" or is_limited):
            first, *others = row.tiles[0]
            words = tuple(other for other in others if not str(other).isdigit())
            options = SUFFIXES.get(row.options, "")
            key = (row.header, options, dtype, row.head_dim > 256, first, words, is_limited)
            groups[key] = max(groups.get(key, (0, "")), (row.head_dim, name))
    return frozenset(name for _, name in groups.values())


@functools.cache
def sources_with_host_code() -> frozenset[str]:
    """One source of each stage and group of options.

    The host code of others is the same templates for other dtypes and head dims. nvcc's front end checks it with their
    device code, so that compiling it takes a third of their time and shows nothing new.
    """
    groups: dict[tuple[object, ...], str] = {}
    for name, ((row, dtype), *_) in rows_of_sources(sm90=True).items():
        if dtype != "fp16":  # is_checked leaves most of them out
            suffix = SUFFIXES.get(row.options, "")
            groups.setdefault((row.architecture, row.stage, suffix, dtype == "fp32", row.head_dim > 256), name)
    return frozenset(groups.values())


# Registers

FEW_BYTES = 8  # of spills, in the choice of the sources that are read


def has_limit(row: Row, dtype: str) -> bool:
    """Whether tools/check_cuda_sources.sh --once reads the spills of a row: it allows few, or most calls of a model run it.
    Kernels of whole heads, which are quick to compile, are read with every option.
    """
    stages = ("forward", "backward", "heads_forward", "heads_backward")
    runs_often = (row.options == "kPlain" or row.stage == "heads_forward") and row.stage in stages and dtype == "bf16"
    return row.spill <= FEW_BYTES or runs_often


# Bytes that kernels without a row may spill, beside those of the rows in their source: around a call that divides 64-bit integers.
SPILLS_WITHOUT_ROW = {"18bias_finish_kernel": 12}
# Bytes that the instances for packed calls of a row may spill.
SPILLS_OF_PACKED = {r"\d+heads_(?:for|back)ward_kernelI.*Lb1E": 64}


def spilling(log: str, rows: Iterable[tuple[Row, str]]) -> list[str]:
    """The kernels of a source, by its `ptxas -v` log, that spill more than their rows allow.

    Kernels whose names do not say which row they have, such as the one that rounds dq, may spill as much as any row of their type and
    head dim in the source.
    """
    rows = [*rows]
    limits = [(re.compile(name), limit) for name, limit in SPILLS_OF_PACKED.items()]
    limits += [(row.mangled(dtype), row.spill) for row, dtype in rows]
    limits += [(re.compile(name), limit) for name, limit in SPILLS_WITHOUT_ROW.items()]
    limits += sorted(
        ((re.compile(row.mangled_class(dtype)), row.spill) for row, dtype in rows), key=lambda x: x[1], reverse=True
    )
    problems = []
    for kernel, text in re.findall(r"Compiling entry function '(\w+)'(.*?)(?=Compiling entry function|\Z)", log, re.S):
        spills = max((int(found) for found in re.findall(r"(\d+) bytes spill stores", text)), default=0)
        limit = next((limit for name, limit in limits if name.search(kernel)), 0)
        if spills > limit:
            problems.append(f"spills {spills} bytes, {limit} allowed: {kernel}")
    return problems


def check_spills(logs: Iterable[Path]) -> list[str]:
    rows = rows_of_sources(sm90=True)
    return [
        problem
        for log in logs
        for problem in spilling(
            log.read_text(), [row for name in log.name.split(".")[0].split("+") for row in rows.get(name, ())]
        )
    ]


def main(command: str, *arguments: str) -> int:
    if command in ("write", "write-checked", "write-once"):
        checked = {"write-checked": "apart", "write-once": "joined"}.get(command, "")
        print(*cuda_sources(Path(arguments[0]), sm90=True, checked=checked), sep="\n")
    elif command in ("nvcc", "nvcc-once"):
        words = nvcc_command(arguments, once=command == "nvcc-once")
        os.execvp(words[0], words)
    elif command == "spills":
        problems = check_spills(map(Path, arguments))
        print(*problems, sep="\n", end="\n" if problems else "")
        return len(problems) > 0
    elif command == "page":
        print(page(), end="")
    else:
        raise SystemExit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
