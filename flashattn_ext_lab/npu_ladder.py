"""Tries the kernels for an NPU one after the other, from the smallest one, each compared with the CPU's result. The first rung that
fails shows where to look.

    python -m flashattn_ext_lab.npu_ladder NAME     one rung, in this process

`doctor` runs them all, each in a separate process, because a kernel that hangs can only be stopped with its process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

import flashattn_ext
from flashattn_ext.integrations import sdpa

PATIENCE_SECONDS = 180  # importing torch_npu and loading the kernels takes half a minute on a busy machine
DEVICE = "npu"
PATTERN = 255  # in every byte: NaN in a floating-point type
LIMITS = ((torch.float16, 1e-2), (torch.bfloat16, 3e-2), (torch.float32, 1e-4))  # the largest relative differences
Results = TypeVar("Results", bound=tuple[Tensor, ...])


class Broken(Exception):
    """The failure of a rung, in one line."""


def climb() -> Iterator[tuple[str, bool, str]]:
    """Runs the rungs up to the first that fails; yields the name of each, whether it succeeded, and its result."""
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
    """The largest difference, relative to the largest expected value; raises Broken beyond `limit`, and for NaN."""
    largest = 0.0
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        a, b = a.detach().cpu().double(), b.detach().cpu().double()
        same = a == b  # infinities of the same sign, too
        scale = b[b.isfinite()].abs().amax().clamp_min(1e-6) if b.isfinite().any() else torch.tensor(1.0)
        difference = torch.where(same, 0.0, (a - b).abs()).amax().item() / scale.item() if a.numel() else 0.0
        if not difference <= limit:
            wrong = int((~same).sum())
            raise Broken(
                f"{subject}, result {number}: difference from the CPU {difference:.1e} of the largest value, accepted is at most "
                f"{limit:.0e}; {wrong} of {a.numel()} values differ, {int(a.isnan().sum())} are NaN"
            )
        largest = max(largest, difference)
    return f"{subject}: largest difference from the CPU {largest:.1e}"


def _random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _qkv(
    batch: int, rows: int, heads: tuple[int, int], dtype: torch.dtype = torch.float16, keys: int | None = None
) -> dict[str, Tensor]:
    """Inputs with these numbers of query and KV heads, of 64 dims; as many keys as rows by default."""
    keys = rows if keys is None else keys
    sizes = {"q": (rows, heads[0]), "k": (keys, heads[1]), "v": (keys, heads[1])}
    return {name: _random(batch, *size, 64, dtype=dtype, seed=ord(name)) for name, size in sizes.items()}


def _run_on_both(run: Callable[[str], Results]) -> tuple[Results, Results]:
    """The results of a call on the NPU and on the CPU. Memory of an NPU may contain the right results of an earlier process, and a
    kernel that never ran would leave them there. So blocks of the sizes of the results are first filled with a pattern and
    freed: torch's allocator reuses them.
    """
    expected = run("cpu")
    blocks = [torch.full((t.nbytes,), PATTERN, dtype=torch.uint8, device=DEVICE) for t in expected]
    del blocks
    return run(DEVICE), expected


def _mask() -> str:
    """Kernels rng_state and dropout_mask: vector cores only, integers only, every bit must agree."""
    call = (2, 3, 21, 131, 0.3, -5)
    (got,), (expected,) = _run_on_both(lambda device: (flashattn_ext.dropout_mask(*call, device=device),))
    wrong = int((got.cpu() != expected).sum())
    if wrong:
        raise Broken(f"{wrong} of {expected.numel()} bits of the mask differ from the CPU's")
    return f"all {expected.numel()} bits of the mask are the CPU's"


def _prepare() -> str:
    """Kernels backward_prepare and backward_finish: without keys no kernel runs between them. The gradient of the sink is
    a sum over delta, which the first computes, and the gradient of q is the zeros that the second writes.
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

    return _compare("gradients of q and the sink without keys", *_run_on_both(run), 1e-3)


def _attention(call: str, limit: float, inputs: dict[str, Tensor], backward: bool = False, **options: Any) -> str:
    """Compares out and lse, with the backward also the gradients of the inputs."""

    def run(device: str) -> tuple[Tensor, ...]:
        leaves = {name: t.detach().to(device).requires_grad_(backward) for name, t in inputs.items()}
        placed = {name: value.to(device) if hasattr(value, "to") else value for name, value in options.items()}
        results = flashattn_ext.forward(**leaves, **placed, return_lse=True)
        if not backward:
            return results
        return *results, *torch.autograd.grad(results, [*leaves.values()], [torch.ones_like(t) for t in results])

    return _compare(f"out, lse{' and gradients' if backward else ''} of {call}", *_run_on_both(run), limit)


def _whole(backward: bool) -> str:
    """Every core runs several tasks, with most options of a call."""
    texts = []
    for dtype, limit in LIMITS[:2]:
        inputs = {**_qkv(2, 300, (8, 4), dtype), "sink": _random(8, dtype=torch.float32)}
        call = f"2 x 300 rows, causal, 8 heads, dropout and sink, {dtype}"
        texts.append(_attention(call, limit, inputs, backward, causal=True, dropout_p=0.2, rng_seed=7))
    return "; ".join(texts)


def _every_kernel() -> str:
    """The other kernels: there is one for each type of inputs and each set of options that a row of
    ascend_c/kernel_list.h names (none, dropout, a Mask, biases, all of them), and in 16 bits one for rows of many keys.
    """
    slopes, mask = torch.tensor([0.5, 0.25]), flashattn_ext.Mask.chunked(50, 70, 70)
    options: dict[str, dict[str, Any]] = {
        "no option": {},
        "dropout": {"dropout_p": 0.2, "rng_seed": 7},
        "a Mask": {"mask": mask},
        "slopes": {"alibi_slopes": slopes},
        "every option": {"dropout_p": 0.2, "rng_seed": 7, "mask": mask, "alibi_slopes": slopes},
    }
    for dtype, limit in LIMITS:
        for name, given in options.items():
            inputs = _qkv(1, 70, (2, 2), dtype)
            _attention(f"a call with {name}, {dtype}", limit, inputs, backward=True, causal=True, **given)
        if dtype != torch.float32:
            _attention(f"a call with many keys, {dtype}", limit, _qkv(1, 70, (2, 2), dtype, keys=1100))
    return (
        f"out, lse and gradients of {len(LIMITS) * len(options)} calls: {len(options)} sets of options in fp16, bf16 and fp32; out and "
        "lse of calls with many keys"
    )


def _beside_torch() -> str:
    """Calls of scaled_dot_product_attention with a mask: torch's own on the device, which torch_npu runs, beside ours. Ours must be
    right; about torch's the text says where it drops the mask.
    """
    rows, keys, heads, limit = 70, 90, 2, 1e-2
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(1, 1, rows, keys, generator=generator) < 0.7
    visible[..., 0] = True  # no row is empty
    hidden = torch.zeros(visible.shape, dtype=torch.float16).masked_fill(~visible, -torch.inf)
    masks: dict[str, dict[str, Any]] = {
        "no mask": {},
        "is_causal": {"is_causal": True},
        "a bool mask": {"attn_mask": visible},
        "an additive mask": {"attn_mask": hidden},
    }
    agrees, drops, differs = 0, [], []
    for dim in (64, 80, 256):
        q, k, v = (_random(1, heads, n, dim, seed=n + dim) for n in (rows, keys, keys + 1))
        v = v[:, :, :keys]
        wide = [t.float() for t in (q, k, v)]
        on_device = [t.to(DEVICE) for t in (q, k, v)]
        unmasked = _SDPA(*wide)
        for name, options in masks.items():
            call = f"{name} at D = {dim}"
            given = {key: value.float() if value is hidden else value for key, value in options.items()}
            expected = _SDPA(*wide, **given)
            placed = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
            with sdpa.activate(report=True) as report:
                ours = _SDPA(*on_device, **placed)
            assert report is not None
            if report.ours != 1:
                raise Broken(f"{call} did not run on these kernels: {report}")
            _compare(call, [ours], [expected], limit)
            try:
                theirs = _SDPA(*on_device, **placed)
                _compare(call, [theirs], [expected], limit)
                agrees += 1
            except Broken:
                try:
                    _compare(call, [theirs], [unmasked], limit)
                    drops.append(call)
                except Broken as other:
                    differs.append(str(other))
            except RuntimeError as error:
                differs.append(f"{call}: {str(error).splitlines()[0]}")
    text = f"{3 * len(masks)} calls of scaled_dot_product_attention agree with the CPU; torch_npu's own do in {agrees}"
    text += f", drop the mask in: {', '.join(drops)}" if drops else ""
    return text + (f", and otherwise: {'; '.join(differs)}" if differs else "")


_SDPA = torch.nn.functional.scaled_dot_product_attention

RUNGS = {
    "mask kernel": _mask,
    "prepare": _prepare,
    # Kernel forward: one cube core and its two vector cores, one exchange in each direction.
    "forward of one tile": lambda: _attention("128 x 128 scores", 5e-3, _qkv(1, 128, (1, 1))),
    "forward": lambda: _whole(backward=False),
    "backward": lambda: _whole(backward=True),
    "every kernel": _every_kernel,
    "compared with torch": _beside_torch,
}


def main(name: str) -> int:
    import torch_npu  # noqa: F401  where torch does not import it by itself

    try:
        print(RUNGS[name]())
    except Exception as error:  # any error fails the rung
        text = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        print(" ".join(text.split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
