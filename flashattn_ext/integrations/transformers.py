"""Hugging Face transformers: `register()`, then attn_implementation="fax" in any model that goes through its AttentionInterface.

    from flashattn_ext.integrations import transformers as fax
    fax.register()
    model = AutoModelForCausalLM.from_pretrained("...", attn_implementation="fax")

Masks become windows and intervals (_transformers_masks.py), position biases of T5 become relative biases. Options of a model that this
package does not support raise an error that names the layer; nothing is ignored. docs/integrations.md has the whole list.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import flashattn_ext
from flashattn_ext import BlockMask, Mask, arguments
from flashattn_ext.decode import has_decoding
from flashattn_ext.mask_arguments import ALL_ROWS
from flashattn_ext.tensor_cache import TensorCache

from . import _mask_tensors, _position_biases, _transformers_paged
from ._mask_tensors import LayerMask
from ._transformers_layers import SAYS_NOTHING, layer_name, unsupported

if TYPE_CHECKING:
    from ._transformers_shared import SharedRows

OLDEST = (4, 57)  # the first version whose masks go through AttentionMaskInterface in nearly every model

_INSTALL = f'pip install --upgrade "transformers>={OLDEST[0]}.{OLDEST[1]}" accelerate'


def register(
    name: str = "fax", *, cp_group: Any = None, mode: str = "auto", sharding: str = "zigzag", invariant: bool = False
) -> None:
    """Registers attn_implementation=name in transformers, for models whose layers go through its AttentionInterface.

    Registering the same name again replaces its options. A model that computes attention with its own code raises NotImplementedError
    when it is made or loaded with that name, with a pointer to the supported models;
    PreTrainedModel.get_correct_attn_implementation is wrapped for that.

    Args:
        name: what models pass as attn_implementation. transformers reserves names with "flash" in them for other packages.
        cp_group: context parallelism over the ranks that share every row of a batch: a process group or a DeviceMesh of one dimension.
            Pass models of that name this rank's part of tokens and position_ids (distributed.shard).
        mode: as in flashattn_ext.distributed.attention; used with cp_group.
        sharding: as in flashattn_ext.distributed.attention; used with cp_group.
        invariant: as in flashattn_ext.forward: the rows of attention have the same bits in a forward of whole sequences and in generate().
            Not with cp_group.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: transformers is older than 4.57; names the installed version.
        ValueError: the name is taken, or contains "flash".
        NotImplementedError: invariant together with cp_group.
    """
    if not isinstance(name, str) or not name or "flash" in name:
        raise ValueError(
            f'name: expected a name without "flash", which transformers keeps for other packages, got {name!r}'
        )
    if flashattn_ext.arguments.flag("invariant", invariant) and cp_group is not None:
        raise NotImplementedError(
            "invariant: expected False where ranks share rows (cp_group), got True; register without one of the two"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"transformers is not installed; {_INSTALL}") from error
    _check_version(transformers.__version__)
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from . import _transformers_masks, _transformers_models

    taken = AttentionInterface._global_mapping.get(name, None if name != "eager" else "eager")
    if taken not in (None, attention) and not _is_made_here(taken):
        raise ValueError(f"name: {name!r} is already an attention implementation of transformers; choose another name")
    if _transformers_models.refuse_others(name):
        _transformers_paged.accept_continuous_batching(_transformers_models.names)
    if cp_group is None:
        AttentionInterface.register(name, functools.partial(attention, invariant=True) if invariant else attention)
        AttentionMaskInterface.register(name, _transformers_masks.attention_mask)
        return
    from ._transformers_shared import SharedRows

    shared = SharedRows(cp_group, mode, sharding)
    AttentionInterface.register(name, functools.partial(attention, shared_rows=shared))
    AttentionMaskInterface.register(name, shared.attention_mask)


def _is_made_here(taken: Any) -> bool:
    """Whether an earlier register() with options has registered this function."""
    return isinstance(taken, functools.partial) and taken.func is attention


def _check_version(version: str) -> None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise RuntimeError(
            f"transformers {version} is too old: expected {'.'.join(map(str, OLDEST))} or newer; {_INSTALL}"
        )


# Values that are computed from a tensor once for all layers.
_documents = TensorCache()  # by position_ids: the Mask of packed documents; None without documents
_packed_masks = TensorCache(most=2)  # by cu_seq_lens_k: the Mask of its documents; two, for two kinds of layers
_dense_masks = TensorCache()  # by a dense mask: its Mask
_flex_masks = TensorCache()  # by the kv_indices of FlexAttention's BlockMask: ours


class _Visible(NamedTuple):
    """Which keys a query sees, as flashattn_ext.forward takes it."""

    left: int = -1
    right: int = -1
    mask: Mask | BlockMask | None = None
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
    indices: Tensor | None = None,
    deterministic: bool | None = None,
    shared_rows: SharedRows | None = None,
    output_attentions: bool | None = None,
    invariant: bool = False,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that register() gives to transformers. Models call it; your own code calls flashattn_ext.forward.

    Args:
        module: the layer; errors name it, and its `is_causal` applies if neither a mask nor `is_causal` is given.
        query: [B, Hq, Sq, D], any strides.
        key: [B, Hk, Sk, D], any strides.
        value: [B, Hk, Sk, Dv], any strides.
        attention_mask: the LayerMask of the mask function; or a dense mask [B or 1, H or 1, Sq or 1, Sk], bool (True is
            visible) or floating-point (added to the scores); or FlexAttention's BlockMask; or None.
        dropout: probability in [0, 1) of dropping an attention weight.
        scaling: factor of the scores, 1 / sqrt(D) by default.
        sliding_window: number of keys that a query sees, its own included; used only without a mask, which contains it otherwise.
        softcap: as in flashattn_ext.forward.
        is_causal: whether queries see only keys up to their own position, if no mask is given.
        s_aux: [Hq], the sink.
        position_bias: [1 or B, Hq, Sq, Sk], added to the scores.
        position_ids: int [B or 1, S]; in causal attention position 0 begins a packed document if the model got no mask, or if its mask
            is lost (None).
        cu_seq_lens_q: int [documents + 1], where the queries of each document begin; the documents are packed into a batch of 1.
        cu_seq_lens_k: int [documents + 1], the same for keys.
        indices: int [B, Sq, n], the keys that each query sees among those that the mask shows (DeepSeek's sparse attention), -1 for none;
            in O(Sq * Sk) memory.
        deterministic: as in flashattn_ext.forward.
        shared_rows: the ranks that share rows, after register(cp_group=...).
        output_attentions: also return the weights of this layer, in O(Sq * Sk) memory; not with dropout.
        invariant: as in flashattn_ext.forward, after register(invariant=True).
        sinks: [B, Hq, Sq, 1], a sink of each query (Inkling 2), with its gradient.
        others: other keyword arguments of models; an unknown one that could change the result raises.

    Returns:
        (out [B, Sq, Hq, Dv], None), or with output_attentions (out, weights [B, Hq, Sq, Sk] in the dtype of query, without a gradient).
        A fully masked query has weights of 0.

    Raises:
        ValueError: a shape or a value is not as described. All errors name the layer.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: the kernels do not support an option of the model.
    """
    if others.get("write_index") is not None and shared_rows is None:
        visible = _without_mask(module, sliding_window, is_causal)
        refused = {"attention_mask": attention_mask, "position_bias": position_bias, "indices": indices, "sinks": sinks}
        shown = {**_shown(visible, scaling, s_aux, softcap), "invariant": invariant}
        starts = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        return _transformers_paged.step_of_requests(
            module, query, key, value, refused, shown, {**others, **starts}
        ), None
    for name, given in others.items():
        if given is not None and given is not False and name not in SAYS_NOTHING:
            raise unsupported(module, name, given)
    if output_attentions and (dropout > 0 or shared_rows is not None):
        raise NotImplementedError(
            f"{layer_name(module)}: output_attentions: expected False with dropout or where ranks share rows (cp_group), got True; call "
            'model.eval(), or load the model with attn_implementation="eager"'
        )
    if shared_rows is not None:
        window = _window_of_shared_rows(
            module,
            attention_mask,
            position_bias=position_bias,
            cu_seq_lens_q=cu_seq_lens_q,
            indices=indices,
            sinks=sinks,
        )
        visible = _without_mask(module, sliding_window, is_causal) if window is None else _Visible(*window)
        out = shared_rows.attention(
            query, key, value, (visible.left, visible.right), position_ids, softmax_scale=scaling, dropout_p=dropout, sink=s_aux,
            softcap=0.0 if softcap is None else softcap, deterministic=bool(deterministic),
        )  # fmt: skip
        return out, None
    if query.shape[0] != key.shape[0]:  # learned queries with a batch of 1, for example
        query, key, value = _same_batch(query, key, value)
    if attention_mask is None:
        visible, and_documents = _without_mask(module, sliding_window, is_causal), True
    else:
        visible, and_documents = _with_mask(module, attention_mask, query, key)
    if and_documents and visible.right == 0:
        visible = _apart(visible, position_ids, query, key)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        visible = _packed(module, visible, query, key, cu_seq_lens_q, cu_seq_lens_k)
    relative_bias, bias = None, visible.bias
    if indices is not None:
        bias = _sum(bias, _selected(indices, query, key))
    if position_bias is not None:
        if _position_biases.is_of_distance(position_bias):
            relative_bias = _position_biases.relative_bias(position_bias)
        else:
            bias = _sum(bias, position_bias)
    if bias is not None and bias.dtype not in (torch.float32, query.dtype):
        bias = bias.float()
    shown = {**_shown(visible, scaling, s_aux, softcap), "mask": visible.mask}
    weights = None
    if output_attentions:
        weights = flashattn_ext.attention_weights(
            query, key, range(query.shape[2]), layout="bhsd", relative_bias=relative_bias, bias=bias, **shown
        ).to(query.dtype)
    scores_are_plain = bias is None and relative_bias is None and dropout == 0
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    results: Any
    if (
        scores_are_plain
        and not isinstance(visible.mask, BlockMask)
        and _is_step_of_generation(query, key, value, s_aux)
    ):
        results = flashattn_ext.flash_attn_with_kvcache(
            q, k, v, invariant=invariant, return_softmax_lse=sinks is not None, **shown
        )
    else:
        results = flashattn_ext.forward(
            q, k, v, dropout_p=dropout, relative_bias=relative_bias, bias=bias, deterministic=bool(deterministic), invariant=invariant,
            return_lse=sinks is not None, **shown,
        )  # fmt: skip
    return (results, weights) if sinks is None else _with_sinks(module, sinks, results, weights)


def _shown(visible: _Visible, scaling: float | None, sink: Tensor | None, softcap: float | None) -> dict[str, Any]:
    """The options of flashattn_ext that are about scores."""
    return {
        "causal": visible.right == 0, "window_size": (visible.left, visible.right), "softmax_scale": scaling, "sink": sink,
        "softcap": 0.0 if softcap is None else softcap,
    }  # fmt: skip


def _with_sinks(
    module: nn.Module, sinks: Tensor, results: tuple[Tensor, Tensor], weights: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Adds a logit of each query to its softmax, which scales the query's weights by exp(lse) / (exp(lse) + exp(sink)).

    results: out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]; weights: [B, Hq, Sq, Sk].
    """
    out, lse = results
    if sinks.shape not in ((*lse.shape, 1), (1, *lse.shape[1:], 1)):
        raise ValueError(
            f"{layer_name(module)}: sinks: expected a logit of each query, {[*lse.shape, 1]}, got shape {list(sinks.shape)}"
        )
    share = torch.sigmoid(lse - sinks[..., 0])  # 0 where a query sees no key
    out = (out * share.transpose(1, 2)[..., None]).to(out.dtype)
    return out, None if weights is None else (weights * share.detach()[..., None]).to(weights.dtype)


def _is_step_of_generation(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> bool:
    """Whether this is a decoding step: few queries, a KV cache and no gradients. The split-KV kernels are the fastest for it."""
    if query.shape[2] > 16 or query.shape[2] >= key.shape[2]:
        return False
    if not (type(query) is type(key) is type(value) is Tensor) or not has_decoding(query.device):
        return False
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (query, key, value, sink)):
        return False
    is_read_in_place = key.stride(-1) == 1 and value.stride(-1) == 1
    return is_read_in_place and arguments.autocast_dtype(query) is None


def _same_batch(*tensors: Tensor) -> list[Tensor]:
    batch = max(tensor.shape[0] for tensor in tensors)
    return [tensor.expand(batch, -1, -1, -1) if tensor.shape[0] == 1 else tensor for tensor in tensors]


def _window_of_shared_rows(
    module: nn.Module, attention_mask: Tensor | None, **unsupported: Tensor | None
) -> tuple[int, int] | None:
    """(left, right) of the mask where ranks share rows, None without a mask."""
    for name, given in unsupported.items():
        if given is not None:
            raise NotImplementedError(
                f"{layer_name(module)}: {name}: expected None where ranks share rows (cp_group), got a tensor; documents are given by position_ids, "
                "and other options of scores need a model that is registered without cp_group"
            )
    if attention_mask is None:
        return None
    if isinstance(attention_mask, LayerMask):
        window = _mask_tensors.as_window(_mask_tensors.contents(attention_mask))
        if window is not None:
            return window
    raise NotImplementedError(
        f"{layer_name(module)}: attention_mask: expected the window that the mask function of cp_group makes, got a tensor of shape "
        f"{list(attention_mask.shape)}; leave the mask to transformers"
    )


def _sum(bias: Tensor | None, other: Tensor) -> Tensor:
    return other if bias is None else other + bias


def _selected(indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias [B, 1, Sq, Sk] that hides every key but the selected ones, indices [B, Sq, n]."""
    Sk = key.shape[2]
    hidden = torch.ones((*indices.shape[:2], Sk + 1), dtype=torch.bool, device=query.device)
    at = torch.where(indices < 0, Sk, indices).long()
    hidden = hidden.scatter(2, at, False)[:, None, :, :Sk]  # without the place of those that select nothing
    return torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)


# --- masks --------------------------------------------------------------------------------------------------------------


def _without_mask(module: nn.Module, sliding_window: int | None, is_causal: bool | None) -> _Visible:
    """The visible keys if attention_mask is None: the model makes no masks, an encoder has no padding, or the mask was lost.

    Sequence parallelism loses masks: for causal attention the mask function never returns None.
    """
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    side = -1 if sliding_window is None else sliding_window - 1
    return _Visible(side, 0 if causal else side)


def _apart(visible: _Visible, position_ids: Tensor | None, query: Tensor, key: Tensor) -> _Visible:
    """Adds packed documents, which begin at position 0, to a window.

    transformers builds documents into the mask of most models, but not of all (gpt-oss), and a lost mask does not have them.
    """
    length = query.shape[2]
    if position_ids is None or position_ids.dim() != 2 or not 1 < length == key.shape[2] == position_ids.shape[1]:
        return visible
    if not _mask_tensors.may_look(position_ids):
        return visible._replace(mask=Mask.documents((position_ids == 0).cumsum(1)))
    return visible._replace(mask=_documents.get([position_ids], lambda: _documents_of(position_ids)))


def _documents_of(position_ids: Tensor) -> Mask | None:
    begins = position_ids == 0
    return Mask.documents(begins.cumsum(1)) if bool(begins[:, 1:].any()) else None


def _with_mask(module: nn.Module, attention_mask: Tensor, query: Tensor, key: Tensor) -> tuple[_Visible, bool]:
    """The visible keys, and whether position_ids may separate documents."""
    Sq, Sk = query.shape[2], key.shape[2]
    if isinstance(attention_mask, LayerMask):
        return _with_layer_mask(module, attention_mask, Sq, Sk)
    if type(attention_mask).__module__ == "torch.nn.attention.flex_attention":
        return _Visible(mask=_of_flex(attention_mask)), False
    if attention_mask.dim() != 4 or not (attention_mask.is_floating_point() or attention_mask.dtype == torch.bool):
        raise TypeError(
            f"{layer_name(module)}: attention_mask: expected a bool or floating-point tensor [batch, heads or 1, queries, keys], "
            f"got {attention_mask.dtype} of shape {list(attention_mask.shape)}; pass the model a mask [batch, keys] of ones and zeros"
        )
    if attention_mask.is_floating_point():
        return _Visible(bias=attention_mask[..., :Sk]), False
    return _Visible(mask=_of_dense(module, attention_mask, Sq, Sk)), False


def _with_layer_mask(module: nn.Module, layer_mask: LayerMask, Sq: int, Sk: int) -> tuple[_Visible, bool]:
    """As _with_mask. A window, or the Mask that the LayerMask keeps, is found by the first of the layers that share the mask."""
    if torch.compiler.is_compiling():
        return _read_layer_mask(module, layer_mask, Sq, Sk)
    known = layer_mask.known
    if known is not None and known[0] == Sq and known[1] == Sk and layer_mask.untouched():
        found: tuple[_Visible, bool] = known[2]
        return found
    found = visible, _ = _read_layer_mask(module, layer_mask, Sq, Sk)
    if visible.bias is None and (visible.mask is None or visible.mask is layer_mask._kept):
        layer_mask.known = (Sq, Sk, found)
    return found


def _read_layer_mask(module: nn.Module, layer_mask: LayerMask, Sq: int, Sk: int) -> tuple[_Visible, bool]:
    mask: Tensor = layer_mask
    if mask.shape[3] > Sk:  # eager attention of transformers 4 does the same
        mask = mask[..., :Sk]
    if mask.shape[2] == 1 and Sq > 1:
        mask = mask.expand(-1, -1, Sq, -1)
    assert isinstance(mask, LayerMask)
    code = _mask_tensors.contents(mask)
    if code.is_floating_point():  # the model wrote to its mask
        return _Visible(bias=code), False
    window = _mask_tensors.as_window(code)
    if window is not None:
        return _Visible(*window), _mask_tensors.and_documents(code)
    if code.dtype == torch.bool:
        return _Visible(mask=_of_dense(module, code, Sq, Sk)), False
    return _Visible(mask=Mask(code) if torch.compiler.is_compiling() else mask.mask()), False


def _of_flex(block_mask: Any) -> BlockMask:
    """FlexAttention's BlockMask, converted once for all layers."""
    tensors = [block_mask.kv_indices, block_mask.kv_num_blocks]
    return _flex_masks.get(
        tensors, lambda: BlockMask.from_flex(block_mask), (block_mask.mask_mod, block_mask.seq_lengths)
    )


def _of_dense(module: nn.Module, visible: Tensor, Sq: int, Sk: int) -> Mask:
    return _dense_masks.get([visible], lambda: _from_dense(module, visible, Sq, Sk), (Sq, Sk))


def _from_dense(module: nn.Module, attention_mask: Tensor, Sq: int, Sk: int) -> Mask:
    try:
        return Mask.from_dense(attention_mask[..., :Sk].expand(-1, -1, Sq, -1))
    except ValueError as error:
        raise ValueError(
            f"{layer_name(module)}: attention_mask: {error}. In transformers, pass a floating-point mask of 0 and -inf"
        ) from error


def _packed(
    module: nn.Module, visible: _Visible, query: Tensor, key: Tensor, begins_q: Tensor, begins_k: Tensor
) -> _Visible:
    """Combines packed documents, given by their starts, with the other masks."""
    if key.shape[0] != 1:
        raise ValueError(
            f"{layer_name(module)}: cu_seq_lens_k: expected one batch entry with all documents, got a batch of {key.shape[0]}; "
            "pack the documents into one row"
        )
    sides, Sq = (visible.left, visible.right), query.shape[2]

    def made() -> Mask | BlockMask:
        mask = _between(begins_q, begins_k, key.shape[2], *sides)
        return mask if visible.mask is None else mask & visible.mask

    tensors = [begins_k, begins_q]
    if visible.mask is not None:
        tensors.append(visible.mask.lists if isinstance(visible.mask, BlockMask) else visible.mask.intervals)
    return _Visible(mask=_packed_masks.get(tensors, made, (*sides, Sq, key.shape[2])), bias=visible.bias)


def _between(begins_q: Tensor, begins_k: Tensor, Sk: int, left: int, right: int) -> Mask:
    """The Mask of the documents of one batch entry, given by their starts, int [documents + 1]; each aligns the window at its own end."""
    keys = torch.arange(Sk, device=begins_k.device)
    document = torch.searchsorted(begins_k, keys, right=True) - 1
    document = document.clamp(0, begins_k.shape[0] - 2)
    first, last = begins_q[document].long(), begins_q[document + 1].long()
    aligned = keys + last - begins_k[document + 1]  # the query aligned with each key
    if right >= 0:
        first = torch.maximum(first, aligned - min(right, ALL_ROWS))
    if left >= 0:
        last = torch.minimum(last, aligned + min(left, ALL_ROWS) + 1)
    last = torch.where(keys < begins_k[-1], last, 0)
    return Mask(torch.stack([first, last], -1).int()[None, None])
