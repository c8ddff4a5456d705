"""transformers' mask functions, and how attention translates masks, keyword arguments and biases."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from transformers import masking_utils as masks  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import _mask_tensors, _transformers_masks  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402

BATCH = 2
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, 2, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3, -1, 7, 7, 7]])
PACKED = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 3], [0] * 12])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 2], list(range(12))])
LEFT_PADDING = torch.tensor([0, 3])


def custom(batch: Any, head: Any, q: Any, k: Any) -> Any:
    """All rows see a prefix of three keys; the integration does not recognise this function by its code."""
    return (k <= q) | (k < 3)


def dilated(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q - k) % 2 == 0)


def packed(function: Any) -> Any:
    if hasattr(masks, "packed_sequence_compatibility_function"):
        return masks.packed_sequence_compatibility_function(function, POSITIONS, PACKED)
    return masks.and_masks(masks.packed_sequence_mask_function(PACKED), function)


def image_blocks(function: Any) -> Any:
    return masks.or_masks(function, masks.blockwise_overlay(BLOCKS))


window, chunked = masks.sliding_window_causal_mask_function, masks.chunked_causal_mask_function
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masks.causal_mask_function,
    "bidirectional": lambda: masks.bidirectional_mask_function,
    "window": lambda: window(4),
    "window of one": lambda: window(1),
    "window of zero": lambda: window(0),
    "window of zero, or causal": lambda: masks.or_masks(masks.causal_mask_function, masks.sliding_window_overlay(0)),
    "window beyond all keys": lambda: window(100),
    "window beyond all numbers": lambda: window(sys.maxsize),
    "chunks beyond all numbers": lambda: chunked(sys.maxsize, LEFT_PADDING),
    "bidirectional window beyond all numbers": lambda: masks.sliding_window_bidirectional_mask_function(
        sys.maxsize - 1
    ),
    "bidirectional window": lambda: masks.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda: chunked(5, LEFT_PADDING),
    "blocks": lambda: image_blocks(masks.causal_mask_function),
    "blocks and a window": lambda: image_blocks(window(3)),
    "packed": lambda: packed(masks.causal_mask_function),
    "packed and a window": lambda: packed(window(3)),
    "packed and chunks": lambda: packed(chunked(2, torch.zeros(2, dtype=torch.int64))),
    "packed, of a custom function": lambda: packed(custom),
    "packed, in both directions": lambda: masks.packed_sequence_mask_function(PACKED),
    "custom": lambda: custom,
    "a window of a custom function": lambda: masks.and_masks(window(6), custom),
}
# Functions that transformers 4 lacks are left out.
KNOWN = {
    name: make
    for name, make in FUNCTIONS.items()
    if not (name.startswith(("bi", "blocks")) and transformers.__version__ < "5")
}


def values(function: Any, Sq: int, Sk: int, q_offset: int, kv_offset: int) -> Tensor:
    """bool [BATCH, Sq, Sk] from the function itself."""
    batch, q, k = torch.arange(BATCH), torch.arange(Sq) + q_offset, torch.arange(Sk) + kv_offset
    return function(batch[:, None, None], 0, q[:, None], k).expand(BATCH, Sq, Sk)


def dense(mask: Tensor, Sq: int, Sk: int) -> Tensor:
    """bool [BATCH, Sq, Sk] of what attention reads of the value that the mask function returned."""
    code = _mask_tensors.contents(mask)
    limits = _mask_tensors.as_window(code)
    if limits is not None:
        left, right = limits
        distance = torch.arange(Sk) - (torch.arange(Sq)[:, None] + Sk - Sq)
        visible = (distance >= -left if left >= 0 else True) & (distance <= (right if right >= 0 else Sk))
        return visible.expand(BATCH, Sq, Sk)
    visible = code if code.dtype == torch.bool else flashattn_ext.Mask(code).dense(Sq)
    return visible[:, 0].expand(BATCH, Sq, Sk)


def eagers(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The mask [BATCH, 1, Sq, Sk] that eager attention adds to the scores."""
    return torch.zeros((), dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]


def made(
    function: Any, Sq: int, Sk: int, q_offset: Any = 0, kv_offset: int = 0, padding: Tensor | None = None
) -> Tensor:
    return _transformers_masks.attention_mask(
        BATCH, Sq, Sk, q_offset, kv_offset, function, padding, device="cpu", use_vmap=False
    )


@pytest.mark.parametrize("padding", ["none", "all ones", "left", "right", "holes"])
@pytest.mark.parametrize("name", KNOWN)
def test_mask_functions(name: str, padding: str) -> None:
    """A whole sequence: the intervals equal the function, pair by pair."""
    function = KNOWN[name]()
    seen = torch.ones(BATCH, 12, dtype=torch.bool)
    if padding != "none":
        hidden = {"all ones": [], "left": [0, 1, 2], "right": [10, 11], "holes": [2, 5, 6]}[padding]
        seen[1, hidden] = False
    got = made(function, 12, 12, padding=None if padding == "none" else seen)
    assert _mask_tensors.contents(got).dtype == torch.int32
    visible = values(function, 12, 12, 0, 0) & seen[:, None]
    assert torch.equal(dense(got, 12, 12), visible)
    assert got.dtype == torch.float32 and torch.equal(got, eagers(visible))


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", [name for name in KNOWN if "packed" not in name])
def test_mask_functions_beside_earlier_keys(name: str, as_tensor: bool) -> None:
    """Three queries after keys of a cache that has dropped two; static caches, longer than the keys in them."""
    function = KNOWN[name]()
    for Sq, Sk, q_offset, kv_offset in [(3, 10, 9, 2), (1, 8, 7, 0), (3, 12, 5, 0), (12, 12, 0, 0)]:
        offset = torch.tensor(q_offset) if as_tensor else q_offset
        got = made(function, Sq, Sk, offset, kv_offset)
        visible = values(function, Sq, Sk, q_offset, kv_offset)
        assert torch.equal(dense(got, Sq, Sk), visible)
        assert torch.equal(got, eagers(visible))


def test_keys_behind_the_padding_mask_are_hidden() -> None:
    """A static cache is longer than the mask of the tokenizer."""
    seen = torch.ones(BATCH, 8, dtype=torch.bool)
    seen[1, 2] = False
    got = made(masks.causal_mask_function, 3, 12, 20, padding=seen)
    visible = torch.nn.functional.pad(seen, (0, 4))[:, None].expand(BATCH, 3, 12)
    assert torch.equal(dense(got, 3, 12), visible)


@pytest.mark.parametrize("name", ["causal", "window", "packed", "blocks", "custom"])
def test_mask_functions_that_are_traced(name: str) -> None:
    if name not in KNOWN:
        pytest.skip(f"transformers {transformers.__version__} has no blocks")
    function, padding = KNOWN[name](), torch.ones(BATCH, 12, dtype=torch.bool)
    padding[1, :4] = False
    torch.compiler.reset()
    traced = torch.compile(made, backend="eager", fullgraph=True)
    got = traced(function, 12, 12, padding=padding)
    assert torch.equal(dense(got, 12, 12), values(function, 12, 12, 0, 0) & padding[:, None])


def test_what_is_plain_needs_no_intervals() -> None:
    """Windows stay windows, so that a call without padding is as fast as `forward` with the same window."""
    expected = {"causal": (-1, 0), "window": (3, 0), "window beyond all keys": (-1, 0)}
    for name, limits in expected.items():
        for padding in (None, torch.ones(BATCH, 12, dtype=torch.bool)):
            code = _mask_tensors.contents(made(KNOWN[name](), 12, 12, padding=padding))
            assert code.numel() == 0 and _mask_tensors.as_window(code) == limits


@pytest.mark.parametrize("Sq", [1, 2, 3, 12])
def test_a_model_that_adds_its_mask_to_scores_gets_what_eager_gets(Sq: int) -> None:
    """It computes attention itself."""
    seen = torch.ones(BATCH, 12, dtype=torch.bool)
    seen[0, :3] = False
    mask = made(masks.causal_mask_function, Sq, 12, 12 - Sq, padding=seen)
    scores = torch.randn(BATCH, 4, Sq, 12)
    visible = values(masks.causal_mask_function, Sq, 12, 12 - Sq, 0) & seen[:, None]
    assert torch.equal(scores + mask, scores + eagers(visible))
    for copied in (mask, mask.clone()):
        assert torch.equal(dense(copied, Sq, 12), dense(mask, Sq, 12))


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 0, 0], [-1, -1, 0, 0, -1, -1], [2, 1, 1, 1, 1, 2]])
def test_ids_that_come_back_are_no_runs(ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents with one id see each other: the function is evaluated, in parts, and is not an interval."""
    monkeypatch.setattr(_transformers_masks, "_ELEMENTS_AT_ONCE", 60)
    function = masks.packed_sequence_mask_function(torch.tensor([ids] * BATCH))
    got = made(function, 6, 6)
    assert _mask_tensors.contents(got).dtype == torch.bool
    assert torch.equal(dense(got, 6, 6), values(function, 6, 6, 0, 0))
    assert torch.equal(got, eagers(values(function, 6, 6, 0, 0)))


@pytest.mark.parametrize(
    "ids", [[3, 3, -1, 1, 1, -1], [0, -1, 0, -1, 1, 1], [-2, -2, 0, 0, -2, -1], [1, 1, 1, 0, 0, 0]]
)
def test_blocks_of_any_ids(ids: list[int]) -> None:
    """Ids below 0 are outside blocks; ids may fall or rise, and an id that occurs in two runs is not an interval."""
    if not hasattr(masks, "blockwise_overlay"):
        pytest.skip(f"transformers {transformers.__version__} has no blocks")
    function = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.tensor([ids] * BATCH)))
    got = made(function, 6, 6)
    assert torch.equal(dense(got, 6, 6), values(function, 6, 6, 0, 0))
    assert (_mask_tensors.contents(got).dtype == torch.bool) == (ids == [0, -1, 0, -1, 1, 1])


def test_a_function_that_changed_its_meaning_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later transformers in which a window of w is w + 1 keys wide: the integration must not rely on the known meaning."""

    def overlay(sliding_window: int) -> Any:
        def inner_mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
            return k >= q - sliding_window

        return inner_mask

    monkeypatch.setattr(masks, "sliding_window_overlay", overlay)
    known = _transformers_masks._recognised()
    assert overlay(2).__code__ not in known
    assert masks.causal_mask_function.__code__ in known
    function = masks.and_masks(overlay(2), masks.causal_mask_function)
    assert torch.equal(dense(made(function, 12, 12), 12, 12), values(function, 12, 12, 0, 0))


# --- attention ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.layer_idx = 3


def tensors(Sq: int = 12, Sk: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(BATCH, 4, Sq, 8), torch.randn(BATCH, 2, Sk, 8), torch.randn(BATCH, 2, Sk, 8)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Attention in plain PyTorch, [B, Sq, Hq, D]."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    scores = scores if visible is None else scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def test_dense_masks_of_users() -> None:
    q, k, v = tensors()
    visible = values(custom, 12, 12, 0, 0)[:, None]
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, visible)[0], expected(q, k, v, visible))
    added = torch.randn(BATCH, 1, 12, 12).masked_fill(values(dilated, 12, 12, 0, 0)[:, None].logical_not(), -torch.inf)
    for bias in (added, added.double(), added[:1, :, :1].clamp(min=-5)):
        torch.testing.assert_close(fax.attention(Layer(), q, k, v, bias)[0], expected(q, k, v, bias=bias.float()))


def test_flex_attentions_block_masks() -> None:
    """What a user of FlexAttention gives to a model; converted once for all layers, and in steps of generation."""
    q, k, v = tensors()
    block_mask = flex_attention.create_block_mask(dilated, BATCH, 1, 12, 12, device="cpu")
    visible = values(dilated, 12, 12, 0, 0)[:, None]
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, block_mask)[0], expected(q, k, v, visible))
    assert fax._of_flex(block_mask) is fax._of_flex(block_mask)
    packed_ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    apart = (torch.arange(12) < 5)[:, None] == (torch.arange(12) < 5)
    of_one = flex_attention.create_block_mask(dilated, None, None, 12, 12, device="cpu")
    got, _ = fax.attention(Layer(), q[:1], k[:1], v[:1], of_one, cu_seq_lens_q=packed_ends, cu_seq_lens_k=packed_ends)
    torch.testing.assert_close(got, expected(q[:1], k[:1], v[:1], visible[:1] & apart))
    of_step = flex_attention.create_block_mask(lambda b, h, i, j: (i + j) % 2 == 0, None, None, 3, 12, device="cpu")
    even = (torch.arange(3)[:, None] + torch.arange(12)) % 2 == 0
    with torch.no_grad():
        got, _ = fax.attention(Layer(), q[:, :, :3], k, v, of_step)
    torch.testing.assert_close(got, expected(q[:, :, :3], k, v, even))


def test_a_model_takes_flex_attentions_block_mask() -> None:
    fax.register()
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (BATCH, 140), generator=torch.Generator().manual_seed(0))
    block_mask = flex_attention.create_block_mask(dilated, BATCH, 1, 140, 140, device="cpu")
    hidden = ~values(dilated, 140, 140, 0, 0)[:, None].expand(BATCH, 1, 140, 140)
    logits = {}
    for name, mask in (("eager", torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)), ("fax", block_mask)):
        model.set_attn_implementation(name)
        logits[name] = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits["fax"], logits["eager"], rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_no_interval_names_the_layer() -> None:
    q, k, v = tensors()
    mask = made(dilated, 12, 12)
    with pytest.raises(
        ValueError, match=r"Layer of layer 3: attention_mask: .* key 0 .*floating-point mask of 0 and -inf"
    ):
        fax.attention(Layer(), q, k, v, mask)


@pytest.mark.parametrize("mask", [torch.ones(BATCH, 12), torch.ones(BATCH, 1, 12, 12, dtype=torch.int64)])
def test_masks_of_other_kinds(mask: Tensor) -> None:
    with pytest.raises(
        TypeError, match=r"Layer of layer 3: attention_mask: expected a bool or floating-point .* got torch\."
    ):
        fax.attention(Layer(), *tensors(), mask)


def test_without_a_mask_the_module_says_what_is_causal() -> None:
    q, k, v = tensors()
    causal = values(masks.causal_mask_function, 12, 12, 0, 0)[:, None]
    in_window = values(window(4), 12, 12, 0, 0)[:, None]
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, None)[0], expected(q, k, v))
    torch.testing.assert_close(fax.attention(Layer(is_causal=True), q, k, v, None)[0], expected(q, k, v, causal))
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, None, is_causal=True)[0], expected(q, k, v, causal))
    got, _ = fax.attention(Layer(is_causal=True), q, k, v, None, sliding_window=4)
    torch.testing.assert_close(got, expected(q, k, v, in_window))


@pytest.mark.parametrize("lost", [True, False])
def test_positions_that_begin_again(lost: bool) -> None:
    """Sequence parallelism drops masks, and some models make masks without reading positions: documents stay apart."""
    q, k, v = tensors()
    mask = None if lost else made(masks.causal_mask_function, 12, 12)
    visible = values(packed(masks.causal_mask_function), 12, 12, 0, 0)[:, None]
    got, _ = fax.attention(Layer(is_causal=True), q, k, v, mask, position_ids=POSITIONS)
    torch.testing.assert_close(got, expected(q, k, v, visible))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padding", ["all ones", "another row"])
def test_positions_that_begin_again_where_transformers_separates_no_documents(padding: str, compiled: bool) -> None:
    """It does not where a mask is given. A row does not depend on the padding of another one."""
    q, k, v = tensors()
    seen = torch.ones(BATCH, 12, dtype=torch.bool)
    seen[1, :3] = padding != "another row"

    def attend() -> Tensor:
        mask = made(masks.causal_mask_function, 12, 12, padding=seen)
        out: Tensor = fax.attention(Layer(is_causal=True), q, k, v, mask, position_ids=POSITIONS)[0]
        return out

    torch.compiler.reset()
    got = torch.compile(attend, backend="eager", fullgraph=True)() if compiled else attend()
    visible = values(masks.causal_mask_function, 12, 12, 0, 0) & seen[:, None]
    torch.testing.assert_close(got[0], expected(q, k, v, visible[:, None])[0])
    torch.testing.assert_close(got[1, 3:], expected(q, k, v, visible[:, None])[1, 3:])


@pytest.mark.parametrize("width", [2**31, sys.maxsize])
def test_documents_with_a_window_beyond_all_keys(width: int) -> None:
    begins = beginnings(0, 5, 12)
    packed = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "is_causal": True}
    assert torch.equal(outputs(sliding_window=width, **packed), outputs(**packed))
    assert _mask_tensors.as_window(_mask_tensors.window_code(width, 0, "cpu")) == (-1, 0)


def test_documents_of_other_lengths_in_queries_and_keys() -> None:
    """Each document is aligned at its own end; keys after the last document are masked for every row."""
    q, k, v = (t[:1] for t in tensors(7, 12))
    begins_q, begins_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 6, 11], dtype=torch.int32)
    options = {"cu_seq_lens_q": begins_q, "cu_seq_lens_k": begins_k, "max_length_q": 4, "max_length_k": 6}
    got, _ = fax.attention(Layer(is_causal=True), q, k, v, None, **options)
    parts = [((0, 3), (0, 6)), ((3, 7), (6, 11))]
    alone = [
        fax.attention(Layer(is_causal=True), q[:, :, slice(*a)], k[:, :, slice(*b)], v[:, :, slice(*b)], None)[0]
        for a, b in parts
    ]
    torch.testing.assert_close(got, torch.cat(alone, 1))
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected one batch entry"):
        fax.attention(Layer(), *tensors(), None, **options)


def outputs(**options: Any) -> Tensor:
    torch.manual_seed(3)
    return fax.attention(nn.Module(), *(t[:1] for t in tensors()), None, **options)[0]


def beginnings(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


def chunks(size: int, Sq: int, Sk: int) -> Tensor:
    """The mask of a model whose queries see their own chunk."""
    return _mask_tensors.layer_mask(flashattn_ext.Mask.chunked(size, Sq, Sk).intervals, 1, Sq, Sk)


def kept_documents(Sq: int, Sk: int, mask: Tensor | None, changed: str) -> None:
    """Two layers with the same tensors, a change of one of them, and a third layer."""
    torch.manual_seed(3)
    q, k, v = (t[:1] for t in tensors(Sq, Sk))
    begins = {"cu_seq_lens_q": beginnings(0, 4, Sq), "cu_seq_lens_k": beginnings(0, 4, Sk)}

    def layer(mask: Tensor | None, **given: Tensor) -> Tensor:
        return fax.attention(nn.Module(), q, k, v, mask, is_causal=False, **given)[0]

    assert torch.equal(layer(mask, **begins), layer(mask, **begins))
    if changed == "mask":
        assert mask is not None
        mask.copy_(chunks(5, Sq, Sk))
    else:
        begins[changed][1] = 7
    fresh = {name: tensor.clone() for name, tensor in begins.items()}
    expected = layer(None if mask is None else mask.clone(), **fresh)
    torch.testing.assert_close(layer(mask, **begins), expected, rtol=0, atol=0)


@pytest.mark.parametrize("changed", ["cu_seq_lens_q", "cu_seq_lens_k", "mask"])
@pytest.mark.parametrize("inference", [False, True])
def test_tensors_that_are_written_to_between_calls(changed: str, inference: bool) -> None:
    """As in a training loop with static buffers. What was computed from a tensor for other layers is computed again."""
    with torch.inference_mode(inference):
        mask = chunks(3, 12, 12) if changed == "mask" else None
        kept_documents(12, 12, mask, changed)


def test_beginnings_of_queries_that_are_another_tensor() -> None:
    """The Mask cached for cu_seq_lens_k depends on cu_seq_lens_q, too."""
    begins_k = beginnings(0, 4, 12)
    outputs(cu_seq_lens_q=beginnings(0, 4, 12), cu_seq_lens_k=begins_k, is_causal=True)
    got = outputs(cu_seq_lens_q=beginnings(0, 6, 12), cu_seq_lens_k=begins_k, is_causal=True)
    expected = outputs(cu_seq_lens_q=beginnings(0, 6, 12), cu_seq_lens_k=begins_k.clone(), is_causal=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("inference", [False, True])
def test_positions_that_are_written_to_between_calls(inference: bool) -> None:
    with torch.inference_mode(inference):
        positions = torch.arange(12)[None].clone()
        plain = outputs(position_ids=positions, is_causal=True)
        positions[0, 5:] -= 5
        packed = outputs(position_ids=positions, is_causal=True)
        assert torch.equal(packed, outputs(position_ids=positions.clone(), is_causal=True))
        assert not torch.equal(packed, plain)


def test_dense_masks_and_position_biases_that_are_written_to() -> None:
    visible = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    bias = torch.arange(12.0)[None, None, None].expand(1, 4, 12, 12) - torch.arange(12.0)[:, None]
    bias = bias.contiguous() / 9
    for tensor, name in ((visible, "attention_mask"), (bias, "position_bias")):

        def layer(given: Tensor, name: str = name) -> Tensor:
            torch.manual_seed(3)
            q, k, v = (t[:1] for t in tensors())
            mask = given if name == "attention_mask" else None
            return fax.attention(nn.Module(), q, k, v, mask, **({} if mask is not None else {name: given}))[0]

        before = layer(tensor)
        tensor[:, :, 3:, 1] = 0
        assert torch.equal(layer(tensor), layer(tensor.clone())) and not torch.equal(layer(tensor), before)


def test_nothing_is_put_on_the_tensors_of_users() -> None:
    """A copy of the tensor would carry the attribute, and so would a saved file."""
    positions, begins = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]), beginnings(0, 5, 12)
    outputs(position_ids=positions, is_causal=True)
    outputs(cu_seq_lens_q=begins, cu_seq_lens_k=begins, is_causal=True)
    assert not positions.__dict__ and not begins.__dict__


@pytest.mark.parametrize("kind", ["beginnings", "dense", "intervals"])
def test_what_is_kept_for_a_tensor_goes_with_it(kind: str) -> None:
    if kind == "beginnings":
        tensor = beginnings(0, 5, 12)
        outputs(cu_seq_lens_q=tensor, cu_seq_lens_k=tensor, is_causal=True)
    else:
        tensor = torch.ones(1, 1, 12, 12).tril().bool() if kind == "dense" else chunks(3, 12, 12)
        fax.attention(nn.Module(), *(t[:1] for t in tensors()), tensor)
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


def test_sink_softcap_and_scaling() -> None:
    q, k, v = tensors()
    sink = torch.randn(4)
    got, weights = fax.attention(Layer(), q, k, v, None, scaling=0.7, softcap=1.5, s_aux=sink)
    options = {"softmax_scale": 0.7, "softcap": 1.5, "sink": sink, "layout": "bhsd"}
    torch.testing.assert_close(got, flashattn_ext.attention_reference(q, k, v, **options).transpose(1, 2))
    assert weights is None and got.is_contiguous()


def test_gradient_of_a_sink_alone() -> None:
    """Few queries and many keys, as in a generation step; the decoding kernels have no gradients."""
    q, k, v = tensors(5)
    sink = torch.randn(4, requires_grad=True)
    got = fax.attention(Layer(), q, k, v, None, s_aux=sink)[0]
    want = flashattn_ext.attention_reference(q, k, v, sink=sink, layout="bhsd").transpose(1, 2)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), sink)[0] for out in (got, want)))


def test_learned_queries_of_one_batch_entry() -> None:
    q, k, v = tensors(5)
    got, _ = fax.attention(Layer(), q[:1], k, v, None)
    torch.testing.assert_close(got, expected(q[:1].expand(BATCH, -1, -1, -1), k, v))
