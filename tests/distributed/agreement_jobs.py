"""Jobs of test_agreement.py: calls that are wrong on some ranks must raise on every rank."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import group_of
from torch.distributed.device_mesh import init_device_mesh

from flashattn_ext import Mask, distributed

S = 128  # on each rank


def _qkv(device: str, Hq: int = 4, Hk: int = 2, S: int = S, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(1, S, heads, 8, device=device, dtype=dtype) for heads in (Hq, Hk, Hk)]


def _expect(kind: type[Exception], match: str, device: str, options: dict[str, Any], **shape: Any) -> None:
    with pytest.raises(kind, match=match):
        distributed.attention(*_qkv(device, **shape), group=group_of(2), **options)


def ranks_that_differ_are_told(device: str) -> None:
    rank = dist.get_rank()
    if rank >= 2:
        return
    causal = rank == 0
    _expect(ValueError, "causal is True on rank 0 and False on rank 1", device, {"causal": causal})
    _expect(ValueError, "q is .*float32.* on rank 0 and .*float64.* on rank 1|q is .*float32.* and .*float16", device, {},
            dtype=torch.float32 if rank == 0 else torch.float64 if device == "cpu" else torch.float16)  # fmt: skip
    _expect(
        ValueError,
        r"q is .*rows, 4, 8\] on rank 0 and .*rows, 6, 8\] on rank 1",
        device,
        {"mode": "ring"},
        Hq=4 + 2 * rank,
    )
    _expect(ValueError, "mode is ring on rank 0 and allgather on rank 1", device, {"mode": ("ring", "allgather")[rank]})
    _expect(ValueError, "seqlen is .* on rank 0 and .* on rank 1.*; give seqlen", device, {}, S=S // (1 + rank))
    with pytest.raises(ValueError, match=r"sink is a .* on rank 0 and nothing on rank 1"):
        sink = torch.zeros(4, device=device) if rank == 0 else None
        distributed.attention(*_qkv(device), group=group_of(2), sink=sink)


def contents_that_differ_are_told_on_demand(device: str) -> None:
    """With FLASHATTN_EXT_DISTRIBUTED_CHECK=1 every call checks; without it, later calls with the same signature skip the check."""
    rank = dist.get_rank()
    if rank >= 2:
        return
    q, k, v = _qkv(device)
    whole = 2 * S

    def starts(at: int) -> torch.Tensor:
        return torch.tensor([0, at, whole], dtype=torch.int32)

    heads = torch.linspace(0.1, 0.4, 4, device=device)
    calls: dict[str, tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]] = {
        "cu_seqlens": ([t[0] for t in (q, k, v)], {"cu_seqlens": starts(70)}, {"cu_seqlens": starts(71)}),
        "mask_intervals": ([q, k, v], *({"mask": Mask.chunked(n, whole, whole, device=device)} for n in (9, 8))),
        "sink": ([q, k, v], {"sink": heads}, {"sink": heads + 1}),
        "alibi_slopes": ([q, k, v], {"alibi_slopes": heads}, {"alibi_slopes": heads.flip(0)}),
        "relative_bias": ([q, k, v], *({"relative_bias": torch.full((4, 3), n, device=device)} for n in (0.0, 0.5))),
        "bias": ([q, k, v], *({"bias": torch.full((1, 1, 1, whole), n, device=device)} for n in (0.0, 0.5))),
    }
    for name, (tensors, same, other) in calls.items():
        options: dict[str, Any] = {"group": group_of(2), "seqlen": whole, "mode": "ring"}
        distributed.attention(*tensors, **options, **same)
        os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"] = "1"
        try:
            distributed.attention(*tensors, **options, **same)
            with pytest.raises(ValueError, match=rf"what {name} holds is \[.* on rank 0 and \[.* on rank 1"):
                distributed.attention(*tensors, **options, **(same if rank == 0 else other))
        finally:
            del os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"]
    rows = torch.randn(1, 1, S, whole, device=device) + rank  # of this rank
    os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"] = "1"
    try:
        distributed.attention(q, k, v, group=group_of(2), bias=rows)
        with pytest.raises(ValueError, match="causal is True on rank 0 and False on rank 1"):
            distributed.attention(q, k, v, group=group_of(2), causal=rank == 0)
        os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"] = "yes"
        with pytest.raises(ValueError, match="FLASHATTN_EXT_DISTRIBUTED_CHECK: expected 0 or 1, got 'yes'"):
            distributed.attention(q, k, v, group=group_of(2))
    finally:
        del os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"]


def a_bias_that_has_rows_on_some_ranks_only_is_told(device: str) -> None:
    """Of 129 positions rank 2 of contiguous sharding has one: the other ranks' biases decide what its bias of one row means."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != 4:
        return
    options: dict[str, Any] = {"group": group_of(4), "seqlen": 129, "sharding": "contiguous", "mode": "ulysses"}
    rows = distributed.shard_lengths(129, group=group_of(4), sharding="contiguous")[rank]
    bias = torch.zeros(1, 1, rows if rank == 0 else 1, 129, device=device)
    with pytest.raises(ValueError, match="bias: expected the rows of each rank on every rank"):
        distributed.attention(*_qkv(device, S=rows), bias=bias, **options)


def keys_that_are_not_split_alike_are_told(device: str) -> None:
    """In cross attention; keys of another length are an own sequence, of seqlen_k positions."""
    if dist.get_rank() >= 2:
        return
    q, k, v = _qkv(device)
    starts = torch.tensor([0, 100, 2 * S], dtype=torch.int32)
    packed = {"cu_seqlens": starts, "group": group_of(2)}
    for mode in ("auto", "ulysses", "allgather", "ring"):
        options: dict[str, Any] = {"group": group_of(2), "mode": mode}
        assert distributed.attention(q, k[:, :64], v[:, :64], seqlen_k=128, **options).shape == q.shape
        told = "got {}; split with shard.*, and seqlen_k= where keys are of another sequence"
        for name, keys, values in (("k", k[:, :64], v[:, :64]), ("v", k, v[:, :64])):
            with pytest.raises(ValueError, match=rf"{name}: expected 128 of the 256 positions .* {told.format(64)}"):
                distributed.attention(q, keys, values, **options)
        with pytest.raises(ValueError, match=rf"k: expected 72 of the 200 positions .* {told.format(128)}"):
            distributed.attention(q, k, v, seqlen_k=200, **options)
        longer = 2 + dist.get_rank()
        with pytest.raises(ValueError, match=r"seqlen_k is 512 on rank 0 and 768 on rank 1.*; give seqlen"):
            distributed.attention(q, *(torch.cat([t] * longer, 1) for t in (k, v)), seqlen_k=2 * S * longer, **options)
    q, k, v = (t[0] for t in (q, k, v))
    distributed.attention(q, k, v, cu_seqlens_k=starts, mode="ring", **packed)  # the signature of the next calls
    for wrong, told in (
        ([0, 2 * S], r"cu_seqlens_k: expected the length of cu_seqlens \(3\), got 2"),
        ([0, 9, 3], r"cu_seqlens_k: expected starts from 0 .* got \[0, 9, 3\]"),
    ):
        with pytest.raises(ValueError, match=told):
            distributed.attention(
                q, k, v, cu_seqlens_k=torch.tensor(wrong, dtype=torch.int32), seqlen_k=2 * S, mode="ring", **packed
            )
    with pytest.raises(ValueError, match=r"cu_seqlens: expected the starts of the packed queries .* got None"):
        distributed.attention(q, k, v, cu_seqlens_k=starts, group=group_of(2))
    with pytest.raises(ValueError, match="seqlen_k: expected at least 0, got -1"):
        distributed.attention(q, k, v, seqlen_k=-1, **packed)


def a_refused_call_draws_no_seed(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    generator = torch.cuda if device == "cuda" else torch
    tensors = _qkv(device)
    for kind, options in (
        (ValueError, {"sink": torch.zeros(5, device=device)}),
        (ValueError, {"softcap": -1.0}),
        (TypeError, {"return_lse": 1}),
        (TypeError, {"return_max_logits": "yes"}),
        (TypeError, {"causal": 1}),
        (NotImplementedError, {"invariant": True}),
    ):
        before = generator.get_rng_state()
        with pytest.raises(kind):
            distributed.attention(*tensors, group=group_of(2), dropout_p=0.5, **options)
        assert torch.equal(generator.get_rng_state(), before), options
    # A rank that passes a seed, and one that draws one, make the same call.
    seed = 3 if dist.get_rank() else None
    os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"] = "1"
    try:
        distributed.attention(*tensors, group=group_of(2), dropout_p=0.5, rng_seed=seed)
    finally:
        del os.environ["FLASHATTN_EXT_DISTRIBUTED_CHECK"]


def what_is_wrong_on_one_rank_is_told_on_all(device: str) -> None:
    rank = dist.get_rank()
    if rank >= 2:
        return
    whole = {"seqlen": 2 * S}
    match = "expected 128 of the 256 positions" if rank == 1 else "another rank.*rank 1: q: expected 128 of the 256"
    _expect(ValueError, match, device, whole, S=S - rank)
    _expect(
        ValueError,
        "'ulysses' needs a number of query heads divisible by the 2 ranks, got 3",
        device,
        {"mode": "ulysses"},
        Hq=3,
        Hk=3,
    )
    _expect(ValueError, "multiple of the 3 KV heads", device, {}, Hq=4, Hk=3)
    _expect(
        ValueError, r"dropout_p: expected a probability in \[0, 1\), got 1", device, {"dropout_p": 1.0, "rng_seed": 1}
    )
    _expect(ValueError, "sink: expected shape", device, {"sink": torch.zeros(5, device=device)})
    _expect(ValueError, "origin: expected None or", device, {"origin": (0, 0, 0, 0)})
    _expect(ValueError, "cu_seqlens|dimensions", device, {"cu_seqlens": torch.tensor([0, 2 * S], dtype=torch.int32)})
    _expect(TypeError, "unexpected keyword argument 'causl'", device, {"causl": True})
    _expect(
        TypeError,
        "'is_causal': here it is causal; 's_aux': here it is sink",
        device,
        {"is_causal": True, "s_aux": None},
    )
    with pytest.raises(
        TypeError, match=r"attention\(\) takes 3 positional arguments .*Argument 4 is bool True: causal"
    ):
        distributed.attention(*_qkv(device), True)
    scale = torch.tensor(0.5, device=device, requires_grad=True)
    _expect(TypeError, "softmax_scale: .*scale q instead", device, {"softmax_scale": scale})
    _expect(ValueError, "sharding: expected one of", device, {"sharding": "striped"})
    _expect(ValueError, "mode: expected one of", device, {"mode": "usp"})
    with pytest.raises(ValueError, match="starts from 0 that do not decrease"):
        q, k, v = (t[0] for t in _qkv(device))
        distributed.attention(
            q, k, v, group=group_of(2), cu_seqlens=torch.tensor([0, 9, 3], dtype=torch.int32), seqlen=256
        )
    distributed.attention(*_qkv(device), group=group_of(2), causal=True)  # a valid call works afterwards


def groups_are_checked(device: str) -> None:
    qkv, ranks = _qkv(device), dist.get_world_size()
    mine = dist.new_group([0])
    if dist.get_rank() > 0:
        with pytest.raises(ValueError, match="not one of its ranks"):
            distributed.attention(*qkv, group=mine)
    with pytest.raises(TypeError, match="expected a process group, a DeviceMesh or None, got str"):
        distributed.attention(*qkv, group="world")
    if ranks == 4:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "context"))
        with pytest.raises(ValueError, match="DeviceMesh of one dimension, got 2"):
            distributed.attention(*qkv, group=mesh)
        out = distributed.attention(*qkv, group=mesh["context"], causal=True)
        torch.testing.assert_close(out, distributed.attention(*qkv, group=mesh["context"].get_group(), causal=True))


def a_rank_that_does_not_come_is_waited_for_until_the_timeout(device: str) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(3)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match="failed on rank 0 of 2: another rank has ended, is later than the timeout"
        ):
            distributed.attention(*_qkv(device), group=group)
        assert time.monotonic() - start < 30


def a_rank_that_leaves_between_calls_is_waited_for_until_the_timeout(device: str) -> None:
    """After ranks have agreed on a signature, the exchange itself detects the missing rank."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    rank = dist.get_rank()
    if rank >= 2:
        return
    for mode in ("ring", "ulysses"):
        distributed.attention(*_qkv(device), group=group, mode=mode)
    if rank == 1:
        time.sleep(3)
        return
    with pytest.raises(RuntimeError, match=r"exchange of .* failed on rank 0 of 2"):
        distributed.attention(*_qkv(device), group=group, mode="ring")


def shards_are_put_together_again(device: str) -> None:
    for ranks in {2, dist.get_world_size()}:
        if dist.get_rank() >= ranks:
            continue
        split: dict[str, Any] = {"group": group_of(ranks)}
        for length in (0, 5, 64, 130, 1000):
            for split["sharding"] in ("zigzag", "contiguous"):
                whole = (
                    torch.arange(3 * length * 2, device=device, dtype=torch.float32).view(3, length, 2).requires_grad_()
                )
                part = distributed.shard(whole, **split)
                assert part.shape[1] == distributed.shard_lengths(length, **split)[dist.get_rank()]
                part_leaf = part.detach().requires_grad_()
                again = distributed.unshard(part_leaf, seqlen=length, **split)
                assert torch.equal(again, whole)
                again.backward(2 * whole)
                assert part_leaf.grad is not None and torch.equal(part_leaf.grad, 2 * part)
    for call, x in ((distributed.shard, torch.zeros(2, 4)), (distributed.unshard, torch.tensor(1.0))):
        with pytest.raises(ValueError, match=r"dim: expected a dimension of x of shape \[.*\], got 9"):
            call(x, dim=9)
    with pytest.raises(ValueError, match="seqlen: expected at least 0, got -1"):
        distributed.shard_lengths(-1)
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="expected 64 of the 128 positions"):
            distributed.unshard(torch.zeros(1, 60, device=device), group=group_of(2), seqlen=128)
