"""torchtitan: `--override.imports flashattn_ext.integrations.torchtitan.flex` (or `.varlen`) runs the attention of a model here.

torchtitan's registry has overrides: functions that replace the configuration of a component, which a training run names by their import
path. flex() replaces FlexAttention, the attention of models that are built with attn_backend="flex", and varlen() VarlenAttention.
Checkpoints stay as they are. Importing this module imports torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types
from torch import Tensor
from torch.nn.attention import flex_attention
from torchtitan.config import derive, override
from torchtitan.distributed.utils import is_in_batch_invariant_mode
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

import flashattn_ext
from flashattn_ext import BlockMask
from flashattn_ext.tensor_cache import TensorCache

_block_masks = TensorCache(most=2)  # by the kv_indices of FlexAttention's BlockMask: ours


class Attention(VarlenAttention):
    """torchtitan's VarlenAttention on these kernels: causal attention, or a window, within documents that are packed into rows.

    Unlike torchtitan's it computes in the dtype of its inputs, float32 included, and runs on CPUs too. In torchtitan's batch-invariant
    mode it is invariant=True.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The configuration of VarlenAttention."""

    def __init__(self, config: Config) -> None:
        # Without VarlenAttention's own, which activates torch's FlashAttention-3 or -4 in the whole process.
        super(VarlenAttention, self).__init__()
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """Attention of the documents of all rows.

        Args:
            q_BLNH: queries [B, L, Hq, D].
            k_BLNH: keys [B, L, Hk, D].
            v_BLNH: values [B, L, Hk, Dv].
            attention_masks: a VarlenMetadata: where documents begin in the B * L positions.
            scale: factor of the scores, 1 / sqrt(D) by default.
            out_transform: a function of out [B, L, Hq, Dv] and lse [B, L, Hq], whose result is returned.
            enable_gqa: whether keys may have fewer heads than queries.
            others: other keyword arguments; one that is not None raises.

        Returns:
            out [B, L, Hq, Dv], or what out_transform returns.

        Raises:
            ValueError: a shape or a value is not as described.
            TypeError: a type or a dtype is not as described, or an unknown keyword argument.
            NotImplementedError: the kernels do not support the call.
        """
        _refuse(others)
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                f"attention_masks: expected a VarlenMetadata, got {type(attention_masks).__name__}; build the model with attn_backend='varlen'"
            )
        _check_heads(q_BLNH, k_BLNH, enable_gqa)
        documents, rows = attention_masks, q_BLNH.shape[:2]
        with spmd_types.no_typecheck():
            q, k, v = (t.flatten(0, 1) for t in (q_BLNH, k_BLNH, v_BLNH))
            out, lse = flashattn_ext.varlen_forward(
                q, k, v, documents.cu_seq_q, documents.cu_seq_k, documents.max_q, documents.max_k, window_size=self.window_size,
                softmax_scale=scale, invariant=is_in_batch_invariant_mode(), return_lse=True,
            )  # fmt: skip
            out, lse = out.unflatten(0, rows), lse.mT.unflatten(0, rows)
        return _transformed(out, lse, q_BLNH, out_transform)


class BlockAttention(FlexAttention):
    """torchtitan's FlexAttention on these kernels: any visible pairs, as its BlockMask has them, without a score_mod.

    Nothing is compiled, and no kernel is tuned.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """The configuration of FlexAttention, of which kernel_options do nothing here."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of the pairs that a block mask shows.

        Args:
            q_BLNH: queries [B, L, Hq, D].
            k_BLNH: keys [B, L, Hk, D].
            v_BLNH: values [B, L, Hk, Dv].
            attention_masks: FlexAttention's BlockMask; converted once for all layers.
            score_mod: None; a function of scores raises.
            scale: factor of the scores, 1 / sqrt(D) by default.
            enable_gqa: whether keys may have fewer heads than queries.
            out_transform: a function of out [B, L, Hq, Dv] and lse [B, L, Hq], whose result is returned.
            others: other keyword arguments; one that is not None raises.

        Returns:
            out [B, L, Hq, Dv], or what out_transform returns.

        Raises:
            ValueError: a shape or a value is not as described.
            TypeError: a type or a dtype is not as described, or an unknown keyword argument.
            NotImplementedError: a score_mod, or torchtitan's batch-invariant mode; the kernels do not support the call.
        """
        _refuse(others)
        if score_mod is not None:
            raise NotImplementedError(
                "score_mod: expected None, there are no score functions here; leave the override out for this model"
            )
        if not isinstance(attention_masks, flex_attention.BlockMask):
            raise TypeError(
                f"attention_masks: expected FlexAttention's BlockMask, got {type(attention_masks).__name__}; build the model with "
                "attn_backend='flex'"
            )
        _check_heads(q_BLNH, k_BLNH, enable_gqa)
        with spmd_types.no_typecheck():
            tensors = [attention_masks.kv_indices, attention_masks.kv_num_blocks]
            made_from = attention_masks.mask_mod, attention_masks.seq_lengths
            mask = _block_masks.get(tensors, lambda: BlockMask.from_flex(attention_masks), made_from)
            out, lse = flashattn_ext.forward(
                q_BLNH, k_BLNH, v_BLNH, mask=mask, softmax_scale=scale, invariant=is_in_batch_invariant_mode(), return_lse=True
            )  # fmt: skip
        return _transformed(out, lse.mT, q_BLNH, out_transform)


def _refuse(others: dict[str, Any]) -> None:
    for name, given in others.items():
        if given is not None:
            raise TypeError(f"{name}: expected nothing by this name, got {type(given).__name__}")


def _check_heads(q: Tensor, k: Tensor, enable_gqa: bool) -> None:
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(f"k_BLNH: expected the {q.shape[2]} heads of q_BLNH without enable_gqa, got {k.shape[2]}")


def _transformed(
    out: Tensor, lse: Tensor, q: Tensor, out_transform: Callable[[Tensor, Tensor], Tensor] | None
) -> Tensor:
    """out [B, L, H, Dv] after out_transform of it and lse [B, L, H]."""
    _typed_as(out, q)
    _typed_as(lse, q)
    return out if out_transform is None else out_transform(out, lse)


def _typed_as(result: Tensor, q: Tensor) -> None:
    """Gives a result the type of q in torchtitan's check of how tensors are split, where that is on."""
    if spmd_types.is_type_checking():
        from spmd_types.runtime import get_partition_spec

        parts = get_partition_spec(q)
        kept = None if parts is None else spmd_types.PartitionSpec(*parts[: result.dim()])
        spmd_types.assert_type(result, spmd_types.get_local_type(q), kept)


@override(target=VarlenAttention.Config, description="Packed attention on the kernels of flashattn_ext")
def varlen(config: VarlenAttention.Config) -> Attention.Config:
    """The override that a training run names: every VarlenAttention of the model becomes Attention.

    Args:
        config: the configuration of a VarlenAttention.

    Returns:
        The same configuration of Attention.
    """
    replaced: Attention.Config = derive(config, Attention.Config)
    return replaced


@override(target=FlexAttention.Config, description="Block-masked attention on the kernels of flashattn_ext")
def flex(config: FlexAttention.Config) -> BlockAttention.Config:
    """The override that a training run names: every FlexAttention of the model becomes BlockAttention.

    Args:
        config: the configuration of a FlexAttention.

    Returns:
        The same configuration of BlockAttention.
    """
    replaced: BlockAttention.Config = derive(config, BlockAttention.Config)
    return replaced
