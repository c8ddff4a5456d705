"""Jobs of test_composition.py: distributed attention together with other tools of a training script."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import group_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext
from flashattn_ext import distributed

MODES = ("ulysses", "allgather", "ring")


def _parts(device: str, group: Any, keys: int = 256) -> list[Tensor]:
    torch.manual_seed(3)
    whole = [torch.randn(2, n, heads, 16, device=device) for n, heads in ((256, 4), (keys, 2), (keys, 2))]
    return [distributed.shard(t, group=group).requires_grad_() for t in whole]


def _gradients(function: Any, parts: list[Tensor]) -> list[Tensor]:
    out = function(*parts)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parts)]


def checkpointing_computes_the_same_again(device: str) -> None:
    for mode in MODES:
        if dist.get_rank() >= 2:
            return
        parts = _parts(device, group_of(2))

        def call(q: Tensor, k: Tensor, v: Tensor, mode: str = mode) -> Tensor:
            return distributed.attention(q, k, v, group=group_of(2), mode=mode, causal=True, dropout_p=0.2)

        torch.manual_seed(dist.get_rank())
        expected = _gradients(call, parts)
        torch.manual_seed(dist.get_rank())
        got = _gradients(lambda *parts, call=call: checkpoint(call, *parts, use_reentrant=False), parts)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def a_drawn_seed_drops_what_one_device_drops(device: str) -> None:
    """With equal generators on all ranks, as after torch.manual_seed."""
    if dist.get_rank() >= 2:
        return
    torch.manual_seed(3)
    whole = [torch.randn(2, 256, heads, 16, device=device) for heads in (4, 2, 2)]
    parts = [distributed.shard(t, group=group_of(2)) for t in whole]
    for mode in MODES:
        torch.manual_seed(4)
        expected = distributed.shard(flashattn_ext.forward(*whole, dropout_p=0.4), group=group_of(2))
        torch.manual_seed(4)
        got = distributed.attention(*parts, group=group_of(2), mode=mode, dropout_p=0.4)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def compiled_functions_have_no_break(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    group = group_of(2)
    for mode in MODES:
        module = distributed.DistributedAttention(
            16, causal=True, group=group, mode=mode, learnable_sink=True, num_heads=4
        )
        module.to(device)

        for keys in (256, 384):  # self-attention, and cross attention

            def call(
                q: Tensor, k: Tensor, v: Tensor, _sink: Tensor, module: nn.Module = module, keys: int = keys
            ) -> Tensor:
                return 2 * module(q * 1.5, k, v, seqlen_k=keys)

            given = [*_parts(device, group, keys), *module.parameters()]
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            for a, b in zip(_gradients(compiled, given), _gradients(call, given), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
            torch.compiler.reset()


class Block(nn.Module):
    """A residual block of attention with a sink; with a group, over a sequence that it shares."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)
        options: dict[str, Any] = {"head_dim": 8, "causal": True, "learnable_sink": True, "num_heads": 4}
        self.attention = (
            flashattn_ext.FlashAttention(**options)
            if group is None
            else distributed.DistributedAttention(group=group, **options)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)) for part in self.qkv(x).split([32, 16, 16], -1))
        return x + self.out(self.attention(q, k, v).flatten(2))


def _model(group: Any = None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(50, 32), Block(group), Block(group), nn.Linear(32, 50))


def _batch(step: int, device: str) -> Tensor:
    return torch.randint(50, (4, 257), generator=torch.Generator().manual_seed(step)).to(device)


def _losses(model: nn.Module, step_loss: Any, steps: int = 4) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss, told = step_loss(model, step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(told.item())
    return losses


def _loss_of_one_process(device: str) -> list[float]:
    def step_loss(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        tokens = _batch(step, device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return loss, loss.detach()

    return _losses(_model().to(device), step_loss)


def _loss_of_a_mesh(device: str, wrap: Any) -> list[float]:
    """Half of the batch on each row of a 2 x 2 mesh, half of the sequence on each column; gradients are means over all four."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "context"))
    model = wrap(_model(mesh["context"]).to(device), mesh)

    def step_loss(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
        tokens = _batch(step, device).chunk(2)[mesh["data"].get_local_rank()]
        inputs, targets = (
            distributed.shard(t, group=mesh["context"])
            for t in (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        )
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return loss, mean / 4

    return _losses(model, step_loss)


def fsdp2_on_a_mesh_has_the_losses_of_one_process(device: str) -> None:
    if dist.get_world_size() < 4:
        return

    def wrap(model: nn.Module, mesh: Any) -> nn.Module:
        flat = init_device_mesh(device, (4,))
        for block in (model[1], model[2]):
            fully_shard(block, mesh=flat)
        fully_shard(model, mesh=flat)
        assert isinstance(model[1].attention.sink, DTensor)
        return model

    torch.testing.assert_close(_loss_of_a_mesh(device, wrap), _loss_of_one_process(device), rtol=1e-4, atol=1e-4)


class Attention(nn.Module):
    """A module of each kind, made on the meta device but for the slopes' values."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"head_dim": 8, "learnable_sink": True, "num_heads": 4}
        slopes = nn.Parameter(torch.tensor([0.1, 0.2, 0.3, 0.4], device="cpu"))
        self.layers = nn.ModuleList(
            [flashattn_ext.FlashAttention(**options, alibi_slopes=slopes), distributed.DistributedAttention(group=group, **options)]
        )  # fmt: skip

    def forward(self, q: Tensor) -> Tensor:
        for layer in self.layers:
            q = layer(q, q, q)
        return q


def _is_as_new(parameters: dict[str, Tensor]) -> None:
    expected = {
        "layers.0.alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "layers.0.sink": torch.zeros(4), "layers.1.sink": torch.zeros(4)
    }  # fmt: skip
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach().cpu(), expected[name]), name


def modules_made_on_the_meta_device_are_initialised(device: str) -> None:
    """By FSDP1 itself, and by FSDP2's recipe: to_empty(), then reset_parameters() of every module that has it. On two ranks and on one."""
    for ranks in (2, 1):
        if dist.get_rank() >= ranks:
            return
        group = group_of(2) if ranks == 2 else dist.new_group([0], use_local_synchronization=True)
        x = torch.randn(1, 128, 4, 8, device=device)
        with torch.device("meta"):
            model = Attention(group)
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        wrapped = FullyShardedDataParallel(model, process_group=group, device_id=here, use_orig_params=True)
        with FullyShardedDataParallel.summon_full_params(wrapped):
            _is_as_new({name.removeprefix("_fsdp_wrapped_module."): p for name, p in wrapped.named_parameters()})
        wrapped(x).sum().backward()

        with torch.device("meta"):
            model = Attention(group)
        mesh = DeviceMesh.from_group(group, device)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=device)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        parameters = dict(model.named_parameters())
        assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
        _is_as_new({name: parameter.full_tensor() for name, parameter in parameters.items()})  # type: ignore[attr-defined]
        model(x).sum().backward()


def ddp_on_a_mesh_has_the_losses_of_one_process(device: str) -> None:
    if dist.get_world_size() < 4:
        return
    got = _loss_of_a_mesh(device, lambda model, mesh: DistributedDataParallel(model))
    torch.testing.assert_close(got, _loss_of_one_process(device), rtol=1e-4, atol=1e-4)


def ranks_count_the_flops_of_the_whole(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    for keys in (256, 384):
        whole = [
            torch.randn(2, n, heads, 16, device=device, requires_grad=True)
            for n, heads in ((256, 4), (keys, 2), (keys, 2))
        ]
        with FlopCounterMode(display=False) as expected:
            flashattn_ext.forward(*whole, causal=True, window_size=(50, -1)).sum().backward()
        for mode in MODES:
            with FlopCounterMode(display=False) as counted:
                options = {"group": group_of(2), "mode": mode, "causal": True, "window_size": (50, -1)}
                distributed.attention(*_parts(device, group_of(2), keys), seqlen_k=keys, **options).sum().backward()
            assert 2 * counted.get_total_flops() == expected.get_total_flops() > 0, (mode, keys)


def second_derivatives_say_what_to_do(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    for mode in MODES:
        parts = _parts(device, group_of(2))
        out = distributed.attention(*parts, group=group_of(2), mode=mode)
        (gradient,) = torch.autograd.grad(out.square().sum(), parts[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="has no double backward; use flashattn_ext"):
            gradient.sum().backward()


def tangents_are_refused(device: str) -> None:
    """Forward-mode derivatives, which would otherwise be 0."""
    if dist.get_rank() >= 2:
        return
    parts = [part.detach() for part in _parts(device, group_of(2))]
    sink = torch.zeros(parts[0].shape[-2], device=device)
    for mode in MODES:
        options = {"group": group_of(2), "mode": mode}
        for given in parts[:1], [sink]:

            def attend(t: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
                q, s = (t, sink) if t.dim() > 1 else (parts[0], t)
                return distributed.attention(q, *parts[1:], sink=s, **options)

            with pytest.raises(NotImplementedError, match="has no forward-mode derivatives"):
                torch.func.jvp(attend, tuple(given), tuple(given))


def autocast_is_followed(device: str) -> None:
    if dist.get_rank() >= 2:
        return
    parts = _parts(device, group_of(2))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = distributed.attention(*parts, group=group_of(2), causal=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(part.grad is not None and part.grad.dtype == torch.float32 for part in parts)


def a_module_without_its_group_is_no_copy(device: str) -> None:
    """A model trained over ranks is loaded on one device."""
    module = (
        distributed.DistributedAttention(16, learnable_sink=True, num_heads=4, group=group_of(2))
        if dist.get_rank() < 2
        else None
    )
    if module is not None:
        alone = flashattn_ext.FlashAttention(16, learnable_sink=True, num_heads=4)
        alone.load_state_dict(copy.copy(module.state_dict()))
