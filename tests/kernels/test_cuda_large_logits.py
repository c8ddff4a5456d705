"""The cases of test_large_logits.py that choose a CUDA kernel: classes of head dims, whole heads, few queries, splits, fp8 and sm_80."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_backends import cuda_backends
from helpers import Case
from test_large_logits import biased, check, check_derivatives, check_lse, check_uniform, magnified

import flashattn_ext
from flashattn_ext import attention_reference, quantize_fp8

BACKENDS = cuda_backends()
HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
CLASSES = (64, 80, 96, 128, 144, 160, 192, 256, 384, 512)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Any:
    with flashattn_ext.use_backend(request.param):
        yield request.param


def sizes(D: int, **more: Any) -> dict[str, Any]:
    return {"B": 1, "Sq": 130, "Sk": 300, "D": D, "Dv": D, **more}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [10, 40, 3e5], ids="{:g}".format)
@pytest.mark.parametrize("D", CLASSES)
def test_classes_of_head_dims(backend: str, D: int, magnitude: float, dtype: torch.dtype) -> None:
    """Logits on both sides of 2^10 and of 2^16: of the mark of a row, and of rounded products."""
    check(Case(dtype=dtype, **sizes(D)), "cuda", magnified(magnitude))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"dropout_p": 0.3, "rng_seed": 3},
        {"mask": "documents"},
        {"alibi": "heads"},
        {"softcap": 5000.0},
        {"relative": 20},
        {"bias": "bhq"},
        {"Hq": 8, "Hk": 1, "causal": True, "Sk": 1000},
        {"lengths_q": (3, 0, 130, 70), "lengths_k": (300, 40, 130, 70)},
    ],
    ids=str,
)
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_options_of_classes(backend: str, D: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(Case(dtype=dtype, **sizes(D, **options)), "cuda", magnified(40))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 80, 128])
def test_whole_heads(D: int, causal: bool, dtype: torch.dtype) -> None:
    """So many heads of 256 tokens that a thread block of Hopper computes all of one, and reads the words of lse itself."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count
    for use_lse in (False, True):
        case = Case(dtype=dtype, B=1, Sq=256, Sk=256, Hq=heads, Hk=heads, D=D, Dv=D, causal=causal, use_lse=use_lse)
        check(case, "cuda", magnified(40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("magnitude", [10, 40, 3e5], ids="{:g}".format)
@pytest.mark.parametrize("Sq,Hq,Hk", [(1, 2, 2), (5, 4, 1), (17, 2, 2), (40, 2, 2), (32, 4, 1), (64, 2, 2)])
@pytest.mark.parametrize("D", [64, 128])
def test_few_queries(backend: str, D: int, Sq: int, Hq: int, Hk: int, magnitude: float, dtype: torch.dtype) -> None:
    """1 to 128 rows of a KV head: kernels that split the keys, and backwards that keep all rows."""
    check(Case(dtype=dtype, **sizes(D, Sq=Sq, Sk=5000, Hq=Hq, Hk=Hk)), "cuda", magnified(magnitude))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("Sq", [1, 20, 130])
@pytest.mark.parametrize("D", [64, 96, 128, 200])
def test_derivatives_of_classes(backend: str, D: int, Sq: int, dtype: torch.dtype) -> None:
    for magnitude in (13, 48):
        check_derivatives(Case(dtype=dtype, **sizes(D, Sq=Sq), use_lse=True), "cuda", magnified(magnitude))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("value", [-1e9, -1.0, 1.0], ids="{:g}".format)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_tiles_of_biases(backend: str, D: int, value: float, dtype: torch.dtype) -> None:
    """Biases of 16 bits, which Hopper copies in tiles: of -1e9, and of the smallest and the largest number."""
    largest = torch.finfo(dtype).max
    size = value * largest if abs(value) == 1 else max(value, -largest)
    for rows in ("all", "some"):
        check_uniform(Case(dtype=dtype, **sizes(D, bias="bhq")), "cuda", biased(size, rows))


@pytest.mark.parametrize("magnitude", [1, 40, 3e4], ids="{:g}".format)
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("Sq", [1, 130])
def test_fp8(backend: str, Sq: int, D: int, magnitude: float) -> None:
    """Weights are larger by 256 there, which a large maximum loses if the offset holds it: lse shows it."""
    q, k, v = (torch.randn(1, S, 2, D, device="cuda") for S in (Sq, 600, 600))
    named = zip("qkv", (q * magnitude, k * magnitude, v), strict=True)
    elements, options = {}, {}
    for name, t in named:
        elements[name], options[f"descale_{name}"] = quantize_fp8(t, 2)
    out, lse = flashattn_ext.forward(*elements.values(), return_lse=True, **options)
    values = [t.double() * options[f"descale_{n}"][:, None, :, None] for n, t in elements.items()]
    exact, exact_lse = attention_reference(*values, return_lse=True)
    assert (out.double() - exact).abs().max() <= 0.25  # weights of e4m3 differ by 1 / 16
    if magnitude == 1:
        torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3)
    else:
        # Tensor cores sum products of e4m3 with 13 bits behind the leading one of the largest.
        check_lse(lse, exact_lse, rtol=2**-10)
