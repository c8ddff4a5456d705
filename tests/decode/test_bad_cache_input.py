"""What flash_attn_with_kvcache refuses, before anything is written, and what no content of its tensors can make it do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import CacheCase, make_inputs

import flashattn_ext

INT32 = torch.int32


def arguments(device: str, **changed: Any) -> dict[str, Any]:
    """A call that works, but for what is changed."""
    good = {
        "q": torch.randn(2, 1, 4, 16), "k_cache": torch.randn(2, 32, 2, 16), "v_cache": torch.randn(2, 32, 2, 16),
        "k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16), "cache_seqlens": torch.tensor([3, 7], dtype=INT32),
    }  # fmt: skip
    # A function makes a tensor whose strides a copy to the device would not keep.
    made = {n: t(device) if callable(t) else t for n, t in {**good, **changed}.items()}
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in made.items()}


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q_rank": (ValueError, "q", {"q": torch.randn(2, 4, 16)}),
    "q_no_tensor": (TypeError, "q", {"q": 3}),
    "cache_dtype": (TypeError, "v_cache", {"v_cache": torch.randn(2, 32, 2, 16).half()}),
    "cache_heads": (ValueError, "v_cache", {"v_cache": torch.randn(2, 32, 1, 16)}),
    "cache_head_dim": (ValueError, "k_cache", {"k_cache": torch.randn(2, 32, 2, 8)}),
    "cache_last_dimension": (ValueError, "k_cache", {"k_cache": lambda device: torch.randn(2, 32, 2, 32, device=device)[..., ::2]}),
    "cache_entries": (ValueError, "k_cache", {"k_cache": torch.randn(1, 32, 2, 16), "v_cache": torch.randn(1, 32, 2, 16)}),
    "heads": (ValueError, "q", {"q": torch.randn(2, 1, 3, 16)}),
    "k_without_v": (ValueError, "k and v", {"v": None}),
    "k_shape": (ValueError, "k", {"k": torch.randn(2, 1, 4, 16)}),
    "k_without_lengths": (ValueError, "cache_seqlens", {"cache_seqlens": None}),
    "k_longer_than_cache": (ValueError, "k", {"k": torch.randn(2, 33, 2, 16), "v": torch.randn(2, 33, 2, 16)}),
    "length_dtype": (TypeError, "cache_seqlens", {"cache_seqlens": torch.tensor([3, 7])}),
    "length_shape": (ValueError, "cache_seqlens", {"cache_seqlens": torch.tensor([3], dtype=INT32)}),
    "length_type": (TypeError, "cache_seqlens", {"cache_seqlens": 2.5}),
    "int_length_too_large": (ValueError, "cache_seqlens", {"cache_seqlens": 32}),
    "int_length_negative": (ValueError, "cache_seqlens", {"cache_seqlens": -1}),
    "table_dtype": (TypeError, "block_table", {"block_table": torch.zeros(2, 1, dtype=torch.int64)}),
    "table_shape": (ValueError, "block_table", {"block_table": torch.zeros(3, 1, dtype=INT32)}),
    "table_rank": (ValueError, "block_table", {"block_table": torch.zeros(2, dtype=INT32)}),
    "table_and_batch_idx": (
        ValueError, "cache_batch_idx",
        {"block_table": torch.zeros(2, 1, dtype=INT32), "cache_batch_idx": torch.zeros(2, dtype=INT32)},
    ),
    "page_size": (
        ValueError, "pages",
        {
            "block_table": torch.zeros(2, 2, dtype=INT32), "k_cache": torch.randn(2, 24, 2, 16),
            "v_cache": torch.randn(2, 24, 2, 16),
        },
    ),
    "rotary_without_k": (ValueError, "rotary_cos", {"k": None, "v": None, "rotary_cos": torch.ones(32, 8), "rotary_sin": torch.ones(32, 8)}),
    "cos_without_sin": (ValueError, "rotary_sin", {"rotary_cos": torch.ones(32, 8)}),
    "rotary_dtype": (TypeError, "rotary_cos", {"rotary_cos": torch.ones(32, 8).half(), "rotary_sin": torch.ones(32, 8).half()}),
    "rotary_too_wide": (ValueError, "rotary_cos", {"rotary_cos": torch.ones(32, 9), "rotary_sin": torch.ones(32, 9)}),
    "rotary_too_short": (ValueError, "rotary_cos", {"rotary_cos": torch.ones(31, 8), "rotary_sin": torch.ones(31, 8)}),
    "num_splits": (ValueError, "num_splits", {"num_splits": -1}),
    "sink_and_smooth": (ValueError, "sink", {"sink": torch.zeros(4), "smooth_softmax": True}),
    "mask_heads": (ValueError, "mask", {"mask": flashattn_ext.Mask(torch.zeros(1, 3, 1, 2, dtype=INT32))}),
    "softcap": (ValueError, "softcap", {"softcap": -1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_writes_nothing(name: str, device: str) -> None:
    error, named, changed = REFUSED[name]
    given = arguments(device, **changed)
    before = given["k_cache"].clone()
    with pytest.raises(error, match=named):
        flashattn_ext.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize(
    ("name", "values"),
    [("cache_seqlens", (3, 32)), ("cache_seqlens", (-1, 3)), ("cache_batch_idx", (0, 2)), ("cache_leftpad", (4, 0))],
    ids=["no_room", "negative", "entry", "leftpad"],
)
def test_refuses_values_where_they_are_at_hand(name: str, values: tuple[int, ...]) -> None:
    given = arguments("cpu", **{name: torch.tensor(values, dtype=INT32)})
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=name):
        flashattn_ext.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)


@pytest.mark.parametrize("Sq", [1, 40])
def test_block_tables_never_lead_outside_the_cache(Sq: int, device: str) -> None:
    inputs = make_inputs(CacheCase(lengths=(100, 37), page_size=16, Sq=Sq, causal=True), torch.float32)
    numbers = torch.tensor([-(2**31), -1, 0, 3, 15, 16, 17, 2**31 - 1], dtype=INT32)
    inputs.options["block_table"] = numbers[torch.randint(len(numbers), (2, 8))]
    for cache in inputs.tensors[1:3]:
        cache.copy_(torch.randn_like(cache))
    expected, _ = inputs.to(torch.float32).reference()
    # Neighbours of the caches in memory are NaN: reading them would show.
    for index in (1, 2):
        cache = inputs.tensors[index]
        around = torch.full((cache.shape[0] + 8, *cache.shape[1:]), float("nan"), device=device)
        around[4:-4] = cache.to(device)
        inputs.tensors[index] = around[4:-4]
    inputs.tensors[0] = inputs.tensors[0].to(device)
    inputs.options = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in inputs.options.items()}
    torch.testing.assert_close(inputs.call()[0].cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("new_keys", [0, 1])
def test_lengths_beyond_the_block_table(new_keys: int, device: str) -> None:
    """flash-attn raises RuntimeError, everything else that is wrong with an argument is a ValueError here: it is both."""
    q, cache = torch.randn(1, 1, 2, 16, device=device), torch.randn(4, 16, 2, 16, device=device)
    new = torch.randn(1, 1, 2, 16, device=device) if new_keys else None
    lengths = torch.tensor([31 - new_keys], dtype=INT32, device=device)
    table = torch.zeros(1, 2, dtype=INT32, device=device)

    def call() -> None:
        flashattn_ext.flash_attn_with_kvcache(
            q, cache, cache.clone(), new, new, cache_seqlens=lengths, block_table=table
        )

    call()
    lengths += 1
    call()
    lengths += 1
    before = cache.clone()
    with pytest.raises(RuntimeError, match="block_table") as raised:
        call()
    assert isinstance(raised.value, ValueError) and torch.equal(cache, before)
    with pytest.raises(ValueError, match="block_table"):  # the contents that were looked at before
        call()


def test_appending_through_a_hostile_table_stays_in_the_cache(device: str) -> None:
    around = torch.full((12, 16, 2, 16), 7.0, device=device)
    cache = around[4:8]
    q, new = torch.randn(2, 3, 2, 16, device=device), torch.randn(2, 3, 2, 16, device=device)
    table = torch.tensor([[-5, 99], [2**31 - 1, -(2**31)]], dtype=INT32, device=device)
    lengths = torch.tensor([14, 29], dtype=INT32, device=device)
    flashattn_ext.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths, block_table=table)
    assert (around[:4] == 7).all() and (around[8:] == 7).all() and (cache != 7).any()
