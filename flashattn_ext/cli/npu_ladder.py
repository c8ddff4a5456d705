"""The kernels for an NPU tried one after the other, from the smallest one, each beside the CPU's result. The first rung that
breaks is where to look.

    python -m flashattn_ext.cli.npu_ladder NAME     one rung, in this process

`doctor` climbs them all, each in a process of its own: a kernel that never ends cannot be stopped in any other way.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import flashattn_ext

PATIENCE_SECONDS = 180  # importing torch_npu and loading the kernels takes half a minute on a busy machine
DEVICE = "npu"


class Broken(Exception):
    """What a rung found, in one line."""


def climb() -> Iterator[tuple[str, bool, str]]:
    """Runs the rungs up to the first that breaks; yields the name of each, whether it holds, and what came of it."""
    names = iter(RUNGS)
    for name in names:
        holds, text = _in_own_process(name)
        yield name, holds, text
        if not holds:
            break
    for name in names:
        yield name, False, "not tried"


def _in_own_process(name: str) -> tuple[bool, str]:
    command = [sys.executable, "-m", __name__, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {PATIENCE_SECONDS} seconds: a kernel hangs"
    lines = (done.stdout if done.returncode == 0 else done.stderr + done.stdout).strip().splitlines()
    text = lines[-1] if lines else f"the process ended with status {done.returncode} and said nothing"
    return done.returncode == 0, text


def _compare(subject: str, got: Iterable[Tensor], expected: Iterable[Tensor], limit: float) -> str:
    """The largest difference, as a part of the largest expected value; raises Broken beyond `limit`, and for NaN."""
    largest = 0.0
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        same = a == b  # infinities of the same sign, too
        scale = b[b.isfinite()].abs().amax().clamp_min(1e-6) if b.isfinite().any() else torch.tensor(1.0)
        difference = torch.where(same, 0.0, (a - b).abs()).amax().item() / scale.item() if a.numel() else 0.0
        if not difference <= limit:
            wrong = int((~same).sum())
            raise Broken(
                f"{subject}, result {number}: difference from the CPU {difference:.1e} of the largest value, at most "
                f"{limit:.0e} is right; {wrong} of {a.numel()} values differ, {int(a.isnan().sum())} are NaN"
            )
        largest = max(largest, difference)
    return f"{subject}: largest difference from the CPU {largest:.1e}"


def _random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _mask() -> str:
    """Kernels rng_state and dropout_mask: vector cores alone, integers alone, every bit must agree."""
    call = (2, 3, 21, 131, 0.3, -5)
    masks = [flashattn_ext.dropout_mask(*call, device=device).cpu() for device in (DEVICE, "cpu")]
    wrong = int((masks[0] != masks[1]).sum())
    if wrong:
        raise Broken(f"{wrong} of {masks[0].numel()} bits of the mask differ from the CPU's")
    return f"all {masks[0].numel()} bits of the mask are the CPU's"


def _prepare() -> str:
    """Kernels backward_prepare and backward_finish: with no key there is nothing between them. The gradient of the sink is
    a sum over delta, which the first computes, and the gradient of q is the zeros that it writes.
    """
    rows, heads, dim = 150, 3, 64
    values: dict[str, Any] = {
        "dout": _random(1, rows, heads, dim, seed=1),
        "out": _random(1, rows, heads, dim, seed=2),
        "lse": _random(1, heads, rows, dtype=torch.float32, seed=3),
        "q": _random(1, rows, heads, dim),
        "k": _random(1, 0, heads, dim),
        "v": _random(1, 0, heads, dim),
        "sink": _random(heads, dtype=torch.float32, seed=4),
    }

    def run(device: str) -> tuple[Tensor, ...]:
        gradients = flashattn_ext.backward(**{name: value.to(device) for name, value in values.items()})
        return tuple(gradient for gradient in gradients if gradient is not None)

    return _compare("gradients of q and the sink without keys", run(DEVICE), run("cpu"), 1e-3)


def _one_tile() -> str:
    """Kernel forward: one cube core and its two vector cores, one hand-over each way."""
    inputs = [_random(1, 128, 1, 64, seed=seed) for seed in range(3)]

    def run(device: str) -> tuple[Tensor, Tensor]:
        return flashattn_ext.forward(*(t.to(device) for t in inputs), return_lse=True)

    return _compare("out and lse of 128 x 128 scores", run(DEVICE), run("cpu"), 5e-3)


def _whole(dtype: torch.dtype, backward: bool) -> str:
    """Every core several times, and most of what a call can ask for."""
    q, k, v = (_random(2, 300, heads, 64, dtype=dtype, seed=heads) for heads in (8, 4, 4))
    sink = _random(8, dtype=torch.float32)

    def run(device: str) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(device).requires_grad_(backward) for t in (q, k, v, sink)]
        out, lse = flashattn_ext.forward(
            *leaves[:3], sink=leaves[3], causal=True, dropout_p=0.2, rng_seed=7, return_lse=True
        )
        if not backward:
            return out, lse
        return torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))

    subject = (
        f"{'gradients' if backward else 'out and lse'} of 2 x 300 rows, causal, 8 heads, dropout and sink, {dtype}"
    )
    return _compare(subject, run(DEVICE), run("cpu"), 3e-2 if dtype == torch.bfloat16 else 1e-2)


def _forward() -> str:
    return "; ".join(_whole(dtype, backward=False) for dtype in (torch.float16, torch.bfloat16))


def _backward() -> str:
    return "; ".join(_whole(dtype, backward=True) for dtype in (torch.float16, torch.bfloat16))


RUNGS = {
    "mask kernel": _mask,
    "prepare": _prepare,
    "forward of one tile": _one_tile,
    "forward": _forward,
    "backward": _backward,
}


def main(name: str) -> int:
    import torch_npu  # noqa: F401  where torch does not import it by itself

    try:
        print(RUNGS[name]())
    except Exception as error:  # whatever goes wrong in there is what the rung is for
        text = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        print(" ".join(text.split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
