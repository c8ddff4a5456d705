"""The decoding ops under torch.library.opcheck and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import CacheCase, make_inputs
from torch import Tensor

import flashattn_ext
from flashattn_ext import ops

CASES = {
    "read": CacheCase(causal=True, Sq=3),
    "append": CacheCase(new=2, Sq=2, causal=True, rotary_dim=16),
    "pages": CacheCase(new=2, Sq=2, page_size=16, sink=True, tree=True),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    for op_name in ("decode", "decode_append"):
        op = getattr(ops, op_name)

        def recorded(*arguments: Any, op: Any = op) -> Any:
            calls.append(arguments)
            return op(*arguments)

        monkeypatch.setattr(ops, op_name, recorded)
    inputs = make_inputs(CASES[name], torch.float32).to(torch.float32, device)
    inputs.tensors[1:3] = [cache.nan_to_num(0.5) for cache in inputs.tensors[1:3]]
    inputs.call()
    pure = torch.ops.flashattn_ext.decode_append if CASES[name].new else torch.ops.flashattn_ext.decode
    torch.library.opcheck(pure.default, (*calls[0], []))


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_break(name: str, device: str) -> None:
    inputs = make_inputs(CASES[name], torch.float32).to(torch.float32, device)
    expected_inputs = inputs.to(torch.float32, device)
    expected, _ = expected_inputs.call()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(tensors: list[Tensor | None], options: dict[str, Any]) -> Tensor:
        out: Tensor = flashattn_ext.flash_attn_with_kvcache(*tensors, **options)
        return out * 2

    assert torch.equal(attend(inputs.tensors, inputs.options), expected * 2)
    for ours, theirs in zip(inputs.tensors[1:3], expected_inputs.tensors[1:3], strict=True):
        assert torch.equal(ours.nan_to_num(0.5), theirs.nan_to_num(0.5))


def test_lengths_and_scales_may_change(device: str) -> None:
    q, cache = torch.randn(2, 1, 4, 16, device=device), torch.randn(2, 64, 2, 16, device=device)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def attend(length: int, scale: float) -> Tensor:
        out: Tensor = flashattn_ext.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length, softmax_scale=scale)
        return out

    for length, scale in ((5, 0.5), (9, 0.25), (64, 1.5)):
        expected = flashattn_ext.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length, softmax_scale=scale)
        torch.testing.assert_close(attend(length, scale), expected)
