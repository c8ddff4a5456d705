"""What layers of transformers pass to attention beside its arguments, and how errors name a layer."""

from __future__ import annotations

from typing import Any

from torch import nn

# Keyword arguments that do not affect attention, or repeat another argument. Most models pass what their call gets, arguments of the loss
# and columns of the batch included, to every layer.
SAYS_NOTHING = {
    # options of a forward pass and of its output
    "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "output_hidden_states", "output_router_logits", "return_dict",
    "seq_idx", "use_cache",
    # arguments of losses, transformers' own and those that replace it
    "accum_dtype", "ignore_index", "labels", "num_items_in_batch", "return_loss", "return_token_accuracy", "shift_labels", "skip_logits",
    "use_token_scaling",
    # what tokenizers, processors and collators put beside input_ids
    "assistant_masks", "completion_mask", "length", "mm_token_type_ids", "num_truncated_tokens", "offset_mapping",
    "overflow_to_sample_mapping", "overflowing_tokens", "special_tokens_mask", "token_type_ids",
}  # fmt: skip


def layer_name(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} of layer {index}"


def unsupported(module: nn.Module, name: str, given: Any) -> Exception:
    return NotImplementedError(
        f"{layer_name(module)}: {name}: expected nothing by this name, got {type(given).__name__}; it may change the result of attention, "
        'and "fax" does not support it. Use another attn_implementation for this model, "eager" for example'
    )
