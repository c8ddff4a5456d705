"""The arguments of a call, as csrc/call/options.def describes them: the named tuples in which they travel, and their types for type checkers.

A row of options.def appears here by itself: as a field of CallTensors or CallOptions, with its default, among the gradients, and in
what vmap.py, integrations/dtensor.py and distributed/ do with tensors of its dimensions.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from . import _C

if TYPE_CHECKING:
    from typing_extensions import Self

    from .block_mask import BlockMask
    from .mask import Mask


class Option(NamedTuple):
    """One row of csrc/call/options.def."""

    name: str
    type: str  # as in the schemas of the ops: "Tensor?", "SymInt", "Scalar", "bool", "SymInt[]?" or "ScalarType?"
    default: Any
    dims: str  # what the first dimensions of a tensor are: "sequences", "heads", "batch_heads", "scores", "batch_kv_heads" or "blocks" (Dims in csrc/call/options.h)
    gradient: str  # computed by a backward: "" never, "always", or "if_needed"
    is_of_distance: bool  # its gradient needs the centres of rows (csrc/rules/bias.h)
    decodes: bool  # whether the decoding ops take it as well


OPTIONS = tuple(Option(**row) for row in _C.options())
TENSORS = tuple(option for option in OPTIONS if option.type == "Tensor?")
NUMBERS = tuple(option for option in OPTIONS if option.type != "Tensor?")  # numbers, flags and lists

# Names, in the order of the results of the op `backward`.
BIASES = tuple(option.name for option in TENSORS if option.gradient == "if_needed")
LEARNED = tuple(option.name for option in TENSORS if option.gradient)  # the biases included
DIFFERENTIABLE = ("q", "k", "v", *LEARNED)
assert LEARNED[len(LEARNED) - len(BIASES) :] == BIASES


if TYPE_CHECKING:

    class Record(tuple[Any, ...]):
        """A named tuple whose fields are only known when the package is imported."""

        _fields: tuple[str, ...]

        def __new__(cls, *values: Any, **named: Any) -> Self: ...
        def __getattr__(self, name: str) -> Any: ...
        def _replace(self, **changed: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...

    class CallTensors(Record):
        q: Tensor
        k: Tensor
        v: Tensor

    class CallOptions(Record): ...

else:
    CallTensors = namedtuple(
        "CallTensors", ["q", "k", "v", *(option.name for option in TENSORS)], defaults=[option.default for option in TENSORS]
    )  # fmt: skip
    CallTensors.__doc__ = "The tensors of a call, in the order of the ops' schemas; q, k and v, then the tensors of csrc/call/options.def."
    CallOptions = namedtuple(
        "CallOptions", [option.name for option in NUMBERS], defaults=[option.default for option in NUMBERS]
    )
    CallOptions.__doc__ = "The arguments of a call that follow its tensors, in the order of the ops' schemas."


def _places(names: tuple[str, ...]) -> list[int]:
    return [CallTensors._fields.index(name) for name in names]


_BIASES, _DIFFERENTIABLE = _places(BIASES), _places(DIFFERENTIABLE)
_OF_DISTANCE = _places(tuple(option.name for option in TENSORS if option.is_of_distance))


def biases(tensors: CallTensors) -> list[Any]:
    """The tensors whose gradients the backward computes only if requested; they are the last ones of DIFFERENTIABLE."""
    return [tensors[place] for place in _BIASES]


def differentiable(tensors: CallTensors) -> list[Any]:
    """The tensors that can have a gradient, in the order of the results of the op `backward`."""
    return [tensors[place] for place in _DIFFERENTIABLE]


def wanted(tensors: Any, needs: Any) -> list[bool]:
    """For each of LEARNED whether the backward computes its gradient. needs: for each of BIASES whether its gradient is needed."""
    needed = dict(zip(BIASES, needs, strict=True))
    return [getattr(tensors, name) is not None and needed.get(name, True) for name in LEARNED]


def keeps_centres(tensors: CallTensors, needs: Callable[[Tensor], bool]) -> bool:
    """Whether the forward returns the centres of rows (csrc/rules/bias.h), for accurate gradients of slopes and relative biases.

    needs: whether the backward computes the gradient of such a tensor.
    """
    return any(tensors[place] is not None and needs(tensors[place]) for place in _OF_DISTANCE)


# --- the keyword arguments of the public functions, for type checkers ------------------------------------------------------


class SoftmaxOptions(TypedDict, total=False):
    """Options that decide about weights before dropout, except biases."""

    causal: bool
    window_size: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    mask: Mask | BlockMask | None
    smooth_softmax: bool
    sink: Tensor | None
    origin: tuple[int, ...] | None


class SharedOptions(SoftmaxOptions, total=False):
    """Options that forward, varlen_forward, backward and attention_reference have in common."""

    dropout_p: float


class BiasOptions(TypedDict, total=False):
    alibi_slopes: Tensor | None
    relative_bias: Tensor | None
    bias: Tensor | None


class Fp8Options(TypedDict, total=False):
    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    out_dtype: torch.dtype | None


class SeedOption(TypedDict, total=False):
    rng_seed: int | None


class ConvertedOptions(SharedOptions, BiasOptions, Fp8Options, total=False):
    """The keyword arguments of calls.convert(), which has their defaults."""

    deterministic: bool
    invariant: bool


class AttentionOptions(ConvertedOptions, SeedOption, total=False):
    """Options of forward and varlen_forward."""


class ReferenceOptions(SharedOptions, BiasOptions, Fp8Options, SeedOption, total=False):
    """Options of attention_reference."""


class WeightsOptions(SoftmaxOptions, BiasOptions, total=False):
    """Options of attention_weights."""


class BackwardOptions(SharedOptions, SeedOption, total=False):
    """Options of backward without the biases, on which its return type depends."""

    dlse: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    layout: str
    deterministic: bool
    invariant: bool
