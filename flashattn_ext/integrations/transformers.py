"""Hugging Face transformers: `register()`, then attn_implementation="fax" in any model that goes through its AttentionInterface.

    from flashattn_ext.integrations import transformers as fax
    fax.register()
    model = AutoModelForCausalLM.from_pretrained("...", attn_implementation="fax")

Masks become windows and intervals (_transformers_masks.py), position biases of T5 become biases of a distance. What a model asks for
and this package cannot do raises and names the layer; nothing is dropped. docs/integrations.md has the whole list.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import flashattn_ext
from flashattn_ext import Mask
from flashattn_ext.decode import has_decoding

from . import _mask_tensors

if TYPE_CHECKING:
    from ._transformers_shared import SharedRows

OLDEST = (4, 57)  # the first version whose masks go through AttentionMaskInterface in nearly every model

# What models and training loops hand down to every layer and what says nothing about attention, or says it a second time.
_SAYS_NOTHING = {
    "cache_position", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


def register(name: str = "fax", *, cp_group: Any = None, mode: str = "auto", sharding: str = "zigzag") -> None:
    """Makes attn_implementation=name run through flashattn_ext in every model of transformers. Doing it again changes nothing.

    Args:
        name: how models will ask for it. transformers takes names with "flash" in them for other packages.
        cp_group: ranks that share every row of a batch: a process group or a DeviceMesh of one dimension. Models of that name are
            given this rank's part of tokens and position_ids (distributed.shard).
        mode, sharding: as in flashattn_ext.distributed.attention, with cp_group.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: it is older than 4.57; names its version.
        ValueError: the name is taken, or has "flash" in it.
    """
    if not isinstance(name, str) or not name or "flash" in name:
        raise ValueError(
            f'name: expected a name without "flash", which transformers keeps for other packages, got {name!r}'
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is not installed; pip install 'flashattn_ext[hf]'") from error
    _check_version(transformers.__version__)
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from . import _transformers_masks

    taken = AttentionInterface._global_mapping.get(name, None if name != "eager" else "eager")
    if taken not in (None, attention) and not _is_of_group(taken):
        raise ValueError(f"name: {name!r} is another attention implementation of transformers; choose one that is free")
    if cp_group is None:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, _transformers_masks.attention_mask)
        return
    from ._transformers_shared import SharedRows

    shared = SharedRows(cp_group, mode, sharding)
    AttentionInterface.register(name, functools.partial(attention, shared_rows=shared))
    AttentionMaskInterface.register(name, shared.attention_mask)


def _is_of_group(taken: Any) -> bool:
    """Whether it is what an earlier register(cp_group=...) has put there."""
    return isinstance(taken, functools.partial) and taken.func is attention


def _check_version(version: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise RuntimeError(
            f"transformers {version} is too old: expected {'.'.join(map(str, OLDEST))} or newer; "
            "pip install --upgrade 'flashattn_ext[hf]'"
        )


_DOCUMENTS = (
    "_flashattn_ext_documents"  # the attribute of a tensor that says where documents are, with what was made of it
)


class _Visible(NamedTuple):
    """Which keys a query sees, as flashattn_ext.forward takes it."""

    left: int = -1
    right: int = -1
    mask: Mask | None = None
    bias: Tensor | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    shared_rows: SharedRows | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers registers as an attention function.

    Args:
        module: the layer; its name stands in errors, its `is_causal` counts where there is neither a mask nor `is_causal`.
        query: [B, Hq, Sq, D], key: [B, Hk, Sk, D], value: [B, Hk, Sk, Dv]; any strides.
        attention_mask: what the mask function returned; or a user's dense mask [B or 1, H or 1, Sq or 1, Sk], bool (True is
            seen) or floating-point (added to the scores); or None.
        position_ids: int [B or 1, S]; where there is no mask but a causal one, position 0 begins a packed document.
        sliding_window: keys that a query sees, its own among them; counts where there is no mask, which has it otherwise.
        s_aux: [Hq], the sink.
        position_bias: [1 or B, Hq, Sq, Sk], added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: int [documents + 1], where documents begin that are packed into the only batch entry.
        shared_rows: the ranks that share rows, after register(cp_group=...).
        others: as models hand them down; one that could change the result and is not known here raises.

    Returns:
        (out [B, Sq, Hq, Dv], None)

    Raises:
        ValueError, TypeError, NotImplementedError: naming the layer.
    """
    for name, given in others.items():
        if given is not None and given is not False and name not in _SAYS_NOTHING:
            raise _unsupported(module, name, given)
    if shared_rows is not None:
        if position_bias is not None or cu_seq_lens_q is not None:
            name = "cu_seq_lens_q" if position_bias is None else "position_bias"
            raise NotImplementedError(
                f"{_layer(module)}: {name}: expected None where ranks share rows (cp_group); documents are told by position_ids"
            )
        window = None if attention_mask is None else _mask_tensors.as_window(attention_mask)
        if attention_mask is not None and window is None:
            raise NotImplementedError(
                f"{_layer(module)}: attention_mask: expected what the mask function of cp_group made, got a tensor of shape {list(attention_mask.shape)}"
            )
        visible = _without_mask(module, sliding_window, is_causal) if window is None else _Visible(*window)
        out = shared_rows.attention(
            query, key, value, (visible.left, visible.right), position_ids, softmax_scale=scaling, dropout_p=dropout, sink=s_aux,
            softcap=softcap or 0.0, deterministic=bool(deterministic),
        )  # fmt: skip
        return out, None
    if query.shape[0] != key.shape[0]:  # learned queries of one batch entry, say
        query, key, value = _same_batch(query, key, value)
    if attention_mask is None:
        visible = _without_mask(module, sliding_window, is_causal)
    else:
        visible = _with_mask(module, attention_mask, query, key)
    if visible.right == 0 or visible.mask is not None:
        visible = _apart(visible, position_ids, query, key)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        visible = _packed(module, visible, query, key, cu_seq_lens_q, cu_seq_lens_k)
    relative_bias, bias = None, visible.bias
    if position_bias is not None:
        if _is_of_distance(position_bias):
            relative_bias = _relative_bias(position_bias)
        else:
            bias = position_bias if bias is None else position_bias + bias
    if bias is not None and bias.dtype not in (torch.float32, query.dtype):
        bias = bias.float()
    scores_are_plain = bias is None and relative_bias is None and dropout == 0
    if scores_are_plain and _is_step_of_generation(query, key, value, s_aux):
        out = flashattn_ext.flash_attn_with_kvcache(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=visible.right == 0,
            window_size=(visible.left, visible.right), softmax_scale=scaling, softcap=softcap or 0.0, sink=s_aux,
            mask=visible.mask,
        )  # fmt: skip
        return out, None
    out = flashattn_ext.forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        causal=visible.right == 0, window_size=(visible.left, visible.right), softmax_scale=scaling,
        dropout_p=dropout, sink=s_aux, softcap=softcap or 0.0, relative_bias=relative_bias, bias=bias, mask=visible.mask,
        deterministic=bool(deterministic),
    )  # fmt: skip
    return out, None


def _is_step_of_generation(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> bool:
    """Few queries beside a cache, and no gradients: the kernels that split the cache serve such calls best."""
    plain = type(query) is Tensor and type(key) is Tensor and type(value) is Tensor
    if not plain or query.shape[2] > 16 or query.shape[2] >= key.shape[2] or not has_decoding(query.device):
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sink)):
        return False
    is_read_in_place = key.stride(-1) == 1 and value.stride(-1) == 1
    return is_read_in_place and not torch.is_autocast_enabled(query.device.type)


def _layer(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} of layer {index}"


def _unsupported(module: nn.Module, name: str, given: Any) -> Exception:
    if name == "output_attentions":
        return NotImplementedError(
            f'{_layer(module)}: output_attentions: attention weights are never formed here; load the model with attn_implementation="eager"'
        )
    return NotImplementedError(
        f"{_layer(module)}: {name}: expected nothing by this name, got {type(given).__name__}; it may change what attention computes "
        'and "fax" does not know it. Use another attn_implementation for this model'
    )


def _same_batch(*tensors: Tensor) -> list[Tensor]:
    batch = max(tensor.shape[0] for tensor in tensors)
    return [tensor.expand(batch, -1, -1, -1) if tensor.shape[0] == 1 else tensor for tensor in tensors]


# --- masks --------------------------------------------------------------------------------------------------------------


def _without_mask(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> _Visible:
    """A model that makes no masks, or an encoder that has nothing to hide; or a mask that was lost on the way here, as sequence
    parallelism loses it: for causal attention the mask function returns no None."""
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    side = -1 if sliding_window is None else sliding_window - 1
    return _Visible(side, 0 if causal else side)


def _apart(visible: _Visible, position_ids: Tensor | None, query: Tensor, key: Tensor) -> _Visible:
    """Packed documents, which begin at position 0, where the mask says nothing about them.

    transformers builds documents into the mask for most models, but for some (gpt-oss) it does not, and a lost mask has none.
    """
    length = query.shape[2]
    if position_ids is None or position_ids.dim() != 2 or not 1 < length == key.shape[2] == position_ids.shape[1]:
        return visible
    if not _mask_tensors.may_look(position_ids):
        mask = Mask.documents((position_ids == 0).cumsum(1))
        return visible._replace(mask=mask if visible.mask is None else mask & visible.mask)
    if visible.mask is not None:  # the mask function has looked at more
        return visible
    known = getattr(position_ids, _DOCUMENTS, None)
    if known is None:  # once for all layers
        begins = position_ids == 0
        known = [Mask.documents(begins.cumsum(1))] if bool(begins[:, 1:].any()) else []
        setattr(position_ids, _DOCUMENTS, known)
    return visible._replace(mask=known[0]) if known else visible


def _with_mask(module: nn.Module, attention_mask: Tensor, query: Tensor, key: Tensor) -> _Visible:
    window = _mask_tensors.as_window(attention_mask)
    if window is not None:
        return _Visible(*window)
    mask = _mask_tensors.as_mask(attention_mask)
    if mask is not None:
        return _Visible(mask=mask)
    if attention_mask.dim() != 4 or not (attention_mask.is_floating_point() or attention_mask.dtype == torch.bool):
        raise TypeError(
            f"{_layer(module)}: attention_mask: expected a bool or floating-point tensor [batch, heads or 1, queries, keys], "
            f"got {attention_mask.dtype} of shape {list(attention_mask.shape)}; give the model a mask [batch, keys] of ones and zeros"
        )
    attention_mask = attention_mask[..., : key.shape[2]]
    if attention_mask.is_floating_point():
        return _Visible(bias=attention_mask)
    mask = _mask_tensors.remembered(attention_mask)
    if mask is None:
        try:
            mask = Mask.from_dense(attention_mask.expand(-1, -1, query.shape[2], -1))
        except ValueError as error:
            raise ValueError(
                f"{_layer(module)}: attention_mask: {error}. In transformers that is a floating-point mask of 0 and -inf"
            ) from error
        _mask_tensors.remember(attention_mask, mask)
    return _Visible(mask=mask)


def _packed(
    module: nn.Module, visible: _Visible, query: Tensor, key: Tensor, begins_q: Tensor, begins_k: Tensor
) -> _Visible:
    """Documents by their beginnings, and whatever else hides keys. The last two Masks are kept for other layers."""
    if key.shape[0] != 1:
        raise ValueError(
            f"{_layer(module)}: cu_seq_lens_k: expected one batch entry with all documents, got a batch of {key.shape[0]}"
        )
    made: list[
        tuple[Any, Mask]
    ] = []  # what each Mask was made from, and the Mask; two, for models with two kinds of layers
    if not torch.compiler.is_compiling():
        made = getattr(begins_k, _DOCUMENTS, made)
    given = (visible.left, visible.right, query.shape[2], visible.mask)
    for known, mask in made:
        if known[:3] == given[:3] and known[3] is given[3]:
            return _Visible(mask=mask, bias=visible.bias)
    mask = _between(begins_q, begins_k, key.shape[2], visible.left, visible.right)
    mask = mask if visible.mask is None else mask & visible.mask
    if not torch.compiler.is_compiling():
        setattr(begins_k, _DOCUMENTS, [*made[-1:], (given, mask)])
    return _Visible(mask=mask, bias=visible.bias)


def _between(begins_q: Tensor, begins_k: Tensor, Sk: int, left: int, right: int) -> Mask:
    """Documents of one batch entry by their beginnings, int [documents + 1]; each has the window aligned at its own end."""
    keys = torch.arange(Sk, device=begins_k.device)
    document = torch.searchsorted(begins_k, keys, right=True) - 1
    document = document.clamp(0, begins_k.shape[0] - 2)
    first, last = begins_q[document].long(), begins_q[document + 1].long()
    aligned = keys + last - begins_k[document + 1]  # the query at the key's own place
    if right >= 0:
        first = torch.maximum(first, aligned - right)
    if left >= 0:
        last = torch.minimum(last, aligned + left + 1)
    last = torch.where(keys < begins_k[-1], last, 0)
    return Mask(torch.stack([first, last], -1).int()[None, None])


# --- position biases ----------------------------------------------------------------------------------------------------


def _is_of_distance(position_bias: Tensor) -> bool:
    """Whether a bias [1, H, Sq, Sk] depends on the distance of key and query alone, as one that comes from buckets does.

    It is looked at once and remembers the answer; every layer of T5 is given the same tensor.
    """
    if position_bias.shape[0] != 1 or not _mask_tensors.may_look(position_bias):
        return False
    known: bool | None = getattr(position_bias, "_flashattn_ext_is_of_distance", None)
    if known is None:
        values = position_bias.detach()
        known = bool(torch.equal(values[:, :, 1:, 1:], values[:, :, :-1, :-1]))
        position_bias._flashattn_ext_is_of_distance = known  # type: ignore[attr-defined]
    return known


def _relative_bias(position_bias: Tensor) -> Tensor:
    """The bias of every distance, [H, 2 L + 1] with L one less than the longer of Sq and Sk, from the first column and row.

    A diagonal's gradient goes to the one element that was taken; they all come from the same entry of the table.
    """
    Sq, Sk = position_bias.shape[2:]
    distance = torch.arange(1 - Sq, Sk, device=position_bias.device)
    distances = position_bias[0, :, (-distance).clamp(min=0), distance.clamp(min=0)]
    # flashattn_ext counts from the key that the query is aligned with, Sk - Sq further on.
    return torch.nn.functional.pad(distances, (max(Sq - Sk, 0), max(Sk - Sq, 0)))
