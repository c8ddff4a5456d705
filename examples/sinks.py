"""Trains a small gpt-oss: every other layer has a sliding window, and every head has a learned sink.

    python examples/sinks.py      on the CPU in about a minute

A sink is a logit without a value: a head that finds nothing to attend to puts its weight there. The last lines of the output show how
far the sinks have moved from 0, and the loss without them. Requires: pip install transformers accelerate.
"""

from __future__ import annotations

import argparse
import os

# torch's OpenMP threads busy-wait for each other, which makes this several times slower if other programs use the same cores.
# OpenMP reads this variable when torch is imported. A value that is already set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from topics import END, VOCABULARY, documents
from transformers import GptOssConfig, GptOssForCausalLM

from flashattn_ext.integrations import transformers as fax

CONTEXT, BATCH = 128, 8
CONFIG = GptOssConfig(
    vocab_size=VOCABULARY, hidden_size=96, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=24, num_local_experts=2, num_experts_per_tok=1, sliding_window=32, max_position_embeddings=4096,
    layer_types=["sliding_attention", "full_attention"] * 2, pad_token_id=END, eos_token_id=END,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    fax.register()
    CONFIG._attn_implementation = "fax"
    model = GptOssForCausalLM(CONFIG).to(device)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.sinks)
    data = torch.tensor([token for document in documents(longest=1 << 30) for token in document])
    sinks = [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("sinks")]
    optimizer = torch.optim.AdamW([{"params": others, "lr": 2e-3}, {"params": sinks, "lr": 2e-2}], weight_decay=0.01)
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (BATCH,))
        ids = torch.stack([data[start : start + CONTEXT] for start in starts]).to(device)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f} nats per byte", flush=True)
    model.eval()
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
        for layer, kind in zip(model.model.layers, CONFIG.layer_types, strict=True):
            print(f"{kind}: sinks " + ", ".join(f"{sink:+.2f}" for sink in layer.self_attn.sinks.tolist()))
            layer.self_attn.sinks.fill_(-1e4)  # the sink gets no weight
        without = model(ids, labels=ids).loss.item()
    print(f"loss of the last batch {loss:.3f}; without the sinks {without:.3f}")


if __name__ == "__main__":
    main()
