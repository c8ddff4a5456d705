"""One causal attention on a GPU, forward, for a profiler that watches this process and is switched on for the second call; the
first one loads libraries:

python -m flashattn_ext_lab.experiments.one_call ATTENTION B H S D DTYPE
"""

from __future__ import annotations

import sys

import torch

from .harness import FORWARD, Inputs, Sizes

if __name__ == "__main__":
    attention, *shape, dtype = sys.argv[1:]
    sizes = Sizes(**dict(zip("BHSD", map(int, shape), strict=True)), dtype=dtype)
    call = Inputs.random(torch.device("cuda"), sizes).call(attention, FORWARD)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
