"""Small random models whose code reads the mask outside of attention: convolutions, routers, indexers, poolers, their own attention."""

from __future__ import annotations

from typing import Any

import torch
from families import BATCH, LENGTH, VOCABULARY, Family, picture, token_ids, translation
from torch import Tensor


def frames(generator: torch.Generator, mask: Tensor, bins: int) -> dict[str, Tensor]:
    """Four frames of features for each token."""
    features = torch.randn(BATCH, 4 * LENGTH, bins, generator=generator)
    return {"input_features": features, "attention_mask": mask.repeat_interleave(4, 1)}


def speech(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    return frames(generator, mask, 16)


def audio(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    given = frames(generator, mask, 128)
    return {**given, "attention_mask": given["attention_mask"].bool()}


def patches(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    """A picture of 2 by 4 patches and one of 4 by 4."""
    return {
        "pixel_values": torch.randn(BATCH, 16, 48, generator=generator),
        "pixel_attention_mask": (torch.arange(16) < torch.tensor([[8], [16]])).long(),
        "spatial_shapes": torch.tensor([[2, 4], [4, 4]]),
    }


def series(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    past, future = 19, 8
    return {
        "past_values": torch.randn(BATCH, past, generator=generator),
        "past_time_features": torch.randn(BATCH, past, 2, generator=generator),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future, generator=generator),
        "future_time_features": torch.randn(BATCH, future, 2, generator=generator),
        "decoder_attention_mask": (torch.arange(future) < torch.tensor([[5], [future]])).long(),
    }


def two_tokens(generator: torch.Generator, mask: Tensor) -> dict[str, Tensor]:
    return {"input_ids": token_ids(generator)[:, :2], "attention_mask": torch.ones(BATCH, 2, dtype=torch.int64)}


_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **_NO_DROPOUT,
}  # fmt: skip
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Queries see 5 keys, which an indexer chooses among those that the mask shows.
_SPARSE = {
    **_SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
    "mlp_layer_types": ["dense", "sparse"], "index_topk": 5, "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip


def _speech_encoder() -> dict[str, Any]:
    sizes = {"num_mel_bins": 16, "conv_kernel_size": 5, "subsampling_conv_channels": 16}
    return {**_SMALL, **_NO_DROPOUT, **sizes, "dropout_positions": 0.0, "layerdrop": 0.0}


MASK_READERS = {
    "lasr": Family("LasrEncoderConfig", "LasrEncoder", _speech_encoder(), speech, padded=("right",)),
    "lasr_ctc": Family(
        "LasrCTCConfig", "LasrForCTC",
        {"encoder_config": _speech_encoder, "vocab_size": VOCABULARY, "pad_token_id": 0}, speech, padded=("right",),
    ),
    "nllb_moe": Family(
        "NllbMoeConfig", "NllbMoeModel",
        {**_ENCODER_DECODER, "vocab_size": VOCABULARY, "num_experts": 4, "expert_capacity": 64, "encoder_sparse_step": 2,
         "decoder_sparse_step": 2, "moe_token_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "decoder_start_token_id": 1, "max_position_embeddings": 64, "router_ignore_padding_tokens": False},
        translation, padded=("right",), since=(5, 20),
    ),
    "deepseek_v32": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", _SPARSE),
    "deepseek_v32_two_tokens": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", _SPARSE, two_tokens, padded=("right",)),
    "glm_moe_dsa": Family("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", _SPARSE),
    "axk2": Family("AXK2Config", "AXK2ForCausalLM", _SPARSE),
    "siglip2": Family(
        "Siglip2VisionConfig", "Siglip2VisionModel", {**_SMALL, "patch_size": 4, "num_patches": 16}, patches, padded=("right",)
    ),
    "phi4_vision": Family(  # its layers say that they are causal, which eager attention does not read, and get no mask from eager's function
        "Phi4MultimodalVisionConfig", "Phi4MultimodalVisionModel", {**_SMALL, "image_size": 16, "patch_size": 4}, picture, padded=("right",)
    ),
    "gemma4_audio": Family(
        "Gemma4AudioConfig", "Gemma4AudioModel",
        {**_SMALL, "output_proj_dims": 32, "conv_kernel_size": 5, "attention_chunk_size": 6, "attention_context_left": 5,
         "attention_context_right": 2},
        audio, padded=("right",),
    ),
    "informer": Family(
        "InformerConfig", "InformerModel",
        {**_ENCODER_DECODER, "prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 2},
        series, padded=("right",), since=(5, 20),
    ),
}  # fmt: skip
