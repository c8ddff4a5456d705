"""Static types: result types depend on return_lse, and options have typed names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
import flashattn_ext as fx

q = torch.zeros(1, 2, 1, 8)
starts = torch.tensor([0, 2], dtype=torch.int32)
"""
RIGHT = """
fx.forward(q, q, q, causal=True, window_size=(3, -1)).sum()
out, lse = fx.forward(q, q, q, dropout_p=0.1, rng_seed=3, return_lse=True)
lse.sum()
fx.varlen_forward(q, q, q, starts, starts, 2, 2, sink=None).sum()
out, lse = fx.varlen_forward(q, q, q, starts, starts, 2, 2, return_lse=True)
fx.attention_reference(q, q, q, layout="bhsd").sum()
out, lse = fx.attention_reference(q, q, q, return_lse=True)
mask = fx.Mask.chunked(2, 2, 2) & fx.Mask.documents(torch.zeros(1, 2, dtype=torch.long))
out, lse = fx.forward(q, q, q, softcap=3.0, mask=mask, bias=q, return_lse=True)
dq, dk, dv, dsink = fx.backward(None, q, q, q, out, lse, softcap=3.0, mask=mask)
dq, dk, dv, dsink, dslopes, drelative, dbias = fx.backward(None, q, q, q, out, lse, bias=q)
fx.t5_relative_bias(q, 3, bidirectional=False).sum()
fx.supports(q, q, q, causal=True, rng_seed=3).slow.upper()
"""
WRONG = """
pair: tuple[torch.Tensor, torch.Tensor] = fx.forward(q, q, q)
fx.forward(q, q, q, return_lse=True).sum()
fx.forward(q, q, q, is_causal=True)
fx.varlen_forward(q, q, q, starts, starts, 2, 2, causal="no")
fx.forward(q, q, q, mask=q)
fx.supports(q, q, q, is_causal=True)
dq, dk, dv, dsink = fx.backward(None, q, q, q, out, lse, bias=q)
"""


def test_types_of_calls(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + RIGHT + WRONG)
    command = [sys.executable, "-m", "mypy", "--config-file", "", "--follow-imports=silent", str(program)]
    command += ["--cache-dir", str(ROOT / "build" / "mypy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    first = (PROGRAM + RIGHT).count("\n") + 2
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if "error:" in line}
    assert lines == set(range(first, first + WRONG.count("\n") - 1)), done.stdout + done.stderr
