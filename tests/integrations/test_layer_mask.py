"""LayerMask: to all but attention it is eager's mask, whatever is done to it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from test_transformers_masks import BATCH, KNOWN, custom, dilated, eagers, made, tensors, values  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import _mask_tensors  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402
from flashattn_ext.integrations._mask_tensors import LayerMask  # noqa: E402
from flashattn_ext.integrations._transformers_masks import attention_mask  # noqa: E402
from flashattn_ext.integrations._transformers_shared import SharedRows  # noqa: E402

KINDS: dict[str, Any] = {
    "causal": masks.causal_mask_function,
    "both sides": lambda batch, head, q, k: q >= 0,
    "window": masks.sliding_window_causal_mask_function(4),
    "intervals": custom,
    "pairs": dilated,
}
SIZES = [(12, 12), (3, 12), (1, 12)]


def pair(kind: str, Sq: int, Sk: int, padded: bool = True) -> tuple[Tensor, Tensor]:
    """A mask and eager's."""
    seen = torch.ones(BATCH, Sk, dtype=torch.bool)
    seen[0, :3] = not padded
    visible = values(KINDS[kind], Sq, Sk, Sk - Sq, 0) & seen[:, None]
    return made(KINDS[kind], Sq, Sk, Sk - Sq, padding=seen), eagers(visible)


# Operations after which the result is still a LayerMask.
COMPACT: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": Tensor.detach,
    "clone": Tensor.clone,
    "a copy": copy.deepcopy,
    "first keys": lambda mask: mask[..., :7],
    "last keys": lambda mask: mask[:, :, :, 5:],
    "last queries": lambda mask: mask[:, :, -2:],
    "first queries": lambda mask: mask[:, :, :1],
    "a batch entry": lambda mask: mask[1:],
    "queries and keys": lambda mask: mask[1:, :, -2:, 2:9],
    "no keys": lambda mask: mask[..., 5:3],
    "heads": lambda mask: mask.expand(-1, 4, -1, -1),
    "keys of heads": lambda mask: mask.expand(-1, 4, -1, -1)[..., 2:9].clone(),
    "queries from one": lambda mask: mask[:, :, :1].expand(-1, -1, 6, -1),
    "bfloat16": lambda mask: mask.to(torch.bfloat16),
    "float16": Tensor.half,
    "float64": Tensor.double,
    "a copy on its device": lambda mask: mask.to("cpu", copy=True),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "two casts": lambda mask: mask.to(torch.bfloat16).to(torch.float32),
    "bool": Tensor.bool,
    "not": Tensor.logical_not,
    "equal to 0": lambda mask: mask == 0.0,
    "one head": lambda mask: mask[:, 0],
    "the last query": lambda mask: mask[:, :, -1, :],
    "every second key": lambda mask: mask[..., ::2],
    "repeat": lambda mask: mask.repeat(1, 4, 1, 1),
    "reshape": lambda mask: mask.expand(-1, 4, -1, -1).reshape(8, *mask.shape[2:]),
    "transpose": lambda mask: mask.transpose(2, 3),
    "masked_fill": lambda mask: mask.masked_fill(mask == 0, 3.0),
    "sum with scores": lambda mask: mask + torch.ones(BATCH, 4, *mask.shape[2:]),
    "concatenation": lambda mask: torch.cat([mask, torch.ones_like(mask)], -1),
    "pad": lambda mask: nn.functional.pad(mask, (0, 2)),
    "reduction": lambda mask: torch.all(~(mask == 0.0), dim=2),
    "gather": lambda mask: mask.gather(-1, torch.zeros(mask.shape, dtype=torch.int64)),
}  # fmt: skip


@pytest.mark.parametrize(("Sq", "Sk"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_operations(kind: str, Sq: int, Sk: int) -> None:
    for padded in (False, True):
        for name, operation in {**COMPACT, **OTHERS}.items():
            mask, eager = pair(kind, Sq, Sk, padded)
            got, want = operation(mask), operation(eager)
            assert isinstance(got, LayerMask) == (name in COMPACT), name
            assert name not in COMPACT or mask._formed is None, f"{name} formed every pair"  # type: ignore[attr-defined]
            assert got.dtype == want.dtype and torch.equal(got, want), name
            assert not isinstance(got, LayerMask) or got.stride() == got.eager().stride(), name


def test_attention_reads_the_code_of_slices() -> None:
    """What attention gets from a slice or a copy is the same mask."""
    q, k, v = tensors()
    for kind in ("causal", "window", "intervals"):
        mask, _ = pair(kind, 12, 12)
        seen = values(KINDS[kind], 12, 12, 0, 0)[:, None].clone()
        seen[0, :, :, :3] = False
        for part in (mask, mask.clone(), mask.detach(), mask.expand(-1, 4, -1, -1)):
            got = fax.attention(nn.Module(), q, k, v, part)[0]
            want = flashattn_ext.forward(q, k, v, layout="bhsd", mask=flashattn_ext.Mask.from_dense(seen)).transpose(
                1, 2
            )
            assert torch.equal(got, want)
        rows = mask[:, :, -3:, :]
        got = fax.attention(nn.Module(), q[:, :, -3:], k, v, rows)[0]
        torch.testing.assert_close(got, want[:, -3:])
        # transformers 4 passes masks that are longer than the keys, and eager attention drops the last ones
        got = fax.attention(nn.Module(), q, k[:, :, :7], v[:, :, :7], mask)[0]
        visible = flashattn_ext.Mask.from_dense(seen[..., :7])
        torch.testing.assert_close(
            got, flashattn_ext.forward(q, k[:, :, :7], v[:, :, :7], layout="bhsd", mask=visible).transpose(1, 2)
        )


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "zero_": Tensor.zero_,
    "to some keys": lambda mask: mask[:, :, :, :3].fill_(-2),
    "to a query": lambda mask: mask.__setitem__((slice(None), slice(None), 0), -7.0),
    "to a head": lambda mask: mask[:, 0].fill_(-1),
    "through detach": lambda mask: mask.detach()[..., 2:5].add_(1),
    "masked_fill_": lambda mask: mask.masked_fill_(mask == 0, -5.0),
    "+=": lambda mask: mask.__iadd__(1),
    "copy_": lambda mask: mask.copy_(torch.full(mask.shape, -3.0)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_writes(kind: str, inference: bool) -> None:
    """Eager's mask is written to, and attention adds it to the scores from then on."""
    q, k, v = tensors()
    with torch.inference_mode(inference):
        for name, write in WRITES.items():
            mask, eager = pair(kind, 12, 12)
            assert not mask.is_written()  # type: ignore[attr-defined]
            write(mask), write(eager)
            assert torch.equal(mask, eager), name
            assert torch.equal(mask.clone(), eager) and torch.equal(mask[..., 1:], eager[..., 1:]), name
            assert torch.equal(_mask_tensors.contents(mask), eager), name  # type: ignore[arg-type]
            got, want = (fax.attention(nn.Module(), q, k, v, each)[0] for each in (mask, eager))
            assert torch.equal(got, want), name


def test_layers_share_what_the_first_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until something may have written to the mask."""
    reads = []
    contents = _mask_tensors.contents
    monkeypatch.setattr(_mask_tensors, "contents", lambda mask: reads.append(mask) or contents(mask))
    layer = nn.Module()
    for kind in ("causal", "intervals"):
        mask, expected = pair(kind, 12, 12, padded=False)
        q, k, v = (torch.randn(BATCH, 4, 12, 16) for _ in range(3))
        reads.clear()
        for _ in range(3):
            out, _ = fax.attention(layer, q, k, v, mask)
            torch.testing.assert_close(out, fax.attention(layer, q, k, v, expected)[0])
        assert len(reads) == 1, kind
        for tensor in (mask, expected):
            tensor[..., 6:] = torch.finfo(torch.float32).min
        out, _ = fax.attention(layer, q, k, v, mask)
        torch.testing.assert_close(out[:, 6:], fax.attention(layer, q, k, v, expected)[0][:, 6:])
        assert len(reads) == 2, kind


def test_padding_is_read_where_no_gradient_is_recorded(device: str) -> None:
    """A GPU is not waited for in training; a batch without padding then has intervals, and without gradients a window."""
    seen = torch.ones(BATCH, 12, dtype=torch.bool, device=device)
    for Sq, grad in ((1, False), (12, False), (12, True)):
        with torch.set_grad_enabled(grad):
            mask = attention_mask(BATCH, Sq, 12, 12 - Sq, 0, attention_mask=seen, device=device)
        is_window = _mask_tensors.as_window(mask.code) is not None
        assert is_window == (not grad or device == "cpu")


def test_reading_changes_nothing() -> None:
    mask, _ = pair("intervals", 12, 12)
    for operation in {**COMPACT, **OTHERS}.values():
        operation(mask)
    assert _mask_tensors.contents(mask) is mask.code  # type: ignore[attr-defined, arg-type]


def test_a_mask_that_is_read_first_in_another_mode() -> None:
    """Eager's mask is an ordinary tensor, which later uses can differentiate."""
    mask, eager = pair("window", 12, 12)
    with torch.inference_mode():
        assert torch.equal(mask + 0, eager)
    scores = torch.zeros(BATCH, 1, 12, 12, requires_grad=True)
    (scores * mask.clamp(min=-9)).sum().backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, eager.clamp(min=-9))
    mask, eager = pair("window", 12, 12)
    torch.func.vmap(lambda row: row + mask)(torch.zeros(3, 12))
    assert torch.equal(mask, eager)
    mask, eager = pair("window", 12, 12)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert (mask + 1).shape == mask.shape
    assert torch.equal(mask, eager) and torch.equal(mask + 0, eager)


def test_files_numpy_and_text() -> None:
    mask, eager = pair("causal", 12, 12)
    assert torch.equal(pickle.loads(pickle.dumps(mask)), eager)
    assert (mask.numpy() == eager.numpy()).all() and mask.tolist() == eager.tolist()
    assert (
        str(made(masks.causal_mask_function, 12, 12))
        == "LayerMask([2, 1, 12, 12], torch.float32, window (-1, 0), on cpu)"
    )
    assert "torch.int32" in str(mask)


def test_an_empty_batch() -> None:
    mask = _transformers_mask(0, padding=torch.ones(0, 12, dtype=torch.bool))
    assert mask.shape == (0, 1, 12, 12) and mask.eager().shape == (0, 1, 12, 12)
    intervals = _mask_tensors.layer_mask(torch.zeros(0, 1, 12, 2, dtype=torch.int32), 0, 12, 12)
    assert _mask_tensors.as_window(intervals.code) is None  # type: ignore[attr-defined]


def _transformers_mask(batch: int, padding: Tensor) -> Any:
    from flashattn_ext.integrations import _transformers_masks

    return _transformers_masks.attention_mask(batch, 12, 12, attention_mask=padding, device="cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """What a model does with its mask."""
    out = fax.attention(nn.Module(), q, k, v, mask)[0]
    part = fax.attention(nn.Module(), q[:, :, -2:], k, v, mask[:, :, -2:])[0]
    return out, part, mask == 0, mask + q[:, :1, :, :1]


def close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for each, other in zip(got, want, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize(("name", "dynamic"), [("window", False), ("custom", True)])
def test_torch_compile(name: str, dynamic: bool) -> None:
    """In one graph that makes the mask, reads it, slices it and attends with it; and as the input of a graph."""
    q, k, v = tensors()
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, made(KNOWN[name](), q.shape[2], k.shape[2]))

    torch.compiler.reset()
    close(torch.compile(whole, **options)(q, k, v), whole(q, k, v))
    compiled = torch.compile(attend, **options)
    for written in (False, True):
        mask = made(KNOWN[name](), 12, 12)
        if written:
            mask[:, :, :, 0] = -1.0
        close(compiled(q, k, v, mask), attend(q, k, v, mask))


@pytest.mark.parametrize("name", ["causal", "custom"])
def test_writes_in_a_graph(name: str) -> None:
    """Are seen, or refused where torch.compile shows them too late."""
    q, k, v = tensors()

    def whole(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        mask = made(KNOWN[name](), q.shape[2], k.shape[2])
        mask[:, :, :, 0] = -1.0
        return attend(q, k, v, mask)

    torch.compiler.reset()
    compiled = torch.compile(whole, backend="aot_eager", fullgraph=True)
    if torch.__version__ >= "2.13":
        close(compiled(q, k, v), whole(q, k, v))
        return
    try:
        close(compiled(q, k, v), whole(q, k, v))
    except Exception as error:
        assert "this model writes to its mask" in str(error)


def test_rows_that_ranks_share_have_no_mask_of_every_pair() -> None:
    """A rank knows the window, but not the positions of the other ranks' keys."""
    shared = SharedRows.__new__(SharedRows)
    for sizes in ({"q_length": 12, "kv_length": 12}, {"cache_position": torch.arange(12), "kv_length": 12}):
        mask = shared.attention_mask(BATCH, **sizes)
        assert mask.shape == (BATCH, 1, 12, 12)
        assert _mask_tensors.as_window(_mask_tensors.contents(mask[..., :])) == (-1, 0)  # type: ignore[arg-type]
        with pytest.raises(
            NotImplementedError, match=r"attention_mask: .*this model reads it elsewhere.*without cp_group"
        ):
            mask == 0  # noqa: B015
