"""Property-based comparison with the reference over the whole option space, and every three features by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import covering
import pytest
import torch
from helpers import TENSORS, VIEWS, Case, assert_same_bits, call_function, check, gradients, make_inputs, refusal, run
from hypothesis import given, reject
from hypothesis import strategies as st
from mask_cases import BLOCK_KINDS, KINDS

import flashattn_ext

LENGTHS = st.sampled_from([0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 257])
HEAD_DIMS = st.one_of(
    st.sampled_from([1, 3, 16, 32, 64, 80, 96, 128, 192, 255, 256, 257, 320, 384, 512]),
    st.integers(1, 256),
    st.integers(257, 512),
)
SIDES = st.one_of(st.just(-1), st.integers(0, 140))
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
# Places of a call in a larger one: multiples of the generator's 16 rows and 64 keys, and others.
ORIGINS = st.one_of(
    st.tuples(st.integers(0, 3), st.integers(0, 5)),
    st.tuples(
        st.integers(0, 3), st.integers(0, 5), st.sampled_from([0, 1, 16, 64, 100]), st.sampled_from([0, 1, 64, 70, 128])
    ),
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([0, 16, 100]),
        st.sampled_from([0, 64, 128]),
        st.sampled_from([-90, -1, 20]),
    ),
)
SCALES = st.one_of(st.none(), st.sampled_from([0.0, -0.2, 0.125, 1.0]))


def scores_and_masks(draw: st.DrawFn, varlen: bool) -> dict[str, Any]:
    """Each option in one call of four, so that calls with few options are drawn too."""

    def some(options: dict[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
        present = draw(st.integers(0, 3)) == 0
        return {name: draw(strategy) for name, strategy in options.items()} if present else {}

    bias = {
        "bias": st.sampled_from(["", "b", "h", "q", "bh", "bq", "hq", "bhq"]),
        "bias_dtype": st.none() | st.just(torch.float32),
    }
    masks = some({
        "mask": st.sampled_from(KINDS if varlen else (*KINDS, *BLOCK_KINDS)), "mask_heads": st.sampled_from(["1", "k", "q"]),
        "mask_batch": st.booleans(),
    })  # fmt: skip
    origin = some({"origin": ORIGINS})
    if masks.get("mask") in BLOCK_KINDS and len(origin.get("origin", ())) > 2:
        origin = {"origin": origin["origin"][:2]}
    return {
        **some({"softcap": st.sampled_from([0.3, 2.0, 30.0, 3e4, 1e8, 1e30])}),
        **some({"alibi": st.sampled_from(["heads", "batch"])}),
        **some({"relative": st.sampled_from([0, 1, 7, 40, 130]), "relative_dtype": DTYPES}),
        **({} if varlen else some({**bias, "bias_hides": st.sampled_from([0.0, 0.0, 0.2, 1.0])})),
        **masks,
        **origin,
        **some({"max_logits": st.just(True)}),
    }  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    B = draw(st.integers(0, 3))
    Hk = draw(st.sampled_from([1, 2, 3]))
    D = draw(HEAD_DIMS)
    varlen = draw(st.booleans())
    extra_logit = draw(st.sampled_from(["none", "smooth", "sink"]))
    dropout_p = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9]))
    lengths = st.lists(LENGTHS, min_size=B, max_size=B).map(tuple)
    return Case(
        B=B,
        Sq=draw(LENGTHS),
        Sk=draw(LENGTHS),
        Hq=Hk * draw(st.sampled_from([1, 2, 3])),
        Hk=Hk,
        D=D,
        Dv=draw(st.one_of(st.just(D), HEAD_DIMS)),
        lengths_q=draw(lengths) if varlen else None,
        lengths_k=draw(lengths) if varlen else None,
        layout=draw(st.sampled_from(["bshd", "bhsd"])),
        causal=draw(st.booleans()),
        window_size=draw(st.tuples(SIDES, SIDES)),
        softmax_scale=draw(SCALES),
        **scores_and_masks(draw, varlen),
        dropout_p=dropout_p,
        rng_seed=draw(st.integers(0, 2**63 - 1)) if dropout_p else None,
        smooth_softmax=extra_logit == "smooth",
        sink_dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
        if extra_logit == "sink"
        else None,
        views=draw(st.tuples(*[st.sampled_from(VIEWS)] * 3)),
        needs_grad=tuple(draw(st.sets(st.sampled_from(TENSORS)))),
        use_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.every_isa
@given(case=cases())
def test_any_call_agrees_with_the_reference(device: str, dtype: torch.dtype, case: Case) -> None:
    if device != "cpu" and case.sink_dtype == torch.float64:
        case = replace(case, sink_dtype=torch.float32)
    check(replace(case, dtype=dtype), device)


@pytest.mark.no_emulator
@given(case=cases())
def test_any_call_of_the_function_has_the_bits_of_forward(device: str, dtype: torch.dtype, case: Case) -> None:
    case = replace(case, dtype=dtype, max_logits=False)
    if case.origin is not None and (device != "cpu" or flashattn_ext._C.forced_backend()):
        case = replace(case, dropout_p=0.0)  # the ops refuse dropout at some origins there; forward moves such calls
    if refusal(case, device):
        reject()
    inputs = make_inputs(case, device)
    expected = run(case, inputs)
    out, lse = call_function(case, inputs)
    assert_same_bits(out.detach(), expected.out, "out")
    assert_same_bits(lse.detach(), expected.lse, "lse")
    for name, gradient in gradients(case, inputs, out, lse).items():
        on_cpu = not (flashattn_ext._C.forced_backend() or device).startswith("cuda")  # there atomic sums have no order
        torch.testing.assert_close(
            gradient,
            expected.grads[name],
            **(dict(rtol=0, atol=0) if on_cpu else {}),
            msg=lambda m, n=name: f"d{n}: {m}",
        )


FEATURES = {
    "varlen": dict(lengths_q=(40, 0, 65), lengths_k=(64, 3, 33)),
    "bhsd": dict(layout="bhsd"),
    "causal": dict(causal=True),
    "window": dict(window_size=(20, 5)),
    "scale": dict(softmax_scale=-0.3),
    "dropout": dict(dropout_p=0.2, rng_seed=7),
    "smooth": dict(smooth_softmax=True),
    "sink": dict(sink_dtype=torch.float32),
    "softcap": dict(softcap=1.5),
    "alibi": dict(alibi="batch"),
    "relative": dict(relative=9),
    "bias": dict(bias="hq", bias_hides=0.1),
    "key_bias": dict(bias="b", bias_dtype=torch.float32),
    "documents": dict(mask="documents", mask_heads="k"),
    "intervals": dict(mask="intervals", mask_heads="q"),
    "blocks": dict(mask="block_pairs", mask_heads="q"),
    "gqa": dict(Hq=6, Hk=2),
    "mla": dict(D=96, Dv=48),
    "odd": dict(D=37, Dv=37),
    "strided": dict(views=("packed", "transposed", "padded")),
    "longer_k": dict(Sk=130),
    "longer_q": dict(Sq=97),
    "origin": dict(origin=(1, 2, 16, 64)),
    "lse": dict(use_lse=True),
    "max_logits": dict(max_logits=True),
    "frozen_k": dict(needs_grad=("q", "v", "sink", "relative_bias")),
}
EXCLUSIVE = [{"smooth", "sink"}, {"varlen", "bhsd"}, {"varlen", "longer_k"}, {"varlen", "longer_q"}, {"mla", "odd"}]
EXCLUSIVE += [{"bias", "varlen"}, {"key_bias", "varlen"}, {"bias", "key_bias"}, {"documents", "intervals"}]
EXCLUSIVE += [{"blocks", other} for other in ("documents", "intervals", "varlen", "origin")]


def fit(features: set[str]) -> bool:
    return not any(exclusive <= features for exclusive in EXCLUSIVE)


def check_features(features: tuple[str, ...], device: str, dtype: torch.dtype) -> None:
    options = {name: value for feature in features for name, value in FEATURES[feature].items()}
    check(Case(**{"dtype": dtype, "Sq": 65, "Sk": 65, **options}), device)


@pytest.mark.whole_product
@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("features", covering.of_triples(list(FEATURES), fit, share=0.3), ids="+".join)
def test_every_three_features(device: str, dtype: torch.dtype, features: tuple[str, ...]) -> None:
    """Any three that fit together, present or absent in every way."""
    check_features(features, device, dtype)


@pytest.mark.nightly
@pytest.mark.dtypes("float32", "bfloat16")
@pytest.mark.parametrize("pair", [pair for pair in itertools.combinations(FEATURES, 2) if fit(set(pair))], ids="+".join)
def test_every_pair_of_features(device: str, dtype: torch.dtype, pair: tuple[str, str]) -> None:
    check_features(pair, device, dtype)


@pytest.mark.every_isa
@pytest.mark.parametrize("form", ["varlen", "bias"])
def test_every_feature_at_once(device: str, dtype: torch.dtype, form: str) -> None:
    together = {}
    for name in ("causal", "window", "scale", "dropout", "origin", "sink", "gqa", "mla", "strided", "lse"):
        together |= FEATURES[name]
    for name in ("softcap", "alibi", "relative", "intervals"):
        together |= FEATURES[name]
    lengths = {"Sq": 65, "Sk": 65} if form == "bias" else {}  # packed calls have no bias
    check(Case(**{"dtype": dtype, **lengths, **together, **FEATURES[form]}), device)
