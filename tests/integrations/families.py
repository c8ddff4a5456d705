"""Small random models of many families, one entry each, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
BATCH, LENGTH = 2, 24
LENGTHS = (15, LENGTH)  # tokens of each row; the others are padding

# The configuration keys of sizes in nearly every language model.
_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
}  # fmt: skip
_TWO_KINDS_OF_LAYERS = ["sliding_attention", "full_attention"]


def padding_mask(side: str) -> Tensor:
    """int64 [BATCH, LENGTH], 1 where there is a token."""
    index = torch.arange(LENGTH)
    rows = [index < n if side == "right" else index >= LENGTH - n for n in LENGTHS]
    return torch.stack(rows).long()


def token_ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def text(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": token_ids(generator), "attention_mask": mask}


def translation(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    """Inputs of an encoder and a decoder of different lengths."""
    return {
        "input_ids": token_ids(generator),
        "attention_mask": mask,
        "decoder_input_ids": token_ids(generator)[:, :17],
        "decoder_attention_mask": torch.ones(BATCH, 17, dtype=torch.int64),
    }


def speech(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    features = torch.randn(BATCH, 8, 2 * LENGTH, generator=generator)
    return {"input_features": features, "decoder_input_ids": token_ids(generator), "decoder_attention_mask": mask}


def picture(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}


def picture_in_text(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    """Four image tokens in the middle of each row, which see each other."""
    ids = token_ids(generator)
    ids[:, 10:14] = IMAGE_TOKEN
    kinds = (ids == IMAGE_TOKEN).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds, **picture(generator, mask)}


IMAGE_TOKEN = VOCABULARY - 1


@dataclass(frozen=True)
class Family:
    config: str  # a class of transformers
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[torch.Generator, Tensor], dict[str, Tensor]] = text
    padded: tuple[str, ...] = ("right", "left")  # padding sides
    packed: bool = True  # a causal language model that takes position_ids
    since: tuple[int, int] = (4, 57)  # the first transformers whose model goes through the attention interface

    def lacking(self) -> str:
        """Why the installed transformers cannot show it; empty if it can."""
        if not all(hasattr(transformers, name) for name in (self.config, self.model)):
            return f"transformers {transformers.__version__} has no {self.model}"
        version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
        if version < self.since:
            return f"{self.model} of transformers {transformers.__version__} has its own attention code"
        return ""

    def make(self) -> nn.Module:
        torch.manual_seed(11)
        sizes = {name: value() if callable(value) else value for name, value in self.sizes.items()}
        model = getattr(transformers, self.model)(getattr(transformers, self.config)(**sizes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # With the small default weights, attention would hardly change the results of a small model.
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.15)
                elif "sink" in name:
                    parameter.normal_(0, 1)
        return model.eval()


def _gemma3_text() -> dict[str, Any]:
    return {**_DECODER, "sliding_window": 8, "layer_types": _TWO_KINDS_OF_LAYERS, "query_pre_attn_scalar": 8}


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", _DECODER),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": 7}),
    "gemma2": Family(
        "Gemma2Config", "Gemma2ForCausalLM",
        {**_DECODER, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _gemma3_text()),
    "gpt_oss": Family(
        "GptOssConfig", "GptOssForCausalLM",
        {**_DECODER, "sliding_window": 8, "layer_types": _TWO_KINDS_OF_LAYERS, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM", {**_DECODER, "sliding_window": 9}),
    "olmo2": Family("Olmo2Config", "Olmo2ForCausalLM", _DECODER),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {**_DECODER, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "llama4": Family(
        "Llama4TextConfig", "Llama4ForCausalLM",
        {**_DECODER, "attention_chunk_size": 8, "num_local_experts": 1, "intermediate_size_mlp": 48,
         "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "inkling2": Family(  # a sink of each query, which layers compute, beside a position bias of each
        "Inkling2TextConfig", "Inkling2ForCausalLM",
        {**_DECODER, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "moe_intermediate_size": 16,
         "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window_size": 8, "rel_extent": 16, "d_rel": 4,
         "layer_types": ["hybrid_sliding", "hybrid"], "unpadded_vocab_size": VOCABULARY, "n_layers_per_attn_res_block": 1}, packed=False,
    ),
    "gpt2": Family(
        "GPT2Config", "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": Family("BertConfig", "BertForMaskedLM", _ENCODER, packed=False),
    "roberta": Family("RobertaConfig", "RobertaForMaskedLM", _ENCODER, packed=False),
    "modernbert": Family(
        "ModernBertConfig", "ModernBertForMaskedLM",
        {**_ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
         "eos_token_id": 2}, packed=False, since=(5, 0),
    ),
    "t5": Family(
        "T5Config", "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0},
        inputs=translation, packed=False, since=(5, 20),
    ),
    "whisper": Family(
        "WhisperConfig", "WhisperForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
         "max_source_positions": LENGTH, "max_target_positions": 64, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1},
        inputs=speech, padded=("right",), packed=False,
    ),
    "vit": Family(
        "ViTConfig", "ViTForImageClassification",
        {**_VISION, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, inputs=picture, padded=("right",), packed=False,
    ),
    "beit": Family(  # its position bias is learned for each pair of patches and comes as a mask
        "BeitConfig", "BeitForImageClassification",
        {**_VISION, "use_shared_relative_position_bias": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
         "drop_path_rate": 0.0},
        inputs=picture, padded=("right",), packed=False, since=(5, 20),
    ),
    "gemma3_image": Family(
        "Gemma3Config", "Gemma3ForConditionalGeneration",
        {"text_config": _gemma3_text, "vision_config": lambda: {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
         "mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN, "boi_token_index": 3, "eoi_token_index": 4},
        inputs=picture_in_text, packed=False,
    ),
}  # fmt: skip
