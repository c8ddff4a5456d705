"""One causal attention on a GPU, forward, for a profiler that watches this process:

python -m flashattn_ext.cli.experiments.one_call ATTENTION B H S D DTYPE

The profiler is switched on for the second call; the first one loads libraries.
"""

from __future__ import annotations

import sys

import torch

from .context import FORWARD, Context, Inputs


def main(attention: str, B: str, H: str, S: str, D: str, dtype: str) -> None:
    context = Context(torch.device("cuda"), quick=True)
    call = Inputs.random(context, tuple(map(int, (B, H, S, D))), dtype).call(attention, FORWARD, causal=True)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
