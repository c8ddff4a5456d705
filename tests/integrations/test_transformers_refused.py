"""Models of transformers that cannot run through register() say so by name when they are made."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from flashattn_ext.integrations import transformers as fax  # noqa: E402

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    pytest.skip("which models have code of their own changes with the version", allow_module_level=True)

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
# These models add the mask of the registered function to their scores, or use it in masked_fill.
OWN_CODE: dict[str, dict[str, Any]] = {
    "BloomModel": {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "MptModel": {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "CodeGenModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "MPNetModel": SMALL,
    "BigBirdModel": SMALL,
    "NystromformerModel": SMALL,
    "MegatronBertModel": SMALL,
    "RoFormerModel": SMALL,
    "LongformerModel": {**SMALL, "attention_window": 4},
    "DogeModel": SMALL,  # some layers use the attention interface, and the model makes its own mask
}
# These models look up a class by the implementation's name.
TABLES: dict[str, dict[str, Any]] = {
    "FalconModel": SMALL,
    "GPTNeoModel": {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 4, "attention_types": [[["global"], 1]]},
    "GPTJModel": {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
    "SamModel": {},
}  # fmt: skip


def make(model: str, sizes: dict[str, Any], implementation: str) -> Any:
    config = getattr(transformers, model.removesuffix("Model") + "Config")(**sizes)
    config._attn_implementation = implementation
    return getattr(transformers, model)(config)


MOVED = ("CodeGenModel", "GPTJModel")  # transformers 5.24 has them on its attention interface, older versions do not


def goes_through_the_interface(model: str) -> bool:
    source = inspect.getsource(sys.modules[getattr(transformers, model).__module__])
    return model in MOVED and "ALL_ATTENTION_FUNCTIONS.get_interface" in source


@pytest.mark.parametrize("model", [*OWN_CODE, *TABLES])
def test_models_with_an_attention_of_their_own_are_refused_by_name(model: str) -> None:
    fax.register()
    fax.register("fax-again")
    if goes_through_the_interface(model):
        check_against_eager(model)
        return
    reason = "computes attention with its own code" if model in OWN_CODE else r"chooses one of its own classes \(eager"
    for name in ("fax", "fax-again"):
        with pytest.raises(
            NotImplementedError, match=rf'^{model}: attn_implementation="{name}" works for .*{reason}'
        ) as told:
            make(model, {**OWN_CODE, **TABLES}[model], name)
        assert "\n" not in str(told.value)


def check_against_eager(model: str) -> None:
    """Two rows, one of them padded, and then two queries, for which a mask could be broadcast."""
    ids, seen = torch.arange(3, 17).view(2, 7), torch.ones(2, 7, dtype=torch.long)
    seen[0, :3] = 0
    eager, ours = (make(model, {**OWN_CODE, **TABLES}[model], name).eval() for name in ("eager", "fax"))
    ours.load_state_dict(eager.state_dict())
    for queries in (7, 2):
        given = {"input_ids": ids[:, -queries:], "attention_mask": seen[:, -queries:]}
        expected, got = (each(**given).last_hidden_state[given["attention_mask"].bool()] for each in (eager, ours))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_reads_its_mask_as_visible_keys() -> None:
    """With eager's mask it hides what it should see; transformers' own eager attention has NaN for a row that sees every key."""
    fax.register()
    if not hasattr(transformers, "NemotronAsrStreamingEncoder"):
        pytest.skip(f"transformers {transformers.__version__} has no such model")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_mel_bins": 16,
    }
    config = transformers.NemotronAsrStreamingEncoderConfig(**sizes, subsampling_conv_channels=16)
    config._attn_implementation = "fax"
    with pytest.raises(
        NotImplementedError, match=r'^NemotronAsrStreamingEncoder: .* reads its mask as .*; use "sdpa" for it$'
    ):
        transformers.NemotronAsrStreamingEncoder(config)
    config._attn_implementation = "sdpa"
    features = {"input_features": torch.randn(1, 32, 16)}
    assert transformers.NemotronAsrStreamingEncoder(config).eval()(**features).last_hidden_state.isfinite().all()


def test_other_implementations_of_those_models_are_left_alone() -> None:
    fax.register()
    ids = torch.arange(3, 9)[None]
    assert make("BloomModel", OWN_CODE["BloomModel"], "eager")(input_ids=ids).last_hidden_state.isfinite().all()


def test_a_subclass_of_a_model_that_can_is_not_refused() -> None:
    """The module of the subclass does not use the attention interface."""
    fax.register()

    class Mine(transformers.LlamaModel):
        pass

    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    config._attn_implementation = "fax"
    assert Mine(config)(input_ids=torch.arange(3, 9)[None]).last_hidden_state.isfinite().all()


def test_a_model_that_is_switched_over_is_checked() -> None:
    fax.register()
    model = make("DogeModel", OWN_CODE["DogeModel"], "eager")
    with pytest.raises(NotImplementedError, match=r"^DogeModel: "):
        model.set_attn_implementation("fax")
