"""One causal attention on a GPU, forward, for a profiler that watches this process:

python -m flashattn_ext_lab.experiments.one_call ATTENTION B H S D DTYPE

The profiler is switched on for the second call; the first one loads libraries.
"""

from __future__ import annotations

import sys

import torch

from .harness import FORWARD, Inputs


def main(attention: str, B: str, H: str, S: str, D: str, dtype: str) -> None:
    shape = tuple(map(int, (B, H, S, D)))
    call = Inputs.random(torch.device("cuda"), shape, dtype).call(attention, FORWARD, causal=True)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
