"""Every rejected call raises the right exception, names the argument and what it got, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flashattn_ext
from flashattn_ext import Mask
from flashattn_ext.options import CallOptions, CallTensors

Arguments = dict[str, Any]


class Row(NamedTuple):
    """`change` makes a good call bad; the message must contain all of `words`."""

    name: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception]
    words: tuple[str, ...]


def dense_call(device: str) -> Arguments:
    q, k, v = (torch.randn(shape, device=device) for shape in ((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 24)))
    return dict(q=q, k=k, v=v)


def varlen_call(device: str) -> Arguments:
    q, k, v = (torch.randn(shape, device=device) for shape in ((9, 4, 16), (11, 2, 16), (11, 2, 24)))
    starts_q, starts_k = (torch.tensor(s, dtype=torch.int32, device=device) for s in ([0, 4, 9], [0, 8, 11]))
    return dict(q=q, k=k, v=v, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=5, max_seqlen_k=8)


def starts(*values: int) -> Callable[[Arguments], torch.Tensor]:
    return lambda a: torch.tensor(values, dtype=torch.int32, device=a["q"].device)


def row(error: type[Exception], words: str, **changes: Any) -> Row:
    """A row whose changes are values, or functions of the good arguments. `words` are separated by spaces."""

    def change(arguments: Arguments) -> Arguments:
        return {name: value(arguments) if callable(value) else value for name, value in changes.items()}

    shown = ",".join(f"{n}={v}" if isinstance(v, (int, float, str, tuple)) else n for n, v in changes.items())
    return Row(f"{shown}:{words}".replace(" ", "_"), change, error, tuple(words.split()))


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Arguments], torch.Tensor]:
    return lambda a: torch.zeros(shape, dtype=dtype, device=a["q"].device)


def cast(name: str, dtype: torch.dtype) -> Callable[[Arguments], torch.Tensor]:
    return lambda a: a[name].to(dtype)


def mask(*shape: int) -> Callable[[Arguments], Mask]:
    """A Mask with intervals of that shape."""
    return lambda a: Mask(torch.zeros(shape, dtype=torch.int32, device=a["q"].device))


SHARED = [
    # not tensors
    row(TypeError, "q list", q=[1.0]),
    row(TypeError, "k NoneType", k=None),
    row(TypeError, "v int", v=3),
    row(TypeError, "sink float", sink=0.5),
    row(TypeError, "sink list", sink=[0.0] * 4),
    # dtypes
    row(TypeError, "q int64", q=cast("q", torch.int64), k=cast("k", torch.int64), v=cast("v", torch.int64)),
    row(TypeError, "q bool", q=cast("q", torch.bool), k=cast("k", torch.bool), v=cast("v", torch.bool)),
    row(TypeError, "q complex64", q=cast("q", torch.cfloat), k=cast("k", torch.cfloat), v=cast("v", torch.cfloat)),
    row(TypeError, "q float8_e5m2", **{n: cast(n, torch.float8_e5m2) for n in "qkv"}),
    row(TypeError, "k float16 float32", k=cast("k", torch.float16)),
    row(TypeError, "v bfloat16 float32", v=cast("v", torch.bfloat16)),
    row(TypeError, "float16 float32", q=cast("q", torch.float16)),
    row(TypeError, "sink int32", sink=new(4, dtype=torch.int32)),
    row(TypeError, "sink bool", sink=new(4, dtype=torch.bool)),
    # sinks
    row(ValueError, "sink 4 3", sink=new(3)),
    row(ValueError, "sink 4 1", sink=new(4, 1)),
    row(ValueError, "sink 4", sink=new()),
    row(ValueError, "sink smooth_softmax", sink=new(4), smooth_softmax=True),
    # biases
    row(TypeError, "alibi_slopes float", alibi_slopes=0.5),
    row(TypeError, "alibi_slopes float32 float16", alibi_slopes=new(4, dtype=torch.float16)),
    row(TypeError, "alibi_slopes float32 float64", alibi_slopes=new(4, dtype=torch.float64)),
    row(TypeError, "alibi_slopes float32 int32", alibi_slopes=new(4, dtype=torch.int32)),
    row(ValueError, "alibi_slopes [4] [2, 4] [3]", alibi_slopes=new(3)),
    row(ValueError, "alibi_slopes [4] [2, 4] [3, 4]", alibi_slopes=new(3, 4)),
    row(ValueError, "alibi_slopes [4] [2, 4] [1, 4]", alibi_slopes=new(1, 4)),
    row(ValueError, "alibi_slopes [4] [2, 4] [4, 2]", alibi_slopes=new(4, 2)),
    row(ValueError, "alibi_slopes [4] [2, 4] []", alibi_slopes=new()),
    row(TypeError, "relative_bias list", relative_bias=[[0.0]] * 4),
    row(TypeError, "relative_bias floating int32", relative_bias=new(4, 5, dtype=torch.int32)),
    row(ValueError, "relative_bias [4, 2 L + 1] [3, 5]", relative_bias=new(3, 5)),
    row(ValueError, "relative_bias [4, 2 L + 1] [5]", relative_bias=new(5)),
    row(ValueError, "relative_bias odd got 6 [4, 6]", relative_bias=new(4, 6)),
    row(ValueError, "relative_bias odd got 0 [4, 0]", relative_bias=new(4, 0)),
    row(TypeError, "bias float", bias=0.5),
    # masks
    row(TypeError, "mask Mask Tensor (2, 7) from_dense bias", mask=new(2, 7)),
    row(TypeError, "mask Mask list", mask=[(0, 1)] * 7),
    row(TypeError, "mask Mask str", mask="causal"),
    # numbers
    row(ValueError, "softcap above 0 -1", softcap=-1.0),
    row(ValueError, "softcap finite inf", softcap=math.inf),
    row(ValueError, "softcap finite nan", softcap=math.nan),
    row(TypeError, "softcap str", softcap="30"),
    row(TypeError, "softcap NoneType", softcap=None),
    row(TypeError, "softcap bool", softcap=True),
    row(ValueError, "dropout_p 1", dropout_p=1.0),
    row(ValueError, "dropout_p -0.1", dropout_p=-0.1),
    row(ValueError, "dropout_p 1.5", dropout_p=1.5),
    row(ValueError, "dropout_p nan", dropout_p=math.nan),
    row(TypeError, "dropout_p str", dropout_p="0.1"),
    row(TypeError, "dropout_p NoneType", dropout_p=None),
    row(ValueError, "softmax_scale inf", softmax_scale=math.inf),
    row(ValueError, "softmax_scale nan", softmax_scale=math.nan),
    row(TypeError, "softmax_scale str", softmax_scale="1"),
    row(ValueError, "window_size -2", window_size=(-2, 0)),
    row(ValueError, "window_size -5", window_size=(0, -5)),
    row(ValueError, "window_size 3", window_size=3),
    row(ValueError, "window_size (1, 2, 3)", window_size=(1, 2, 3)),
    row(TypeError, "window_size 1.5", window_size=(1.5, 2)),
    row(TypeError, "window_size None", window_size=(None, 2)),
    row(TypeError, "rng_seed float", rng_seed=1.5, dropout_p=0.1),
    row(TypeError, "rng_seed str", rng_seed="1", dropout_p=0.1),
    row(ValueError, f"rng_seed {2**64}", rng_seed=2**64, dropout_p=0.1),
    row(ValueError, f"rng_seed {-(2**63) - 1}", rng_seed=-(2**63) - 1, dropout_p=0.1),
]

DENSE = [
    row(ValueError, "q [5, 4, 16] 4", q=new(5, 4, 16)),
    row(ValueError, "k [7, 16] 4", k=new(7, 16)),
    row(ValueError, "v [1, 2, 7, 2, 24] 4", v=new(1, 2, 7, 2, 24)),
    row(ValueError, "q []", q=new()),
    row(ValueError, "k 2 3", k=new(3, 7, 2, 16)),
    row(ValueError, "v 2 1", v=new(1, 7, 2, 24)),
    row(ValueError, "v 7 8", v=new(2, 8, 2, 24)),
    row(ValueError, "v 2 4", v=new(2, 7, 4, 24)),
    row(ValueError, "4 3 heads", k=new(2, 7, 3, 16), v=new(2, 7, 3, 24)),
    row(ValueError, "4 8 heads", k=new(2, 7, 8, 16), v=new(2, 7, 8, 24)),
    row(ValueError, "4 0 heads", k=new(2, 7, 0, 16), v=new(2, 7, 0, 24)),
    row(ValueError, "k 16 17", k=new(2, 7, 2, 17)),
    row(ValueError, "q 513 512", q=new(2, 5, 4, 513), k=new(2, 7, 2, 513)),
    row(ValueError, "v 600 512", v=new(2, 7, 2, 600)),
    row(ValueError, "q 0", q=new(2, 5, 4, 0), k=new(2, 7, 2, 0)),
    row(ValueError, "v 0", v=new(2, 7, 2, 0)),
    row(TypeError, "bias float32 float16", bias=new(1, 4, 5, 7, dtype=torch.float16)),
    row(TypeError, "bias float32 bool", bias=new(1, 4, 5, 7, dtype=torch.bool)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [5, 7]", bias=new(5, 7)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [4, 5, 7]", bias=new(4, 5, 7)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [3, 4, 5, 7]", bias=new(3, 4, 5, 7)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [2, 2, 5, 7]", bias=new(2, 2, 5, 7)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [2, 4, 7, 5]", bias=new(2, 4, 7, 5)),
    row(ValueError, "bias [2 or 1, 4 or 1, 5 or 1, 7] [2, 4, 5, 1]", bias=new(2, 4, 5, 1)),
    row(ValueError, "mask intervals [2 or 1, 1 or 2 or 4, 7, 2] [3, 1, 7, 2]", mask=mask(3, 1, 7, 2)),
    row(ValueError, "mask intervals [2 or 1, 1 or 2 or 4, 7, 2] [2, 3, 7, 2]", mask=mask(2, 3, 7, 2)),
    row(ValueError, "mask intervals [2 or 1, 1 or 2 or 4, 7, 2] [2, 1, 8, 2]", mask=mask(2, 1, 8, 2)),
    row(ValueError, "mask intervals [2 or 1, 1 or 2 or 4, 7, 2] [2, 1, 5, 2]", mask=mask(2, 1, 5, 2)),
    row(ValueError, "mask intervals [2 or 1, 1 or 2 or 4, 7, 2] [1, 7, 2]", mask=mask(1, 7, 2)),
    row(ValueError, "layout sbhd bshd bhsd", layout="sbhd"),
    row(ValueError, "layout None bshd bhsd", layout=None),
    row(ValueError, "layout BSHD", layout="BSHD"),
    # Shapes of the other layout, without layout=.
    row(ValueError, "v", q=new(2, 4, 5, 16), k=new(2, 2, 7, 16), layout="bhsd"),
]

VARLEN = [
    row(ValueError, "q 3 [2, 5, 4, 16]", q=new(2, 5, 4, 16)),
    row(ValueError, "v 11 12", v=new(12, 2, 24)),
    row(ValueError, "k 16 8", k=new(11, 2, 8)),
    row(TypeError, "cu_seqlens_q list", cu_seqlens_q=[0, 4, 9]),
    row(TypeError, "cu_seqlens_k NoneType", cu_seqlens_k=None),
    row(TypeError, "cu_seqlens_q int32 int64", cu_seqlens_q=cast("cu_seqlens_q", torch.int64)),
    row(TypeError, "cu_seqlens_k int32 float32", cu_seqlens_k=cast("cu_seqlens_k", torch.float32)),
    row(ValueError, "cu_seqlens_q [1, 3]", cu_seqlens_q=lambda a: a["cu_seqlens_q"][None]),
    row(ValueError, "cu_seqlens_k [0]", cu_seqlens_k=new(0, dtype=torch.int32)),
    row(ValueError, "cu_seqlens_k 3 4", cu_seqlens_k=starts(0, 2, 8, 11)),
    row(ValueError, "bias packed [1, 1, 9, 11] relative_bias", bias=new(1, 1, 9, 11)),
    row(ValueError, "mask intervals [1 or 2 or 4, 11, 2] [1, 1, 11, 2]", mask=mask(1, 1, 11, 2)),
    row(ValueError, "mask intervals [1 or 2 or 4, 11, 2] [1, 9, 2]", mask=mask(1, 9, 2)),
    row(ValueError, "mask intervals [1 or 2 or 4, 11, 2] [3, 11, 2]", mask=mask(3, 11, 2)),
    row(ValueError, "max_seqlen_q -1", max_seqlen_q=-1),
    row(ValueError, "max_seqlen_k -7", max_seqlen_k=-7),
    row(TypeError, "max_seqlen_q float", max_seqlen_q=5.0),
    row(TypeError, "max_seqlen_k NoneType", max_seqlen_k=None),
]

# Only the CPU backend reads the values of cu_seqlens: elsewhere that would synchronise with the device.
CU_SEQLENS_VALUES = [
    row(ValueError, "cu_seqlens_q 0 1", cu_seqlens_q=starts(1, 4, 9)),
    row(ValueError, "cu_seqlens_k 0 -1", cu_seqlens_k=starts(-1, 4, 11)),
    row(ValueError, "cu_seqlens_q 6 5", cu_seqlens_q=starts(0, 6, 5)),
    row(ValueError, "cu_seqlens_k -3", cu_seqlens_k=starts(0, -3, 11)),
    row(ValueError, "cu_seqlens_q 9 10", cu_seqlens_q=starts(0, 4, 10)),
    row(ValueError, "cu_seqlens_k 11 1000", cu_seqlens_k=starts(0, 8, 1000)),
]


def names(rows: list[Row]) -> list[str]:
    return [r.name for r in rows]


def assert_rejected(function: Callable[..., Any], good: Arguments, bad: Row) -> None:
    function(**good)
    arguments = {**good, **bad.change(good)}
    tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    before = {name: t.clone() for name, t in tensors.items()}
    generator = torch.get_rng_state()
    with pytest.raises(bad.error) as caught:
        function(**arguments)
    message = str(caught.value)
    assert type(caught.value) is bad.error, f"{type(caught.value).__name__}: {message}"
    for word in bad.words:
        assert word.lower() in message.lower(), f"{word!r} is not in the message: {message}"
    for name, t in tensors.items():
        assert torch.equal(t, before[name]), f"{name} was changed by the rejected call"
    assert torch.equal(torch.get_rng_state(), generator), "a rejected call drew random numbers"


@pytest.mark.parametrize("bad", SHARED + DENSE, ids=names(SHARED + DENSE))
def test_forward_names_the_bad_argument(device: str, bad: Row) -> None:
    assert_rejected(flashattn_ext.forward, dense_call(device), bad)


@pytest.mark.parametrize("bad", SHARED + VARLEN, ids=names(SHARED + VARLEN))
def test_varlen_forward_names_the_bad_argument(device: str, bad: Row) -> None:
    assert_rejected(flashattn_ext.varlen_forward, varlen_call(device), bad)


@pytest.mark.parametrize("bad", CU_SEQLENS_VALUES, ids=names(CU_SEQLENS_VALUES))
def test_cu_seqlens_values(bad: Row) -> None:
    assert_rejected(flashattn_ext.varlen_forward, varlen_call("cpu"), bad)


@pytest.mark.parametrize("bad", SHARED + DENSE, ids=names(SHARED + DENSE))
def test_forward_of_meta_tensors(bad: Row) -> None:
    good = dense_call("meta")
    with pytest.raises(bad.error, match=bad.words[0]):
        flashattn_ext.forward(**{**good, **bad.change(good)})


@pytest.mark.parametrize("bad", SHARED + VARLEN, ids=names(SHARED + VARLEN))
def test_varlen_forward_of_meta_tensors(bad: Row) -> None:
    good = varlen_call("meta")
    with pytest.raises(bad.error, match=bad.words[0]):
        flashattn_ext.varlen_forward(**{**good, **bad.change(good)})


def test_a_refused_call_with_dropout_draws_nothing(device: str) -> None:
    for good, function in ((dense_call, flashattn_ext.forward), (varlen_call, flashattn_ext.varlen_forward)):
        bad = row(ValueError, "v", v=lambda a: a["v"][:-1], dropout_p=0.5)
        assert_rejected(function, good(device), bad)


def backward_call(device: str) -> Arguments:
    good = dense_call(device)
    out, lse = flashattn_ext.forward(**good, return_lse=True)
    return dict(dout=torch.ones_like(out), **good, out=out, lse=lse, rng_seed=1)


BACKWARD = [
    row(TypeError, "out NoneType", out=None),
    row(TypeError, "lse list", lse=[0.0]),
    row(TypeError, "dout int", dout=1),
    row(ValueError, "dout [2, 5, 4, 24] [2, 5, 4, 16]", dout=new(2, 5, 4, 16)),
    row(ValueError, "out [2, 5, 4, 24] [2, 4, 5, 24]", out=new(2, 4, 5, 24)),
    row(ValueError, "lse [2, 4, 5] [2, 5, 4]", lse=new(2, 5, 4)),
    row(ValueError, "dlse [2, 4, 5] [4, 5]", dlse=new(4, 5)),
    row(TypeError, "dout float16 float32", dout=cast("dout", torch.float16)),
    row(TypeError, "out float16 float32", out=cast("out", torch.float16)),
    row(TypeError, "lse float16 float32", lse=cast("lse", torch.float16)),
    row(ValueError, "rng_seed None", rng_seed=None, dropout_p=0.1),
]


@pytest.mark.parametrize("bad", BACKWARD, ids=names(BACKWARD))
def test_backward_names_the_bad_argument(device: str, bad: Row) -> None:
    assert_rejected(flashattn_ext.backward, backward_call(device), bad)


@pytest.mark.parametrize("bad", BACKWARD, ids=names(BACKWARD))
def test_backward_of_meta_tensors(bad: Row) -> None:
    good = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in backward_call("cpu").items()}
    with pytest.raises(bad.error, match=bad.words[0]):
        flashattn_ext.backward(**{**good, **bad.change(good)})


@pytest.mark.parametrize("bad", SHARED, ids=names(SHARED))
def test_backward_checks_what_forward_checks(device: str, bad: Row) -> None:
    assert_rejected(flashattn_ext.backward, backward_call(device), bad)


# The rows whose changes are arguments of attention_weights.
OF_OTHERS = {"v", "dropout_p", "rng_seed"}
WEIGHTS = [r for r in SHARED + DENSE if not OF_OTHERS & {*r.change(dense_call("cpu")), *r.words}]
WEIGHTS += [
    row(TypeError, "q float8_e5m2", **{n: cast(n, torch.float8_e5m2) for n in "qk"}),
    row(TypeError, "k float16", k=cast("k", torch.float16)),
    row(ValueError, "bias 7 1", bias=new(1, 1, 1, 1)),
    row(ValueError, "q 513 512", q=new(2, 5, 4, 513), k=new(2, 7, 2, 513)),
    row(ValueError, "origin (0, 0, 1)", origin=(0, 0, 1)),
]


@pytest.mark.parametrize("bad", WEIGHTS, ids=names(WEIGHTS))
def test_attention_weights_checks_what_forward_checks(device: str, bad: Row) -> None:
    good = {name: t for name, t in dense_call(device).items() if name != "v"}
    assert_rejected(lambda **given: flashattn_ext.attention_weights(rows=[0, 3], **given), good, bad)
    given = {**good, **bad.change(good)}
    with pytest.raises(bad.error) as of_weights:
        flashattn_ext.attention_weights(rows=[0, 3], **given)
    if isinstance(given["k"], torch.Tensor):  # the checks of shapes and values are those of one function
        with pytest.raises(bad.error) as of_forward:
            flashattn_ext.forward(v=given["k"], **given)
        assert str(of_weights.value) == str(of_forward.value)


@pytest.mark.parametrize("name", ["k", "sink", "alibi_slopes", "relative_bias", "bias", "mask"])
def test_attention_weights_of_tensors_on_different_devices(device: str, name: str) -> None:
    tensors = {
        **{n: t for n, t in dense_call(device).items() if n != "v"},
        "sink": torch.zeros(4, device=device), "alibi_slopes": torch.zeros(4, device=device),
        "relative_bias": torch.zeros(4, 3, device=device), "bias": torch.zeros(1, 1, 1, 7, device=device),
        "mask": Mask.chunked(2, 5, 7, device=device),
    }  # fmt: skip
    flashattn_ext.attention_weights(rows=[0], **tensors)
    with pytest.raises(ValueError, match=rf"^{name}: .*{device}.*meta"):
        flashattn_ext.attention_weights(rows=[0], **{**tensors, name: tensors[name].to("meta")})


MASK = [
    row(ValueError, "B -1", B=-1),
    row(ValueError, "Sk -4", Sk=-4),
    row(TypeError, "Sq float", Sq=1.5),
    row(ValueError, "dropout_p 1", dropout_p=1.0),
    row(TypeError, "dropout_p str", dropout_p="a"),
    row(TypeError, "rng_seed None", rng_seed=None),
    row(ValueError, f"rng_seed {2**70}", rng_seed=2**70),
]


@pytest.mark.parametrize("bad", MASK, ids=names(MASK))
def test_dropout_mask_names_the_bad_argument(device: str, bad: Row) -> None:
    good = dict(B=1, H=2, Sq=3, Sk=4, dropout_p=0.5, rng_seed=1, device=device)

    def function(**arguments: Any) -> torch.Tensor:
        arguments.pop("q", None)
        return flashattn_ext.dropout_mask(**arguments)

    assert_rejected(function, good, bad)


@pytest.mark.parametrize("name", ["k", "v", "sink", "alibi_slopes", "relative_bias", "bias", "mask"])
def test_tensors_on_different_devices_are_refused(device: str, name: str) -> None:
    good = dense_call(device)
    given = {
        **good,
        "sink": torch.zeros(4, device=device),
        "alibi_slopes": torch.zeros(4, device=device),
        "relative_bias": torch.zeros(4, 3, device=device),
        "bias": torch.zeros(1, 1, 1, 7, device=device),
        "mask": Mask.chunked(2, 5, 7, device=device),
    }
    elsewhere = {**good, name: given[name].to("meta")}
    with pytest.raises(ValueError, match=rf"{name}.*{device}.*meta|{name}.*meta.*{device}"):
        flashattn_ext.forward(**elsewhere)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_on_another_device(device: str, name: str) -> None:
    good = varlen_call(device)
    with pytest.raises(ValueError, match=rf"{name}.*{device}.*meta|{name}.*meta.*{device}"):
        flashattn_ext.varlen_forward(**{**good, name: good[name].to("meta")})


@pytest.mark.parametrize(
    "intervals,extremes,error,words",
    [
        (
            torch.zeros(1, 1, 7, 2),
            torch.zeros(1, 1, 2, 4),
            TypeError,
            "mask: expected intervals of dtype int32, got float32",
        ),
        (torch.zeros(1, 1, 7, 2).int(), None, ValueError, "mask_intervals and mask_extremes must be given together"),
        (torch.zeros(1, 1, 7, 2).int(), torch.zeros(1, 1, 2, 4), ValueError, "mask_extremes: .* got float32"),
        (torch.zeros(1, 1, 7, 2).int(), torch.zeros(1, 1, 1, 4).int(), ValueError, r"mask_extremes: .*\[1, 1, 2, 4\]"),
        (torch.zeros(1, 1, 7, 2).int(), torch.zeros(2, 1, 2, 4).int(), ValueError, r"mask_extremes: .*\[1, 1, 2, 4\]"),
    ],
)
def test_the_op_checks_what_a_mask_has_made(
    device: str, intervals: torch.Tensor, extremes: torch.Tensor | None, error: type[Exception], words: str
) -> None:
    """Kernels trust the shape of the extremes, so the op itself checks it."""
    good = dense_call(device)
    mask = intervals.to(device), None if extremes is None else extremes.to(device)
    with pytest.raises(error, match=words):
        tensors = CallTensors(**good, mask_intervals=mask[0], mask_extremes=mask[1])
        torch.ops.flashattn_ext.forward.call(*tensors, *CallOptions(), None, False)


def test_unknown_and_missing_arguments(device: str) -> None:
    good = dense_call(device)
    with pytest.raises(TypeError, match="is_causal"):
        flashattn_ext.forward(**good, is_causal=True)
    with pytest.raises(TypeError, match="v"):
        flashattn_ext.forward(good["q"], good["k"])


def test_sparse_tensors_are_refused(device: str) -> None:
    good = dense_call(device)
    with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
        flashattn_ext.forward(**{**good, "k": good["k"].to_sparse()})


def test_a_good_call_works_after_every_bad_one(device: str) -> None:
    good = dense_call(device)
    expected = flashattn_ext.forward(**good)
    for bad in SHARED + DENSE:
        with pytest.raises(bad.error):
            flashattn_ext.forward(**{**good, **bad.change(good)})
    assert torch.equal(flashattn_ext.forward(**good), expected)
