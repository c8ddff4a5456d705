"""How fast the cube cores of this NPU store sums to memory, and how long an empty launch takes: the two rates that the time model of
ascend_c/emulator/rates.h guesses and that decide most. docs/ascend_first_run.md says what hangs on them.
"""

from __future__ import annotations

import ctypes
import statistics
from pathlib import Path

import torch

import flashattn_ext

TIMES, WARMUP, RUNS, LAUNCHES = 1000, 3, 10, 100
ROWS, COLUMNS = 128, (64, 128, 256)
GIGAHERTZ = 1.8  # the clock of the model
REPORT = Path(__file__).parents[1] / "build" / "npu_report.txt"


def table() -> str:
    """Measures every layout and width; a Markdown table."""
    library = ctypes.CDLL(str(flashattn_ext._build._npu_library()))
    library.flashattn_ext_ascend_fix_rate_bytes.restype = ctypes.c_int64
    library.flashattn_ext_ascend_fix_rate.restype = ctypes.c_char_p
    size = library.flashattn_ext_ascend_fix_rate_bytes()
    memory = torch.zeros(size, dtype=torch.uint8, device="npu")

    def launch(columns: int, times: int, fractals: bool) -> None:
        error = library.flashattn_ext_ascend_fix_rate(
            ctypes.c_void_p(memory.data_ptr()), columns, times, ctypes.c_bool(fractals)
        )
        if error:
            raise RuntimeError(error.decode())

    def microseconds(columns: int, times: int, fractals: bool, launches: int) -> float:
        """The time of one launch."""
        found = []
        for _ in range(WARMUP + RUNS):
            begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(launches):
                launch(columns, times, fractals)
            end.record()
            torch.npu.synchronize()
            found.append(1000 * begin.elapsed_time(end) / launches)
        return statistics.median(found[WARMUP:])

    empty = microseconds(COLUMNS[0], 0, False, LAUNCHES)
    lines = [
        f"an empty launch: {empty:.1f} us",
        f"| Fixpipe of {ROWS} rows, fp32 | columns | us | bytes per cycle of a core at {GIGAHERTZ} GHz |",
        "| --- | --- | --- | --- |",
    ]
    for fractals in (False, True):
        for columns in COLUMNS:
            each = (microseconds(columns, TIMES, fractals, 1) - empty) / TIMES
            rate = ROWS * columns * 4 / (each * GIGAHERTZ * 1000)
            lines.append(f"| {'fractals (NZ)' if fractals else 'rows (ND)'} | {columns} | {each:.3f} | {rate:.1f} |")
    return "\n".join(lines)


def append_to_report(text: str) -> None:
    """Adds them to the report that build.sh leaves after a failure, or begins it."""
    REPORT.parent.mkdir(exist_ok=True)
    with REPORT.open("a") as report:
        report.write(f"--- rates of the cube cores' stores\n{text}\n\n")
