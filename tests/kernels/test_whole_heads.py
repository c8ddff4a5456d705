"""Short sequences: kernels that hold all keys of a head, at the lengths around their steps and where they end."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, assert_same_bits, check, make_inputs

import flashattn_ext

# Only the kernels of a GPU tell these shapes apart.
pytestmark = [pytest.mark.no_emulator, pytest.mark.nightly, pytest.mark.dtypes("float16", "bfloat16")]

LENGTHS = [1, 15, 16, 17, 48, 49, 64, 77, 96, 97, 128, 197, 208, 209, 256, 257]
# Options that the kernels have, and some with which a call runs others.
OPTIONS: dict[str, dict[str, object]] = {
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "negative scale": {"softmax_scale": -0.3, "causal": True},
    "large scale": {"softmax_scale": 30.0},
    "smooth": {"smooth_softmax": True, "use_lse": True},
    "sink": {"sink_dtype": torch.float32, "use_lse": True},
    "constant sink": {"sink_dtype": torch.float32, "needs_grad": ("q", "k", "v")},
    "max logits": {"max_logits": True},
    "softcap": {"softcap": 3.0, "causal": True},
    "slopes": {"alibi": "batch", "needs_grad": ("q", "k", "v")},
    "slopes with gradient": {"alibi": "heads"},
    "relative": {"relative": 20, "needs_grad": ("q", "k", "v"), "causal": True},
    "relative with gradient": {"relative": 20, "causal": True, "use_lse": True},
    "clamped relative with gradient": {"relative": 3, "dropout_p": 0.2, "rng_seed": 5},
    "distances with gradients": {"alibi": "batch", "relative": 300, "sink_dtype": torch.float32, "use_lse": True},
    "dropout": {"dropout_p": 0.3, "rng_seed": 3, "window_size": (40, 7)},
    "origin": {"origin": (1, 2, 30, 10), "causal": True, "dropout_p": 0.2, "rng_seed": 5},
    "mask": {"mask": "documents"},
    "mask of query heads": {"mask": "intervals", "mask_heads": "q", "use_lse": True},
    "mask and window": {"mask": "intervals", "mask_heads": "k", "mask_batch": False, "window_size": (30, 5)},
    "mask and sink": {"mask": "and", "causal": True, "sink_dtype": torch.float32, "use_lse": True},
    "mask and slopes": {"mask": "intervals", "alibi": "batch", "relative": 10, "max_logits": True},
    "mask and bias": {"mask": "documents", "bias": "bhq"},
    "mask and bias of keys": {"mask": "intervals", "bias": "b"},
    "mask with all": {"mask": "intervals", "mask_heads": "q", "bias": "hq", "softcap": 5.0, "dropout_p": 0.2, "rng_seed": 1,
                      "alibi": "heads", "sink_dtype": torch.float32},
}  # fmt: skip
# A packed call has no bias of any shape.
PACKED_OPTIONS = {name: options for name, options in OPTIONS.items() if "bias" not in options}
PACKED_OPTIONS["mask with others"] = {name: value for name, value in OPTIONS["mask with all"].items() if name != "bias"}
BIASES: dict[str, dict[str, object]] = {
    "dense": {"bias": "bhq"},
    "causal": {"bias": "bhq", "causal": True, "use_lse": True},
    "window": {"bias": "bhq", "window_size": (20, 5), "softmax_scale": -0.3},
    "hides": {"bias": "bhq", "bias_hides": 0.3},
    "grouped": {"bias": "bhq", "Hk": 2},
    "constant": {"bias": "bhq", "needs_grad": ("q", "k", "v")},
    "sink": {"bias": "hq", "sink_dtype": torch.float32, "use_lse": True},
    "origin": {"bias": "bhq", "origin": (1, 2, 30, 10), "causal": True},
    "dropout": {"bias": "bhq", "dropout_p": 0.2, "rng_seed": 1},
    "softcap": {"bias": "hq", "softcap": 5.0, "causal": True},
    "of heads": {"bias": "hq"},
    "of batch": {"bias": "bq"},
    "of keys": {"bias": "b"},
    "fp32": {"bias": "bhq", "bias_dtype": torch.float32},
    "shared and hides": {"bias": "hq", "bias_hides": 0.3, "causal": True},
    "with all": {"bias": "bhq", "softcap": 5.0, "dropout_p": 0.2, "rng_seed": 1, "sink_dtype": torch.float32,
                 "needs_grad": ("q", "k", "v", "bias")},
}  # fmt: skip


@pytest.mark.parametrize("D", [32, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(device: str, dtype: torch.dtype, length: int, D: int) -> None:
    check(Case(dtype=dtype, B=2, Sq=length, Sk=length, Hq=3, Hk=3, D=D, Dv=D, use_lse=True), device)


@pytest.mark.parametrize(
    "sizes", [(1, 50), (33, 100), (150, 77), (256, 31), (300, 64), (700, 200), (70, 0), (0, 20)], ids=str
)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
def test_other_lengths_and_groups(
    device: str, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    """Several query tiles of a KV head, several query heads of one, and rows or keys that do not exist."""
    (Hq, Hk), (Sq, Sk) = heads, sizes
    for causal in (False, True):
        check(Case(dtype=dtype, B=2, Sq=Sq, Sk=Sk, Hq=Hq, Hk=Hk, D=64, Dv=64, causal=causal, use_lse=True), device)


@pytest.mark.parametrize("D,Dv", [(8, 8), (5, 32), (24, 40), (64, 48), (100, 128), (128, 128)])
@pytest.mark.parametrize("views", ["plain", "transposed", "packed", "padded", "offset", "expanded"])
def test_head_dims_and_views(device: str, dtype: torch.dtype, views: str, D: int, Dv: int) -> None:
    """Columns that are less than those of the class, and rows that are not next to each other or not aligned."""
    check(Case(dtype=dtype, B=2, Sq=50, Sk=60, Hq=2, Hk=2, D=D, Dv=Dv, causal=True, views=(views,) * 3), device)


@pytest.mark.parametrize("option", [*OPTIONS])
@pytest.mark.parametrize("D,length", [(32, 128), (32, 49), (64, 90), (64, 64), (128, 60)])
def test_options(device: str, dtype: torch.dtype, D: int, length: int, option: str) -> None:
    case = Case(dtype=dtype, B=2, Sq=length, Sk=length, Hq=4, Hk=2, D=D, Dv=D, **OPTIONS[option])  # type: ignore[arg-type]
    check(case, device)


@pytest.mark.parametrize(
    "sizes", [(1, 50), (33, 64), (40, 17), (100, 50), (130, 20), (49, 96), (30, 200), (200, 128)], ids=str
)
@pytest.mark.parametrize(
    "option", ["mask of query heads", "mask and sink", "distances with gradients", "mask with all"]
)
def test_options_of_other_lengths(device: str, dtype: torch.dtype, option: str, sizes: tuple[int, int]) -> None:
    """Several query tiles of a head, keys that do not fill a step, and a tile that a Mask hides."""
    for D, Hk in ((32, 4), (64, 2)):
        shape: dict[str, object] = {"B": 2, "Sq": sizes[0], "Sk": sizes[1], "Hq": 4, "Hk": Hk, "D": D, "Dv": D}
        check(Case(dtype=dtype, **{**shape, **OPTIONS[option]}), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["plain", *PACKED_OPTIONS])
@pytest.mark.parametrize("D,longest", [(32, 128), (32, 60), (64, 64), (64, 90), (128, 60)])
def test_packed_options(device: str, dtype: torch.dtype, D: int, longest: int, option: str) -> None:
    """Sequences without queries, keys or both, of one row, and of other numbers of queries than keys."""
    case = Case(
        dtype=dtype,
        lengths_q=(33, 0, 1, longest, 20, 0, longest - 3),
        lengths_k=(33, 17, 1, longest, 0, 0, longest // 2),
        Hq=4,
        Hk=2,
        D=D,
        Dv=D,
        **PACKED_OPTIONS.get(option, {}),  # type: ignore[arg-type]
    )
    check(case, device)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("D,heads", [(32, (3, 3)), (64, (4, 1)), (128, (2, 2))], ids=str)
def test_packed_lengths(device: str, dtype: torch.dtype, D: int, heads: tuple[int, int], length: int) -> None:
    """Beside shorter sequences and a hint of more rows than there are."""
    lengths = (length // 2, length, length - 1, 1)
    for causal, more in ((False, 0), (True, 20)):
        case = Case(
            dtype=dtype,
            lengths_q=lengths,
            lengths_k=lengths[::-1],
            hints=(length + more, length + more),
            Hq=heads[0],
            Hk=heads[1],
            D=D,
            Dv=D - 8,
            causal=causal,
            use_lse=True,
        )
        check(case, device)


@pytest.mark.parametrize("bias", [*BIASES])
@pytest.mark.parametrize("length", [49, 50, 63, 64, 77, 100, 128, 197, 200, 255, 256])
@pytest.mark.parametrize("D", [32, 64])
def test_biases(device: str, dtype: torch.dtype, D: int, length: int, bias: str) -> None:
    """A bias of windows or of pairs, whose rows may have any alignment, with its gradient."""
    shape: dict[str, object] = {"B": 2, "Sq": length, "Sk": length, "Hq": 4, "Hk": 4, "D": D, "Dv": D}
    check(Case(dtype=dtype, **{**shape, **BIASES[bias]}), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(1, 40), (40, 1), (3, 7), (17, 200), (200, 17), (130, 72), (256, 30)], ids=str)
@pytest.mark.parametrize("bias", ["dense", "of heads", "causal", "grouped"])
def test_biases_of_other_lengths(device: str, dtype: torch.dtype, bias: str, sizes: tuple[int, int]) -> None:
    """Several query tiles of a head, few rows and few keys."""
    shape: dict[str, object] = {"B": 2, "Sq": sizes[0], "Sk": sizes[1], "Hq": 4, "Hk": 4, "D": 32, "Dv": 24}
    check(Case(dtype=dtype, **{**shape, **BIASES[bias]}), device)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["offset", "padded", "odd rows", "expanded"])
@pytest.mark.parametrize("length", [49, 50, 64, 77, 96, 128, 197])
def test_results_do_not_depend_on_where_a_bias_lies(device: str, dtype: torch.dtype, length: int, place: str) -> None:
    """Vectors of it are copied from any alignment, and elements where its rows have another stride, with the same bits.

    With more than 128 keys Hopper's forward of a bias that TMA can copy is another kernel.
    """
    inputs = make_inputs(
        Case(dtype=dtype, B=2, Sq=length, Sk=length, Hq=2, Hk=2, D=32, Dv=32, bias="bhq", bias_hides=0.1), device
    )
    assert inputs.bias is not None
    bias = inputs.bias.detach()
    if place == "expanded":
        bias = bias[:1].expand_as(bias)
        placed = bias
    elif place == "offset":
        placed = torch.full((bias.numel() + 3,), torch.nan, dtype=dtype, device=device)[3:].view_as(bias).copy_(bias)
    else:
        columns = (length + 7) // 8 * 8 + (16 if place == "padded" else 3)
        wide = torch.full((*bias.shape[:3], columns), torch.nan, dtype=dtype, device=device)
        placed = wide[..., 1 : length + 1] if place == "odd rows" else wide[..., :length]
        placed.copy_(bias)

    def results(bias: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v, bias)]
        out = flashattn_ext.forward(*leaves[:3], bias=leaves[3], causal=True)
        return [out, *torch.autograd.grad(out, leaves, inputs.q.detach())]

    before = results(bias.contiguous())
    assert all(t.isfinite().all() for t in before)
    for again, first in zip(results(placed), before, strict=True):
        if length <= 128:
            assert_same_bits(again, first)
        else:
            torch.testing.assert_close(again, first, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_bits_repeat(device: str, dtype: torch.dtype, causal: bool) -> None:
    """In every run, also without `deterministic`, and for a sequence whatever others are beside it."""
    inputs = make_inputs(Case(dtype=dtype, B=3, Sq=70, Sk=70, Hq=4, Hk=4, D=64, Dv=64), device)

    def results(batch: slice) -> list[torch.Tensor]:
        leaves = [t[batch].detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out = flashattn_ext.forward(*leaves, causal=causal)
        return [out, *torch.autograd.grad(out, leaves, out.detach())]

    first = results(slice(None))
    assert all(t.isfinite().all() and t.abs().max() > 0 for t in first)
    for batch in (slice(None), slice(1, 2)):
        for again, before in zip(results(batch), first, strict=True):
            assert_same_bits(again, before[batch])


@pytest.mark.parametrize("D", [32, 64])
def test_a_key_that_is_not_finite_reaches_the_rows_that_see_it_alone(device: str, dtype: torch.dtype, D: int) -> None:
    """Rows before the first 16 keys that hold it, in a causal call, and other heads."""
    inputs = make_inputs(Case(dtype=dtype, B=2, Sq=100, Sk=100, Hq=2, Hk=2, D=D, Dv=D), device)
    q, k, v = (t.detach().clone() for t in (inputs.q, inputs.k, inputs.v))
    k[0, 80, 0] = torch.nan
    out = flashattn_ext.forward(q, k, v, causal=True)
    assert out[0, 80:, 0].isnan().all()
    assert out[0, :64].isfinite().all() and out[:, :, 1].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("D,lengths", [(32, (7, 20, 30)), (64, (20, 23, 21)), (64, (33, 1, 30))], ids=str)
def test_what_is_not_finite_stays_in_its_document(
    device: str, dtype: torch.dtype, D: int, lengths: tuple[int, ...], where: str, poison: float
) -> None:
    """Other documents of a Mask keep their bits, in the same step too; rows that see the value are not finite."""
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(device)
    mask, inside = flashattn_ext.Mask.documents(ids), ids[0] == 1
    tensors = {
        name: torch.randn(2, sum(lengths), heads, D, device=device).to(dtype)
        for name, heads in (("q", 4), ("k", 2), ("v", 2), ("dout", 4))
    }

    def results() -> dict[str, torch.Tensor]:
        leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
        out, lse = flashattn_ext.forward(*leaves, mask=mask, return_lse=True)
        gradients = torch.autograd.grad(out, leaves, tensors["dout"])
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse.transpose(1, 2), *gradients), strict=True))

    clean = results()
    for name in tensors if where == "all" else [where]:
        tensors[name][:, inside] = poison
    after = results()
    seen_in = {"v": "out dq dk", "dout": "dq dk dv"}.get(where, "out dq dk dv").split()
    for name, got in after.items():
        assert_same_bits(got[:, ~inside], clean[name][:, ~inside], name)
        if name in seen_in and poison != torch.inf:
            assert not got[:, inside].isfinite().any(), name


@pytest.mark.parametrize("D,length", [(32, 60), (64, 64), (64, 90)])
def test_rows_that_see_nothing(device: str, dtype: torch.dtype, D: int, length: int) -> None:
    """A Mask hides all keys from some rows, and some keys from all rows: their results are exact."""
    keys = torch.arange(length)
    first = keys // 20 // 2 * 40
    last = torch.where((keys >= 10) & (keys < 45), first, first + 20)
    mask = flashattn_ext.Mask(torch.stack([first, last], -1).int()[None, None]).to(device)
    seen = mask.dense(length)[0, 0]
    blind, hidden = ~seen.any(1), ~seen.any(0)
    assert blind.any() and hidden.any() and not blind.all()
    q, k, v = (torch.randn(2, length, 2, D, device=device).to(dtype).requires_grad_() for _ in range(3))
    out, lse = flashattn_ext.forward(q, k, v, mask=mask, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert not out[:, blind].any() and not dq[:, blind].any() and lse[:, :, blind].isneginf().all()
    assert not dk[:, hidden].any() and not dv[:, hidden].any()
    for t in (out[:, ~blind], lse[:, :, ~blind], dq, dk, dv):
        assert t.isfinite().all()


def test_bits_of_a_mask_and_of_slopes_repeat(device: str, dtype: torch.dtype) -> None:
    """No sum of them is atomic, also without `deterministic`."""
    inputs = make_inputs(
        Case(dtype=dtype, B=3, Sq=60, Sk=60, Hq=4, Hk=2, D=64, Dv=64, mask="documents", alibi="heads"), device
    )
    leaves = [inputs.q, inputs.k, inputs.v, inputs.alibi_slopes]

    def results() -> list[torch.Tensor]:
        out = flashattn_ext.forward(*leaves[:3], alibi_slopes=leaves[3], mask=inputs.mask)
        return [out, *torch.autograd.grad(out, leaves, inputs.q.detach())]

    first = results()
    assert all(t.isfinite().all() and t.abs().max() > 0 for t in first)
    for again, before in zip(results(), first, strict=True):
        assert_same_bits(again, before)
