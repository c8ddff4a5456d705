"""Hugging Face diffusers: `register()`, then model.set_attention_backend("fax") or `with attention_backend("fax")`.

    from flashattn_ext.integrations import diffusers as fax
    fax.register()
    pipe.transformer.set_attention_backend("fax")

diffusers has a registry of attention backends, whose names are the members of an enumeration; register() adds one to it. Its attention
means what scaled_dot_product_attention means, and so does ours: masks become Masks or biases as in sdpa.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import flashattn_ext

from .sdpa import _converted, _ForTorch

_INSTALL = "pip install --upgrade diffusers"


def register(name: str = "fax") -> None:
    """Adds an attention backend to diffusers, for models that go through its dispatch_attention_fn.

    Registering the same name again is harmless. Calls that the kernels do not support raise, and nothing else runs in their place.

    Args:
        name: what set_attention_backend() and attention_backend() take; lower case.

    Raises:
        ImportError: diffusers is not installed, or has no registry of attention backends.
        ValueError: the name is not lower case, or is that of another backend.
    """
    if not isinstance(name, str) or not name or name != name.lower():
        raise ValueError(f"name: expected a name in lower case, as set_attention_backend() takes it, got {name!r}")
    try:
        from diffusers.models import attention_dispatch as diffusers_own
    except ImportError as error:
        raise ImportError(f"diffusers with models.attention_dispatch is not installed; {_INSTALL}") from error
    names, registry = diffusers_own.AttentionBackendName, diffusers_own._AttentionBackendRegistry
    if name in {member.value for member in names}:
        if registry._backends.get(names(name)) is not attention:
            raise ValueError(f"name: {name!r} is an attention backend of diffusers; choose another name")
        return
    checks = [diffusers_own._check_device, diffusers_own._check_shape]
    registry.register(_added(names, name), constraints=checks)(attention)


def _added(names: Any, name: str) -> Any:
    """A new member of the enumeration of backends, which Python has no public way to extend."""
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    return member


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The backend that register() gives to diffusers. Models call it; your own code calls flashattn_ext.forward.

    Args:
        query: [B, Sq, Hq, D].
        key: [B, Sk, Hk, D].
        value: [B, Sk, Hk, Dv].
        attn_mask: bool (True is visible) or floating-point (added to the scores), which broadcasts to [B, Hq, Sq, Sk]; or keys [B, Sk].
        dropout_p: probability in [0, 1) of dropping an attention weight.
        is_causal: query i sees the keys up to i, whatever the lengths.
        scale: factor of the scores, 1 / sqrt(D) by default.
        enable_gqa: whether key and value may have fewer heads than query.
        return_lse: also return lse [B, Sq, Hq].
        _parallel_config: diffusers' own context parallelism; anything but None raises.

    Returns:
        out [B, Sq, Hq, Dv], or (out, lse).

    Raises:
        ValueError: a shape or a value is not as described.
        TypeError: a type or a dtype is not as described.
        NotImplementedError: diffusers' own context parallelism; or the kernels do not support the call.
    """
    if _parallel_config is not None:
        raise NotImplementedError(
            "_parallel_config: expected None, got diffusers' own context parallelism, which has other attention backends; split the sequence "
            "with flashattn_ext.distributed instead"
        )
    if attn_mask is not None and is_causal:
        raise ValueError(
            "is_causal: expected False beside an attn_mask, got True; include the causal mask in attn_mask"
        )
    if attn_mask is not None and attn_mask.shape == (
        query.shape[0],
        key.shape[1],
    ):  # also where there are as many queries
        attn_mask = attn_mask[:, None, None]
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    try:
        tensors, options = _converted(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except _ForTorch as error:
        raise ValueError(f"attention backend of flashattn_ext: {error}") from None
    if not return_lse:
        out: Tensor = flashattn_ext.forward(*tensors, **options)
        return out
    out, lse = flashattn_ext.forward(*tensors, return_lse=True, **options)
    return out, lse.transpose(1, 2)
