"""torch.nn.functional.scaled_dot_product_attention through this package's kernels.

    flashattn_ext.integrations.sdpa.activate()      # from here on, on the CPU, CUDA and an NPU, forward and backward
    with flashattn_ext.integrations.sdpa.activate(report=True) as report: ...

The semantics of a call stay as documented by torch. A call that these kernels do not support runs on torch's own kernels, and a
Report counts these calls by reason.

While activated, the operator aten::scaled_dot_product_attention has a kernel of this module for the autograd and backend keys of a
device, registered through torch's registry of attention implementations. Every call goes through this operator, before torch pads
heads, makes bool masks additive or chooses a kernel.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _C, api, arguments
from .._build import build_info
from ..block_lists import blocks_in
from ..block_mask import BlockMask
from ..mask import Mask
from ..tensor_cache import TensorCache, state_of

NAME = "flashattn_ext"

_SDPA = torch.ops.aten.scaled_dot_product_attention.default


@dataclass
class Report:
    """Counts which kernels the calls of scaled_dot_product_attention ran on; str() gives a readable summary.

    Args:
        ours: number of calls that ran on this package's kernels.
        torchs: number of calls that ran on torch's own kernels, by reason.
    """

    ours: int = 0
    torchs: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"scaled_dot_product_attention: {self.ours} calls by flashattn_ext, {self.torchs.total()} by torch"]
        return "\n".join(lines + [f"  {count} by torch: {reason}" for reason, count in self.torchs.most_common()])


class Activation:
    """Result of activate(): already in force; as a context manager it restores the previous state at the end of a with block.

    A with block after the first one puts it in force again. `report` is the Report, or None without report=True; `with activate(...)
    as report` binds it. Not made by users.
    """

    def __init__(self, report: Report | None) -> None:
        self.report = report
        self._before: list[Activation | None] = []  # what was active at each begin that has not ended
        self._begin()
        self._is_entered = False

    def _begin(self) -> None:
        global _current, _outside
        registry = _registry()
        is_active = _is_active()
        if not is_active:
            _outside = registry.current_flash_attention_impl()
            _deactivate(registry, None)  # in torch 2.10 an implementation that was activated later has left it in force
            registry.register_flash_attention_impl(NAME, register_fn=_Registration)
            registry.activate_flash_attention_impl(NAME)
        self._before.append(_current if is_active else None)
        _current = self

    def __enter__(self) -> Report | None:
        if self._is_entered or _current is not self or not _is_active():  # not the begin of activate()
            self._begin()
        self._is_entered = True
        return self.report

    def __exit__(self, *_error: Any) -> None:
        global _current
        before = self._before.pop()
        if before is not None and _is_active():
            _current = before
        else:
            restore()


_current: Activation | None = None
_outside: str | None = None  # the name of another implementation that was active before the first Activation


def activate(report: bool = False) -> Activation:
    """Runs torch.nn.functional.scaled_dot_product_attention on this package's kernels, in the whole process.

    Functions that torch.compile has compiled before keep the kernels they were compiled with. torch.nn.attention.sdpa_kernel still
    applies: where it switches flash attention off, torch's own kernels run, as they do for calls that these kernels do not support.
    Activating again is harmless.

    Args:
        report: count the calls by the kernels they ran on, see Report.

    Returns:
        An Activation: a context manager that undoes this, with the attribute `report` (a Report or None).

    Raises:
        TypeError: report is not a bool.
        RuntimeError: torch is older than 2.10, which has no registry of attention implementations.
    """
    return Activation(Report() if arguments.flag("report", report) else None)


def restore() -> None:
    """Restores torch to its state before activate(); harmless if nothing is activated.

    Raises:
        RuntimeError: torch is older than 2.10, which has no registry of attention implementations.
    """
    global _current, _outside
    registry = _registry()
    outside, _current, _outside = _outside, None, None
    _deactivate(registry, outside)
    _forget(NAME)


def _deactivate(registry: Any, outside: str | None) -> None:
    """Removes this module's kernel; the implementation named `outside`, if any, is then the active one.

    Activating an implementation ends the one before it from torch 2.11 on. torch 2.10 has no function that ends one, and adds those
    that are activated to the ones in force.
    """
    is_current = registry.current_flash_attention_impl() == NAME
    if hasattr(registry, "restore_flash_attention_impl"):
        if is_current:
            registry.restore_flash_attention_impl()
            if outside is not None:
                registry.activate_flash_attention_impl(outside)
        return
    private: Any = sys.modules["torch.nn.attention._registry"]
    handle = private._FLASH_ATTENTION_HANDLES.pop(NAME, None)
    if handle is not None:
        handle.remove()
    if is_current:
        private._FLASH_ATTENTION_ACTIVE = outside


def _registry() -> Any:
    """torch.nn.attention, if it has the registry of attention implementations."""
    import torch.nn.attention as registry

    if not hasattr(registry, "register_flash_attention_impl"):
        raise RuntimeError(
            f"flashattn_ext.integrations.sdpa: expected torch 2.10 or newer, which can register attention implementations, got "
            f"torch {torch.__version__}; install a newer torch, or call flashattn_ext.forward"
        )
    return registry


def _forget(name: str) -> None:
    """Removes a name from torch's list of implementations; torch has no function for that."""
    from torch.nn.attention import _registry as registry

    getattr(registry, "_FLASH_ATTENTION_IMPLS", {}).pop(name, None)


def _is_active() -> bool:
    """Whether this module's kernel is the active implementation; torch's own restore_flash_attention_impl() also deactivates it."""
    return _current is not None and _registry().current_flash_attention_impl() == NAME


class _Registration:
    """The kernels registered in torch's dispatcher, until remove()."""

    def __init__(self) -> None:
        backends = build_info()["backends"]
        devices = ["CPU"] + (["CUDA"] if any("cuda" in name for name in backends) else [])
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for key in (key for device in devices for key in (device, f"Autograd{device}")):
            self._library.impl("scaled_dot_product_attention", _attention, key)
        if "ascend" in backends and _has_torch_npu():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
                for key in ("PrivateUse1", "AutogradPrivateUse1"):
                    self._library.impl("scaled_dot_product_attention", _on_npu(key), key, with_keyset=True)

    def remove(self) -> None:
        self._library = None


# --- the kernel -------------------------------------------------------------------------------------------------------


class _ForTorch(Exception):
    """The reason why a call is left to torch's own kernels."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    torchs: Callable[..., Tensor] = _SDPA.decompose,
) -> Tensor:
    report = None if _current is None else _current.report
    try:
        out = _run(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except (_ForTorch, NotImplementedError, ValueError, TypeError) as error:
        # Errors of this package are reported as reasons: torch's kernels run the call, or raise torch's own error.
        if report is not None:
            report.torchs[str(error)] += 1
    else:
        if report is not None:
            report.ours += 1
        return out
    return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _has_torch_npu() -> bool:
    """Whether NPU tensors can exist. torch_npu registers a kernel of its own, so it has to be imported before this module's."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _on_npu(key: str) -> Callable[..., Tensor]:
    """The kernel for a dispatch key of NPUs. Calls that are left to torch go to the kernel that was registered before."""
    own = torch.library.get_kernel(_SDPA, key)

    def attention(keys: Any, *arguments: Any, **options: Any) -> Tensor:
        def torchs(*arguments: Any, **options: Any) -> Tensor:
            # The kernel for autograd may call the operator again, for the backend's key: that call was left to torch, too.
            left, _thread.left_to_torch = _is_left(), True
            try:
                result: Tensor = own.call_boxed(keys, *arguments, **options)
                return result
            finally:
                _thread.left_to_torch = left

        return (torchs if _is_left() else functools.partial(_attention, torchs=torchs))(*arguments, **options)

    return attention


_thread = threading.local()


def _is_left() -> bool:
    return getattr(_thread, "left_to_torch", False)


def _run(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention for q [..., Hq, Sq, D], k [..., Hk, Sk, D] and v [..., Hk, Sk, Dv] of 2 dimensions or more."""
    if not torch._C._get_flash_sdp_enabled():
        raise _ForTorch(
            "flash attention is switched off (torch.nn.attention.sdpa_kernel, torch.backends.cuda.enable_flash_sdp)"
        )
    if torch.autograd.forward_ad._current_level >= 0:
        raise _ForTorch("forward-mode differentiation")
    if is_causal and attn_mask is not None:
        raise _ForTorch("attn_mask together with is_causal")
    if any(getattr(placement, "dim", None) == q.dim() - 2 for placement in getattr(q, "placements", ())):
        raise _ForTorch("a DTensor with a sharded sequence")  # torch's context parallelism
    rank = max(q.dim(), k.dim(), v.dim())
    if attn_mask is not None and attn_mask.dim() > rank:
        raise _ForTorch("an attn_mask with more dimensions than the other tensors")
    call = functools.partial(_of_batches, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if rank > 4:
        return _of_more_dimensions(q, k, v, attn_mask, call)
    out = call(q, k, v, attn_mask)
    return out if rank == 4 else out.reshape(out.shape[4 - rank :])


def _of_more_dimensions(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, call: Callable[..., Tensor]
) -> Tensor:
    """Attention of q [*lead, Hq, Sq, D] of more than 4 dimensions, as in models of proteins, which attend along one axis of pairs.

    The lead dimensions become one batch. An attn_mask that all of it shares stays one: the kernels add up its gradient, and no copy of
    it is made. Where some lead dimensions share it and others have their own, there is a call for each index of the fewer ones.
    """
    if any(hasattr(t, "placements") for t in (q, k, v)):
        raise _ForTorch("a DTensor of more than 4 dimensions")
    rank = max(q.dim(), k.dim(), v.dim())
    q, k, v = (t[(None,) * (rank - t.dim())] for t in (q, k, v))
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (t.expand(*lead, *t.shape[-3:]) for t in (q, k, v))
    looped: list[int] = []
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (rank - attn_mask.dim())]
        if any(size not in (1, of_all) for size, of_all in zip(attn_mask.shape, lead, strict=False)):
            raise _ForTorch(f"an attn_mask of shape {list(attn_mask.shape)} for a batch of {list(lead)}")
        own = [dim for dim in range(len(lead)) if attn_mask.shape[dim] != 1]
        shared = [dim for dim in range(len(lead)) if attn_mask.shape[dim] == 1 != lead[dim]]
        if own and shared and attn_mask.shape[-2] > 1 and 0 not in lead:
            looped = min(own, shared, key=lambda dims: math.prod(lead[dim] for dim in dims))
        elif own:  # nothing is shared, or the mask has one row: a copy is small
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:])
    outs = []
    for index in itertools.product(*(range(lead[dim]) for dim in looped)):
        at = dict(zip(looped, index, strict=True))
        tensors = [_at(t, at).flatten(0, -4) for t in (q, k, v)]
        outs.append(call(*tensors, None if attn_mask is None else _at(attn_mask, at).flatten(0, -4)))
    sizes = [lead[dim] for dim in (*looped, *(dim for dim in range(len(lead)) if dim not in looped))]
    out = (torch.stack(outs) if looped else outs[0]).reshape(*sizes, *outs[0].shape[1:])
    return out.movedim(tuple(range(len(looped))), tuple(looped))


def _at(t: Tensor, at: dict[int, int]) -> Tensor:
    """A view: of dimension d the entry at[d], unless there is one for all."""
    return t[tuple(slice(at[d], at[d] + 1) if d in at and t.shape[d] != 1 else slice(None) for d in range(t.dim()))]


def _of_batches(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Attention [B, Hq, Sq, Dv] of tensors of up to 4 dimensions."""
    tensors, options = _converted(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    # The memory layout of the result is [B, Sq, Hq, Dv], as in torch's fused kernels, so that models merge heads without a copy.
    out: Tensor = api.forward(*tensors, **options).transpose(1, 2)
    return out


def _converted(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:  # fmt: skip
    """Tensors [B, S, H, D] and options of forward() that mean what scaled_dot_product_attention means with these arguments."""
    if not _fit_already(q, k, v, enable_gqa):
        q, k, v = _broadcast(q, k, v, enable_gqa)
    batch, heads = q.shape[:2]
    Sq, Sk = q.shape[2], k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options: dict[str, Any] = {"softmax_scale": scale, "dropout_p": dropout_p}
    if is_causal:
        # Query i sees the keys up to i (aligned at the top left), whatever the lengths.
        if Sq > Sk:
            options["window_size"] = (-1, Sq - Sk)
        else:
            options["causal"] = True
            if Sq < Sk:
                k, v = k.narrow(1, 0, Sq), v.narrow(1, 0, Sq)
    elif attn_mask is not None:
        options["mask"], options["bias"] = _mask_and_bias(attn_mask, q.dtype, batch, heads, Sq, Sk)
    return (q, k, v), options


def _fit_already(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the tensors are [B, H, S, D] with head counts that forward() takes: a fast path around the broadcasting logic."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return False
    (Bq, Hq), (Bk, Hk), of_v = q.shape[:2], k.shape[:2], v.shape[:2]
    return Bq == Bk == of_v[0] and Hk == of_v[1] and (Hq == Hk or (enable_gqa and Hk > 0 and Hq % Hk == 0))


def _broadcast(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views [B, H, S, D] of all three, where the head count of q is a multiple of the head count of k and v."""
    q, k, v = (t[(None,) * (4 - t.dim())] for t in (q, k, v))
    B = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])[0]
    Hk = torch.broadcast_shapes(k.shape[1:2], v.shape[1:2])[0]
    Hq = Hk if q.shape[1] == 1 else q.shape[1]
    if Hk not in (1, Hq) and not (enable_gqa and Hk and Hq % Hk == 0):
        raise _ForTorch("head counts of query and key that do not match")
    q = q.expand(B, Hq, -1, -1)
    k, v = (t.expand(B, Hk, -1, -1) for t in (k, v))
    return q, k, v


# --- masks ------------------------------------------------------------------------------------------------------------


# Pairs of a head from which on a call with a BlockMask is faster than one with a dense bias, although one call in a step makes it: with 4
# heads of 64 on two cores 0.87 of the time at 512 x 512 where every block is partial, 0.55 where 70 % are hidden; 1.2 at 256 x 256.
# On an H200 layers share it, made in 0.6 ms at 1024 x 1024. Forward and backward of 16 heads of 64 and 128 take 0.85 and 1.03 of the
# time of a dense bias where every block is partial, and 0.65 and 0.75 where half of them are hidden.
_LEAST_OF_BLOCKS = {"cpu": 512 * 512, "cuda": 1024 * 1024}
# The BlockMasks of the latest boolean masks, which all layers that get such a mask share.
_block_masks = TensorCache(most=2)


def _mask_and_bias(
    attn_mask: Tensor, dtype: torch.dtype, batch: int, heads: int, Sq: int, Sk: int
) -> tuple[Mask | BlockMask | None, Tensor | None]:
    """An attn_mask that broadcasts to [B, Hq, Sq, Sk] as an argument of forward(): a Mask if it consists of intervals, a BlockMask if that
    costs less than a bias, else a bias.

    Values are read on the CPU only: reading them elsewhere would wait for the device.
    """
    attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    # Heads are those of the queries: a Mask may have as many as the keys, too, which torch refuses.
    if any(size not in (1, n) for size, n in zip(attn_mask.shape, (batch, heads, Sq, Sk), strict=True)):
        raise _ForTorch(
            f"an attn_mask of shape {list(attn_mask.shape)} for a batch of {batch} with {heads} query heads, {Sq} queries and {Sk} keys"
        )
    attn_mask = attn_mask.expand(-1, -1, attn_mask.shape[2] if attn_mask.shape[2] == 1 else Sq, Sk)
    if Sq == 0:  # nothing to mask, and no first row to read
        return None, attn_mask if attn_mask.requires_grad else None
    is_plain = type(attn_mask) is Tensor and not torch._C._len_torch_dispatch_stack()
    readable = is_plain and attn_mask.device.type == "cpu"
    visible = attn_mask if attn_mask.dtype == torch.bool else None
    if visible is None:
        hides_or_not = (
            readable and not attn_mask.requires_grad and bool(((attn_mask == 0) | (attn_mask == -torch.inf)).all())
        )
        if not hides_or_not:
            return None, attn_mask
        visible = attn_mask == 0
    if visible.shape[2] == 1 or visible.stride(2) == 0:  # every row sees the same keys
        keys = visible[:, :, 0]
        return Mask(torch.stack([torch.zeros_like(keys, dtype=torch.int32), keys * Sq], -1).int()), None
    if readable:
        first, count, is_interval = _interval_of_rows(visible)
        if is_interval:
            everything = bool((count == Sq).all())
            return None if everything else Mask(torch.stack([first, first + count], -1).int()), None
    if is_plain and (blocks := _block_mask(visible)) is not None:
        return blocks, None
    hidden = torch.zeros((), dtype=dtype, device=attn_mask.device).masked_fill(~visible, -torch.inf)
    return None, hidden if attn_mask is visible else attn_mask


def _block_mask(visible: Tensor) -> BlockMask | None:
    """The BlockMask of bool [B or 1, 1 or Hq, Sq, Sk], made once for as long as that is not written to; None where a dense bias is faster.

    On a GPU it has room for the bits of all blocks, so that nothing waits for the device, and is made only where it can be kept.
    """
    device = visible.device.type
    Sq, Sk = visible.shape[2:]
    if Sq * Sk < _LEAST_OF_BLOCKS.get(device, math.inf) or _C.forced_backend().startswith("ascend"):
        return None
    if device == "cpu":
        return BlockMask.from_dense(visible)
    visible = visible[: 1 if visible.stride(0) == 0 else None, : 1 if visible.stride(1) == 0 else None]
    # Layers cut the keys off a mask that they share, so the tensor that the view is of is the key.
    kept = visible if visible._base is None else visible._base
    if state_of([kept]) is None:
        return None
    most = visible.shape[0] * visible.shape[1] * blocks_in(Sq) * blocks_in(Sk)
    cut = (visible.shape, visible.stride(), visible.storage_offset())
    return _block_masks.get([kept], lambda: BlockMask.from_dense(visible, max_partial=most), cut)


def _interval_of_rows(visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    """bool [B, H, Sq, Sk] -> the first row that sees each key and their number, [B, H, Sk] each, and whether the rows are contiguous."""
    first = visible.view(torch.uint8).argmax(2)
    count = visible.sum(2, dtype=torch.int32)
    begins = (visible[:, :, 1:] > visible[:, :, :-1]).sum(2, dtype=torch.int32) + visible[:, :, 0]
    return first, count, bool((begins <= 1).all())
