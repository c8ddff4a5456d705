"""Masks through the kernels: against the reference, over fully masked, fully visible and partial tiles, and hostile extremes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from helpers import Case, assert_same_bits, check, cu_seqlens, make_inputs, run
from mask_cases import KINDS

import flashattn_ext
from flashattn_ext import Mask


@pytest.mark.every_isa
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_constructor(device: str, dtype: torch.dtype, kind: str, causal: bool) -> None:
    check(
        Case(dtype=dtype, Sq=150, Sk=150, Hq=4, Hk=2, mask=kind, mask_heads="q", causal=causal, use_lse=True),
        device,
    )


@pytest.mark.shapes_for("cuda npu", D=(64, 129, 320))
@pytest.mark.parametrize("heads", ["1", "k", "q"])
@pytest.mark.parametrize("D", [32, 64, 96, 128, 129, 192, 256, 320, 512])
def test_heads_and_head_dims(device: str, dtype: torch.dtype, heads: str, D: int) -> None:
    case = Case(
        dtype=dtype, Sq=200, Sk=290, Hq=4, Hk=2, D=D, Dv=D, mask="intervals", mask_heads=heads, mask_batch=False
    )
    check(case, device)


def extremes_of(pairs: list[tuple[int, int]]) -> list[int]:
    """The first and end of the rows that see one of these keys, and of the rows that see all of them."""
    seen = [(max(first, 0), max(end, 0)) for first, end in pairs]
    seen = [(first, end) if first < end else (2**31 - 1, 0) for first, end in seen]
    firsts, ends = [first for first, _ in seen], [end for _, end in seen]
    return [min(firsts), max(ends), max(firsts), min(ends)]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 17), (5, 1023), (2, 1, 2100), (1, 1, 3072)], ids=str)
def test_extremes(device: str, shape: tuple[int, ...]) -> None:
    """Of every 16 keys, then of every 1024: with fully masked keys, negative rows, and a view that is not contiguous."""
    generator = torch.Generator().manual_seed(sum(shape))
    intervals = torch.randint(-20, 100, (*shape, 2), generator=generator, dtype=torch.int32)
    intervals[..., 0] -= torch.randint(0, 2, shape, generator=generator, dtype=torch.int32) * 60
    rows = [
        [extremes_of(head[start : start + size]) for size in (16, 1024) for start in range(0, shape[-1], size)]
        for head in intervals.flatten(0, -3).tolist()
    ]
    on_device = intervals.transpose(-1, -2).contiguous().to(device).transpose(-1, -2)
    extremes = flashattn_ext.ops.mask_extremes(on_device)
    assert extremes.device == on_device.device
    assert torch.equal(extremes.cpu().flatten(0, -3), torch.tensor(rows, dtype=torch.int32))


@pytest.mark.every_isa
@pytest.mark.parametrize("Sq,Sk", [(1, 1), (1, 300), (63, 65), (129, 64), (64, 129), (300, 16), (257, 17), (40, 0)])
@pytest.mark.parametrize("kind", ["intervals", "and"])
def test_tile_edges(device: str, dtype: torch.dtype, Sq: int, Sk: int, kind: str) -> None:
    check(Case(dtype=dtype, Sq=Sq, Sk=Sk, mask=kind, use_lse=True, seed=Sq + Sk), device)


@pytest.mark.every_isa
@pytest.mark.parametrize(
    "options",
    [
        dict(window_size=(60, 10)),
        dict(smooth_softmax=True),
        dict(sink_dtype=torch.float32, causal=True),
        dict(softmax_scale=-0.3),
        dict(softcap=3.0, causal=True),
        dict(alibi="heads"),
        dict(dropout_p=0.3, rng_seed=5),
        dict(dropout_p=0.3, rng_seed=5, softcap=3.0, bias="bhq", bias_hides=0.2),
    ],
    ids=lambda options: "-".join(options),
)
def test_with_other_options(device: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    check(Case(dtype=dtype, Sq=140, Sk=170, Hq=4, Hk=2, mask="documents", use_lse=True, **options), device)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kind", ["prefix_lm", "documents"])
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
def test_runs_of_whole_tiles(device: str, dtype: torch.dtype, D: int, kind: str, causal: bool) -> None:
    """So many keys that fully visible tiles are adjacent, and a query tile has a list of key tiles."""
    check(Case(dtype=dtype, B=1, Sq=800, Sk=800, Hq=2, Hk=1, D=D, Dv=D, mask=kind, causal=causal, use_lse=True), device)


LENGTHS = ((70, 1, 0, 133, 16, 90), (40, 5, 31, 150, 16, 0))


@pytest.mark.every_isa
@pytest.mark.parametrize("kind", ["intervals", "documents", "prefix_lm", "window", "padding"])
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
def test_packed(device: str, dtype: torch.dtype, kind: str, causal: bool) -> None:
    """Granules of the extremes count from the first packed key: sequences begin and end within them."""
    lengths_q, lengths_k = (LENGTHS[1], LENGTHS[1]) if kind == "documents" else LENGTHS
    case = Case(
        dtype=dtype, lengths_q=lengths_q, lengths_k=lengths_k, Hq=4, Hk=2, mask=kind, causal=causal, use_lse=True
    )
    check(case, device)


def long_mask(name: str, S: int) -> Mask:
    """Masks with hidden keys between visible ones, over several of the coarse extremes."""
    if name == "window":
        return Mask.window(200, 0, S, S, global_keys=3)
    if name == "chunks":
        return Mask.chunked(700, S, S)
    keys = torch.arange(S)
    if name == "islands":  # all rows see the keys of every fifth hundred; the other keys are masked for every row
        seen = keys // 100 % 5 == 0
        return Mask(torch.stack([0 * keys, seen * S], -1).int()[None, None])
    assert name == "far", name  # rows see keys at the other end of the sequence alone
    return Mask(torch.stack([S - 30 - keys, S - keys], -1).int()[None, None])


@pytest.mark.parametrize("name", ["window", "chunks", "islands", "far"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("S, of_type, tolerance", [(2500, torch.float32, 1e-5), (4500, torch.bfloat16, 2e-2)])
def test_long_sequences(
    device: str, name: str, deterministic: bool, S: int, of_type: torch.dtype, tolerance: float
) -> None:
    """Visible key tiles of a query tile are further apart than a warp tests at once: 32 tiles, of 128 keys in 16 bits."""
    mask = long_mask(name, S)
    q, k, v, dout = (torch.randn(1, S, 1, 16, device=device).to(of_type) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flashattn_ext.forward(*leaves, mask=mask.to(device), return_lse=True, deterministic=deterministic)
    grads = torch.autograd.grad(out, leaves, dout)
    q, k, v = wide = [t.detach().float().requires_grad_() for t in leaves]
    scores = (q[0, :, 0] @ k[0, :, 0].T / 4).masked_fill(~mask.dense(S)[0, 0].to(device), -math.inf)
    expected = torch.nan_to_num(scores.softmax(-1)) @ v[0, :, 0]
    torch.testing.assert_close(out[0, :, 0].float(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(-1), rtol=0, atol=tolerance)
    expected_grads = torch.autograd.grad(expected, wide, dout[0, :, 0].float())
    for name, got, ref in zip("qkv", grads, expected_grads, strict=True):
        torch.testing.assert_close(
            got.float(),
            torch.nan_to_num(ref),
            rtol=tolerance,
            atol=10 * tolerance,
            msg=lambda m, n=name: f"d{n}: {m}",
        )


@pytest.mark.every_isa
@pytest.mark.parametrize("extra_logit", ["none", "smooth", "sink"])
def test_rows_that_see_nothing(device: str, dtype: torch.dtype, extra_logit: str) -> None:
    """Every other block of 40 rows is fully masked, and keys 20 to 70 are masked for every row: their results are exact."""
    S = 130
    keys = torch.arange(S)
    first = keys // 40 // 2 * 80
    last = torch.where((keys >= 20) & (keys < 70), first - 5, first + 40)
    mask = Mask(torch.stack([first, last], -1).int()[None, None]).to(device)
    blind = ~mask.dense(S)[0, 0].any(1)
    hidden = ~mask.dense(S)[0, 0].any(0)
    assert blind.any() and hidden.any()
    q, k, v = (torch.randn(2, S, 2, 32, device=device).to(dtype).requires_grad_() for _ in range(3))
    sink = torch.randn(2, device=device, dtype=lse_dtype(dtype))
    options = {"none": {}, "smooth": dict(smooth_softmax=True), "sink": dict(sink=sink)}[extra_logit]
    out, lse = flashattn_ext.forward(q, k, v, mask=mask, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert not out[:, blind].any() and not dq[:, blind].any()
    assert not dk[:, hidden].any() and not dv[:, hidden].any()
    expected = {"none": torch.full_like(sink, -math.inf), "smooth": torch.zeros_like(sink), "sink": sink}[extra_logit]
    assert_same_bits(lse[:, :, blind], expected[None, :, None].expand(2, 2, int(blind.sum())), "lse")
    for name, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        assert t.isfinite().all(), name


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def results(mask: Mask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = flashattn_ext.forward(*leaves, mask=mask, return_lse=True, deterministic=True, **options)
    return [out, lse.transpose(1, 2), *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)]


@pytest.mark.every_isa
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_document_keeps_its_bits(device: str, dtype: torch.dtype, causal: bool) -> None:
    """Other documents, in the same tile or with far larger values, do not change the bits."""
    lengths = (37, 150, 60, 200)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].to(device)
    mask = Mask.documents(ids)
    q, k, v = (torch.randn(1, sum(lengths), 2, 64, device=device).to(dtype) for _ in range(3))
    before = results(mask, q, k, v, causal=causal)
    own = ids[0] == 1
    for t in (q, k, v):
        t[:, ~own] = 30 * torch.randn_like(t[:, ~own])
    after = results(mask, q, k, v, causal=causal)
    for what, got, expected in zip(("out", "lse", "dq", "dk", "dv"), after, before, strict=True):
        assert_same_bits(got[:, own], expected[:, own], what)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.shapes_for("cuda npu", D=(64,))
@pytest.mark.parametrize("D, heads", [(64, (4, 2)), (128, (6, 1)), (192, (2, 1))])
def test_deterministic_gradients_of_documents(
    device: str, dtype: torch.dtype, D: int, heads: tuple[int, int], causal: bool
) -> None:
    """Documents of one to four tiles of keys. On Hopper the key tiles of grouped heads add in descending order in the
    second batch entry, and in ascending order in the first, where one document has half of the rows."""
    lengths = torch.tensor([[200, 1, 64, 90, 420, 25], [190, 150, 120, 110, 90, 140]])
    ids = torch.stack([torch.repeat_interleave(torch.arange(6), entry) for entry in lengths])
    mask = Mask.documents(ids).to(device)
    q = torch.randn(2, 800, heads[0], D, device=device).to(dtype)
    k, v = (torch.randn(2, 800, heads[1], D, device=device).to(dtype) for _ in range(2))

    def gradients(deterministic: bool) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flashattn_ext.forward(*leaves, mask=mask, causal=causal, deterministic=deterministic)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    tolerance = 3e-2 if dtype.itemsize == 2 else 1e-5
    first, second, in_any_order = gradients(True), gradients(True), gradients(False)
    for name, got, again, expected in zip("qkv", first, second, in_any_order, strict=True):
        assert_same_bits(again, got, f"d{name}")
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}")


NAMES = ("out", "lse", "dq", "dk", "dv")


def isolated_results(mask: Mask, tensors: dict[str, torch.Tensor], **options: object) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv, of tensors q, k, v, dout."""
    leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
    out, lse = flashattn_ext.forward(*leaves, mask=mask, return_lse=True, deterministic=True, **options)
    return [out.detach(), lse.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, tensors["dout"])]


def target_of(device: str) -> tuple[str, ...]:
    """What computes: the device, the forced backend, the instruction set."""
    return device, flashattn_ext._C.forced_backend() or "", flashattn_ext._C.cpu_isa()


Clean = tuple[Mask, torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]
Options = tuple[tuple[str, object], ...]


@functools.lru_cache(maxsize=16)  # every target: the tests differ in the values that are not finite
def clean_documents(target: tuple[str, ...], dtype: torch.dtype, D: int, options: Options) -> Clean:
    """Four documents: their Mask, which rows are of the second one, tensors, and the results."""
    lengths = (70, 131, 5, 294)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].to(target[0])
    tensors = {
        name: torch.randn(1, sum(lengths), heads, D, device=target[0]).to(dtype)
        for name, heads in (("q", 2), ("k", 1), ("v", 1), ("dout", 2))
    }
    mask = Mask.documents(ids)
    return mask, ids[0] == 1, tensors, isolated_results(mask, tensors, **dict(options))


@functools.lru_cache(maxsize=16)
def clean_padding(target: tuple[str, ...], dtype: torch.dtype, D: int, options: Options) -> Clean:
    """Padding before and after the tokens of a row: the Mask, which rows are padding, tensors, and the results."""
    S, first, last = 300, 41, 210
    keys = torch.arange(S)
    is_token = (keys >= first) & (keys < last)
    mask = Mask(torch.stack([is_token * first, is_token * last], -1).int()[None, None]).to(target[0])
    tensors = {name: torch.randn(2, S, 2, D, device=target[0]).to(dtype) for name in ("q", "k", "v", "dout")}
    return mask, ~is_token.to(target[0]), tensors, isolated_results(mask, tensors, **dict(options))


@pytest.mark.every_isa
@pytest.mark.no_emulator  # test_ascend_isolation.py
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize(
    ("D", "options"),
    [(64, {}), (128, dict(causal=True)), (256, {}), (64, dict(softcap=3.0)), (128, dict(softcap=3.0, causal=True))],
    ids=["64", "128-causal", "256", "64-softcap", "128-causal-softcap"],
)
def test_what_is_not_finite_stays_in_its_document(
    device: str, dtype: torch.dtype, D: int, options: dict[str, object], where: str, poison: float
) -> None:
    """Other documents of the row keep their bits, in the same tile too; rows that see the value are not finite."""
    mask, inside, tensors, clean = clean_documents(target_of(device), dtype, D, tuple(options.items()))
    tensors = {name: t.clone() for name, t in tensors.items()}
    for name in tensors if where == "all" else [where]:
        tensors[name][:, inside] = poison
    after = isolated_results(mask, tensors, **options)
    for what, got, expected in zip(NAMES, after, clean, strict=True):
        assert_same_bits(got[:, ~inside], expected[:, ~inside], what)
    seen_in = dict(q="out dq dk dv", k="out dq dk dv", v="out dq dk", dout="dq dk dv", all="out dq dk dv")[where]
    for what, got in zip(NAMES, after, strict=True):
        if what in seen_in.split() and math.isnan(poison):
            assert not got[:, inside].isfinite().any(), what


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("S", [200, 700])
def test_isolated_values_in_many_tiles(device: str, D: int, S: int) -> None:
    """So many tiles that a thread block of a GPU computes several: in each, other rows see the value that is not finite."""
    B, H, dtype = 8, 16, torch.bfloat16
    starts = torch.arange(B)[:, None] * 23 + 40  # of a document of 60 tokens that is not finite, between two others
    tokens = torch.arange(S)
    ids = ((tokens >= starts).int() + (tokens >= starts + 60)).to(device)
    mask, inside = Mask.documents(ids), ids == 1
    q, k, v = (torch.randn(B, S, heads, D, device=device).to(dtype) for heads in (H, 4, 4))
    clean = flashattn_ext.forward(q, k, v, mask=mask, causal=True)
    v[inside] = math.nan
    got = flashattn_ext.forward(q, k, v, mask=mask, causal=True)
    assert_same_bits(got[~inside], clean[~inside])
    assert got[inside].isnan().all()


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
def test_walks_over_many_tiles(device: str, D: int, causal: bool) -> None:
    """More tiles than a warp tests at once: fully visible, partial, and fully masked tiles that are not finite."""
    Sq, Sk, dtype = 300, 8000, torch.bfloat16
    keys = torch.arange(Sk)
    kind = keys // 190 % 5
    last = torch.where(kind == 1, 0, torch.where(kind == 2, 150, Sq))
    mask = Mask(torch.stack([0 * keys, last], -1).int()[None, None]).to(device)
    q, k, v = (torch.randn(1, S, 2, D, device=device).to(dtype) for S in (Sq, Sk, Sk))
    for t in (k, v):
        t[:, (kind == 1).to(device)] = math.nan
    out, lse = flashattn_ext.forward(q, k, v, mask=mask, causal=causal, return_lse=True)
    seen = mask.dense(Sq)[0, 0].to(device)
    if causal:
        seen = seen & torch.ones_like(seen).tril(Sk - Sq)
    for h in range(2):
        scores = (q[0, :, h].double() @ k[0, :, h].nan_to_num().double().T * D**-0.5).masked_fill(~seen, -math.inf)
        expected = scores.softmax(-1) @ v[0, :, h].nan_to_num().double()
        torch.testing.assert_close(out[0, :, h].double(), expected, rtol=0, atol=2e-3)
        torch.testing.assert_close(lse[0, h].double(), scores.logsumexp(-1), rtol=0, atol=1e-4)


@pytest.mark.every_isa
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("D", [64, 128, 192])
@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(dropout_p=0.3, rng_seed=1)], ids=["", "cap", "drop"])
def test_padding_may_hold_anything(
    device: str, dtype: torch.dtype, options: dict[str, object], D: int, poison: float
) -> None:
    """Padding before and after the tokens of a row: rows that are fully masked, and keys that are masked for every row."""
    if (flashattn_ext._C.forced_backend() or device).startswith(("ascend", "npu")) and options.get("dropout_p"):
        D = min(D, 128)  # with a Mask and 16 bits they have no dropout beyond that
    mask, padding, tensors, clean = clean_padding(target_of(device), dtype, D, tuple(options.items()))
    tensors = {name: t.clone() for name, t in tensors.items()}
    for t in tensors.values():
        t[:, padding] = poison
    after = isolated_results(mask, tensors, **options)
    for what, got, expected in zip(NAMES, after, clean, strict=True):
        assert_same_bits(got, expected, what)
        assert what == "lse" or not got[:, padding].any(), what


@pytest.mark.every_isa
def test_a_document_agrees_with_itself_alone(device: str, dtype: torch.dtype) -> None:
    lengths = (37, 150, 60)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(device)
    q, k, v = (torch.randn(1, sum(lengths), 2, 64, device=device).to(dtype) for _ in range(3))
    whole = results(Mask.documents(ids), q, k, v, causal=True)
    atol = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for n in range(3):
        own = ids[0] == n
        leaves = [t[:, own].requires_grad_() for t in (q, k, v)]
        out, lse = flashattn_ext.forward(*leaves, causal=True, return_lse=True)
        alone = [out, lse.transpose(1, 2), *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)]
        for what, got, expected in zip(("out", "lse", "dq", "dk", "dv"), whole, alone, strict=True):
            torch.testing.assert_close(
                got[:, own], expected, rtol=atol, atol=4 * atol, msg=lambda m, w=what, n=n: f"{w} of {n}: {m}"
            )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bits_alone_in_a_batch_and_packed(device: str, dtype: torch.dtype, causal: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    intervals = torch.randint(-10, 130, (3, 2, 170, 2), generator=generator).int()
    q = torch.randn(3, 120, 4, 40, device=device).to(dtype)
    k, v = (torch.randn(3, 170, 2, 40, device=device).to(dtype) for _ in range(2))
    mask = Mask(intervals).to(device)
    batch = results(mask, q, k, v, causal=causal)
    assert all(a.equal(b) for a, b in zip(batch, results(mask, q, k, v, causal=causal), strict=True))
    for b in range(3):
        part = slice(b, b + 1)
        alone = results(Mask(mask.intervals[part]), q[part], k[part], v[part], causal=causal)
        for what, got, expected in zip(("out", "lse", "dq", "dk", "dv"), alone, batch, strict=True):
            assert_same_bits(got, expected[part], f"{what} of entry {b}")
    # Packed behind another sequence of 13 rows, so that both have keys in one granule of the extremes.
    stranger = [torch.randn(13, *t.shape[2:], device=device).to(dtype) for t in (q, k, v)]
    leaves = [torch.cat([s, t[1]]).requires_grad_() for s, t in zip(stranger, (q, k, v), strict=True)]
    packed = Mask(torch.cat([intervals[0, :, :13], intervals[1]], 1)).to(device)
    starts_q, starts_k = cu_seqlens([13, 120], device), cu_seqlens([13, 170], device)
    out, lse = flashattn_ext.varlen_forward(
        *leaves, starts_q, starts_k, 120, 170, mask=packed, causal=causal, return_lse=True, deterministic=True
    )
    grads = torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)
    for what, got, expected in zip(("out", "lse", "dq", "dk", "dv"), (out, lse.T, *grads), batch, strict=True):
        assert_same_bits(got[13:], expected[1], f"packed {what}")


EXTREMES = {
    "fully masked": (2**31 - 1, 0, 0, 2**31 - 1),
    "fully visible": (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1),
    "reversed": (2**31 - 1, -(2**31), 2**31 - 1, -(2**31)),
    "rows that do not exist": (10**9, 10**9 + 7, 10**9, 10**9 + 7),
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", [*EXTREMES, "random"])
def test_extremes_that_lie(device: str, name: str, deterministic: bool, packed: bool) -> None:
    """Extremes are data: with any contents, a call ends and leaves memory around its tensors alone."""
    generator = torch.Generator().manual_seed(1)
    S = 300
    intervals = torch.randint(-5, S + 5, (1, 1, S, 2), generator=generator).int().to(device)
    mask = Mask(intervals[0] if packed else intervals)
    extremes = mask.extremes()
    if name == "random":
        extremes.copy_(torch.randint(-10, S + 10, extremes.shape, generator=generator))
    else:
        extremes.copy_(torch.tensor(EXTREMES[name]))
    assert mask.extremes().data_ptr() == extremes.data_ptr()
    q, k, v = (torch.randn(1, S, 2, 64, device=device).requires_grad_() for _ in range(3))
    if packed:
        starts = cu_seqlens([113, S - 113], device)
        rows = [t[0] for t in (q, k, v)]
        out = flashattn_ext.varlen_forward(*rows, starts, starts, 200, 200, mask=mask, deterministic=deterministic)
    else:
        out = flashattn_ext.forward(q, k, v, mask=mask, deterministic=deterministic)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for t in (out, *grads):
        assert t.shape[-3:] in (q.shape[-3:], out.shape[-3:]) and t.isfinite().all()
    if name == "fully masked":
        assert not out.any() and not any(t.any() for t in grads)


def test_views_of_the_intervals(device: str) -> None:
    """Intervals that begin at any element, and intervals that are expanded over the batch."""
    case = Case(Sq=90, Sk=110, mask="intervals", mask_batch=False)
    inputs = make_inputs(case, device)
    expected = run(case, inputs)
    assert inputs.mask is not None
    intervals = inputs.mask.intervals
    shifted = torch.empty(intervals.numel() + 1, dtype=torch.int32, device=device)[1:].view(intervals.shape)
    for view in (shifted.copy_(intervals), intervals.expand(case.B, -1, -1, -1)):
        inputs.mask = Mask(view)
        got = run(case, inputs)
        torch.testing.assert_close(got.out, expected.out)
        torch.testing.assert_close(got.grads, expected.grads)
