"""Block masks as arguments of calls: what takes them, what refuses them, compiled, checkpointed, exported."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext
from flashattn_ext import BlockMask, Mask
from flashattn_ext.options import CallOptions, CallTensors

pytestmark = pytest.mark.no_emulator  # the Ascend C kernels have no block masks: the last test

S = 150


def rows(device: str, length: int = S, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, length, 2, 16, device=device).to(dtype).requires_grad_()


def some_pairs(device: str, seed: int = 0, heads: int = 2) -> BlockMask:
    generator = torch.Generator().manual_seed(seed)
    return BlockMask.from_dense((torch.rand(1, heads, S, S, generator=generator) < 0.5).to(device))


def two_layers(x: Tensor, mask: BlockMask, **options: Any) -> Tensor:
    y = flashattn_ext.forward(x, x, x, mask=mask, causal=True, **options)
    return flashattn_ext.forward(y, x, y, mask=mask, **options)


def gradient(function: Callable[..., Tensor], x: Tensor, mask: BlockMask) -> Tensor:
    (grad,) = torch.autograd.grad(function(x, mask).square().sum(), x)
    return grad


def test_every_function_takes_it(device: str) -> None:
    x, mask = rows(device), some_pairs(device)
    bias = torch.where(mask.dense(), 0.0, -math.inf)
    expected, lse, most = flashattn_ext.forward(x, x, x, bias=bias, return_lse=True, return_max_logits=True)
    got = flashattn_ext.forward(x, x, x, mask=mask, return_lse=True, return_max_logits=True)
    torch.testing.assert_close(got, (expected, lse, most))
    module = flashattn_ext.FlashAttention(head_dim=16)
    torch.testing.assert_close(module(x, x, x, mask=mask), expected)
    reference = flashattn_ext.attention_reference(x, x, x, mask=mask, return_lse=True)
    torch.testing.assert_close(reference, (expected, lse))
    weights = flashattn_ext.attention_weights(x, x, [0, 140, 7], mask=mask)
    torch.testing.assert_close(weights, flashattn_ext.attention_weights(x, x, [0, 140, 7], bias=bias))
    options = CallOptions(softmax_scale=0.25)
    out, *_ = flashattn_ext.FlashAttentionFunction.apply(
        x, x, x, *[None] * 6, mask.lists, mask.bits, None, options, False
    )
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    found = flashattn_ext.backward(dout, x, x, x, expected, lse, mask=mask)
    wanted = flashattn_ext.backward(dout, x, x, x, expected, lse, bias=bias)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(one, other)
    heads_first = [x.transpose(1, 2)] * 3
    torch.testing.assert_close(
        flashattn_ext.forward(*heads_first, mask=mask, layout="bhsd"), expected.transpose(1, 2).contiguous()
    )
    assert flashattn_ext.supports(x, x, x, mask=mask)


def test_lists_whose_entries_do_not_fit_32_bits(device: str) -> None:
    x, mask = rows(device), some_pairs(device)
    entries = mask.lists[..., :1].expand(-1, -1, 2**33 + mask.lists.shape[2])  # of one word in memory
    longest = BlockMask(entries, mask.bits, S, S)
    with pytest.raises(
        ValueError, match=r"mask: expected a BlockMask with room for at most 2147483647 blocks in a head, got room for"
    ):
        flashattn_ext.forward(x, x, x, mask=longest)


def test_the_example_of_flex_attention(device: str) -> None:
    """FlexAttention's mask and tensors, unchanged."""
    q, k, v = (torch.randn(2, 2, S, 16, device=device) for _ in range(3))
    block_mask = flex_attention.create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < 40 * (h + 1)), 2, 2, S, S, device=device
    )
    expected = flex_attention.flex_attention(q, k, v, block_mask=block_mask)
    out = flashattn_ext.forward(q, k, v, mask=BlockMask.from_flex(block_mask), layout="bhsd")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("randomness", ["mask shared", "mask mapped"])
def test_vmap(device: str, randomness: str) -> None:
    x, masks = torch.stack([rows(device).detach() for _ in range(3)]), [some_pairs(device, seed) for seed in range(3)]
    if randomness == "mask shared":
        outs = torch.vmap(lambda t: flashattn_ext.forward(t, t, t, mask=masks[0]))(x)
        masks = [masks[0]] * 3
    else:
        lists, bits = (torch.stack([getattr(m, name) for m in masks]) for name in ("lists", "bits"))
        outs = torch.vmap(lambda t, *of: flashattn_ext.forward(t, t, t, mask=BlockMask(*of, S, S)))(x, lists, bits)
    for out, t, mask in zip(outs, x, masks, strict=True):
        torch.testing.assert_close(out, flashattn_ext.forward(t, t, t, mask=mask))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_router_inside_a_compiled_function(device: str, backend: str) -> None:
    torch._dynamo.reset()

    def step(x: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(3, scores.topk(2, 3).indices, True)
        mask = BlockMask.from_blocks(chosen, S, S, block_size=(128, 64))
        return flashattn_ext.forward(x, x, x, mask=mask, causal=True)

    x, scores = rows(device), torch.rand(2, 1, 2, 3, device=device)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(gradient(compiled, x, scores), gradient(step, x, scores), rtol=1e-4, atol=1e-5)


def test_masks_that_change_need_no_new_compilation(device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(two_layers, fullgraph=True, backend=counter)
    for step in range(3):
        x, mask = rows(device), some_pairs(device, step)
        torch.testing.assert_close(gradient(function, x, mask), gradient(two_layers, x, mask), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device: str, use_reentrant: bool) -> None:
    x, mask, layers = rows(device), some_pairs(device), functools.partial(two_layers, deterministic=True)
    expected = gradient(layers, x, mask)
    checkpoint(layers, x, mask, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_saved_program_with_a_mask_is_loaded(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
            return two_layers(x, mask)

    x, mask, file = rows(device).detach(), some_pairs(device), io.BytesIO()
    torch.export.save(torch.export.export(Layer(), (x, mask)), file)
    file.seek(0)
    loaded = torch.export.load(file)
    other = some_pairs(device, seed=1)
    torch.testing.assert_close(loaded.module()(x, other), two_layers(x, other))
    assert torch.equal(loaded.example_inputs[0][1].dense(), mask.dense())


def test_meta_tensors(device: str) -> None:
    assert gradient(two_layers, rows("meta"), some_pairs(device).to("meta")).shape == (2, S, 2, 16)


def test_flops_count_visible_pairs() -> None:
    x, mask = rows("cpu").detach(), some_pairs("cpu")
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    for options, visible in (({}, mask.dense()), ({"causal": True}, mask.dense() & causal)):
        with FlopCounterMode(display=False) as counter:
            flashattn_ext.forward(x, x, x, mask=mask, **options)
        assert counter.get_total_flops() == 2 * int(visible.sum()) * 2 * (16 + 16)


def fp8(x: Tensor) -> Tensor:
    return x.detach().to(torch.float8_e4m3fn)


def packed(function: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    starts = torch.tensor([0, S], dtype=torch.int32, device=x.device)
    return function(x[0], x[0], x[0], starts, starts, S, S, **options)


REFUSED: dict[str, tuple[Callable[[Tensor, BlockMask], Any], str]] = {
    "packed": (lambda x, m: packed(flashattn_ext.varlen_forward, x, mask=m), "a packed call .* padded sequences"),
    "origin": (lambda x, m: flashattn_ext.forward(x, x, x, mask=m, origin=(0, 0, 0, 0)), "an origin of four numbers"),
    "invariant": (lambda x, m: flashattn_ext.forward(x, x, x, mask=m, invariant=True), "invariant=True"),
    "fp8": (lambda x, m: flashattn_ext.forward(fp8(x), fp8(x), fp8(x), mask=m), "float8_e4m3fn .* bfloat16"),
    "cache": (
        lambda x, m: flashattn_ext.flash_attn_with_kvcache(x, x.detach().clone(), x.detach().clone(), mask=m),
        "a call with a KV cache",
    ),
    "reference of a cache": (
        lambda x, m: flashattn_ext.kvcache_reference(x, x.detach().clone(), x.detach().clone(), mask=m),
        "a call with a KV cache",
    ),
    "packed reference": (
        lambda x, m: flashattn_ext.attention_reference(
            x[0], x[0], x[0], cu_seqlens_q=torch.tensor([0, S]).int(), cu_seqlens_k=torch.tensor([0, S]).int(), mask=m
        ),
        "packed sequences",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_take_it_says_so(device: str, name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"mask: .*{words}"):
        call(rows(device), some_pairs(device))


def test_sizes_of_another_call(device: str) -> None:
    x, mask = rows(device), some_pairs(device)
    words = r"\[2 or 1, 1 or 2 or 2, 100, 150\].*q of shape \[2, 100, 2, 16\] and k of shape \[2, 150, 2, 16\].*\[1, 2, 150, 150\]"
    for function in (flashattn_ext.forward, flashattn_ext.attention_reference):
        with pytest.raises(ValueError, match=f"mask: expected a BlockMask of shape {words}"):
            function(x[:, :100], x, x, mask=mask)
    for other in (some_pairs(device, heads=3), BlockMask.from_blocks(torch.ones(3, 1, 2, 2).bool().to(device), S, S)):
        with pytest.raises(ValueError, match="mask: expected a BlockMask of shape"):
            flashattn_ext.forward(x, x, x, mask=other)


def test_other_arguments_as_masks(device: str) -> None:
    x = rows(device)
    with pytest.raises(
        TypeError, match=r"mask: expected a flashattn_ext.Mask or BlockMask, got Tensor.*BlockMask.from_dense"
    ):
        flashattn_ext.forward(x, x, x, mask=torch.ones(S, S, dtype=torch.bool))
    of_flex = flex_attention.create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device=device)
    with pytest.raises(TypeError, match=r"got BlockMask; BlockMask.from_flex\(mask\) makes one"):
        flashattn_ext.forward(x, x, x, mask=of_flex)


@pytest.mark.parametrize("max_partial", [0, 3])
def test_more_partial_blocks_than_max_partial(max_partial: int) -> None:
    x = rows("cpu")
    mask = BlockMask.from_dense(torch.rand(2, 2, S, S) < 0.5, max_partial=max_partial)  # 16 blocks
    uses: list[Callable[[], Any]] = [
        lambda: flashattn_ext.forward(x, x, x, mask=mask), lambda: flashattn_ext.attention_reference(x, x, x, mask=mask),
        mask.dense, mask.density, lambda: mask & mask,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=f"mask: expected at most max_partial={max_partial} partly visible blocks"):
            use()


def with_word(lists: Tensor, place: int, value: int) -> Tensor:
    changed = lists.clone()
    changed[0, 0, place] = value
    return changed


@pytest.mark.parametrize(
    "change,error,words",
    [
        (lambda lists, bits: (lists.float(), bits), TypeError, "mask: expected lists and bits of dtype int32, got float32"),
        (lambda lists, bits: (lists, None), ValueError, "mask_lists and mask_bits must be given together"),
        (lambda lists, bits: (lists[..., :-1], bits), ValueError, r"mask: expected the lists of a BlockMask of \[2 or 1, 1 or 2 or 2, 150, 150\]"),
        (lambda lists, bits: (lists, bits[..., :3]), ValueError, r"mask: expected bits of shape \[blocks, 128, 4\]"),
        (lambda lists, bits: (with_word(lists, 0, 1), bits), ValueError, "mask: expected the lists that BlockMask makes"),
        (lambda lists, bits: (with_word(lists, 2, 7), bits), ValueError, "mask: expected the lists that BlockMask makes"),
        (lambda lists, bits: (with_word(lists, 16, 1), bits), ValueError, "mask: expected the lists that BlockMask makes"),
        (lambda lists, bits: (with_word(lists, 17, 9), bits), ValueError, "mask: expected the lists that BlockMask makes"),
        (lambda lists, bits: (with_word(lists, 18, 5), bits), ValueError, "mask: expected the lists that BlockMask makes"),
        (lambda lists, bits: (with_word(lists, 1, -1), bits), ValueError, "mask: expected the same blocks in both lists"),
    ],
)  # fmt: skip
def test_the_op_checks_what_kernels_rely_on(change: Any, error: type[Exception], words: str) -> None:
    """Words 0 to 7 are entries by rows, 8 to 15 by keys, then three starts of each."""
    x, mask = rows("cpu").detach(), some_pairs("cpu")
    assert mask.lists.shape == (1, 2, 24) and mask.lists[0, 0, 16:22].tolist() == [0, 2, 4, 0, 2, 4]
    lists, bits = change(mask.lists, mask.bits)
    tensors = CallTensors(x, x, x, mask_lists=lists, mask_bits=bits)
    with pytest.raises(error, match=words):
        torch.ops.flashattn_ext.forward.call(*tensors, *CallOptions(), None, False)


@pytest.mark.skipif(
    not Path(flashattn_ext.__file__).with_name("_ascend_emulator.so").exists(),
    reason="the emulator is not built (make emulator)",
)
def test_a_backend_without_the_kernels_says_so() -> None:
    x, mask = rows("cpu"), some_pairs("cpu")
    with flashattn_ext.use_backend("ascend-emulator"):
        with pytest.raises(NotImplementedError, match=r"mask: a BlockMask .* Ascend C .* as bias"):
            flashattn_ext.forward(x, x, x, mask=mask)
        assert "BlockMask" in flashattn_ext.supports(x, x, x, mask=mask).refusal


def test_a_mask_and_a_block_mask_are_one_argument(device: str) -> None:
    x, mask, intervals = rows(device), some_pairs(device), Mask.window(30, 0, S, S, device=device)
    expected = flashattn_ext.forward(x, x, x, mask=mask, window_size=(30, 0))
    torch.testing.assert_close(flashattn_ext.forward(x, x, x, mask=mask & intervals), expected)
