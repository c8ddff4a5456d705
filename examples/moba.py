"""Mixture of block attention: a GPT whose queries see their own block of tokens and the blocks that a router chooses, as in MoBA.

    python examples/moba.py               on a GPU, or on the CPU in about two minutes
    python examples/moba.py --steps 30    on the CPU in about 20 seconds
    python examples/moba.py --best 5      with more blocks; 8 are full attention

The router has no weights: a block of queries sees the earlier blocks of keys whose mean has the largest product with the mean of its
queries. The choice is new in every layer and step, and is passed as a BlockMask. The last line compares the model with the same model
trained with full attention.

Source: Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs".
"""

from __future__ import annotations

import argparse
import math

import nanogpt
import torch
import torch.nn.functional as F
from nanogpt import HEADS, WIDTH
from topics import documents
from torch import Tensor

import flashattn_ext
from flashattn_ext import BlockMask

CONTEXT, BATCH, BLOCK = 512, 4, 64


def route(q: Tensor, k: Tensor, best: int) -> Tensor:
    """q, k [B, S, H, D] -> bool [B, H, S / BLOCK, S / BLOCK]: the own block of queries, and the best - 1 earlier ones of each head."""
    of_q, of_k = (x.unflatten(1, (-1, BLOCK)).mean(2) for x in (q, k))
    scores = torch.einsum("bihd,bjhd->bhij", of_q, of_k)
    block = torch.arange(scores.shape[-1], device=q.device)
    scores = scores.masked_fill(block > block[:, None], -math.inf).masked_fill(block == block[:, None], math.inf)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(3, scores.topk(best).indices, True)


class RoutedAttention(nanogpt.Attention):
    best: int | None = 3  # blocks that a block of queries sees; None is full attention

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, WIDTH // HEADS).unbind(2)
        mask = None
        if self.best is not None:
            with torch.no_grad():
                mask = BlockMask.from_blocks(route(q, k, self.best), S, S, block_size=BLOCK)
        return self.project(flashattn_ext.forward(q, k, v, causal=True, mask=mask).flatten(2))


def trained(best: int | None, steps: int, data: Tensor, device: str) -> float:
    """Trains a model on a device, and returns the mean loss of its last steps."""
    torch.manual_seed(0)
    RoutedAttention.best = best
    model = nanogpt.GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.1)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f} nats per byte", flush=True)
    last = losses[-20:]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--best", type=int, default=3, help=f"blocks of {BLOCK} that a block of queries sees, of {CONTEXT // BLOCK}"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    data = torch.tensor([token for document in documents(longest=1 << 30) for token in document])
    nanogpt.Attention, nanogpt.CONTEXT = RoutedAttention, CONTEXT  # type: ignore[misc]
    print(f"{options.best} of {CONTEXT // BLOCK} blocks")
    routed = trained(options.best, options.steps, data, options.device)
    print("all blocks")
    full = trained(None, options.steps, data, options.device)
    print(f"mean loss of the last 20 steps: {routed:.3f} with {options.best} blocks, {full:.3f} with full attention")


if __name__ == "__main__":
    main()
