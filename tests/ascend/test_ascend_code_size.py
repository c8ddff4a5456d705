"""The size of the kernels' code by the estimate of tools/ascend_code_size.py, against the instruction cache of a vector core."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = 32 << 10  # bytes; by another of the vendor's documents it is half of this

# At most so many bytes of the vector core's code: the first rows of the table of kernels are short because they lack what is rare.
MOST = {
    "forward_long_fp16": CACHE // 2,
    "forward_fp16": CACHE // 2,
    "backward_fp16": CACHE // 2,
    "forward_dropout_fp16": 3 * CACHE // 4,
    "backward_dropout_fp16": 3 * CACHE // 4,
    "forward_mask_fp16": 3 * CACHE // 4,
    "backward_mask_fp16": 3 * CACHE // 4,
    "forward_general_fp16": CACHE,
    "forward_general_fp32": CACHE,
    "backward_bias_fp16": CACHE,
    "backward_general_fp16": CACHE,
    "backward_general_fp32": CACHE,
    "backward_prepare_fp16": CACHE // 2,
    "backward_finish_fp16": CACHE // 2,
    "dropout_mask": CACHE // 2,
}


@functools.cache
def sizes(kernel: str) -> tuple[int, int]:
    command = [sys.executable, ROOT / "tools" / "ascend_code_size.py", kernel]
    name, vector, cube = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert name == kernel
    return int(vector), int(cube)


@pytest.mark.parametrize("kernel", MOST)
def test_code_fits_the_instruction_cache(kernel: str) -> None:
    vector, cube = sizes(kernel)
    assert 2000 < vector <= MOST[kernel], vector
    assert cube <= CACHE, cube


def test_the_estimate_counts_instructions_of_the_npu() -> None:
    """Both kernels have the generator; the one with every option also has what the other lacks."""
    assert sizes("forward_general_fp16")[0] > sizes("forward_dropout_fp16")[0] + 4000
