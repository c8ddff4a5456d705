"""fp8 over ranks, on a group of one: DTensors carry it; a sequence that is split over ranks refuses it, and invariant=True."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import flashattn_ext

FP8 = torch.float8_e4m3fn


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)], ids=str)
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (1, 1)])
def test_dtensors(one_rank: None, placement: Replicate | Shard, shape: tuple[int, int]) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16).to(FP8) for heads in (4, 2, 2))
    descales = {name: torch.rand(shape) + 0.5 for name in ("descale_q", "descale_k", "descale_v")}
    expected = flashattn_ext.forward(q, k, v, causal=True, **descales, out_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    sharded = [DTensor.from_local(t, mesh, [placement], run_check=False) for t in (q, k, v)]
    out = flashattn_ext.forward(*sharded, causal=True, **descales, out_dtype=torch.float32)
    assert isinstance(out, DTensor) and isinstance(expected, torch.Tensor)
    assert_same_bits(out.to_local(), expected)


@pytest.mark.parametrize("name", ["q", "descale_k", "out_dtype"])
def test_a_split_sequence_is_refused(one_rank: None, name: str) -> None:
    q = torch.randn(1, 8, 2, 16)
    given = {"q": {}, "descale_k": {"descale_k": torch.ones(1, 2)}, "out_dtype": {"out_dtype": torch.float16}}[name]
    q = q.to(FP8) if name == "q" else q
    with pytest.raises(NotImplementedError, match=rf"{name}: float8_e4m3fn.*distributed.*bfloat16"):
        flashattn_ext.distributed.attention(q, q, q, **given)


def test_invariant_calls_are_refused(one_rank: None) -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match=r"invariant: expected False in flashattn_ext\.distributed"):
        flashattn_ext.distributed.attention(q, q, q, invariant=True)
