"""The size of the Ascend C kernels' code, estimated with an ordinary compiler, in bytes for a vector core and for the cube core.

    python3 tools/ascend_code_size.py [KERNEL ...]      all kernels, or those of ascend_c/inst/ with these names

The kernels are compiled against tests/ascend/code_size/kernel_operator.h, where every instruction of the NPU counts as three machine
instructions. The assembly text that comes out is counted, 4 bytes an instruction, whatever the host's own encoding is. $CXX is the
compiler (c++); it optimises for size (-Os), because a host with few registers unrolls and spills more than the NPU's scalar unit. Its
inlining is not that of CANN's compiler: the sizes are good for comparing kernels and for seeing one grow.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = ROOT / "tests" / "ascend" / "code_size"
INSTRUCTION_BYTES = 4
FLAGS = ["-std=c++17", "-Os", "-fno-exceptions", "-fno-rtti", "-fno-asynchronous-unwind-tables", "-fno-stack-protector"]


def code_bytes(kernel: str, *, cube: bool) -> int:
    """The code of one kernel for one kind of core.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its messages are on stderr.
    """
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *FLAGS,
        "-D__NPU_ARCH__=2201",
        f"-DCODE_SIZE_CUBE={int(cube)}",
    ]
    source = ROOT / "ascend_c" / "inst" / f"{kernel}.cpp"
    with tempfile.TemporaryDirectory() as folder:
        assembly = Path(folder) / "kernel.s"
        subprocess.run([*command, f"-I{HEADERS}", f"-I{ROOT / 'csrc'}", "-S", source, "-o", assembly], check=True)
        text = assembly.read_text()
    count = 0
    for line in text.splitlines():
        stated = line.strip()
        if stated.startswith(".4byte"):
            count += stated.count(",") + 1
        elif re.match(r"\s+[a-z]", line):
            count += 1
    return count * INSTRUCTION_BYTES


def main(kernels: list[str]) -> None:
    """Prints a line for each kernel."""
    for kernel in kernels or sorted(path.stem for path in (ROOT / "ascend_c" / "inst").glob("*.cpp")):
        print(kernel, code_bytes(kernel, cube=False), code_bytes(kernel, cube=True), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
