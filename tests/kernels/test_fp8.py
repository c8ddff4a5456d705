"""Inputs in float8_e4m3fn: the error rule, options, exact values, refusals, and what torch's tools make of such calls."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_backends import runs_hoppers_kernels
from helpers import assert_same_bits, cu_seqlens, own_seeds
from mask_cases import KINDS, make_mask
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flashattn_ext
from flashattn_ext import Mask, fp8, quantize_fp8
from flashattn_ext.options import CallOptions, CallTensors

FP8 = torch.float8_e4m3fn
DESCALES = ("descale_q", "descale_k", "descale_v")
VIEWS = ("plain", "transposed", "padded", "offset", "expanded", "strided_last")


def has_fp8_products(device: str) -> bool:
    """Whether the forward multiplies in e4m3 there, where no kernel for few queries serves the call."""
    return device == "cuda" and runs_hoppers_kernels()


def on(device: str, value: Any) -> Any:
    """Tensors and masks on a device, with the strides and the surroundings that they have in memory."""
    if device == "cpu" or not isinstance(value, (Tensor, Mask)):
        return value
    if isinstance(value, Mask):
        return value.to(device)
    memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).to(device)
    return memory.as_strided(value.size(), value.stride(), value.storage_offset())


@dataclass
class Call:
    """The tensors and options of a call in fp8, dense or packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    lengths: dict[str, Any]  # of a packed call: the arguments of varlen_forward

    def run(self, device: str = "cpu", **more: Any) -> tuple[Tensor, ...]:
        """Runs on the device; the results are on the CPU."""
        function = flashattn_ext.varlen_forward if self.lengths else flashattn_ext.forward
        options = {"return_lse": True, **self.lengths, **self.options, **more}
        results = function(
            *(on(device, t) for t in (self.q, self.k, self.v)),
            **{name: on(device, value) for name, value in options.items()},
        )
        return tuple(t.cpu() for t in (results if isinstance(results, tuple) else (results,)))

    def values(self) -> list[Tensor]:
        """q, k and v in fp64: element * descale."""
        axis = 1 if self.lengths or self.options.get("layout") == "bhsd" else 2
        return [self._values(name, axis) for name in "qkv"]

    def _values(self, name: str, axis: int) -> Tensor:
        t, descale = getattr(self, name).double(), self.options.get(f"descale_{name}")
        if descale is None:
            return t
        heads, batch = t.shape[axis], descale.shape[0]
        of_heads = descale.double().expand(batch, self.k.shape[axis]).repeat_interleave(heads // self.k.shape[axis], 1)
        if not self.lengths:
            return t * (of_heads[:, None, :, None] if axis == 2 else of_heads[:, :, None, None])
        starts = self.lengths[f"cu_seqlens_{'q' if name == 'q' else 'k'}"].tolist()
        for b, (start, end) in enumerate(itertools.pairwise(starts)):
            t[start:end] *= of_heads[min(b, batch - 1)][:, None]
        return t

    def exact(self, v: Tensor | None = None, **more: Any) -> tuple[Tensor, ...]:
        """attention_reference of the values in fp64: (out, lse), or with other values instead of v."""
        q, k, own = self.values()
        options = {name: value for name, value in self.options.items() if name not in (*DESCALES, "out_dtype")}
        lengths = {name: self.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if self.lengths}
        return flashattn_ext.attention_reference(
            q, k, own if v is None else v, **lengths, **{"return_lse": True, **options, **more}
        )

    def simulated(self) -> Tensor:
        """The exact attention whose weights, relative to the largest of a row, are rounded to e4m3 once, and out to bfloat16."""
        packed, bhsd = bool(self.lengths), self.options.get("layout") == "bhsd"
        v = self.values()[2]
        key_axis = 0 if packed else 2 if bhsd else 1
        keys, heads = v.shape[key_axis], v.shape[1 if packed or bhsd else 2]
        eye = torch.eye(keys, dtype=torch.float64)
        eye = eye[:, None].expand(keys, heads, keys)  # [Sk, Hk, Sk]
        if not packed:
            eye = (eye.transpose(0, 1) if bhsd else eye).expand(
                v.shape[0], *(eye.transpose(0, 1) if bhsd else eye).shape
            )
        weights = self.exact(v=eye)[0]
        largest = weights.amax(-1, keepdim=True) if keys else weights.new_zeros(*weights.shape[:-1], 1)
        rounded = (weights / largest.clamp(min=1e-300) * 256).to(torch.float32).to(FP8).double() / 256 * largest
        group = weights.shape[1 if packed or bhsd else 2] // max(heads, 1)
        v = v.repeat_interleave(group, 1 if packed or bhsd else 2)
        if packed:
            out = torch.einsum("qhk,khd->qhd", rounded, v)
        else:
            out = rounded @ v if bhsd else torch.einsum("bqhk,bkhd->bqhd", rounded, v)
        return out.bfloat16()


def relative_error(got: Tensor, ref: Tensor) -> float:
    """Root mean square, relative to that of ref."""
    return (
        float((got.double() - ref).square().mean().sqrt() / ref.square().mean().sqrt().clamp(min=1e-300))
        if ref.numel()
        else 0.0
    )


def in_memory(t: Tensor, kind: str) -> Tensor:
    """t (for `expanded` its first entry or head) in memory of that kind; what lies between its rows is NaN."""
    if kind == "transposed":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "expanded":
        return (t[:1] if t.dim() == 4 else t[:, :1]).expand_as(t)
    shapes = {"padded": (*t.shape[:-1], t.shape[-1] + 3), "offset": (t.numel() + 1,), "strided_last": (*t.shape, 2)}
    if kind not in shapes:
        return t
    memory = torch.full(shapes[kind], 0x7F, dtype=torch.uint8).view(FP8)
    view = {
        "padded": lambda: memory[..., : t.shape[-1]],
        "offset": lambda: memory[1:].view(t.shape),
        "strided_last": lambda: memory[..., 0],
    }[kind]()
    view.copy_(t)
    return view


def random_call(seed: int) -> Call:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    packed, Hk = rng.random() < 0.4, rng.choice([1, 2, 3])
    Hq, B = Hk * rng.choice([1, 2, 4]), rng.randint(1, 3)
    D = rng.choice([16, 64, 64, 128, 80, 33, 7])
    Dv = rng.choice([D, D, 24, 65])
    layout = "bshd" if packed else rng.choice(["bshd", "bhsd"])
    lengths_q = [rng.choice([0, 1, 5, 64, 100]) for _ in range(B)]
    lengths_k = [rng.choice([0, 3, 64, 150]) for _ in range(B)]
    Sq, Sk = rng.choice([1, 17, 100, 200]), rng.choice([5, 64, 150, 400])

    def tensor(S: int, H: int, width: int, lengths: list[int]) -> tuple[Tensor, Tensor]:
        shape = (sum(lengths) + 2, H, width) if packed else (B, S, H, width) if layout == "bshd" else (B, H, S, width)
        values = torch.randn(shape, generator=generator) * 10 ** rng.uniform(-2, 1)
        elements, descale = quantize_fp8(values, 1 if packed or layout == "bhsd" else 2, kv_heads=Hk)
        return in_memory(elements, rng.choice(VIEWS)), descale

    q, descale_q = tensor(Sq, Hq, D, lengths_q)
    k, descale_k = tensor(Sk, Hk, D, lengths_k)
    v, descale_v = tensor(Sk, Hk, Dv, lengths_k)
    options: dict[str, Any] = {}
    for name, descale in zip(DESCALES, (descale_q, descale_k, descale_v), strict=True):
        different = descale * torch.rand(B, 1, generator=generator).add(0.5)
        options[name] = rng.choice(
            [different, different, different[:1, :1].expand(B, Hk), different[:, :1], different[:1]]
        )
    options["softmax_scale"] = rng.choice([None, None, 0.3, -0.2])
    options["causal"] = rng.random() < 0.4
    options["window_size"] = rng.choice([(-1, -1), (-1, -1), (rng.randint(0, 60), rng.randint(0, 20))])
    options["softcap"] = rng.choice([0.0, 0.0, 3.0])
    smooth = rng.random() < 0.3
    options["smooth_softmax"] = smooth
    options["sink"] = None if smooth or rng.random() < 0.6 else torch.randn(Hq, generator=generator)
    options["out_dtype"] = rng.choice([None, None, torch.bfloat16, torch.float16, torch.float32])
    lengths: dict[str, Any] = {}
    if packed:
        lengths = {
            "cu_seqlens_q": cu_seqlens(lengths_q, "cpu"), "cu_seqlens_k": cu_seqlens(lengths_k, "cpu"),
            "max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k),
        }  # fmt: skip
    elif rng.random() < 0.4:
        options["mask"] = make_mask(rng.choice(KINDS), rng.choice([1, Hk]), [(Sq, Sk)] * B, generator)
    if not packed:
        options["layout"] = layout
    return Call(q, k, v, options, lengths)


def check_lse(lse: Tensor, ref: Tensor, device: str, atol: float = 1e-4) -> None:
    """Products in fp8 keep about 14 bits of the largest of their partial sums."""
    if has_fp8_products(device) and ref.numel():
        atol = max(atol, float(ref.abs().max()) * 2**-11)
    torch.testing.assert_close(lse.double(), ref, rtol=2e-5, atol=atol)


def check(call: Call, device: str) -> None:
    """The error rule, lse, and agreement with the reference of the same arguments."""
    out, lse = call.run(device)
    ref, ref_lse = call.exact()
    wanted = call.options.get("out_dtype") or torch.bfloat16
    assert out.dtype == wanted and out.shape == ref.shape and lse.dtype == torch.float32
    assert out.isfinite().all()
    error, simulated = relative_error(out, ref), relative_error(call.simulated(), ref)
    assert error <= 1.1 * simulated + 1e-9, f"error {error:.3g}, simulated {simulated:.3g}"
    # Products are of exact operands; without fp8 products weights are rounded to bfloat16 at most.
    assert error <= (2**-4 if has_fp8_products(device) else 2**-8) or not ref.numel(), f"error {error:.3g}"
    infinite = ref_lse.isinf()
    assert torch.equal(lse.isinf(), infinite)
    # The tanh of GPUs has an error of 2^-11.
    atol = 1e-4 if device == "cpu" else max(1e-4, call.options.get("softcap", 0) * 2**-10)
    check_lse(lse[~infinite], ref_lse[~infinite], device, atol)
    lengths = {name: call.lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k") if call.lengths}
    same, same_lse = flashattn_ext.attention_reference(
        call.q, call.k, call.v, **lengths, **call.options, return_lse=True
    )
    assert same.dtype == wanted and same_lse.dtype == torch.float32
    assert relative_error(same, ref) <= 2**-8 or not ref.numel()
    torch.testing.assert_close(same_lse.double()[~infinite], ref_lse[~infinite], rtol=1e-4, atol=1e-4)


def small(dtype: torch.dtype = FP8, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 33, heads, 32, generator=generator).to(dtype) for heads in (4, 2, 2))
    return Call(q, k, v, options, {})


@pytest.mark.every_isa
@pytest.mark.parametrize("seed", range(20))
def test_random_calls(device: str, seed: int) -> None:
    for own in own_seeds(device, seed):
        check(random_call(own), device)


@pytest.mark.parametrize(("wide", "rows"), [(40, 3), (5000, 3), (40, 70), (5000, 70)])
def test_outliers_among_many_keys(device: str, wide: int, rows: int) -> None:
    """32768 keys of which a few have logits far above the others; most weights are far below the largest."""
    generator = torch.Generator().manual_seed(wide)
    q, k, v = (torch.randn(1, length, 2, 64, generator=generator) for length in (rows, 32768, 32768))
    k[:, ::wide] *= 4
    named = zip("qkv", (quantize_fp8(t, 2) for t in (q, k, v)), strict=True)
    tensors, options = {}, {}
    for name, (elements, descale) in named:
        tensors[name], options[f"descale_{name}"] = elements, descale
    call = Call(**tensors, options=options, lengths={})
    exact_q, exact_k, exact_v = call.values()
    logits = torch.einsum("bqhd,bkhd->bhqk", exact_q, exact_k) / 8
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    rounded = (weights * 256).float().to(FP8).double() / 256
    ref = torch.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdim=True), exact_v)
    simulated = torch.einsum("bhqk,bkhd->bqhd", rounded / weights.sum(-1, keepdim=True), exact_v).bfloat16()
    out, lse = call.run(device)
    assert relative_error(out, ref) <= 1.1 * relative_error(simulated, ref)
    check_lse(lse, torch.logsumexp(logits, -1), device)


# Options of calls with so many rows that Hopper's kernels with products in fp8 serve them.
LONG: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 20)},
    "softcap": {"softcap": 3.0},
    "negative scale": {"softmax_scale": -0.1},
    "sink": {"sink": torch.tensor([0.5, -1.0, 12.0, -math.inf])},
    "smooth": {"smooth_softmax": True, "causal": True},
    "mask": {"mask": Mask.documents(torch.tensor([[0] * 90 + [1] * 200 + [2] * 40]))},
    "origin": {"causal": True, "origin": (0, 0, 20, 0)},
    "bhsd": {"layout": "bhsd", "out_dtype": torch.float32},
}


def long(width: int, values: int, **options: Any) -> Call:
    """330 rows of four heads and as many keys of two."""
    generator = torch.Generator().manual_seed(width)
    axis = 1 if options.get("layout") == "bhsd" else 2
    tensors = []
    for name, heads, columns in (("q", 4, width), ("k", 2, width), ("v", 2, values)):
        drawn = torch.randn(2, 330, heads, columns, generator=generator)
        elements, descale = quantize_fp8(drawn.transpose(1, 2).contiguous() if axis == 1 else drawn, axis, kv_heads=2)
        tensors.append(elements)
        options[f"descale_{name}"] = descale * torch.tensor([[1.0, 2.0], [0.5, 1.5]])
    q, k, v = tensors
    return Call(q, k, v, options, {})


@pytest.mark.shapes_for("cuda", dims=((64, 64), (160, 192), (33, 50)))
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dims", [(64, 64), (80, 96), (128, 128), (160, 192), (192, 128), (256, 256), (33, 50)])
def test_options_of_many_rows(device: str, dims: tuple[int, int], name: str) -> None:
    """The error tells which kernel served the call: with products in fp8 weights are rounded to e4m3."""
    call = long(*dims, **LONG[name])
    check(call, device)
    error = relative_error(call.run(device)[0], call.exact()[0])
    assert (error > 2**-8) == has_fp8_products(device), f"error {error:.3g}"


@pytest.mark.parametrize("width", [64, 96, 128])
def test_more_keys(device: str, width: int) -> None:
    """Above 2048 keys a kernel of its own transposes the values on Hopper, up to that the forward does."""
    generator = torch.Generator().manual_seed(width)
    tensors, options = {}, {}
    for name, length in (("q", 130), ("k", 2100), ("v", 2100)):
        drawn = torch.randn(1, length, 2, width, generator=generator)
        tensors[name], options[f"descale_{name}"] = quantize_fp8(drawn, 2)
    check(Call(**tensors, options={**options, "causal": True}, lengths={}), device)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_packed_sequences_have_the_bits_of_each_alone(device: str, width: int) -> None:
    """Transposed values begin with the first key of a sequence; behind its last key are zeros."""
    generator = torch.Generator().manual_seed(width)
    lengths = [0, 1, 127, 128, 129, 300, 64]
    q, k, v = (torch.randn(sum(lengths), heads, width, generator=generator).to(FP8) for heads in (4, 2, 2))
    starts = cu_seqlens(lengths, "cpu")
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 300, "max_seqlen_k": 300}
    out, _ = Call(q, k, v, {"causal": True}, packed).run(device)
    for start, end in itertools.pairwise(starts.tolist()):
        own = (t[None, start:end] for t in (q, k, v))
        assert_same_bits(out[start:end], Call(*own, {"causal": True}, {}).run(device)[0][0])


def test_nan_of_another_sequence_reaches_no_row(device: str) -> None:
    q, k, v = (torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(9)).to(FP8) for _ in range(3))
    starts = cu_seqlens([90, 110], "cpu")
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 110, "max_seqlen_k": 110}
    expected = Call(q, k, v, {}, packed).run(device)[0]
    for t in (k, v):
        t.view(torch.uint8)[90:] = 0x7F
    out = Call(q, k, v, {}, packed).run(device)[0]
    assert_same_bits(out[:90], expected[:90])
    assert out[90:].isnan().all()


@pytest.mark.every_isa
def test_every_element_has_its_value(device: str) -> None:
    """out of a row that sees one key is the row of v, element * descale, with subnormal numbers and NaN."""
    elements = torch.arange(256, dtype=torch.uint8).view(FP8)
    for width in (256, 255, 130, 100, 9, 1):
        for start in (0, 256 - width):
            v = elements[start : start + width].view(1, 1, 1, width)
            q = torch.ones(1, 3, 1, 16).to(FP8)
            descale = torch.tensor([[1.7]])
            out, _ = Call(q, q[:, :1], v, {"descale_v": descale, "out_dtype": torch.float32}, {}).run(device)
            expected_out = (v.float() * descale).expand(1, 3, 1, width)
            if has_fp8_products(device):  # the weight is 2^8, from an exponent that is rounded once more
                torch.testing.assert_close(out, expected_out, rtol=1e-6, atol=0, equal_nan=True)
            else:
                assert_same_bits(out, expected_out)
            # The same elements as keys: a row of q that is 1 at one place has its element as the logit.
            rows = torch.eye(width)[None, :, None].to(FP8)
            _, lse = Call(rows, v, v, {"softmax_scale": 1.0, "descale_k": descale}, {}).run(device)
            expected = (v.double() * 1.7).view(width)
            seen = ~v.view(width).isnan().any()
            if seen:
                atol = 1e-6 if has_fp8_products(device) else 1e-7
                torch.testing.assert_close(lse.view(width).double(), expected, rtol=1e-6, atol=atol)


@pytest.mark.every_isa
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"smooth_softmax": True}])
def test_without_descales_it_is_a_call_in_bfloat16(device: str, options: dict[str, Any]) -> None:
    """Every element is exact in bfloat16, and the kernels of the CPU compute with the same operands in the same order."""
    call = small(**options)
    wide = Call(call.q.bfloat16(), call.k.bfloat16(), call.v.bfloat16(), options, {})
    for got, expected in zip(call.run(device), wide.run(device), strict=True):
        if device == "cpu":
            assert_same_bits(got, expected)
        elif has_fp8_products(device):
            torch.testing.assert_close(got.float(), expected.float(), rtol=2**-5, atol=2**-4)
        else:
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-8)


def test_max_logits(device: str) -> None:
    call = random_call(3)
    *_, largest = call.run(device, return_max_logits=True)
    *_, expected = call.exact(return_max_logits=True)
    torch.testing.assert_close(largest.double(), expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.every_isa
def test_a_hidden_nan_reaches_no_row(device: str) -> None:
    call = small(mask=Mask.documents(torch.tensor([[0] * 20 + [1] * 13])))
    expected = call.run(device)[0]
    call.v = call.v.clone()
    call.v.view(torch.uint8)[:, 25] = 0x7F
    out = call.run(device)[0]
    assert_same_bits(out[:, :20], expected[:, :20])
    assert out[:, 20:].isnan().all()


def test_threads_do_not_change_bits(restore_threads: None) -> None:
    call = random_call(5)
    torch.set_num_threads(1)
    expected = call.run()
    torch.set_num_threads(2)
    for got, one in zip(call.run(), expected, strict=True):
        assert_same_bits(got, one)


# --- refusals ---------------------------------------------------------------------------------------------------------

BATCH_HEADS = "batch, KV heads"
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: .*bfloat16"),
    "seeded dropout": ({"dropout_p": 0.1, "rng_seed": 3}, NotImplementedError, "dropout_p: .*bfloat16"),
    "slopes": ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes: .*bfloat16"),
    "relative bias": ({"relative_bias": torch.ones(4, 3)}, NotImplementedError, "relative_bias: .*bfloat16"),
    "bias": ({"bias": torch.ones(1, 1, 1, 33)}, NotImplementedError, "bias: .*bfloat16"),
    "shape": ({"descale_k": torch.ones(2, 3)}, ValueError, r"descale_k: .*\[2 or 1, 2 or 1\].*got \[2, 3\]"),
    "query heads": ({"descale_q": torch.ones(2, 4)}, ValueError, "descale_q: .*KV heads"),
    "a number": ({"descale_v": torch.tensor(1.0)}, ValueError, r"descale_v: .*got \[\]"),
    "dtype": ({"descale_v": torch.ones(2, 2).double()}, TypeError, "descale_v: expected dtype float32, got float64"),
    "no tensor": ({"descale_q": 1.0}, TypeError, "descale_q: expected a torch.Tensor"),
    "device": ({"descale_q": torch.ones(2, 2, device="meta")}, ValueError, "descale_q: expected the device of q"),
    "float64 out": ({"out_dtype": torch.float64}, TypeError, "out_dtype: expected bfloat16, float16 or float32"),
    "fp8 out": ({"out_dtype": FP8}, TypeError, "out_dtype: expected bfloat16, float16 or float32"),
    "no dtype": ({"out_dtype": "bfloat16"}, TypeError, "out_dtype: expected a torch.dtype"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        small(**options).run()


@pytest.mark.parametrize("name", [*DESCALES, "out_dtype"])
def test_other_dtypes_have_no_descales(name: str) -> None:
    value = torch.float32 if name == "out_dtype" else torch.ones(2, 2)
    call = small(torch.bfloat16, **{name: value})
    with pytest.raises(ValueError, match=f"{name}: expected None"):
        call.run()
    with pytest.raises(ValueError, match=f"{name}.*: expected None"):
        flashattn_ext.attention_reference(call.q, call.k, call.v, **call.options)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_other_fp8_formats_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"q: expected dtype float8_e4m3fn.*quantize_fp8"):
        small(dtype).run()


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float8_e5m2])
def test_mixed_dtypes_are_refused(other: torch.dtype) -> None:
    call = small()
    with pytest.raises(TypeError, match="v: expected the dtype of q"):
        flashattn_ext.forward(call.q, call.k, call.v.float().to(other))
    with pytest.raises(TypeError, match="k: expected the dtype of q"):
        flashattn_ext.forward(call.q.bfloat16(), call.k, call.v)


@pytest.mark.parametrize("name", ["q", "sink", "descale_k"])
def test_a_call_that_needs_a_gradient_is_refused(name: str) -> None:
    call = small(sink=torch.zeros(4), descale_k=torch.ones(2, 2))
    tensor = call.q if name == "q" else call.options[name]
    tensor.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"no derivatives.*torch.no_grad\(\).*bfloat16"):
        call.run()
    with torch.no_grad():
        out, _ = call.run()
    assert not out.requires_grad


def test_the_backward_is_refused() -> None:
    call = small()
    out, lse = call.run()
    with pytest.raises(NotImplementedError, match="float8_e4m3fn have no backward"):
        flashattn_ext.backward(torch.ones_like(out), call.q, call.k, call.v, out, lse)
    assert not {*DESCALES, "out_dtype"} & inspect.signature(flashattn_ext.backward).parameters.keys()


def test_forward_mode_is_refused() -> None:
    call = small()
    with torch.autograd.forward_ad.dual_level():
        sink = torch.autograd.forward_ad.make_dual(torch.zeros(4), torch.ones(4))
        with pytest.raises(NotImplementedError, match="no derivatives"):
            call.run(sink=sink)


def test_attention_weights_are_refused() -> None:
    call = small()
    with pytest.raises(TypeError, match=r"q: expected no float8_e4m3fn.*element \* descale"):
        flashattn_ext.attention_weights(call.q, call.k, [0])


@pytest.mark.skipif(
    not Path(flashattn_ext.__file__).with_name("_ascend_emulator.so").exists(),
    reason="the emulator is not built (make emulator)",
)
def test_ascend_refuses() -> None:
    with flashattn_ext.use_backend("ascend-emulator"), pytest.raises(NotImplementedError, match=r"Ascend C.*bfloat16"):
        small().run()


# --- torch's tools ----------------------------------------------------------------------------------------------------


def op_arguments(call: Call) -> tuple[Any, ...]:
    tensors = CallTensors(call.q, call.k, call.v, **{name: call.options.get(name) for name in DESCALES})
    return *tensors, *CallOptions(softmax_scale=0.2, out_dtype=call.options.get("out_dtype"))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_opcheck(out_dtype: torch.dtype | None) -> None:
    call = small(descale_q=torch.ones(2, 2), descale_v=torch.ones(1, 2), out_dtype=out_dtype)
    ops = torch.ops.flashattn_ext
    tests = (
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # test_schema compares inputs by arithmetic that torch lacks for fp8
    torch.library.opcheck(ops.forward.call, (*op_arguments(call), None, True), test_utils=tests)
    torch.library.opcheck(ops.forward.default, (*op_arguments(call), None, False, False, True, []), test_utils=tests)


def test_compiled() -> None:
    torch._dynamo.reset()
    call = small(descale_q=torch.full((2, 2), 0.5), descale_k=torch.full((1, 2), 1.5))

    def function(q: Tensor, k: Tensor, v: Tensor, descale_q: Tensor, descale_k: Tensor) -> tuple[Tensor, ...]:
        return flashattn_ext.forward(
            q, k, v, descale_q=descale_q * 2, descale_k=descale_k, out_dtype=torch.float32, causal=True, return_lse=True
        )

    arguments = call.q, call.k, call.v, call.options["descale_q"], call.options["descale_k"]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*arguments), function(*arguments), strict=True):
        assert_same_bits(got, expected)


def test_meta_tensors() -> None:
    call = small(descale_q=torch.ones(2, 2), out_dtype=torch.float16)
    q, k, v = (t.to("meta") for t in (call.q, call.k, call.v))
    out, lse = flashattn_ext.forward(
        q, k, v, descale_q=torch.ones(2, 2, device="meta"), out_dtype=torch.float16, return_lse=True
    )
    assert out.dtype == torch.float16 and out.shape == call.run()[0].shape
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 33)


def test_flop_counter() -> None:
    def flop(dtype: torch.dtype) -> int:
        with FlopCounterMode(display=False) as counter:
            small(dtype, causal=True).run()
        return counter.get_total_flops()

    assert flop(FP8) == flop(torch.bfloat16) > 0


def test_vmap() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 2, 20, 2, 16, generator=generator).to(FP8) for _ in range(3))
    descale = torch.rand(3, 2, 2, generator=generator) + 0.5

    def one(q: Tensor, k: Tensor, v: Tensor, descale: Tensor) -> Tensor:
        out = flashattn_ext.forward(q, k, v, descale_k=descale)
        assert isinstance(out, Tensor)
        return out

    out = torch.vmap(one)(q, k, v, descale)
    for i in range(3):
        assert_same_bits(out[i], one(q[i], k[i], v[i], descale[i]))


def test_autocast_leaves_the_elements_alone() -> None:
    call = small(descale_k=torch.full((1, 1), 3.0))
    expected = call.run()
    with torch.autocast("cpu", torch.bfloat16):
        got = call.run()
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


# --- quantize_fp8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_quantised_values(dtype: torch.dtype) -> None:
    x = torch.randn(2, 50, 6, 32).mul(torch.tensor([1e-4, 1, 3, 100, 0.1, 7])[:, None]).to(dtype)
    elements, descale = quantize_fp8(x, 2)
    assert elements.dtype == FP8 and elements.shape == x.shape
    assert descale.dtype == torch.float32 and descale.shape == (2, 6)
    torch.testing.assert_close(descale * 448, x.float().abs().amax((1, 3)))
    values = elements.float() * descale[:, None, :, None]
    # Half a unit in the last of 4 bits; below 2^-6 of the scaled numbers, half of 2^-9.
    bound = (x.float().abs() * 2**-4).clamp(min=2**-10 * float(descale.max()))
    assert ((values - x.float()).abs() <= bound * 1.001).all()
    transposed, same = quantize_fp8(x.transpose(1, 2), -3)
    assert_same_bits(transposed.float(), elements.transpose(1, 2).float())
    assert_same_bits(same, descale)


def test_query_heads_share_the_descale_of_their_kv_head() -> None:
    q = torch.randn(2, 5, 6, 8)
    elements, descale = quantize_fp8(q, 2, kv_heads=2)
    assert descale.shape == (2, 2)
    torch.testing.assert_close(descale * 448, q.unflatten(2, (2, 3)).abs().amax((1, 3, 4)))
    assert elements.float().unflatten(2, (2, 3)).abs().amax((1, 3, 4)).eq(448).all()


def test_packed_sequences_have_one_descale_for_each_head() -> None:
    x = torch.randn(70, 3, 8)
    elements, descale = quantize_fp8(x, 1)
    assert elements.shape == x.shape and descale.shape == (1, 3)


def test_unusual_values() -> None:
    x = torch.zeros(1, 4, 3, 2)
    x[0, 0, 1] = torch.tensor([math.inf, -2.0])
    x[0, 0, 2] = torch.tensor([math.nan, 4.0])
    elements, descale = quantize_fp8(x, 2)
    assert descale[0].tolist() == pytest.approx([1, 2 / 448, 4 / 448])
    assert elements[0, 0, 1].float().tolist() == [448, -448]
    assert elements[0, 0, 2].float().isnan().tolist() == [True, False]
    empty, ones = quantize_fp8(torch.zeros(2, 0, 3, 8), 2)
    assert empty.shape == (2, 0, 3, 8) and ones.eq(1).all() and ones.shape == (2, 3)


@pytest.mark.no_emulator
@pytest.mark.dtypes("float32", "float64")
@pytest.mark.parametrize("largest", [1.5e-45, 3e-44, 6e-43, 6.4e-43, 9e-43, 1e-42, 1e-40, 5e-36, 1.0, 3e38])
def test_heads_of_every_size(device: str, dtype: torch.dtype, largest: float) -> None:
    """The descale of a head below 6e-43 was 0, and its elements NaN; up to 1e-42 it was rounded down, and elements became the largest."""
    drawn = torch.randn(2, 40, 3, 8, device=device).double()
    x = (drawn / drawn.abs().amax((1, 3), keepdim=True) * largest).to(dtype)
    elements, descale = quantize_fp8(x, 2)
    assert (descale > 0).all() and descale.dtype == torch.float32
    back = elements.double() * descale.double()[:, None, :, None]
    error = (back - x.double()).abs().amax((1, 3)) / x.double().abs().amax((1, 3))
    # Half a step of the dtype relative to the largest element, 2**-4, and what rounding x itself to denormal numbers costs.
    assert (error <= 2**-4 + 1e-3).all()
    assert (elements.double().abs().amax((1, 3)) >= (1 if largest < 1e-42 else 224)).all()


def test_elements_beyond_float32() -> None:
    x = torch.tensor([1e39, -1e38, 1e-300, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
    elements, descale = quantize_fp8(x, 2)
    torch.testing.assert_close(elements.double() * descale.double(), x, rtol=0.05, atol=1e34)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (torch.zeros(2, 3), (1,), ValueError, "x: expected"),
        (torch.zeros(2, 3, 4, 5), (0,), ValueError, "heads_dim: expected a dimension from 1 to 2"),
        (torch.zeros(2, 3, 4, 5), (-1,), ValueError, "heads_dim"),
        (torch.zeros(2, 3, 4, 5).int(), (2,), TypeError, "x: expected dtype"),
        (torch.zeros(2, 3, 4, 5).to(FP8), (2,), TypeError, "x: expected dtype"),
        (None, (2,), TypeError, "x: expected a torch.Tensor"),
        (torch.zeros(2, 3, 4, 5), (1.5,), TypeError, "heads_dim: expected an int"),
    ],
)
def test_bad_arguments_of_quantize(x: Any, arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_fp8(x, *arguments)
    with pytest.raises(ValueError, match="kv_heads: expected a divisor"):
        quantize_fp8(torch.zeros(2, 3, 4, 5), 2, kv_heads=3)


def test_the_reference_takes_elements_as_they_are_without_descales() -> None:
    t = torch.randn(1, 4, 2, 8).to(FP8)
    assert_same_bits(fp8.values(t, None, 2), t.float())
