"""The contestants of `bench cuda` and `bench cpu`: our attention and its peers as functions of a row and of q, k and v, and the tensors of a row."""

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
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashattn_ext

from . import bench_cudnn, bench_derivatives
from .bench_cases import CUDNN, CUDNN_FP8, DTYPES, FA2, FA3, FA4, FLASH_ATTN, FLEX, JVP_FLASH, MATH, OURS, Case
from .block_patterns import ALL_PATTERNS, BlockPattern
from .console import CommandError, chosen
from .model import unfused_attention
from .options import SCORE_OPTIONS, dense_bias

DEVICE = "cuda"
TORCH_BACKENDS = {
    FA2: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    MATH: SDPBackend.MATH,
}
# Modules that PyTorch does not ship, and what they must have: FlashAttention 2, 3 and 4, one that computes with dual numbers, and
# cuDNN's own one, for fp8.
FLASH_MODULES = {
    FLASH_ATTN: ("flash_attn", "flash_attn_func"),
    FA3: ("flash_attn_interface", "flash_attn_func"),
    FA4: ("flash_attn.cute", "flash_attn_func"),
    JVP_FLASH: ("jvp_flash_attention.jvp_attention", "JVPAttn"),
    CUDNN_FP8: ("cudnn", "pygraph"),
}
PEERS = (*TORCH_BACKENDS, *FLASH_MODULES, FLEX)
SDPA, UNFUSED = "torch SDPA", "unfused"  # for the experiments: PyTorch chooses its kernel; separate steps of PyTorch
MATH_LIMIT_BYTES = 8 << 30  # size of one 16-bit B x H x S x S matrix; math keeps several, in 32 bits
BIAS_LIMIT_BYTES = 8 << 30  # size of one 16-bit H x S x S matrix; building it takes several times as much

Attention = Callable[[Case, Tensor, Tensor, Tensor], Tensor]


@functools.cache
def flash_module(name: str) -> ModuleType | None:
    """The module of a key of FLASH_MODULES; None where it cannot be imported."""
    with contextlib.suppress(Exception):  # a module built for another torch fails in many ways: it counts as absent
        module_name, attention = FLASH_MODULES[name]
        module = importlib.import_module(module_name)
        return module if hasattr(module, attention) else None
    return None


def contestants(peers: str | None) -> list[str]:
    """Ours and the peers: the names in a comma-separated list, or all that can be imported."""
    if peers is None:
        return [OURS, *(name for name in PEERS if name not in FLASH_MODULES or flash_module(name))]
    names = chosen("--peers", peers.split(","), PEERS)
    for name, (module, attention) in FLASH_MODULES.items():
        if name in names and not flash_module(name):
            raise CommandError(f"--peers got {name!r}, but {attention} of {module} cannot be imported here")
    return [OURS, *names]


def skip_reason(case: Case, name: str) -> str:
    """Why the contestant is skipped; empty if it runs."""
    scores, bias = case.pairs * case.Hq * 2, case.Hq * case.S**2 * 2
    masks = getattr(ALL_PATTERNS.get(case.pattern), "heads", 1) * case.S**2 * 2
    of_torch, sums = name in TORCH_BACKENDS, case.backward and case.score in ("learned alibi", "relative bias")
    reasons = [
        (name not in (OURS, CUDNN_FP8) and case.dtype == "fp8", "it is called without descales"),
        (name == CUDNN_FP8 and case.dtype != "fp8", "it is compared in fp8 only"),
        (case.derivative and name not in (OURS, MATH, JVP_FLASH), "it has no such derivatives"),
        (name != OURS and case.derivative in bench_derivatives.ALONE, "it does not compute this apart from the rest"),
        (name == JVP_FLASH and case.derivative != "forward & J", "it is compared in forward mode only"),
        (name == MATH and case.lengths, "it does not support packed sequences"),
        (name == MATH and scores > MATH_LIMIT_BYTES, f"a matrix of scores takes {scores / 2**30:.0f} GiB"),
        (of_torch and case.score and bias > BIAS_LIMIT_BYTES, f"a bias of every score takes {bias / 2**30:.0f} GiB"),
        (
            of_torch and case.pattern and masks > BIAS_LIMIT_BYTES,
            f"a mask of every score takes {masks / 2**30:.0f} GiB",
        ),
        (of_torch and case.window, "it has no window"),
        (of_torch and case.deterministic, "it has no deterministic mode"),
        (name in (FA3, FA4) and case.dropout, "it has no dropout"),
        (name == FLEX and not (case.score or case.pattern), "it is compiled for rows with scores or masks only"),
        (name == FLEX and sums, "it would sum the gradients of all scores into a few numbers, one by one"),
    ]
    return next((f"skipped: {reason}" for applies, reason in reasons if applies), "")


def inputs(
    case: Case, device: str | torch.device | None = None, heads_first: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, all [B, S, H, D], or [tokens, H, D] of packed sequences.

    With `heads_first` they are views of memory in the order [B, H, S, D], which is PyTorch's.
    """
    torch.manual_seed(0)
    rows = (sum(case.lengths),) if case.lengths else (case.B, case.S)
    dtype = DTYPES[case.dtype]
    drawn = torch.bfloat16 if case.dtype == "fp8" else dtype
    options: dict[str, Any] = {"device": device or DEVICE, "dtype": drawn}

    def draw(heads: int, columns: int) -> Tensor:
        if heads_first:
            return torch.randn(*rows[:-1], heads, rows[-1], columns, **options).transpose(-3, -2)
        return torch.randn(*rows, heads, columns, **options)

    shapes = ((case.Hq, case.D), (case.Hk, case.D), (case.Hk, case.head_dim_v))
    qkv = (draw(*shape).to(dtype).requires_grad_(case.backward) for shape in shapes)
    return *qkv, draw(case.Hq, case.head_dim_v)


@functools.cache
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [B + 1]: where each packed sequence starts, and the end of the last."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled from scratch, with the sizes of the first call as constants.

    Earlier compilations are discarded: PyTorch stops compiling a function after a few recompilations.
    """
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


class Extras:
    """The arguments that each contestant gets for a row's score option or pattern, built once for all of them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.option, self.pattern = SCORE_OPTIONS.get(case.score), ALL_PATTERNS.get(case.pattern)
        self.trains = case.backward and self.option is not None and self.option.trains
        self.value: Any = self.option and self.option.draw(case.Hq, case.S, DTYPES[case.dtype], device)
        if self.trains:
            self.value.requires_grad_()
        self.mask = self.pattern.make(case.S, device) if self.pattern else None

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `forward`."""
        keywords = {self.option.keyword: self.value} if self.option else {}
        return keywords | ({"mask": self.mask} if self.mask else {})

    @functools.cached_property
    def dense(self) -> Tensor | None:
        """[1, H or 1, S, S], the attn_mask of scaled_dot_product_attention, causal included; None for a plain call."""
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
    def flex(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """FlexAttention over [B, H, S, D], compiled."""
        case, block_mask = self.case, None
        score_mod = self.option.score_mod(self.value) if self.option else None
        if isinstance(self.pattern, BlockPattern):
            block_mask = self.pattern.flex_mask(case.S, self.device)
        elif self.pattern or case.causal:
            rule = self.pattern.rule(case.S, self.device) if self.pattern else lambda b, h, q, k: q >= k
            # Uncompiled it would store all S x S values.
            block_mask = compiled(create_block_mask)(rule, None, None, case.S, case.S, device=self.device)
        options = {"score_mod": score_mod, "block_mask": block_mask, "enable_gqa": case.Hq != case.Hk}
        return functools.partial(compiled(flex_attention), **options)

    @functools.cached_property
    def flash_4(self) -> dict[str, Any]:
        """The keyword arguments of FlashAttention-4, whose block masks have another form."""
        is_of_blocks = isinstance(self.pattern, BlockPattern)
        return self.pattern.flash_4_keywords(self.case.S, self.device) if is_of_blocks else self.keywords

    def trained(self, name: str) -> tuple[Tensor, ...]:
        """The tensors besides q, k and v whose gradients a contestant computes."""
        if not self.trains:
            return ()
        return (self.dense,) if name in (*TORCH_BACKENDS, SDPA) else (self.value,)


@functools.lru_cache(maxsize=1)  # a bias of every score is large
def extras(case: Case, device: torch.device) -> Extras:
    return Extras(case, device)


def attention(name: str, rng_seed: int | None = None) -> Attention:
    """A contestant as a function of a case, q, k and v; only ours uses `rng_seed`."""
    if name in (*TORCH_BACKENDS, SDPA):
        return functools.partial(_torch, name)
    if name in FLASH_MODULES and name not in (JVP_FLASH, CUDNN_FP8):
        return functools.partial(_flash_attn, name)
    others = {FLEX: _flex, UNFUSED: _unfused, JVP_FLASH: _jvp_flash, CUDNN_FP8: _cudnn_fp8}
    return functools.partial(ours, rng_seed) if name == OURS else others[name]


def keywords(case: Case, rng_seed: int | None) -> dict[str, Any]:
    """The options of a row that `forward` and `attention_reference` take."""
    window_size = (case.window - 1, -1) if case.window else (-1, -1)
    return {"causal": case.causal, "window_size": window_size, "dropout_p": case.dropout, "rng_seed": rng_seed}


def ours(rng_seed: int | None, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options = {**keywords(case, rng_seed), "deterministic": case.deterministic, "invariant": case.invariant}
    if not case.lengths:
        return flashattn_ext.forward(q, k, v, **options, **_extras_of(case, q).keywords)
    starts = _starts(case.lengths, q.device)
    return flashattn_ext.varlen_forward(q, k, v, starts, starts, case.S, case.S, **options)


def _extras_of(case: Case, q: Tensor) -> Extras:
    """A call without options has its own empty ones, so that it does not evict a row's tensors from the cache."""
    return extras(case, q.device) if case.score or case.pattern else Extras(case, q.device)


def _torch(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention on views of the same memory; kernel_of() chooses its kernel."""
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
    """The ops under PyTorch's nested tensors, whose Python takes longer than the kernels."""
    starts, aten = _starts(case.lengths, q.device), torch.ops.aten
    sequences = (starts, starts, case.S, case.S)
    if name == FA2:
        return aten._flash_attention_forward(q, k, v, *sequences, case.dropout, case.causal, False)[0]
    if name == CUDNN:
        return aten._cudnn_attention_forward(q, k, v, None, *sequences, True, case.dropout, case.causal)[0]
    batch = (t[None] for t in (q, k, v))
    return aten._efficient_attention_forward(*batch, None, *sequences, case.dropout, int(case.causal), True)[0][0]


def _flash_attn(name: str, case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A TypeError names an option that this version does not have."""
    of_case = _extras_of(case, q)
    keywords: dict[str, Any] = {"causal": case.causal, **(of_case.flash_4 if name == FA4 else of_case.keywords)}
    keywords |= {"dropout_p": case.dropout} if case.dropout else {}
    keywords |= {"window_size": (case.window - 1, 0)} if case.window else {}
    keywords |= {"deterministic": True} if case.deterministic else {}
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


def _jvp_flash(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    forward = flash_module(JVP_FLASH).JVPAttn.fwd_dual
    return forward(*(t.transpose(1, 2) for t in (q, k, v)), causal=case.causal).transpose(1, 2)


def _cudnn_fp8(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return bench_cudnn.attention(flash_module(CUDNN_FP8), case.causal, q, k, v)


def _unfused(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Without masks other than the causal one."""
    of = _extras_of(case, q)
    options: dict[str, Any] = {}
    if of.option and of.option.added:
        options["bias"] = of.option.added(of.value, case.S).to(q.dtype)
    elif of.option:
        options[of.option.keyword] = of.value
    return unfused_attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=case.causal, **options).transpose(1, 2)


def tensors_of(results: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """What timed_call() returned, without graphs."""
    return [t.detach() for t in ((results,) if isinstance(results, Tensor) else results)]


def kernel_of(name: str) -> contextlib.AbstractContextManager[Any]:
    """Entered outside the timed region: entering it takes longer than a short kernel."""
    return sdpa_kernel(TORCH_BACKENDS[name]) if name in TORCH_BACKENDS else contextlib.nullcontext()


def timed_call(
    case: Case, name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rng_seed: int | None = None,
    with_forward: bool = False,
) -> Callable[[], Tensor | Sequence[Tensor]]:  # fmt: skip
    """The timed function: the forward, or the backward, either alone through a retained graph or with its forward."""
    call = attention(name, rng_seed)
    if case.derivative:
        return bench_derivatives.timed(case.derivative, functools.partial(call, case), case.causal, q, k, v, dout)
    if not case.backward:
        return lambda: call(case, q, k, v)
    leaves = (q, k, v, *_extras_of(case, q).trained(name))
    if with_forward:
        return lambda: torch.autograd.grad(call(case, q, k, v), leaves, dout)
    out = call(case, q, k, v)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
