"""Small fp64 calls with every option, as functions of the tensors that have a gradient: for gradcheck and gradgradcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mask_cases import make_mask
from torch import Tensor

# A tensor stands for its shape, in letters: see `size_of`.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(3, 2)),
    "scale": dict(softmax_scale=-0.7),
    "smooth": dict(smooth_softmax=True),
    "sink": dict(sink="q"),
    "softcap": dict(softcap=0.6),
    "slopes": dict(alibi_slopes="q"),
    "slopes of each entry": dict(alibi_slopes="bq", causal=True),
    "relative": dict(relative_bias="q5"),
    "relative, one entry": dict(relative_bias="q1"),
    "biases": dict(softcap=1.5, alibi_slopes="q", relative_bias="q3", window_size=(4, 1), sink="q"),
    "dropout": dict(dropout_p=0.4, rng_seed=17),
    "mask": dict(mask="intervals"),
    "all": dict(
        causal=True, window_size=(4, -1), softmax_scale=0.5, sink="q", dropout_p=0.3, rng_seed=4, softcap=1.2,
        alibi_slopes="q", relative_bias="q5", mask="documents",
    ),
}  # fmt: skip
BROADCASTS = ["bqs", "1qs", "b1s", "bq1", "11s", "1q1", "b11", "111"]  # shapes of a bias before its last dimension


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def tensors_and_options(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], sizes: list[tuple[int, int]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The differentiable tensors of a call by name, and its other arguments; sizes: (Sq, Sk) of each sequence."""
    size_of = {"b": len(sizes), "q": q.shape[-2], "s": sizes[0][0], "k": sizes[0][1]}
    leaves, given = {"q": q, "k": k, "v": v}, dict(options)
    for name in ("sink", "alibi_slopes", "relative_bias", "bias"):
        if name in given:
            leaves[name] = leaf(*(size_of.get(size) or int(size) for size in given.pop(name)))
    if "mask" in given:
        generator = torch.Generator().manual_seed(3)
        given["mask"] = make_mask(given["mask"], k.shape[-2], sizes, generator, packed=q.dim() == 3)
    return leaves, given


def out_and_lse(
    function: Callable[..., Any], leaves: dict[str, Tensor], given: dict[str, Any]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """(out, lse) as a function of the leaves, with 0 for an lse of -inf, of which finite differences have no meaning."""

    def both(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = function(**dict(zip(leaves, tensors, strict=True)), **given, return_lse=True)
        return out, lse.masked_fill(lse.isneginf(), 0)

    return both
