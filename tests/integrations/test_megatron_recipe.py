"""docs/registries.md: the attention of Megatron Core's layers computes what plain PyTorch computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="pip install megatron-core")

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "registries.md"
S, B, HQ, HK, D = 21, 2, 4, 2, 8


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _recipe() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(import contextlib.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def _made(names: dict[str, Any], **options: Any) -> Any:
    config = TransformerConfig(
        num_layers=1, hidden_size=HQ * D, num_attention_heads=HQ, num_query_groups=HK, attention_dropout=0.0, **options
    )
    return names["FusedAttention"](config, 1, AttnMaskType.causal, "self")


def _formula(q: Tensor, k: Tensor, v: Tensor, left: int = -1, sink: Tensor | None = None) -> Tensor:
    """[S, B, H * D] of [S, B, H, D]."""
    k, v = (t.repeat_interleave(HQ // HK, 2) for t in (k, v))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    visible = (distance >= 0) & ((distance <= left) if left >= 0 else True)
    logits = torch.einsum("ibhd,jbhd->bhij", q, k) / D**0.5
    logits = logits.masked_fill(~visible, -torch.inf)
    if sink is not None:
        logits = torch.cat([logits, sink[:, None, None].expand(q.shape[1], HQ, len(q), 1)], -1)
    return torch.einsum("bhij,jbhd->ibhd", logits.softmax(-1)[..., : len(k)], v).flatten(2)


def _same(got: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(out.square().sum(), leaves) for out in (got, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_recipe(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names = _recipe()
    assert names["spec"].submodules.self_attention.submodules.core_attention is names["FusedAttention"]
    q, k, v = (torch.randn(S, B, heads, D, requires_grad=True) for heads in (HQ, HK, HK))
    _same(_made(names)(q, k, v, None), _formula(q, k, v), [q, k, v])
    _same(_made(names, window_size=(4, 0))(q, k, v, None), _formula(q, k, v, 4), [q, k, v])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where Megatron makes the learnable sink
    learnable = _made(names, softmax_type="learnable")
    sink = learnable.softmax_offset
    with torch.no_grad():
        sink.normal_()
    _same(learnable(q, k, v, None), _formula(q, k, v, sink=sink), [q, k, v, sink])


def test_packed_sequences(one_rank: None) -> None:
    q, k, v = (torch.randn(S, heads, D, requires_grad=True) for heads in (HQ, HK, HK))
    starts = torch.tensor([0, 8, S], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=13, max_seqlen_kv=13)
    got = _made(_recipe())(q, k, v, None, packed_seq_params=packed)
    parts = [_formula(*(t[a:b, None] for t in (q, k, v)))[:, 0] for a, b in ((0, 8), (8, S))]
    _same(got, torch.cat(parts), [q, k, v])


def test_what_is_refused(one_rank: None) -> None:
    q = torch.randn(S, B, HQ, D)
    with pytest.raises(NotImplementedError, match=r"attention with .*padding"):
        _made(_recipe())(q, q[:, :, :HK], q[:, :, :HK], None, AttnMaskType.padding)
