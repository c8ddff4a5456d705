"""Models the inner loops of the CPU kernels' products on Arm cores: llvm-mca's cycles for the loops in the objects that
`tools/check_arm64.sh --kernels` leaves in build/arm64. Prints the table of docs/results/cpu.md. No Arm machine is needed, or was.

    python tools/model_arm64.py [--mca llvm-mca-19] [FOLDER]

Fails if a loop stores or loads registers on the stack, or if decoding takes more than 2 conversions for each multiply-add.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Vector instructions that a core begins in a cycle; LLVM's model of each core. Only some have bfmmla.
PIPES = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4, "tsv110": 2}
WITH_BF16 = ("neoverse-n2", "neoverse-v1", "neoverse-v2")
NAMES = {
    "neoverse-n1": "Neoverse N1",
    "neoverse-n2": "N2",
    "neoverse-v1": "V1",
    "neoverse-v2": "V2",
    "tsv110": "Kunpeng 920 (TSV110)",
}
ITERATIONS = 4000
CONVERSIONS = ("fcvtl", "fcvtl2", "shll", "ushll", "uxtl", "zip1")
BRANCHES = ("b.", "cbz", "cbnz", "tbz", "tbnz")


class Loop(NamedTuple):
    function: str
    body: list[str]

    def count(self, *operations: str) -> int:
        return sum(line.split()[0] in operations for line in self.body)


def loops(path: Path) -> Iterator[Loop]:
    """The innermost loops of an object: what a backward branch encloses, without other branches."""
    command = ["aarch64-linux-gnu-objdump", "-d", "-C", "--no-show-raw-insn", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    function, lines = "", {}
    for line in listing.splitlines():
        if begins := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function, lines = begins[1], {}
        elif found := re.match(r"\s*([0-9a-f]+):\s+(.*?)(\s*//.*)?$", line):
            address, text = int(found[1], 16), re.sub(r" <.*>", "", found[2])
            lines[address] = text
            target = re.search(r"\b([0-9a-f]+)$", text) if text.startswith(BRANCHES) else None
            if target and int(target[1], 16) in lines:
                body = [text for at, text in lines.items() if at >= int(target[1], 16)]
                if sum(text.startswith((*BRANCHES, "b\t", "b ")) for text in body) == 1:
                    yield Loop(function, body)


def rate(loop: Loop, operation: str, core: str, mca: str) -> float:
    """Instructions `operation` in a cycle."""
    body = [re.sub(r"\b[0-9a-f]+$", ".Lloop", line) if line.startswith(BRANCHES) else line for line in loop.body]
    command = [mca, "-mtriple=aarch64", f"-mcpu={core}", "-mattr=+bf16", f"-iterations={ITERATIONS}"]
    text = ".Lloop:\n" + "\n".join(body) + "\n"
    report = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    cycles = re.search(r"Total Cycles:\s+(\d+)", report)
    assert cycles is not None, report
    return loop.count(operation) * ITERATIONS / int(cycles[1])


def is_product(loop: Loop, order: int, operand: str) -> bool:
    tile = re.search(r"(?:gemm|matrix)_tile<(\S+), \(\S+::Order\)(\d), \(\S+::Init\)\d, 8, 2>", loop.function)
    return tile is not None and tile[2] == str(order) and operand in tile[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/arm64"))
    parser.add_argument("--mca", default="llvm-mca-19")
    arguments = parser.parse_args()
    neon, bf16 = (list(loops(arguments.folder / f"{name}.o")) for name in ("neon", "neon_bf16"))
    print("| set, dtype, A operand | instruction |", " | ".join(NAMES[core] for core in PIPES), "|")
    print("| --- " * (len(PIPES) + 2) + "|")
    problems = []
    rows = (
        ("neon", neon, "float", "fmla", "fp32"),
        ("neon", neon, "double", "fmla", "fp64"),
        ("neon_bf16", bf16, "Bf16DotOp", "bfmmla", "bf16"),
    )
    for name, all_loops, operand, operation, dtype in rows:
        for order, words in enumerate(("by rows: scores, dk, dv", "by k: out, dq")):
            found = [x for x in all_loops if is_product(x, order, operand) and x.count(operation) == 16]
            problems += [f"{loop.function} uses the stack" for loop in found if any("[sp" in x for x in loop.body)]
            cells = []
            for core, pipes in PIPES.items():
                if operation == "bfmmla" and core not in WITH_BF16:
                    cells.append("-")
                    continue
                slowest = min(rate(loop, operation, core, arguments.mca) for loop in found)
                cells.append(f"{slowest:.2f} of {pipes}: {slowest / pipes:.0%}")
            print(f"| {name}, {dtype}, {words} | {operation} |", " | ".join(cells), "|")
    for loop in neon:
        decodes = re.search(r"(BandValues|BandProduct|RowScores)<\S*B?Float16,", loop.function) is not None
        if decodes and loop.count("fmla") and loop.count(*CONVERSIONS) > 2 * loop.count("fmla"):
            problems.append(f"{loop.function}: {loop.count(*CONVERSIONS)} conversions for {loop.count('fmla')} fmla")
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return len(problems) > 0


if __name__ == "__main__":
    sys.exit(main())
