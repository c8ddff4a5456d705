"""flash_attn_with_kvcache refuses bad calls before it writes, and no contents of its tensors make it leave its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import CacheCase, make_inputs

import flashattn_ext

INT32 = torch.int32


def arguments(device: str, **changed: Any) -> dict[str, Any]:
    """A valid call with the given arguments replaced."""
    good = {
        "q": torch.randn(2, 1, 4, 16), "k_cache": torch.randn(2, 32, 2, 16), "v_cache": torch.randn(2, 32, 2, 16),
        "k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16), "cache_seqlens": torch.tensor([3, 7], dtype=INT32),
    }  # fmt: skip
    # A function makes its tensor on the device, because a copy would not keep the strides.
    made = {n: t(device) if callable(t) else t for n, t in {**good, **changed}.items()}
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in made.items()}


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q_rank": (ValueError, "q", {"q": torch.randn(2, 4, 16)}),
    "q_no_tensor": (TypeError, "q", {"q": 3}),
    "cache_dtype": (TypeError, "v_cache", {"v_cache": torch.randn(2, 32, 2, 16).half()}),
    "cache_heads": (ValueError, "v_cache", {"v_cache": torch.randn(2, 32, 1, 16)}),
    "cache_head_dim": (ValueError, "k_cache", {"k_cache": torch.randn(2, 32, 2, 8)}),
    "head_dim_too_large": (
        ValueError, "head_dim",
        {n: torch.randn(2, rows, heads, 513) for n, rows, heads in
         (("q", 1, 4), ("k_cache", 32, 2), ("v_cache", 32, 2), ("k", 1, 2), ("v", 1, 2))},
    ),
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
    "expanded_k": (ValueError, "k_cache: new keys are written", {"k_cache": lambda device: torch.randn(1, 32, 2, 16, device=device).expand(2, -1, -1, -1)}),
    "expanded_v": (ValueError, "v_cache: new keys are written", {"v_cache": lambda device: torch.randn(2, 32, 1, 16, device=device).expand(-1, -1, 2, -1)}),
    "overlapping_rows": (ValueError, "k_cache: new keys are written", {"k_cache": lambda device: torch.randn(2000, device=device).as_strided((2, 32, 2, 16), (900, 24, 16, 1))}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_writes_nothing(name: str, device: str) -> None:
    error, named, changed = REFUSED[name]
    given = arguments(device, **changed)
    before = given["k_cache"].clone()
    with pytest.raises(error, match=named) as raised:
        flashattn_ext.flash_attn_with_kvcache(**given)
    assert "CPU backend" not in str(raised.value)  # which refuses it, too
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


# k_cache and v_cache that lie in one tensor: whether they share an element.
IN_ONE_TENSOR = {
    "same": (lambda t: (t[:, :, :2, :16], t[:, :, :2, :16]), True),
    "columns": (lambda t: (t[:, :, :2, :16], t[:, :, :2, 15:31]), True),
    "heads": (lambda t: (t[:, :, :2, :16], t[:, :, 1:3, :16]), True),
    "rows": (lambda t: (t[:, :32, :2, :16], t[:, 31:63, :2, :16]), True),
    "later rows and columns": (lambda t: (t[:, :32, :2, :16], t[:, 5:37, 1:3, 8:24]), True),
    "other head_dim": (lambda t: (t[:, :, :2, :16], t[:, :, :2, :8]), True),
    "one column": (lambda t: (t[:, :, :2, :16], t[:, :, :2, 15:16]), True),
    "packed columns": (lambda t: (t[:, :, :2, :16], t[:, :, :2, 16:32]), False),
    "packed heads": (lambda t: (t[:, :, :2, :16], t[:, :, 2:4, :16]), False),
    "halves of rows": (lambda t: (t[:, :32, :2, :16], t[:, 32:, :2, :16]), False),
    "alternating rows": (lambda t: (t[:, ::2, :2, :16], t[:, 1::2, :2, :16]), False),
    "packed column": (lambda t: (t[:, :, :2, :16], t[:, :, :2, 16:17]), False),
    "no elements": (lambda t: (t[:, :, :0, :16], t[:, :, :0, :16]), False),
}


@pytest.mark.parametrize("name", IN_ONE_TENSOR)
def test_refuses_to_append_to_caches_that_share_memory(name: str, device: str) -> None:
    """Keys and values would overwrite each other, in an order that nothing defines."""
    parts, shared = IN_ONE_TENSOR[name]
    whole = torch.randn(2, 64, 4, 32, device=device)
    k_cache, v_cache = parts(whole)
    heads, before = k_cache.shape[2], whole.clone()
    new = {"k": torch.randn(2, 1, heads, k_cache.shape[3]), "v": torch.randn(2, 1, heads, v_cache.shape[3])}
    given = arguments(device, q=torch.randn(2, 1, heads, 16), **new) | {"k_cache": k_cache, "v_cache": v_cache}
    if shared:
        with pytest.raises(ValueError, match=r"v_cache: .*share memory"):
            flashattn_ext.flash_attn_with_kvcache(**given)
        assert torch.equal(whole, before)
        given |= {"k": None, "v": None}  # reading them is fine
    expected = flashattn_ext.flash_attn_with_kvcache(**given | {"k_cache": k_cache.clone(), "v_cache": v_cache.clone()})
    assert torch.equal(flashattn_ext.flash_attn_with_kvcache(**given), expected)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"k_cache": torch.randn(2, 32, 2, 16).half()}, r"k_cache: expected the dtype of q \(float32\), got float16"),
        (
            {"q": torch.randn(2, 1, 4, 16).bfloat16()},
            r"k_cache: expected the dtype of q \(bfloat16\) or float8_e4m3fn, got float32",
        ),
        ({"k": torch.randn(2, 1, 2, 16).double()}, r"k: expected the dtype of q \(float32\), got float64"),
        ({"cache_seqlens": torch.tensor([3, 7])}, r"cache_seqlens: expected dtype int32, got int64"),
        ({"cache_leftpad": torch.zeros(2)}, r"cache_leftpad: expected dtype int32, got float32"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.bool)}, r"block_table: expected dtype int32, got bool"),
    ],
)
def test_dtypes_have_the_names_of_torch(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flashattn_ext.flash_attn_with_kvcache(**arguments("cpu", **changed))


def test_refuses_to_append_to_one_entry_twice() -> None:
    given = arguments("cpu", cache_batch_idx=torch.tensor([1, 1], dtype=INT32))
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=r"cache_batch_idx: .*at most once, got 1 for the sequences 0 and 1"):
        flashattn_ext.flash_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)
    flashattn_ext.flash_attn_with_kvcache(**given | {"k": None, "v": None})


@pytest.mark.parametrize("Sq", [1, 40])
def test_block_tables_never_lead_outside_the_cache(Sq: int, device: str) -> None:
    inputs = make_inputs(CacheCase(lengths=(100, 37), page_size=16, Sq=Sq, causal=True), torch.float32)
    numbers = torch.tensor([-(2**31), -1, 0, 3, 15, 16, 17, 2**31 - 1], dtype=INT32)
    inputs.options["block_table"] = numbers[torch.randint(len(numbers), (2, 8))]
    for cache in inputs.tensors[1:3]:
        cache.copy_(torch.randn_like(cache))
    expected = inputs.to(torch.float32).reference()[0]
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
    """flash-attn raises RuntimeError, and this package raises ValueError for bad values: the error is both."""
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
    with pytest.raises(ValueError, match="block_table"):  # the host has checked these contents before
        call()


def test_appending_through_a_hostile_table_stays_in_the_cache(device: str) -> None:
    around = torch.full((12, 16, 2, 16), 7.0, device=device)
    cache = around[4:8]
    q, new = torch.randn(2, 3, 2, 16, device=device), torch.randn(2, 3, 2, 16, device=device)
    table = torch.tensor([[-5, 99], [2**31 - 1, -(2**31)]], dtype=INT32, device=device)
    lengths = torch.tensor([14, 29], dtype=INT32, device=device)
    flashattn_ext.flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=lengths, block_table=table)
    assert (around[:4] == 7).all() and (around[8:] == 7).all() and (cache != 7).any()
