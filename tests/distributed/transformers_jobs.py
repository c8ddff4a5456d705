"""Jobs of test_shared_transformers.py: models of transformers on parts of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from rank_pool import group_of
from torch import Tensor, nn

from flashattn_ext import distributed
from flashattn_ext.integrations import transformers as fax

S = 256
SIZES: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": S,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=40),
}


def _model(name: str, attention: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def logits_and_gradients_are_those_of_one_process(device: str, name: str, packed: bool) -> None:
    if dist.get_rank() >= 2:
        return
    group = group_of(2)
    fax.register()
    fax.register("fax-cp", cp_group=group)
    fax.register("fax-cp", cp_group=group)  # again
    tokens = torch.randint(50, (2, S + 1), generator=torch.Generator().manual_seed(1)).to(device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(S, device=device)[None].expand(2, -1)
    if packed:
        begins = torch.tensor([[0] * 100 + [100] * 156, [0] * 30 + [30] * 226], device=device)
        positions = positions - begins
    whole = _model(name, "fax").to(device)
    expected = whole(input_ids=inputs, position_ids=positions, use_cache=False).logits
    _loss(expected, targets).backward()
    model = _model(name, "fax-cp").to(device)
    part = [distributed.shard(t, group=group) for t in (inputs, positions, targets)]
    logits = model(input_ids=part[0], position_ids=part[1], use_cache=False).logits
    torch.testing.assert_close(logits, distributed.shard(expected.detach(), group=group), rtol=1e-4, atol=1e-4)
    _loss(logits, part[2]).backward()
    for (parameter, got), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert got.grad is not None and wanted.grad is not None, parameter
        dist.all_reduce(got.grad, group=group)
        torch.testing.assert_close(
            got.grad, wanted.grad, rtol=1e-3, atol=1e-3, msg=lambda text, p=parameter: f"{p}: {text}"
        )


def what_ranks_cannot_share_is_refused(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    group = group_of(2)
    fax.register("fax-cp", cp_group=group)
    model = _model("llama", "fax-cp").to(device)
    tokens = torch.zeros(1, 128, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="position_ids: expected positions that rise by 1"):
        model(input_ids=tokens, use_cache=False)
    padding = torch.ones_like(tokens).index_fill(1, torch.tensor([0], device=device), 0)
    positions = distributed.shard(torch.arange(256, device=device)[None], group=group)
    with pytest.raises(NotImplementedError, match="attention_mask: expected None or ones"):
        model(input_ids=tokens, position_ids=positions, attention_mask=padding, use_cache=False)
