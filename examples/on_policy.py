"""The log-probabilities of a text that a model wrote, from generate() and from one training forward: equal, bit for bit.

    python examples/on_policy.py                the CPU, in seconds; a GPU if there is one
    python examples/on_policy.py --ordinary     the same with ordinary attention and layers

Reinforcement learning takes the ratio of both as the weight of a token, which for the policy that wrote the text is 1 only if they agree.
`invariant=True` gives a row of attention the same bits in a decoding step and in a forward. Every other layer of the model must not
choose the order of its sums by the number of rows either: torch's matrix products, means and softmax do. Here such layers compute blocks
of ROWS rows, the last one padded, so that all of their calls have one shape. Activations, residuals and rotary embeddings work element by
element and need nothing. Programs that generate fast have matrix products for this instead. Requires transformers:
pip install transformers accelerate.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

# torch's OpenMP threads busy-wait for each other, which makes this several times slower if other programs use the same cores.
# OpenMP reads this variable when torch is imported. A value that is already set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from topics import VOCABULARY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from flashattn_ext.integrations import transformers as fax

ROWS = 64
MODEL = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def in_blocks(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """layer(x), for a layer that computes each row x[..., :] by itself."""
    rows = x.flatten(0, -2)
    padded = torch.cat([rows, rows.new_zeros(-len(rows) % ROWS, rows.shape[1])])
    return torch.cat([layer(block) for block in padded.split(ROWS)])[: len(rows)].unflatten(0, x.shape[:-1])


class InBlocks(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return in_blocks(self.layer, x)


def compute_in_blocks(model: nn.Module) -> None:
    """Replaces the layers that sum over a row."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear | LlamaRMSNorm):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, InBlocks(layer))


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Those of ids [B, S] by logits [B, S, VOCABULARY] of the tokens before."""
    return in_blocks(lambda rows: rows.log_softmax(-1), logits.float()).gather(-1, ids[..., None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--steps", type=int, default=200, help="tokens to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    name = "fax" if options.ordinary else "fax-invariant"
    fax.register(name, invariant=not options.ordinary)
    model = AutoModelForCausalLM.from_config(MODEL, attn_implementation=name, dtype=torch.bfloat16)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if not options.ordinary:
        compute_in_blocks(model)

    prompts = torch.randint(VOCABULARY, (3, 20), device=model.device)
    written = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=options.steps, do_sample=True, top_k=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    ids, new = written.sequences, written.sequences[:, prompts.shape[1] :]
    sampled = log_probabilities(torch.stack(written.logits, 1), new)

    # The forward of a training step. Its gradients flow as always.
    trained = log_probabilities(model(ids[:, :-1]).logits[:, prompts.shape[1] - 1 :], new)
    trained.mean().backward()

    ratio = (trained.detach() - sampled).exp()
    print(
        f"{new.numel()} tokens, of which {int((trained == sampled).sum())} have the same log-probability, bit for bit"
    )
    print(f"importance ratios from {ratio.min().item():.6f} to {ratio.max().item():.6f}")


if __name__ == "__main__":
    main()
