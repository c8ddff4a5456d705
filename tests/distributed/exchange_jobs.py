"""Jobs of test_exchanges.py: a call on shards against the call on whole tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import group_of
from torch import Tensor

import flashattn_ext
from flashattn_ext import Mask, distributed

PER_HEAD = ("sink", "alibi_slopes", "relative_bias")


@dataclass(frozen=True)
class DistributedCase:
    """A call of the whole sequence, and how it is split."""

    ranks: int = 2
    mode: str = "ulysses"
    sharding: str = "zigzag"
    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    B: int = 2
    S: int = 256
    Sk: int | None = None  # cross attention: the number of keys; None is self-attention
    Hq: int = 4
    Hk: int = 2
    D: int = 16
    Dv: int = 24
    lengths: tuple[int, ...] | None = None  # of packed sequences; S is their sum plus the rows after the last sequence
    lengths_k: tuple[int, ...] | None = None  # of their keys in cross attention
    layout: str = "bshd"
    sink: bool = False
    alibi: str | None = None  # "heads" or "batch"
    relative: int | None = None  # L of a relative bias
    bias: str | None = None  # which of batch, heads and rows are not broadcast: "", "b", "hq", ...
    mask: str | None = None  # "documents" or "heads"
    use_lse: bool = True
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def row_dim(self) -> int:
        return 0 if self.lengths is not None else 1

    @property
    def keys(self) -> int:
        return self.S if self.Sk is None else self.Sk

    @property
    def is_cross(self) -> bool:
        return self.Sk is not None


def _starts(lengths: tuple[int, ...] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()


def _starts_of_keys(case: DistributedCase) -> Tensor | None:
    return _starts(case.lengths_k if case.is_cross else case.lengths)


def _mask(case: DistributedCase, generator: torch.Generator) -> Mask | None:
    if case.mask is None:
        return None
    cu_seqlens, keys = _starts_of_keys(case), torch.arange(case.keys)
    if cu_seqlens is not None:  # rows from some distance after a key do not see it
        reach = torch.randint(1, 80, (case.Hq if case.mask == "heads" else 1, case.keys), generator=generator)
        within = keys - cu_seqlens[torch.searchsorted(cu_seqlens, keys, right=True) - 1]
        first = torch.zeros_like(reach)
        return Mask(torch.stack([first, within + reach], -1).int().to(case.device))
    documents = (torch.rand(case.B, case.keys, generator=generator) < 0.02).cumsum(1)
    mask = Mask.documents(documents)
    if case.mask == "heads":  # each KV head looks further back than the previous one
        further = 7 * torch.arange(case.Hk, dtype=torch.int32)[None, :, None]
        first, last = mask.intervals.unbind(-1)
        mask = Mask(torch.stack(torch.broadcast_tensors(first, last + further), -1).contiguous())
    return mask.to(case.device)


def _inputs(case: DistributedCase) -> dict[str, Tensor]:
    """Whole tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(case.seed)
    batch = [] if case.lengths is not None else [case.B]
    sequences = case.B if case.lengths is None else len(case.lengths)

    def values(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.device, dtype)

    made = {
        "q": values(*batch, case.S, case.Hq, case.D),
        "k": values(*batch, case.keys, case.Hk, case.D),
        "v": values(*batch, case.keys, case.Hk, case.Dv),
    }
    statistics = torch.promote_types(case.dtype, torch.float32)
    if case.sink:
        made["sink"] = values(case.Hq, dtype=statistics)
    if case.alibi is not None:
        made["alibi_slopes"] = 0.1 * values(*([sequences] * (case.alibi == "batch")), case.Hq, dtype=statistics).abs()
    if case.relative is not None:
        made["relative_bias"] = values(case.Hq, 2 * case.relative + 1, dtype=statistics)
    if case.bias is not None:
        sizes = {"b": case.B, "h": case.Hq, "q": case.S}
        made["bias"] = values(*(size if name in case.bias else 1 for name, size in sizes.items()), case.keys)
    return made


def _whole(case: DistributedCase, tensors: dict[str, Tensor], mask: Mask | None) -> tuple[Tensor, Tensor, Tensor]:
    options = {**case.options, "mask": mask, "return_lse": True, "return_max_logits": True}
    starts, starts_k = _starts(case.lengths), _starts_of_keys(case)
    if starts is None or starts_k is None:
        return flashattn_ext.forward(**tensors, **options)
    return flashattn_ext.varlen_forward(
        **tensors,
        cu_seqlens_q=starts.to(case.device),
        cu_seqlens_k=starts_k.to(case.device),
        max_seqlen_q=int(starts.diff().max()) if len(starts) > 1 else 0,
        max_seqlen_k=int(starts_k.diff().max()) if len(starts_k) > 1 else 0,
        **options,
    )


def _loss(out: Tensor, lse: Tensor, weights: tuple[Tensor, ...], use_lse: bool) -> Tensor:
    loss = (out.to(weights[0].dtype) * weights[0]).sum()
    seen = torch.isfinite(lse)
    return loss + (torch.where(seen, lse, 0) * weights[1]).sum() if use_lse else loss


def _difference(case: DistributedCase, name: str, got: Tensor, expected: Tensor) -> str:
    """An error message, empty where both are close. A rank that raised at once would leave the others waiting for it."""
    tolerance = {
        torch.float64: 1e-9 if got.dtype == torch.float64 else 1e-6,
        torch.float32: 1e-4,
        torch.bfloat16: 3e-2,
        torch.float16: 5e-3,
    }[case.dtype]
    scale = max(1.0, float(expected.double().abs().nan_to_num(0, 0, 0).max())) if expected.numel() else 1.0
    try:
        torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance * scale)
    except AssertionError as error:
        return f"{name} of {case}: {error}"
    return ""


def compare(case: DistributedCase) -> None:
    """out, lse and all gradients on this rank's shard equal the whole call's; ranks outside the group do nothing."""
    if dist.get_rank() >= case.ranks:
        return
    group = group_of(case.ranks)
    split = {"group": group, "sharding": case.sharding}
    mask = _mask(case, torch.Generator().manual_seed(case.seed + 1))
    whole = {name: t.requires_grad_() for name, t in _inputs(case).items()}
    parts: dict[str, Tensor] = {}
    for name, t in whole.items():
        if name in "qkv":
            t = distributed.shard(t, dim=case.row_dim, **split)
        elif name == "bias" and t.shape[2] != 1:
            t = distributed.shard(t, dim=2, **split)
        parts[name] = t.detach().clone().requires_grad_()
    expected_out, expected_lse, expected_max_logits = _whole(case, whole, mask)
    generator = torch.Generator().manual_seed(case.seed + 2)
    weights = tuple(
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(case.device)
        for t in (expected_out, expected_lse)
    )
    _loss(expected_out, expected_lse, weights, case.use_lse).backward()

    given: dict[str, Any] = dict(parts)
    if case.layout == "bhsd":
        given |= {name: given[name].transpose(1, 2) for name in "qkv"}
    if case.is_cross:
        given |= {"seqlen_k": case.Sk, "cu_seqlens_k": _starts_of_keys(case)}
    results = distributed.attention(
        **given, group=group, mode=case.mode, sharding=case.sharding, seqlen=case.S, cu_seqlens=_starts(case.lengths), mask=mask,
        layout=case.layout, return_lse=case.use_lse, return_max_logits=True, **case.options,
    )  # fmt: skip
    part_of_lse = distributed.shard(expected_lse.detach(), dim=-1, **split)
    out, lse, max_logits = results if case.use_lse else (results[0], part_of_lse, results[1])
    out = out.transpose(1, 2) if case.layout == "bhsd" else out
    differences = [_difference(case, "out", out, distributed.shard(expected_out.detach(), dim=case.row_dim, **split))]
    differences.append(_difference(case, "lse", lse, part_of_lse))
    differences.append(_difference(case, "max_logits", max_logits, expected_max_logits))
    part_of_weights = (
        distributed.shard(weights[0], dim=case.row_dim, **split),
        distributed.shard(weights[1], dim=-1, **split),
    )
    _loss(out, lse, part_of_weights, case.use_lse).backward()
    for name, t in parts.items():
        gradient, expected = t.grad, whole[name].grad
        assert gradient is not None and expected is not None
        if name in "qkv":
            expected = distributed.shard(expected, dim=case.row_dim, **split)
        elif (name == "bias" and t.shape[2] == whole[name].shape[2] == 1) or name in PER_HEAD:
            dist.all_reduce(gradient, group=group)
        elif name == "bias":
            expected = distributed.shard(expected, dim=2, **split)
        differences.append(_difference(case, f"d{name}", gradient, expected))
    problems = [text for text in differences if text]
    assert not problems, "\n".join(problems)
