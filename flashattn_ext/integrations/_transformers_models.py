"""Refuses models of transformers that cannot run here when they are made or loaded.

transformers accepts a registered name for every model. A model that computes attention with its own code would run that code, whatever
the name says; a model that looks its attention class up in a table raises KeyError.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

_OWN_CODE = "computes attention with its own code"
_EAGER_OR_SDPA = 'use "eager" or "sdpa" for it'

# By config.model_type: why models that ask the AttentionInterface are refused all the same, and what to do.
_REFUSED = {
    # Some of their layers compute attention with code of their own.
    "bigbird_pegasus": (_OWN_CODE, _EAGER_OR_SDPA),
    "deepseek_v4": (_OWN_CODE, _EAGER_OR_SDPA),
    "doge": (_OWN_CODE, _EAGER_OR_SDPA),
    # It fills its position bias with -inf where the mask is 0, which hides the visible keys where the mask is eager's.
    "nemotron_asr_streaming_encoder": (
        'reads its mask as True for visible keys, which transformers passes with "sdpa" alone (its "eager" attention hides them)',
        'use "sdpa" for it',
    ),
}

names: set[str] = set()  # the names that register() was called with


def refuse_others(name: str) -> bool:
    """From now on, a model that cannot run with attn_implementation=name raises NotImplementedError when it is made.

    Returns:
        Whether this was the first call.
    """
    is_wrapped = bool(names)
    names.add(name)
    if is_wrapped:
        return False
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **options: Any) -> str:
        chosen: str = original(self, requested_attention, *args, **options)
        if chosen in names:
            reason, advice = _REFUSED.get(getattr(self.config, "model_type", ""), ("", ""))
            if own := _why_not(_modules_of(type(self)), chosen):
                reason, advice = own, _EAGER_OR_SDPA
            if reason:
                raise NotImplementedError(
                    f'{type(self).__name__}: attn_implementation="{chosen}" works for models whose layers all go through transformers\' '
                    f"AttentionInterface (docs/integrations.md has a list), but this model {reason}; {advice}"
                )
        return chosen

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]
    return True


def _modules_of(model: type[PreTrainedModel]) -> tuple[str, ...]:
    """Names of the modules that define a class and its base classes."""
    classes = [base for base in model.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel]
    return tuple(base.__module__ for base in classes if base.__module__ in sys.modules)


@functools.cache
def _why_not(names: tuple[str, ...], implementation: str) -> str:
    """Why a class defined in these modules cannot run; empty if it can."""
    modules = [sys.modules[name] for name in names]
    for module in modules:
        table = _table_of_classes(module)
        if table is not None and implementation not in table:
            return f"chooses one of its own classes ({', '.join(table)})"
    if any(_asks_the_interface(module) for module in modules):
        return ""
    return _OWN_CODE if any(_takes_masks(module) and _has_attention(module) for module in modules) else ""


def _table_of_classes(module: ModuleType) -> dict[str, type] | None:
    """The table {"eager": ...Attention, "sdpa": ...} from which a layer picks its class; None if the module has none."""
    for value in vars(module).values():
        if isinstance(value, dict) and "eager" in value and all(_is_module_class(each) for each in value.values()):
            return value
    return None


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _asks_the_interface(module: ModuleType) -> bool:
    return any(value is AttentionInterface or isinstance(value, AttentionInterface) for value in vars(module).values())


def _takes_masks(module: ModuleType) -> bool:
    """Whether a module creates its masks with the registered mask function."""
    return any(getattr(value, "__module__", None) == "transformers.masking_utils" for value in vars(module).values())


def _has_attention(module: ModuleType) -> bool:
    return any(
        _is_module_class(value) and value.__module__ == module.__name__ and "Attention" in name
        for name, value in vars(module).items()
    )
