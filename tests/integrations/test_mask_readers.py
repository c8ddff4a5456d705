"""Models whose code reads the mask outside of attention, with attn_implementation="fax" beside "eager"."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from families import FAMILIES, padding_mask  # noqa: E402
from mask_readers import MASK_READERS  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402
from flashattn_ext.integrations._mask_tensors import LayerMask  # noqa: E402

fax.register()


def made(name: str, implementation: str) -> nn.Module:
    family = MASK_READERS[name]
    if lacking := family.lacking():
        pytest.skip(lacking)
    model = copy.deepcopy(family.make())
    model.set_attn_implementation(implementation)
    return model


def results(model: nn.Module, inputs: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Every floating-point output, without rows of padding, and the gradient of every parameter."""
    torch.manual_seed(5)  # Informer samples keys
    outputs = {name: t for name, t in model(**inputs).items() if isinstance(t, Tensor) and t.requires_grad}
    if "input_ids" in inputs and "logits" in outputs:
        outputs["logits"] = outputs["logits"] * inputs["attention_mask"][..., None]
    loss = torch.zeros(())
    for output in outputs.values():
        loss = loss + (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: t.detach().double() for name, t in {**outputs, **gradients}.items()}


def check(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        error, size = float((value - expected[name]).norm()), float(expected[name].norm())
        assert error <= 2e-5 * max(size, 1.0), f"{name}: error {error:.3e} of {size:.3e}"


@pytest.mark.parametrize(
    ("name", "side"), [(name, side) for name, family in MASK_READERS.items() for side in family.padded]
)
def test_a_padded_batch(name: str, side: str) -> None:
    mask = padding_mask(side)
    inputs = MASK_READERS[name].inputs(torch.Generator().manual_seed(3), mask)
    expected, got = (results(made(name, implementation), inputs, mask) for implementation in ("eager", "fax"))
    check(got, expected)


@pytest.mark.parametrize("name", ["lasr", "nllb_moe", "deepseek_v32"])
def test_inference(name: str) -> None:
    """torch counts no writes in inference mode, so a view of the mask may have been written to."""
    inputs = MASK_READERS[name].inputs(torch.Generator().manual_seed(3), padding_mask("right"))
    with torch.inference_mode():
        expected, got = (made(name, implementation)(**inputs)[0] for implementation in ("eager", "fax"))
    if name == "deepseek_v32":
        expected, got = (logits[inputs["attention_mask"].bool()] for logits in (expected, got))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_torch_compile() -> None:
    """The indexer and attention read the mask in one graph. Before torch 2.13 it has no backward: that of transformers' experts on the CPU
    reads numbers, which torch does not trace there, and a graph with a function of allow_in_graph is not compiled in parts instead."""
    inputs = MASK_READERS["deepseek_v32"].inputs(torch.Generator().manual_seed(3), padding_mask("right"))
    torch.compiler.reset()
    with torch.set_grad_enabled(tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)):
        expected = made("deepseek_v32", "eager")(**inputs).logits
        got = torch.compile(made("deepseek_v32", "fax"), backend="aot_eager")(**inputs).logits
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(got[seen], expected[seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_models_form_no_mask_of_every_pair(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory stays linear in the length, padded or packed."""
    if lacking := FAMILIES[name].lacking():
        pytest.skip(lacking)

    def form(mask: LayerMask) -> Tensor:
        raise AssertionError(f"{mask} was formed")

    monkeypatch.setattr(LayerMask, "_form", form)
    model = FAMILIES[name].make()
    model.set_attn_implementation("fax")
    for side in FAMILIES[name].padded:
        model(**FAMILIES[name].inputs(torch.Generator().manual_seed(3), padding_mask(side)))
    if FAMILIES[name].packed:
        positions = torch.arange(24)[None].expand(2, -1) % 9
        model(input_ids=torch.full((2, 24), 3), position_ids=positions, use_cache=False)


def test_attention_of_those_models_has_no_bias_of_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution forms eager's mask for itself, which does not change what attention gets."""
    given: list[dict[str, Any]] = []
    forward = flashattn_ext.forward
    monkeypatch.setattr(
        flashattn_ext, "forward", lambda *args, **options: given.append(options) or forward(*args, **options)
    )
    made("lasr", "fax")(**MASK_READERS["lasr"].inputs(torch.Generator().manual_seed(3), padding_mask("right")))
    assert len(given) == 2
    assert all(options["bias"] is None and options["mask"] is not None for options in given)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_generation_of_sparse_models(name: str) -> None:
    """The indexer's keys are cached, too."""
    ids = MASK_READERS[name].inputs(torch.Generator().manual_seed(3), padding_mask("left"))
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected, got = (made(name, implementation).generate(**ids, **options) for implementation in ("eager", "fax"))
    assert torch.equal(got, expected)
