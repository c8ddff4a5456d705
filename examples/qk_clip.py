"""QK-clip: a GPT trained with Muon, with the query and key weights of a head scaled down when its largest logit exceeds a threshold.

    python examples/qk_clip.py                  on the CPU in a few seconds
    python examples/qk_clip.py --threshold 1e9  the same without clipping
    python examples/qk_clip.py --plot FILE      also draws the largest logits (with matplotlib)

Muon grows every direction of a weight matrix at the same rate, and the logits, which are products of two such matrices, grow with them.
After a step, the query and key weights of each head with a largest logit m > threshold are multiplied by sqrt(threshold / m), so that the
largest logit becomes the threshold. Fused attention never stores the logits: `return_max_logits=True` returns the largest of each head.

Sources: Kimi Team 2025, "Kimi K2" (MuonClip); Jordan et al. 2024, "Muon".
"""

from __future__ import annotations

import argparse

import nanogpt
import torch
import torch.nn.functional as F
from nanogpt import BATCH, CONTEXT, HEADS, WIDTH
from topics import documents
from torch import Tensor, nn

import flashattn_ext

MOMENTUM = 0.95


class ClippedAttention(nanogpt.Attention):
    """Attention that remembers the largest logit of each head, [HEADS], since the last clip."""

    largest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, WIDTH // HEADS).unbind(2)
        out, max_logits = flashattn_ext.forward(q, k, v, causal=True, return_max_logits=True)
        of_heads = max_logits.amax(0)
        self.largest = of_heads if self.largest is None else torch.maximum(self.largest, of_heads)
        return self.project(out.flatten(2))

    @torch.no_grad()
    def clip(self, threshold: float) -> tuple[float, int]:
        """Scales down the heads above the threshold; returns the largest logit before that, and the number of clipped heads."""
        largest, self.largest = self.largest, None
        assert largest is not None
        factor = (threshold / largest.clamp(min=threshold)).sqrt()
        for parameter in (self.qkv.weight, self.qkv.bias):
            of_queries, of_keys, _ = parameter.view(3, HEADS, WIDTH // HEADS, -1)
            of_queries.mul_(factor[:, None, None])
            of_keys.mul_(factor[:, None, None])
        return largest.max().item(), int((largest > threshold).sum())


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximates the nearest matrix with all singular values 1, by five Newton-Schulz steps with an odd quintic polynomial."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon for matrices: Nesterov momentum with orthogonalised updates."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(MOMENTUM).add_(p.grad)
                p.sub_(
                    orthogonal(p.grad + MOMENTUM * momentum), alpha=group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5
                )


def plot(largest: list[float], threshold: float, path: str) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SystemExit("--plot needs matplotlib; pip install matplotlib, or run without --plot") from None
    figure, axes = pyplot.subplots()
    axes.plot(largest, label="largest logit")
    axes.axhline(threshold, linestyle="--", color="gray", label="threshold")
    axes.set(xlabel="step", ylabel="logit", ylim=(0, max(*largest, min(threshold, 2 * max(largest))) * 1.1))
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threshold", type=float, default=8.0, help="largest logit that a head may have")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--plot", metavar="FILE", help="draw the largest logits")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = torch.tensor([token for document in documents(longest=1 << 30) for token in document])
    model = nanogpt.GPT()
    for block in model.blocks:
        block.attention = ClippedAttention()
    model.to(device)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [Muon(matrices, arguments.learning_rate), torch.optim.AdamW(others, lr=3e-3)]
    largest: list[float] = []
    for step in range(arguments.steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        clips = [block.attention.clip(arguments.threshold) for block in model.blocks]
        largest.append(max(logit for logit, _ in clips))
        if step % 5 == 0 or step == arguments.steps - 1:
            clipped = sum(heads for _, heads in clips)
            print(
                f"step {step:4d}  loss {loss.item():.3f} nats per byte  largest logit {largest[-1]:6.2f}  heads clipped {clipped}",
                flush=True,
            )
    if arguments.plot:
        plot(largest, arguments.threshold, arguments.plot)


if __name__ == "__main__":
    main()
