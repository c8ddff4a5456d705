"""What `bench cuda` compares: our attention and its peers as functions of a row and of q, k and v, and the tensors of a row."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn_ext

from .bench_cases import CUDNN, DTYPES, FA2, FA3, FA4, FLASH_ATTN, MATH, OURS, Case
from .flex import FLEX, block_mask_maker, causal_rule, flex
from .patterns import PATTERNS
from .score_options import SCORE_OPTIONS, dense_bias

DEVICE = "cuda"
TORCH_BACKENDS = {
    FA2: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
# FlashAttention 2, 3 and 4: modules with flash_attn_func and flash_attn_varlen_func, none of which PyTorch brings along.
FLASH_MODULES = {FLASH_ATTN: "flash_attn", FA3: "flash_attn_interface", FA4: "flash_attn.cute"}
PEERS = (*TORCH_BACKENDS, *FLASH_MODULES, FLEX)
MATH_LIMIT_BYTES = 8 << 30  # of one B x H x S x S matrix in 16 bits; math keeps several, and in 32 bits
BIAS_LIMIT_BYTES = 8 << 30  # of one H x S x S matrix in 16 bits; making it takes several times as much
BLOCK_MASK, TABLES = "block mask of flex", "tables of ours"  # what is made once for each mask

Attention = Callable[[Case, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def flash_module(name: str) -> ModuleType | None:
    """The module of a key of FLASH_MODULES; None where it cannot be imported."""
    try:
        module = importlib.import_module(FLASH_MODULES[name])
        return module if hasattr(module, "flash_attn_func") else None
    except Exception:  # one built for another torch fails in many ways, and none of them is ours to report
        return None


def skip_reason(case: Case, name: str) -> str:
    """Why it is not even tried; empty when it is."""
    scores = case.pairs * case.Hq * 2
    if name == MATH and case.lengths:
        return "skipped: it takes no packed sequences"
    if name == MATH and scores > MATH_LIMIT_BYTES:
        return f"skipped: a matrix of scores takes {scores / 2**30:.0f} GiB"
    if name in TORCH_BACKENDS and case.score and (bias := case.Hq * case.S**2 * 2) > BIAS_LIMIT_BYTES:
        return f"skipped: a bias of every score takes {bias / 2**30:.0f} GiB"
    if name in TORCH_BACKENDS and case.window:
        return "skipped: it has no window"
    if name in TORCH_BACKENDS and case.deterministic:
        return "skipped: it has no option for that"
    if name in (FA3, FA4) and case.dropout:
        return "skipped: it has no dropout"
    if name == FLEX and not (case.score or case.pattern):
        return "skipped: compiled for the rows of scores and masks alone"
    if name == FLEX and case.backward and case.score in ("learned alibi", "relative bias"):
        return "skipped: it would add the gradients of all scores to a few numbers, one by one"
    return ""


# Tensors


def inputs(case: Case, device: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, all [B, S, H, D], or [tokens, H, D] of packed sequences."""
    torch.manual_seed(0)
    rows = (sum(case.lengths),) if case.lengths else (case.B, case.S)
    q, k, v, dout = (
        torch.randn(*rows, heads, columns, device=device or DEVICE, dtype=DTYPES[case.dtype])
        for heads, columns in (
            (case.Hq, case.D), (case.Hk, case.D), (case.Hk, case.head_dim_v), (case.Hq, case.head_dim_v),
        )
    )  # fmt: skip
    for t in (q, k, v):
        t.requires_grad_(case.backward)
    return q, k, v, dout


@functools.cache
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [B + 1]: where each packed sequence starts, and the end of the last."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


class Extras:
    """What a row's score option or pattern gives to each contestant, made once for all of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.option = SCORE_OPTIONS.get(case.score)
        self.pattern = PATTERNS.get(case.pattern)
        self.trains = case.backward and self.option is not None and self.option.trains
        self.value: Any = None
        if self.option:
            self.value = self.option.draw(case.Hq, case.S, DTYPES[case.dtype], device)
        if self.trains:
            self.value.requires_grad_()
        self.mask = self.pattern.make(case.S, device) if self.pattern else None

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `forward`."""
        keywords = {self.option.keyword: self.value} if self.option else {}
        return keywords | ({"mask": self.mask} if self.mask else {})

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """[1, H or 1, S, S], what scaled_dot_product_attention adds, causal included; None for a plain call."""
        dtype = DTYPES[self.case.dtype]
        with torch.no_grad():
            if self.option:
                bias = dense_bias(self.option, self.value, self.case.S, dtype, causal=self.case.causal).detach()
            elif self.pattern:
                hidden = ~self.pattern.dense(self.case.S, self.device)
                bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
            else:
                return None
        return bias.requires_grad_(self.trains)

    @functools.cached_property
    def make_block_mask(self) -> Callable[[], Any] | None:
        """Makes FlexAttention's block mask; None where nothing is hidden."""
        if self.pattern:
            rule = self.pattern.rule(self.case.S, self.device)
        else:
            rule = causal_rule if self.case.causal else None
        return block_mask_maker(rule, self.case.S, self.device) if rule else None

    @functools.cached_property
    def flex(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        block_mask = self.make_block_mask() if self.make_block_mask else None
        return flex(self.option.score_mod(self.value) if self.option else None, block_mask)

    def trained(self, name: str) -> tuple[Tensor, ...]:
        """The tensors besides q, k and v whose gradients a contestant gives."""
        if not self.trains:
            return ()
        return (self.dense,) if name in TORCH_BACKENDS else (self.value,)


@functools.lru_cache(maxsize=1)  # a bias of every score is large
def extras(case: Case, device: torch.device) -> Extras:
    return Extras(case, device)


# Contestants


def attention(name: str, rng_seed: int | None = None) -> Attention:
    """A contestant as a function of a case, q, k and v; `rng_seed` is for ours alone."""
    if name == OURS:
        return functools.partial(ours, rng_seed)
    if name in FLASH_MODULES:
        return functools.partial(_flash_attn, name)
    return _flex if name == FLEX else functools.partial(_torch, name)


def ours(rng_seed: int | None, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options: dict[str, Any] = {
        "causal": case.causal, "window_size": window_size(case), "dropout_p": case.dropout, "rng_seed": rng_seed,
        "deterministic": case.deterministic,
    }  # fmt: skip
    if not case.lengths:
        return flashattn_ext.forward(q, k, v, **options, **_extras_of(case, q).keywords)
    starts = _starts(case.lengths, q.device)
    return flashattn_ext.varlen_forward(q, k, v, starts, starts, case.S, case.S, **options)


def window_size(case: Case) -> tuple[int, int]:
    """How many keys a query sees before and after its own, -1 for all; causal hides the latter."""
    return (case.window - 1, -1) if case.window else (-1, -1)


def _extras_of(case: Case, q: Tensor) -> Extras:
    """A call without options gets empty ones of its own, so that it does not push a row's tensors out of the cache."""
    return extras(case, q.device) if case.score or case.pattern else Extras(case, q.device)


def _torch(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention on views of the same memory; kernel_of() chooses how."""
    if case.lengths:
        return _torch_packed(name, case, q, k, v)
    bias = _extras_of(case, q).dense
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        attn_mask=bias,
        dropout_p=case.dropout,
        is_causal=case.causal and bias is None,
        enable_gqa=case.Hq != case.Hk,
    )
    return out.transpose(1, 2)


def _torch_packed(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The ops below PyTorch's nested tensors, whose Python takes longer than the kernels."""
    starts = _starts(case.lengths, q.device)
    sequences = (starts, starts, case.S, case.S)
    aten = torch.ops.aten
    if name == FA2:
        return aten._flash_attention_forward(q, k, v, *sequences, case.dropout, case.causal, False)[0]
    if name == CUDNN:
        return aten._cudnn_attention_forward(q, k, v, None, *sequences, True, case.dropout, case.causal)[0]
    batch = (t[None] for t in (q, k, v))
    return aten._efficient_attention_forward(*batch, None, *sequences, case.dropout, int(case.causal), True)[0][0]


def _flash_attn(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A TypeError names an option that this version does not have."""
    keywords: dict[str, Any] = {"causal": case.causal, **_extras_of(case, q).keywords}
    if case.dropout:
        keywords["dropout_p"] = case.dropout
    if case.window:
        keywords["window_size"] = (case.window - 1, 0)
    if case.deterministic:
        keywords["deterministic"] = True
    module = flash_module(name)
    if case.lengths:
        starts = _starts(case.lengths, q.device)
        keywords |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": case.S, "max_seqlen_k": case.S}
        out = module.flash_attn_varlen_func(q, k, v, **keywords)
    else:
        out = module.flash_attn_func(q, k, v, **keywords)
    return out[0] if isinstance(out, tuple) else out  # some versions return lse as well


def _flex(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _extras_of(case, q).flex(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def kernel_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Outside of what is timed: entering this takes longer than a short kernel."""
    return sdpa_kernel(TORCH_BACKENDS[name]) if name in TORCH_BACKENDS else contextlib.nullcontext()


def timed_call(
    case: Case, name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rng_seed: int | None = None
) -> Callable[[], Tensor | Sequence[Tensor]]:
    """What is timed: the forward, or the backward alone through a graph that is kept."""
    call = attention(name, rng_seed)
    if not case.backward:
        return lambda: call(case, q, k, v)
    out = call(case, q, k, v)
    leaves = (q, k, v, *_extras_of(case, q).trained(name))
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def preparations(case: Case, names: Sequence[str], device: torch.device) -> dict[str, Callable[[], object]]:
    """What makes the tables and the block mask of a row with a pattern."""
    if not case.pattern:
        return {}
    of = extras(case, device)
    calls: dict[str, Callable[[], object]] = {}
    if OURS in names:
        calls[TABLES] = lambda: torch.ops.flashattn_ext.mask_extremes(of.mask.intervals)
    if FLEX in names:
        calls[BLOCK_MASK] = of.make_block_mask
    return calls
