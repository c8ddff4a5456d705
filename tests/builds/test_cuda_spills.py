"""What kernels may spill, by their rows in the table of CUDA kernels, and whose machine code the check reads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))

import kernel_table  # noqa: E402
import sources  # noqa: E402

ROWS = sources.table()


def spill_log(kernel: str, spills: int) -> str:
    return (
        f"ptxas info    : Compiling entry function '{kernel}' for 'sm_90a'\nptxas info    : Function properties for {kernel}\n"
        f"    {spills} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
    )


@pytest.mark.parametrize(
    ("kernel", "allowed"),
    [
        ("_ZN13flashattn_ext4sm9014forward_kernelI13__nv_bfloat16Li128ELNS_7OptionsE0ELi128EEEvNS_10AttnParamsE", 0),
        ("_ZN13flashattn_ext4sm9014forward_kernelI13__nv_bfloat16Li128ELNS_7OptionsE1ELi128EEEvNS_10AttnParamsE", 8),
        ("_ZN13flashattn_ext12other_kernelI13__nv_bfloat16Li128EEEvv", 8),
        ("_ZN13flashattn_ext12other_kernelI13__nv_bfloat16Li96EEEvv", 0),
        ("_ZN13flashattn_ext12other_kernelEv", 0),
        ("_ZN13flashattn_ext18bias_finish_kernelENS_14AttnGradParamsENS_16GeneralWorkspaceEi", 12),
    ],
)
def test_kernels_spill_what_their_rows_allow(tmp_path: Path, kernel: str, allowed: int) -> None:
    log = tmp_path / "sm90_forward_bf16_128.instances.log"
    log.write_text(spill_log("_ZN13flashattn_ext1aEv", 0) + spill_log(kernel, allowed))
    assert sources.check_spills([log]) == []
    log.write_text(spill_log(kernel, allowed + 1) + spill_log("_ZN13flashattn_ext1aEv", 0))
    assert sources.check_spills([log]) == [f"spills {allowed + 1} bytes, {allowed} allowed: {kernel}"]
    both = log.rename(tmp_path / "sm90_forward_bf16_64+sm90_forward_bf16_128.joined.log")
    assert sources.check_spills([both]) == [f"spills {allowed + 1} bytes, {allowed} allowed: {kernel}"]


def test_rows_name_their_kernels() -> None:
    """The limit of another row is not taken for one's own: names of a source's kernels match one row each, in joined sources too."""
    of_stages: dict[tuple[str, str], list[tuple[kernel_table.Row, str]]] = {}
    for rows in sources.rows_of_sources(sm90=True).values():
        of_stages.setdefault((rows[0][0].architecture, rows[0][0].stage), []).extend(rows)
    for rows in of_stages.values():
        for row, dtype in rows:
            arguments = {"fp16": "6__half", "bf16": "13__nv_bfloat16", "fp32": "f", "fp8": "NS_6Float8E"}[dtype]
            if row.options:
                last = f"LNS_7OptionsE{kernel_table.option_bits()[row.options]}E"
            else:
                last = f"Li{row.tile_rows // (1 if row.stage == 'split' else 16)}E"
            values = f"Li{row.head_dim_v}E" if row.architecture == "sm90" else ""
            name = f"kernelI{arguments}Li{row.head_dim}E{last}{values}EE"
            assert [its for its, one in rows if its.mangled(one).search(name)] == [row]


def test_some_kernels_must_not_spill() -> None:
    limits = {
        (row.architecture, row.stage, row.head_dim, row.head_dim_v): row.spill
        for row in ROWS
        if row.options == "kPlain"
    }
    for stage in ("forward", "backward"):
        for head_dim in (64, 128):
            assert limits["sm80", stage, head_dim, head_dim] == limits["sm90", stage, head_dim, head_dim] == 0
        assert limits["sm90", stage, 192, 128] == 0


def test_the_check_reads_one_source_of_each_kind() -> None:
    """The largest head_dim of each kind of rows that allow few spills, and of kernels for Hopper, whose wgmma may be serialised."""
    rows = {
        name: rows[0][0]
        for name, rows in sources.rows_of_sources(sm90=True).items()
        if any(sources.has_limit(row, dtype) or row.architecture == "sm90" for row, dtype in rows)
    }
    read = sources.read_sources()
    assert read < rows.keys() and 3 * len(read) < len(rows)
    assert {(rows[name].header, rows[name].options) for name in read} == {
        (row.header, row.options) for row in rows.values()
    }
    backward = {name for name in rows if re.fullmatch(r"sm90_backward_bf16_\d+", name)}
    assert backward - read == {f"sm90_backward_bf16_{head_dim}" for head_dim in (80, 160, 384)}
    kernels = {"sm90_second_bf16_64", "sm90_second_bf16_128", "sm80_backward_fp32_128"}  # of three templates
    assert read & {*kernels, "sm80_backward_fp16_128", "sm80_jvp_bf16_128"} == kernels
