"""The keyword arguments of transformers' layers, versions of transformers, names, and imports."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from helpers import run_python  # noqa: E402
from test_transformers_masks import BATCH, Layer, expected, made, tensors, values  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

from flashattn_ext.integrations import transformers as fax  # noqa: E402


def test_keywords_that_are_not_known_raise() -> None:
    q, k, v = tensors()
    with pytest.raises(
        NotImplementedError, match="Layer of layer 3: block_indices: expected nothing by this name, got Tensor"
    ):
        fax.attention(Layer(), q, k, v, None, block_indices=torch.zeros(1))
    with pytest.raises(
        NotImplementedError, match=r'Layer of layer 3: output_attentions: .*attn_implementation="eager"'
    ):
        fax.attention(Layer(), q, k, v, None, dropout=0.1, output_attentions=True)
    harmless = {
        "block_indices": None,
        "output_attentions": False,
        "use_cache": True,
        "num_items_in_batch": torch.tensor(3),
    }
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, None, **harmless)[0], expected(q, k, v))


PASSED_OVER = {
    "labels": torch.zeros(BATCH, 12, dtype=torch.int64), "shift_labels": torch.zeros(BATCH, 12, dtype=torch.int64), "ignore_index": -1,
    "token_type_ids": torch.zeros(BATCH, 12, dtype=torch.int64), "special_tokens_mask": torch.zeros(BATCH, 12), "length": torch.tensor([3, 4]),
    "offset_mapping": torch.zeros(BATCH, 12, 2), "return_token_accuracy": True, "accum_dtype": torch.float32,
}  # fmt: skip


def test_keywords_of_losses_and_tokenizers_are_passed_over() -> None:
    q, k, v = tensors()
    torch.testing.assert_close(fax.attention(Layer(), q, k, v, None, **PASSED_OVER)[0], expected(q, k, v))


def test_indices_that_an_indexer_has_chosen() -> None:
    """Keys that are chosen and that the mask shows; -1 chooses none."""
    q, k, v = tensors()
    indices = torch.rand(BATCH, 12, 12).argsort(-1)[..., :5].int()
    indices[..., 0] = torch.arange(12)  # every query chooses a key that it sees
    indices[..., 4] = -1
    chosen = torch.zeros(BATCH, 12, 12, dtype=torch.bool).scatter(2, indices[..., :4].long(), True)
    visible = values(masks.causal_mask_function, 12, 12, 0, 0) & chosen
    mask = made(masks.causal_mask_function, 12, 12)
    got = fax.attention(Layer(), q, k, v, mask, indices=indices)[0]
    torch.testing.assert_close(got, expected(q, k, v, visible[:, None]))


@pytest.mark.parametrize("case", ["causal", "step", "with s_aux", "half"])
def test_sinks_of_queries(case: str) -> None:
    """One more logit in the softmax of each query, with gradients of it and of q, k and v; also where a row sees no key."""
    dtype = torch.bfloat16 if case == "half" else torch.float32
    q, k, v = (t.to(dtype) for t in tensors())
    if case == "step":  # of generation: two queries, no gradient
        q = q[:, :, -2:]
    sinks = torch.randn(*q.shape[:3], 1, dtype=dtype)
    s_aux = torch.randn(q.shape[1]) if case == "with s_aux" else None
    leaves = [t.requires_grad_(case != "step") for t in (q, k, v, sinks)]
    rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    visible = (torch.arange(k.shape[2]) <= rows) & (rows != 0)
    given = None if case == "step" else visible[None, None]

    def formula(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        more = sinks if s_aux is None else torch.cat([sinks, s_aux[:, None, None].to(sinks).expand_as(sinks)], -1)
        weights = torch.cat([logits, more], -1).softmax(-1)[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2), weights

    out, weights = fax.attention(
        Layer(), *leaves[:3], given, sinks=leaves[3], s_aux=s_aux, is_causal=True, output_attentions=True
    )
    assert out.dtype == weights.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected_out, expected_weights = formula(*exact)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=tolerance, atol=tolerance)
    if case != "step":
        got = torch.autograd.grad(out.float().square().sum(), leaves)
        for a, b in zip(got, torch.autograd.grad(expected_out.square().sum(), exact), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=5 * tolerance, atol=5 * tolerance)


def test_sinks_of_another_shape() -> None:
    q, k, v = tensors()
    with pytest.raises(
        ValueError, match=r"Layer of layer 3: sinks: expected a logit of each query, \[.*, 1\], got shape \[4\]"
    ):
        fax.attention(Layer(), q, k, v, None, sinks=torch.zeros(4))


@pytest.mark.parametrize("version", ["4.56.2", "3.0", "4.9"])
def test_a_version_that_is_too_old(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["transformers"], "__version__", version
    )  # importing its Trainer has replaced the module
    with pytest.raises(RuntimeError, match=f"transformers {version} is too old: expected 4.57 or newer"):
        fax.register()


@pytest.mark.parametrize("name", ["", "flash_fax", 3, "sdpa", "eager"])
def test_names_that_are_taken(name: Any) -> None:
    with pytest.raises(ValueError, match="name: "):
        fax.register(name)


def test_registering_twice_and_under_another_name() -> None:
    for name in ("fax", "fax", "fax_2"):
        fax.register(name)
    functions = transformers.AttentionInterface()
    assert functions["fax"] is functions["fax_2"] is fax.attention


def test_the_package_imports_no_integration() -> None:
    done = run_python(
        "import sys, flashattn_ext; print([m for m in sys.modules if m.split('.')[0] == 'transformers' or 'integrations' in m])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_where_transformers_is_missing() -> None:
    done = run_python(
        """
        import sys
        sys.modules["transformers"] = None
        from flashattn_ext.integrations import transformers
        transformers.register()
        """
    )
    assert (
        'ImportError: transformers is not installed; pip install --upgrade "transformers>=4.57" accelerate'
        in done.stderr
    )
