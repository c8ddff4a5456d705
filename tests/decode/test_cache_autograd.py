"""Decoding calls have no derivatives: a backward raises, and autograd knows which tensors they write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashattn_ext


def qkv(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A query, two caches and a new key."""
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    caches = torch.randn(2, 2, 32, 2, 16)
    return q.to(device), *(cache.clone() for cache in caches.to(device)), new.to(device)


def read(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: Tensor) -> Tensor:
    out: Tensor = flashattn_ext.flash_attn_with_kvcache(q, k_cache, v_cache)
    return out


def append(q: Tensor, k_cache: Tensor, v_cache: Tensor, new: Tensor) -> Tensor:
    out: Tensor = flashattn_ext.flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=5)
    return out


BOTH = pytest.mark.parametrize("call", [read, append])


@BOTH
def test_a_backward_raises(call: Callable[..., Tensor], device: str) -> None:
    q, k_cache, v_cache, new = qkv(device)
    out = call(q.requires_grad_(), k_cache, v_cache, new)
    assert out.requires_grad and not k_cache.requires_grad
    with pytest.raises(RuntimeError, match="key-value cache have no gradients"):
        out.sum().backward()
    with torch.no_grad():
        assert not call(q, k_cache, v_cache, new).requires_grad


@BOTH
def test_tangents_are_refused(call: Callable[..., Tensor], device: str) -> None:
    q, *others = qkv(device)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda q: call(q, *others), (q,), (q,))


@pytest.mark.parametrize("place", [1, 2])
def test_a_cache_with_a_gradient_is_not_written_to(place: int, device: str) -> None:
    given = [*qkv(device)]
    given[place].requires_grad_()
    before = given[place].detach().clone()
    with pytest.raises(ValueError, match=f"{'qkv'[place]}_cache: expected a tensor that requires no grad"):
        append(*given)
    assert torch.equal(given[place], before)
    with torch.no_grad():
        append(*given)
    assert not torch.equal(given[place], before)


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("inference", [False, True])
def test_what_has_saved_a_cache_notices_that_it_changed(place: int, inference: bool, device: str) -> None:
    given = qkv(device)
    weight = torch.randn_like(given[place], requires_grad=True)
    loss = (weight * given[place]).sum()
    with torch.inference_mode(inference):
        append(*given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_caches_of_inference_mode(device: str) -> None:
    """Inference tensors have no version counter, and decoding accepts them outside inference mode."""
    q, k_cache, v_cache, new = qkv(device)
    expected = append(q, k_cache, v_cache, new)
    with torch.inference_mode():
        caches = k_cache.clone(), v_cache.clone()
    assert torch.equal(append(q, *caches, new), expected) and torch.equal(caches[0], k_cache)


@pytest.mark.filterwarnings("error")
def test_calls_under_vmap_are_those_of_each_slice(device: str) -> None:
    """torch's fallback for ops without a vmap rule warns, and does not support ops that write."""
    q, k_cache, v_cache, new = (torch.stack([t, t.flip(0), t * 2]) for t in qkv(device))
    out = torch.vmap(read)(q, k_cache, v_cache, new)
    assert torch.equal(out, torch.stack([read(*each) for each in zip(q, k_cache, v_cache, new, strict=True)]))
    copies = k_cache.clone(), v_cache.clone()
    out = torch.vmap(append)(q, *copies, new)
    expected = torch.stack([append(*each) for each in zip(q, k_cache, v_cache, new, strict=True)])
    assert torch.equal(out, expected) and torch.equal(copies[0], k_cache) and torch.equal(copies[1], v_cache)
    shared = torch.vmap(read, (0, None, None, None))(q, k_cache[0], v_cache[0], new[0])
    assert torch.equal(shared, torch.stack([read(each, k_cache[0], v_cache[0], new[0]) for each in q]))


def test_a_cache_that_calls_share_is_not_appended_to_under_vmap(device: str) -> None:
    q, k_cache, v_cache, new = qkv(device)
    before = k_cache.clone()
    with pytest.raises(ValueError, match=r"k_cache: expected a cache for each call .*torch\.vmap"):
        torch.vmap(append, (None, None, None, 0))(q, k_cache, v_cache, torch.stack([new, new + 1]))
    assert torch.equal(k_cache, before)
