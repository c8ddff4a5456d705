"""Models of transformers with attn_implementation="fax" beside "eager": results, every gradient, training, generation."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="the extra `hf` is not installed: pip install -e '.[hf]'")

from families import FAMILIES, LENGTH, Family, padding_mask, token_ids  # noqa: E402

import flashattn_ext  # noqa: E402
from flashattn_ext.integrations import transformers as fax  # noqa: E402

fax.register()


def made(name: str) -> tuple[Family, nn.Module]:
    family = FAMILIES[name]
    if lacking := family.lacking():
        pytest.skip(lacking)
    return family, family.make()


def with_attention(
    model: nn.Module, implementation: str, device: str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    model = copy.deepcopy(model).to(device)
    model.set_attn_implementation(implementation)
    return model if dtype is None else model.to(dtype)


def to(inputs: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    moved = {name: t.to(device) for name, t in inputs.items() if isinstance(t, Tensor)}
    return inputs | {name: t.to(dtype) if t.is_floating_point() else t for name, t in moved.items()}


def at_once(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).logits


def results(model: nn.Module, inputs: dict[str, Any], keep: Tensor | None, run: Any = at_once) -> dict[str, Tensor]:
    """Logits where `keep` [B, S] is 1, and the gradient of every parameter."""
    dtype = next(model.parameters()).dtype
    device = next(model.parameters()).device
    logits = run(model, to(inputs, str(device), dtype))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)).to(logits)
    if keep is not None:
        logits = logits * keep.to(device)[..., None]
    (logits * weights).sum().backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach().double().cpu(), **gradients}


def check(model: nn.Module, inputs: dict[str, Any], keep: Tensor | None, device: str, run_eager: Any = at_once) -> None:
    """On the CPU, fp32: equal to eager attention within rounding. Elsewhere, bf16: the error against eager attention in fp32 is
    at most three times the error of eager attention in bf16."""
    expected = results(with_attention(model, "eager", device), inputs, keep, run_eager)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    eager = (
        results(with_attention(model, "eager", device, dtype), inputs, keep, run_eager) if device != "cpu" else expected
    )
    got = results(with_attention(model, "fax", device, dtype), inputs, keep)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        error, allowed = (float((x - expected[name]).norm()) for x in (value, eager[name]))
        floor = 2e-5 * max(float(expected[name].norm()), 1.0)
        if name.endswith("key.bias") and dtype != torch.float32:
            # Adding one vector to all keys changes no weight: the exact gradient is 0, and both errors are rounding residues.
            floor = 2**-7 * float(expected[name.replace("key.", "value.")].norm())
        if name.endswith("router.bias") and dtype != torch.float32:
            # Two numbers whose sum is 0: eager's error in a column of the weight says more about rounding than the error of one number.
            weight = name.replace("bias", "weight")
            columns = expected[weight].shape[1]
            allowed = max(allowed, float((eager[weight] - expected[weight]).norm()) / columns**0.5)
        assert error <= 3 * allowed + floor, f"{name}: error {error:.3e}, eager {allowed:.3e}"


@pytest.mark.parametrize(
    ("name", "side"), [(name, side) for name, family in FAMILIES.items() for side in family.padded]
)
def test_a_padded_batch(name: str, side: str, device: str) -> None:
    family, model = made(name)
    mask = padding_mask(side)
    inputs = family.inputs(torch.Generator().manual_seed(3), mask)
    kept = inputs.get("decoder_attention_mask", mask if "input_ids" in inputs else None)
    check(model, inputs, kept, device)


def test_t5_adds_a_bias_of_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer reads a dense bias of every query and key."""
    family, model = made("t5")
    given: list[dict[str, Any]] = []
    forward = flashattn_ext.forward
    monkeypatch.setattr(
        flashattn_ext, "forward", lambda *args, **options: given.append(options) or forward(*args, **options)
    )
    with_attention(model, "fax")(**family.inputs(torch.Generator().manual_seed(3), padding_mask("right")))
    assert len(given) == 6
    assert all(options["bias"] is None and options["relative_bias"] is not None for options in given)


def test_a_decoder_that_became_an_encoder(device: str) -> None:
    """The configuration says is_causal=False, but the layers still have is_causal=True."""
    _, model = made("llama")
    model.config.is_causal = False
    ids = token_ids(torch.Generator().manual_seed(3))
    for mask in (torch.ones_like(ids), padding_mask("right")):
        check(model, {"input_ids": ids, "attention_mask": mask}, mask, device)


DOCUMENTS = ((9, 1, 14), (5, 19))  # lengths of the documents in each row


def packed_positions() -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.packed])
def test_packed_documents(name: str, device: str) -> None:
    """Results and gradients equal eager attention over each document alone."""
    _, model = made(name)
    ids = token_ids(torch.Generator().manual_seed(3))
    inputs = {"input_ids": ids, "position_ids": packed_positions(), "use_cache": False}
    if name == "llama4":
        eager = with_attention(model, "eager")
        if not torch.allclose(eager(**inputs).logits, in_parts(eager, inputs), atol=1e-3):
            pytest.skip("this transformers counts chunks from where the row begins, not the document")
    check(model, inputs, None, device, in_parts)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "gemma2"])
def test_positions_that_begin_again_beside_a_mask(name: str, padded: bool, device: str) -> None:
    """A mask of ones, also with padding in another row: transformers separates no documents."""
    _, model = made(name)
    mask = torch.ones(len(DOCUMENTS), LENGTH, dtype=torch.int64)
    mask[1, 20:] = not padded
    ids = token_ids(torch.Generator().manual_seed(3))
    check(model, {"input_ids": ids, "attention_mask": mask, "position_ids": packed_positions()}, mask, device)


def test_arguments_of_the_loss_reach_no_error(device: str) -> None:
    """Padding-free collators and the Trainer pass them, and models pass them on to every layer."""
    _, model = made("llama")
    ids = token_ids(torch.Generator().manual_seed(3)).to(device)
    given = {
        "input_ids": ids,
        "labels": ids,
        "shift_labels": ids.roll(-1, 1),
        "ignore_index": 5,
        "token_type_ids": ids * 0,
    }
    expected, got = (with_attention(model, kind, device)(**given).loss for kind in ("eager", "fax"))
    torch.testing.assert_close(got, expected)


def in_parts(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of packed rows, a document at a time."""
    rows = zip(inputs["input_ids"].split(1), DOCUMENTS, strict=True)
    return torch.cat([torch.cat([model(part).logits for part in row.split(lengths, 1)], 1) for row, lengths in rows])


def test_a_collator_that_says_where_documents_begin(device: str) -> None:
    """With cu_seq_lens beside the positions, and with them alone."""
    _, model = made("mistral")
    model = with_attention(model, "fax", device)
    documents = [{"input_ids": row[:n]} for row, n in zip(token_ids(torch.Generator()).tolist(), (5, 19), strict=True)]
    batch = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(documents)
    batch = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in batch.items() if name != "labels"}
    batch["use_cache"] = False
    expected = with_attention(model, "eager", device)(
        batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    attention = model.model.layers[0].self_attn
    q = torch.randn(1, 4, 24, 8, device=device)
    begins = batch["cu_seq_lens_q"]
    got, _ = fax.attention(attention, q, q, q, None, sliding_window=7, cu_seq_lens_q=begins, cu_seq_lens_k=begins)
    parts = [fax.attention(attention, x, x, x, None, sliding_window=7)[0] for x in q.split((5, 19), 2)]
    torch.testing.assert_close(got, torch.cat(parts, 1))


# --- training -----------------------------------------------------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """Rows with padding at the right, and their labels."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = token_ids(torch.Generator().manual_seed(index))[0]
        mask = (torch.arange(LENGTH) < LENGTH - index).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trained(model: nn.Module, device: str, folder: str, **options: Any) -> dict[str, Tensor]:
    """The weights after two steps of the optimiser."""
    arguments = transformers.TrainingArguments(
        folder, max_steps=2, per_device_train_batch_size=4, learning_rate=0.3, optim="sgd", save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=device == "cpu", dataloader_pin_memory=False, seed=1, **options,
    )  # fmt: skip
    transformers.Trainer(model=model, args=arguments, train_dataset=Rows()).train()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "t5"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_two_steps_of_the_trainer(name: str, gradient_checkpointing: bool, device: str, tmp_path: Any) -> None:
    _, model = made(name)
    options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
    got = trained(with_attention(model, "fax", device), device, str(tmp_path), **options)
    expected = trained(with_attention(model, "eager", device), device, str(tmp_path), **options)
    before = dict(model.named_parameters())
    moved = 0.0
    for parameter, value in expected.items():
        torch.testing.assert_close(got[parameter], value, rtol=1e-3, atol=1e-5)
        moved = max(moved, float((value - before[parameter].detach()).abs().max()))
    assert moved > 1e-3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_repeats_dropout(reentrant: bool, device: str) -> None:
    """Gradients are the same with and without checkpoints, so the recomputed forward drops the same weights."""
    if lacking := FAMILIES["gpt2"].lacking():
        pytest.skip(lacking)
    sizes = {**FAMILIES["gpt2"].sizes, "attn_pdrop": 0.3}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(device).train()
    model.set_attn_implementation("fax")
    ids = token_ids(torch.Generator().manual_seed(3)).to(device)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(5)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append(model.transformer.h[0].attn.c_attn.weight.grad.clone())
    torch.testing.assert_close(*gradients)
    model.eval()
    torch.testing.assert_close(
        model(ids).logits, with_attention(model, "eager", device)(ids).logits, rtol=1e-4, atol=1e-4
    )


def test_dropout_follows_the_generator(device: str) -> None:
    q, k, v = (torch.randn(2, 4, 9, 8, device=device) for _ in range(3))
    torch.manual_seed(3)
    got, _ = fax.attention(nn.Module(), q, k, v, None, dropout=0.4)
    torch.manual_seed(3)
    expected = flashattn_ext.forward(q, k, v, layout="bhsd", dropout_p=0.4).transpose(1, 2)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not torch.allclose(got, fax.attention(nn.Module(), q, k, v, None)[0])


@pytest.mark.parametrize("inputs", ["padded", "packed", "plain"])
def test_torch_compile(inputs: str) -> None:
    """In one graph, which also makes the mask."""
    family = replace(FAMILIES["mistral"], sizes={**FAMILIES["mistral"].sizes, "num_hidden_layers": 1})
    model = with_attention(family.make(), "fax")
    ids = token_ids(torch.Generator().manual_seed(3))
    given = {
        "padded": {"attention_mask": padding_mask("left")},
        "packed": {"position_ids": packed_positions(), "use_cache": False},
        "plain": {},
    }[inputs]
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, expected = compiled(ids, **given).logits, model(ids, **given).logits
    keep = given.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(got[keep], expected[keep], rtol=1e-4, atol=1e-4)


def test_torch_compile_of_a_step_of_generation() -> None:
    """One query with a static cache, whose length is known on the device only."""
    model = with_attention(FAMILIES["gemma3"].make(), "fax")
    ids = token_ids(torch.Generator().manual_seed(3))
    results = []
    torch.compiler.reset()
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        cache = transformers.StaticCache(model.config, max_cache_len=40)
        with torch.no_grad():
            model(ids[:, :20], past_key_values=cache)
            position = {"cache_position": torch.tensor([20])} if transformers.__version__ < "5" else {}
            results.append(step(ids[:, 20:21], past_key_values=cache, **position).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_layers_that_are_moved_to_their_device(tmp_path: Any) -> None:
    """A device map: hooks move each layer's inputs, masks included."""
    from accelerate import dispatch_model

    _, model = made("gemma3")
    model = with_attention(model, "fax")
    inputs = {"input_ids": token_ids(torch.Generator()), "attention_mask": padding_mask("right")}
    expected = model(**inputs).logits.detach()
    names = [name for name, module in model.model.named_children() if not isinstance(module, nn.ModuleList)]
    devices = {f"model.{name}": "cpu" for name in names} | {
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "lm_head": "cpu",
    }
    dispatched = dispatch_model(model, devices, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    torch.testing.assert_close(dispatched(**inputs).logits, expected)


# --- generation ---------------------------------------------------------------------------------------------------------


GENERATING = [
    (name, cache)
    for name in ("llama", "mistral", "gemma3", "gpt_oss", "inkling2", "llama4", "t5", "whisper")
    for cache in ("dynamic", "static")
    if (name, cache)
    != ("inkling2", "static")  # its position bias has the keys of a dynamic cache, with eager attention too
]


@pytest.mark.parametrize(("name", "cache"), GENERATING)
def test_generate(name: str, cache: str, device: str) -> None:
    """Greedy, from prompts with padding at the left; longer than the windows."""
    family, model = made(name)
    inputs = to(family.inputs(torch.Generator().manual_seed(3), padding_mask("left")), device, torch.float32)
    if "decoder_input_ids" in inputs:
        inputs = {name: t for name, t in inputs.items() if not name.startswith("decoder")}
    options: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "output_logits": True}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    eager = with_attention(model, "eager", device)
    try:
        expected = eager.generate(**inputs, **options, return_dict_in_generate=True)
    except TypeError as error:  # 5.5 and a static cache of chunked layers
        pytest.skip(f"this transformers cannot generate with eager attention here either: {error}")
    got = with_attention(model, "fax", device).generate(**inputs, **options, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)


def test_a_prompt_in_parts(device: str) -> None:
    """Several queries with keys that are already in the cache."""
    _, model = made("mistral")
    ids = token_ids(torch.Generator().manual_seed(3)).to(device)
    model = with_attention(model, "fax", device)
    first = model(ids[:, :10], use_cache=True)
    rest = model(ids[:, 10:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_reads_the_cache_through_the_kernels_of_decoding(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step after the prompt, in every layer; a training step never does."""
    calls: list[int] = []

    def counted(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(q.shape[1])
        return original(q, *arguments, **options)

    original = flashattn_ext.flash_attn_with_kvcache
    monkeypatch.setattr(flashattn_ext, "flash_attn_with_kvcache", counted)
    model = with_attention(FAMILIES["llama"].make(), "fax")
    ids = token_ids(torch.Generator().manual_seed(3))
    options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    model.generate(ids[:, :20], max_new_tokens=5, min_new_tokens=5, do_sample=False, **options)
    assert calls == [1] * (4 * model.config.num_hidden_layers)
    model(ids).logits.sum().backward()
    assert len(calls) == 4 * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "bert", "gemma2", "inkling2"])
def test_attention_weights_are_those_of_eager(name: str, device: str) -> None:
    """In every layer, for rows that are not padding: fully masked rows have weights of 0 here."""
    family, model = made(name)
    model.eval()
    mask = padding_mask(family.padded[0])
    inputs = to(family.inputs(torch.Generator().manual_seed(3), mask), device, torch.float32)
    kept = mask.bool().to(device)[:, None, :, None]
    expected, got = (with_attention(model, kind, device)(**inputs, output_attentions=True) for kind in ("eager", "fax"))
    assert len(got.attentions) == len(expected.attentions) > 0
    for a, b in zip(got.attentions, expected.attentions, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a * kept, b * kept, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[0], with_attention(model, "fax", device)(**inputs)[0], rtol=0, atol=0)


def test_attention_weights_of_encoder_and_decoder() -> None:
    """Without padding; both kinds of self-attention, one with a position bias, and cross attention."""
    family, model = made("t5")
    model.eval()
    inputs = family.inputs(torch.Generator().manual_seed(3), None)
    expected, got = (with_attention(model, kind)(**inputs, output_attentions=True) for kind in ("eager", "fax"))
    for field in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(getattr(got, field)) == len(getattr(expected, field)) > 0
        for a, b in zip(getattr(got, field), getattr(expected, field), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
