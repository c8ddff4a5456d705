"""Continuous batching of transformers, model.generate_batch(), with attn_implementation="fax": tokens, pages and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")
try:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.initialization import ensure_decode_fast_path_is_available  # noqa: F401
except ImportError:
    pytest.skip("continuous batching of this transformers has no list to add to", allow_module_level=True)
if not hasattr(ContinuousBatchingConfig, "page_size"):
    pytest.skip(
        "this transformers checks the implementations of continuous batching elsewhere", allow_module_level=True
    )

from families import FAMILIES, VOCABULARY  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402

fax.register()
fax.register("fax-invariant", invariant=True)

LENGTHS = (5, 37, 1, 20, 70, 16)
NEW_TOKENS = 20


def _model(name: str) -> nn.Module:
    family = FAMILIES[name]
    if lacking := family.lacking():
        pytest.skip(lacking)
    model = family.make()
    model.config.eos_token_id = None
    return model


def _greedy() -> Any:
    return transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)


def _tokens(model: nn.Module, implementation: str, **options: Any) -> list[list[int]]:
    """What every request generates. Prompts are longer than a batch, so that they come in chunks beside steps of other requests."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    model.set_attn_implementation(implementation)
    paged = ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 64, "max_batch_tokens": 48, **options})
    results = model.generate_batch(
        prompts, generation_config=_greedy(), continuous_batching_config=paged, progress_bar=False
    )
    tokens = {result.request_id: (result.prompt_ids, result.generated_tokens) for result in results.values()}
    assert len(tokens) == len(prompts)
    return [next(new for prompt, new in tokens.values() if prompt == given) for given in prompts]


def _count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name in ("varlen_forward", "flash_attn_with_kvcache", "forward"):
        original = getattr(flashattn_ext, name)

        def counted(*arguments: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(flashattn_ext, name, counted)
    return calls


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "mistral", "gpt_oss", "gemma2", "gemma3"])
def test_requests_get_the_tokens_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softcap has no other implementation there: Gemma 2 is compared with generate(), a request at a time."""
    model = _model(name)
    if name == "gemma2":
        generator = torch.Generator().manual_seed(1)
        model.set_attn_implementation("eager")
        prompts = [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in LENGTHS]
        expected = [model.generate(each, generation_config=_greedy())[0, each.shape[1] :].tolist() for each in prompts]
    else:
        expected = _tokens(model, "paged|eager")
    calls = _count(monkeypatch)
    assert _tokens(model, "fax") == expected
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert calls["varlen_forward"] > 0 and calls["forward"] == 0


def test_steps_of_one_token_read_the_pages_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("llama")
    calls = _count(monkeypatch)
    in_place = _tokens(model, "fax")
    layers = model.config.num_hidden_layers
    assert calls["flash_attn_with_kvcache"] >= layers * (NEW_TOKENS - len(LENGTHS)) > calls["varlen_forward"]
    calls.clear()
    assert _tokens(model, "fax", max_blocks_per_request=0) == in_place
    assert calls["flash_attn_with_kvcache"] == 0
    assert _tokens(model, "fax", page_size=8) == in_place  # the kernels read pages of 16 keys
    assert calls["flash_attn_with_kvcache"] == 0
    assert _tokens(model, "fax-invariant") == in_place
    assert calls["flash_attn_with_kvcache"] > 0


def test_other_implementations_are_chosen_as_before() -> None:
    model = _model("llama")
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        _tokens(model, "flex_attention")
    assert _tokens(model, "sdpa") == _tokens(model, "paged|eager")


def test_what_layers_may_not_pass_there() -> None:
    layer = nn.Module()
    layer.layer_idx = 3  # type: ignore[assignment]
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    step: dict[str, Any] = {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 4, "max_length_k": 4, "write_index": [], "is_causal": True,
    }  # fmt: skip
    out, _ = fax.attention(layer, q, k, k, None, **step)
    expected = flashattn_ext.varlen_forward(
        *(t[0].transpose(0, 1) for t in (q, k, k)), starts, starts, 4, 4, causal=True
    )
    assert torch.equal(out[0], expected)
    for name, given in (
        ("position_bias", torch.zeros(1, 4, 6, 6)),
        ("attention_mask", torch.zeros(1, 1, 6, 6)),
        ("sinks", torch.zeros(1, 4, 6, 1)),
    ):
        mask = given if name == "attention_mask" else None
        others = {} if name == "attention_mask" else {name: given}
        with pytest.raises(
            NotImplementedError, match=f"Module of layer 3: {name}: expected None in continuous batching"
        ):
            fax.attention(layer, q, k, k, mask, **others, **step)
    with pytest.raises(NotImplementedError, match="Module of layer 3: temperature: expected nothing by this name"):
        fax.attention(layer, q, k, k, None, temperature=2.0, **step)
