"""Checks that test_dtensor.py runs on two ranks: each is a function of a mesh, called on every rank."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flashattn_ext
from flashattn_ext import BlockMask, Mask

RANKS = 2
CHECKS: dict[str, Callable[[DeviceMesh], None]] = {}


def check(function: Callable[[DeviceMesh], None]) -> Callable[[DeviceMesh], None]:
    CHECKS[function.__name__] = function
    return function


def run_all(rank: int, rendezvous: str, device: str, results: Any) -> None:
    """The main function of a rank: puts {check: traceback, or an empty string} into `results`, a dict by rank."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh(device, (RANKS,))
    outcomes = {}
    for name, function in CHECKS.items():
        try:
            torch.manual_seed(0)
            function(mesh)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        torch.compiler.reset()
    results[rank] = outcomes
    dist.destroy_process_group()


def _random(mesh: DeviceMesh, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(mesh.device_type)


def _inputs(mesh: DeviceMesh, Hk: int = 2) -> dict[str, Tensor]:
    return {"q": _random(mesh, 4, 24, 4, 8), "k": _random(mesh, 4, 24, Hk, 8), "v": _random(mesh, 4, 24, Hk, 16)}


def _assert_equal_to_the_whole(
    mesh: DeviceMesh, placements: dict[str, Any], tensors: dict[str, Tensor], expected_placement: Any, **options: Any
) -> None:
    """out, lse and all gradients of a call with DTensors equal the results of the call with whole tensors."""
    whole = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    parts = {
        name: distribute_tensor(t, mesh, [placements[name]]).requires_grad_(t.is_floating_point()) if name in placements else
        t.clone().requires_grad_(t.is_floating_point())
        for name, t in tensors.items()
    }  # fmt: skip
    function = flashattn_ext.varlen_forward if "cu_seqlens_q" in tensors else flashattn_ext.forward
    expected = function(**whole, **options, return_lse=True)
    got = function(**parts, **options, return_lse=True)
    assert got[0].placements == (expected_placement,), got[0].placements
    for name, a, b in zip(("out", "lse"), got, expected, strict=True):
        torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
    for out, lse in (expected, got):
        (out.square().sum() + lse.sum()).backward()
    for name, t in parts.items():
        if t.grad is not None:
            gradient = t.grad.full_tensor() if isinstance(t.grad, DTensor) else t.grad
            torch.testing.assert_close(
                gradient, whole[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"d{n}: {m}"
            )
            assert isinstance(t.grad, DTensor) == isinstance(t, DTensor)


QKV = ("q", "k", "v")


@check
def batch_and_heads_are_shared_out(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for placement in (Shard(0), Shard(2), Replicate()):
            _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, placement), _inputs(mesh), placement, causal=True)
        bhsd = {name: t.transpose(1, 2).contiguous() for name, t in _inputs(mesh).items()}
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, Shard(1)), bhsd, Shard(1), layout="bhsd")


@check
def tensors_that_are_laid_out_otherwise_follow(mesh: DeviceMesh) -> None:
    placements = {"q": Replicate(), "k": Shard(0), "v": Replicate()}
    _assert_equal_to_the_whole(mesh, placements, _inputs(mesh), Shard(0), window_size=(3, 2))


@check
def an_uneven_batch_is_shared_out(mesh: DeviceMesh) -> None:
    for B in (1, 3):
        tensors = {name: t[:B].contiguous() for name, t in _inputs(mesh).items()}
        options = {"causal": True, "dropout_p": 0.2, "rng_seed": 5}
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, Shard(0)), tensors, Shard(0), **options)


@check
def a_sink_is_a_dtensor_or_plain(mesh: DeviceMesh) -> None:
    for placement in (Shard(0), Shard(2), Replicate()):
        tensors = {**_inputs(mesh), "sink": _random(mesh, 4)}
        placements = dict.fromkeys(QKV, placement)
        _assert_equal_to_the_whole(mesh, placements, tensors, placement)
        _assert_equal_to_the_whole(mesh, {**placements, "sink": Replicate()}, tensors, placement)
        _assert_equal_to_the_whole(mesh, {**placements, "sink": Shard(0)}, tensors, placement)


@check
def biases_and_masks_follow(mesh: DeviceMesh) -> None:
    documents = Mask.documents(_random(mesh, 4, 24).gt(1).cumsum(1))
    per_head = Mask(
        documents.intervals.repeat(1, 2, 1, 1)
        - torch.arange(2, device=mesh.device_type, dtype=torch.int32)[:, None, None]
    )
    biases = {
        "alibi_slopes": _random(mesh, 4).abs(),
        "relative_bias": _random(mesh, 4, 11),
        "bias": _random(mesh, 4, 1, 24, 24),
    }
    others = {"alibi_slopes": _random(mesh, 4, 4).abs(), "bias": _random(mesh, 1, 4, 1, 24)}
    for placement in (Shard(0), Shard(2), Replicate()):
        placements = dict.fromkeys(QKV, placement)
        for extra, mask in ((biases, documents), (others, per_head), ({}, documents)):
            tensors = {**_inputs(mesh), **extra}
            _assert_equal_to_the_whole(mesh, placements, tensors, placement, mask=mask, softcap=5.0)
            _assert_equal_to_the_whole(
                mesh, {**placements, **dict.fromkeys(extra, Replicate())}, tensors, placement, mask=mask
            )


@check
def block_masks_follow(mesh: DeviceMesh) -> None:
    pairs = {
        heads: BlockMask.from_dense(_random(mesh, batch, heads, 24, 24).gt(0))
        for batch, heads in ((4, 2), (1, 4), (4, 1))
    }
    for placement in (Shard(0), Shard(2), Replicate()):
        for mask in pairs.values():
            _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, placement), _inputs(mesh), placement, mask=mask)


@check
def biases_of_sixteen_bit_calls_follow(mesh: DeviceMesh) -> None:
    """ALiBi slopes and a relative bias in 16 bits: the forward keeps the centres of rows for the gradients (csrc/rules/bias.h)."""
    halves = {name: t.bfloat16() for name, t in _inputs(mesh).items()}
    tensors = {**halves, "alibi_slopes": _random(mesh, 4).abs(), "relative_bias": _random(mesh, 4, 11)}
    for placement in (Shard(0), Shard(2), Replicate()):
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, placement), tensors, placement, smooth_softmax=True)


@check
def dropout_of_the_parts_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    for placement in (Shard(0), Shard(2), Replicate()):
        options = {"dropout_p": 0.3, "rng_seed": 11, "causal": True}
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, placement), _inputs(mesh), placement, **options)
        options["origin"] = (3, 5)
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, placement), _inputs(mesh), placement, **options)


@check
def a_drawn_seed_is_the_same_where_generators_are(mesh: DeviceMesh) -> None:
    tensors = _inputs(mesh)
    parts = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors.items()}
    torch.manual_seed(3)
    expected = flashattn_ext.forward(**tensors, dropout_p=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(flashattn_ext.forward(**parts, dropout_p=0.5).full_tensor(), expected, rtol=0, atol=0)


@check
def packed_sequences_share_out_heads(mesh: DeviceMesh) -> None:
    tensors = {name: t.flatten(0, 1) for name, t in _inputs(mesh).items()}
    cu_seqlens = torch.tensor([0, 5, 40, 96], dtype=torch.int32, device=mesh.device_type)
    tensors |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    options = {"max_seqlen_q": 56, "max_seqlen_k": 56, "causal": True, "dropout_p": 0.1, "rng_seed": 2}
    _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, Shard(1)), tensors, Shard(1), **options)


@check
def a_sequence_is_gathered_with_a_warning(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _assert_equal_to_the_whole(mesh, dict.fromkeys(QKV, Shard(1)), _inputs(mesh), Replicate())
    assert any("gathers the whole sequence" in str(w.message) for w in caught), [str(w.message) for w in caught]


@check
def heads_that_do_not_divide_are_gathered_with_a_warning(mesh: DeviceMesh) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        placements = {"q": Shard(2), "k": Replicate(), "v": Replicate()}
        _assert_equal_to_the_whole(mesh, placements, _inputs(mesh, Hk=1), Replicate())
    assert any("1 KV heads are not both divisible" in str(w.message) for w in caught), [str(w.message) for w in caught]


@check
def the_raw_backward_takes_dtensors(mesh: DeviceMesh) -> None:
    tensors = _inputs(mesh)
    out, lse = flashattn_ext.forward(**tensors, return_lse=True)
    dout = _random(mesh, *out.shape)
    expected = flashattn_ext.backward(dout, *tensors.values(), out, lse)
    parts = [distribute_tensor(t, mesh, [Shard(0)]) for t in (dout, *tensors.values(), out, lse)]
    for got, gradient in zip(flashattn_ext.backward(*parts)[:3], expected[:3], strict=True):
        assert got.placements == (Shard(0),)
        torch.testing.assert_close(got.full_tensor(), gradient, rtol=0, atol=0)


@check
def second_derivatives_follow(mesh: DeviceMesh) -> None:
    """Of all inputs that have them, on the CPU, the only device that has second derivatives. In fp64: gradients that are
    summed over ranks are rounded in another order, which the penalty amplifies.
    """
    if mesh.device_type != "cpu":
        return
    extra = {
        "sink": _random(mesh, 4), "alibi_slopes": _random(mesh, 4).abs(), "relative_bias": _random(mesh, 4, 11),
        "bias": _random(mesh, 1, 4, 1, 24),
    }  # fmt: skip
    tensors = {name: t.double() for name, t in {**_inputs(mesh), **extra}.items()}

    def of_a_penalty(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        options = {"causal": True, "dropout_p": 0.2, "rng_seed": 5, "softcap": 3.0}
        out, lse = flashattn_ext.forward(**given, **options, return_lse=True)
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), list(given.values()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), list(given.values()))

    expected = of_a_penalty({name: t.clone().requires_grad_() for name, t in tensors.items()})
    for placement in (Shard(0), Shard(2), Replicate()):
        placements = {**dict.fromkeys(QKV, placement), **dict.fromkeys(extra, Replicate())}
        parts = {n: distribute_tensor(t, mesh, [placements[n]]).requires_grad_() for n, t in tensors.items()}
        for name, got, ref in zip(tensors, of_a_penalty(parts), expected, strict=True):
            torch.testing.assert_close(
                got.full_tensor(), ref, rtol=1e-9, atol=1e-9, msg=lambda m, n=name, p=placement: f"{p}, {n}: {m}"
            )


@check
def supports_answers_for_this_rank(mesh: DeviceMesh) -> None:
    """Without communication: one rank may ask alone."""
    if mesh.get_local_rank():
        return
    tensors = _inputs(mesh)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        q, k, v = (DTensor.from_local(t, mesh, [placement], run_check=False) for t in tensors.values())
        backend = flashattn_ext.supports(*tensors.values()).backend
        for mixed in ((q, k, v), (q, tensors["k"], tensors["v"])):
            if (
                len({t.shape[1] for t in mixed}) == 1 == len({t.shape[0] for t in mixed})
                and mixed[0].shape[2] % mixed[1].shape[2] == 0
            ):
                assert flashattn_ext.supports(*mixed, causal=True, dropout_p=0.1).backend == backend
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the call warns that it gathers; this is no call
            fp8 = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
        refused = flashattn_ext.supports(*fp8, dropout_p=0.1)
        assert refused.refusal == flashattn_ext.supports(*(t.to_local() for t in fp8), dropout_p=0.1).refusal != ""
    starts = torch.tensor([0, 40, 96], dtype=torch.int32, device=mesh.device_type)
    packed = [DTensor.from_local(t.flatten(0, 1), mesh, [Shard(1)], run_check=False) for t in tensors.values()]
    assert flashattn_ext.supports(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=56, max_seqlen_k=56)


@check
def the_dropout_mask_is_on_every_rank(mesh: DeviceMesh) -> None:
    plain = flashattn_ext.ops.rng_state(torch.empty(0, device=mesh.device_type), 7)
    state = DTensor.from_local(plain, mesh, [Replicate()])
    got = flashattn_ext.ops.dropout_mask(state, 2, 2, 16, 64, 0.5, None)
    assert got.placements == (Replicate(),)
    assert torch.equal(got.to_local(), flashattn_ext.dropout_mask(2, 2, 16, 64, 0.5, 7, mesh.device_type))


@check
def a_compiled_function_takes_dtensors(mesh: DeviceMesh) -> None:
    tensors = _inputs(mesh)
    parts = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in tensors.values()]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashattn_ext.forward(q, k, v, causal=True)

    out = compiled(*parts)
    assert out.placements == (Shard(2),)
    torch.testing.assert_close(out.full_tensor(), flashattn_ext.forward(**tensors, causal=True), rtol=0, atol=0)
    out.sum().backward()
    assert parts[1].grad.placements == (Shard(2),)


# --- models -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block of attention with dropout and a sink."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, seed: int, origin: tuple[int, int] | None) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (linear(x).view(B, S, self.heads, -1) for linear in (self.q, self.k, self.v))
        out = flashattn_ext.forward(q, k, v, causal=True, dropout_p=0.1, rng_seed=seed, origin=origin)
        return x + self.out(out.reshape(B, S, -1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor, seed: int, origin: tuple[int, int] | None = None) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, seed, origin)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def _batch(mesh: DeviceMesh, step: int) -> Tensor:
    return torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(step)).to(mesh.device_type)


def _new_model(mesh: DeviceMesh) -> Model:
    torch.manual_seed(1)
    return Model().to(mesh.device_type)


def _losses_of_one_process(mesh: DeviceMesh, steps: int) -> list[float]:
    model = _new_model(mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = model(_batch(mesh, step), step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@check
def tensor_parallel_training_has_the_losses_of_one_process(mesh: DeviceMesh) -> None:
    model = _new_model(mesh)
    for block in model.blocks:
        plan = dict.fromkeys(("q", "k", "v"), ColwiseParallel(use_local_output=False))
        parallelize_module(block, mesh, {**plan, "out": RowwiseParallel()})
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(5):
        loss = model(_batch(mesh, step), step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, _losses_of_one_process(mesh, 5), rtol=1e-4, atol=1e-4)


@check
def fsdp2_training_has_the_losses_of_one_process(mesh: DeviceMesh) -> None:
    model = _new_model(mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, losses = mesh.get_local_rank(), []
    for step in range(5):
        part = _batch(mesh, step).chunk(RANKS)[rank]
        loss = model(part, step, origin=(rank * part.shape[0], 0))  # the part has the dropout mask of the whole batch
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        mean = DTensor.from_local(loss.detach() / RANKS, mesh, [Partial()]).full_tensor()
        losses.append(mean.item())
    torch.testing.assert_close(losses, _losses_of_one_process(mesh, 5), rtol=1e-4, atol=1e-4)
