"""A GPT and its training loop in plain PyTorch, after Karpathy's nanoGPT, with this package's attention.

    python examples/nanogpt.py      on the CPU in about a minute

Attention is one call of `flashattn_ext.forward`: causal, with dropout, without an S x S matrix in memory.
"""

from __future__ import annotations

import argparse
import math
import os

# torch's OpenMP threads busy-wait for each other, which makes this several times slower if other programs use the same cores.
# OpenMP reads this variable when torch is imported. A value that is already set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.nn.functional as F
from topics import VOCABULARY, documents, text
from torch import Tensor, nn

import flashattn_ext

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 128, 12
DROPOUT = 0.05


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        # Slices of one tensor [B, S, 3, heads, head_dim], read in place.
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, WIDTH // HEADS).unbind(2)
        out = flashattn_ext.forward(q, k, v, causal=True, dropout_p=DROPOUT if self.training else 0.0)
        return self.project(out.flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm_1, self.norm_2 = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> logits [B, S, VOCABULARY]; the output head is tied to the token embedding."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.T

    @torch.no_grad()
    def write(self, ids: Tensor, length: int) -> Tensor:
        for _ in range(length):
            likely = self(ids[:, -CONTEXT:])[:, -1].topk(5)
            drawn = torch.multinomial(likely.values.softmax(-1), 1)
            ids = torch.cat([ids, likely.indices.gather(1, drawn)], 1)
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    data = torch.tensor([token for document in documents(longest=1 << 30) for token in document])
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(steps):
        rate = 4e-3 * min((step + 1) / 20, 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).to(device)
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f} nats per byte", flush=True)
    model.eval()
    prompt = torch.tensor([list(b"The statement ")], device=device)
    print(text(model.write(prompt, 120)[0].tolist()))


if __name__ == "__main__":
    main()
