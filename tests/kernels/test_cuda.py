"""Tests that need a GPU: streams, graphs, no synchronisation, sizes beyond 32-bit offsets and grid limits."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from gpu_backends import has_hoppers_kernels, runs_hoppers_kernels
from helpers import Case, assert_same_bits, check, cu_seqlens, run_python

import flashattn_ext

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "csrc"))

import kernel_table

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PATHS = [name.removeprefix("cuda-") for name in flashattn_ext.build_info()["backends"] if name.startswith("cuda-")]
OPTIONS = kernel_table.option_bits()
Result = TypeVar("Result")


def row_of(family: str, stage: str, D: int, Dv: int, dropout: bool) -> kernel_table.Row | None:
    """The row of the table that a call without other options runs."""
    allowed = [
        name
        for name, bits in OPTIONS.items()
        if not bits & ~OPTIONS["kGeneral"] and (bits & OPTIONS["kDropout"] or not dropout)
    ]
    rows = [
        row
        for row in kernel_table.table()
        if (row.architecture, row.stage) == (family, stage) and row.options in allowed
    ]
    fitting = (row for row in rows if "bf16" in row.dtypes and row.head_dim >= D and row.head_dim_v >= Dv)
    return next(fitting, None)


# The kernels of both directions that such calls run. `bench tune` compares the results of other tiles with these.
TILES = sorted(
    {
        (f"cuda-{row.architecture}", row.head_dim, row.head_dim_v, dropout)
        for row in kernel_table.table()
        for dropout in (False, True)
        if row.stage in ("forward", "backward") and (has_hoppers_kernels() or row.architecture != "sm90")
        if row_of(row.architecture, row.stage, row.head_dim, row.head_dim_v, dropout) is row
    }
)


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Any call that synchronises with the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of a step, after one on another stream, and the results that its replays overwrite."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def leaves(*shape: int, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_compiled_tile(tile: tuple[str, int, int, bool], packed: bool, dtype: torch.dtype) -> None:
    backend, D, Dv, dropout = tile
    sizes = (
        {"lengths_q": (150, 1, 260), "lengths_k": (170, 33, 300), "window_size": (100, 40)}
        if packed
        else {"Sq": 300, "Sk": 330, "causal": True}
    )
    case = Case(dtype=dtype, Hq=4, D=D, Dv=Dv, dropout_p=0.2 * dropout, rng_seed=7 if dropout else None, **sizes)
    with flashattn_ext.use_backend(backend):
        check(case, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_never_waits_for_the_device(dtype: torch.dtype, no_waiting: None) -> None:
    q, k, v = leaves(2, 100, 4, 65, dtype=dtype)
    sink = torch.randn(4, device="cuda", requires_grad=True)
    for deterministic in (False, True):
        out = flashattn_ext.forward(q, k, v, causal=True, dropout_p=0.1, sink=sink, deterministic=deterministic)
        torch.autograd.grad(out, (q, k, v, sink), torch.ones_like(out))
    starts = torch.zeros(3, dtype=torch.int32, device="cuda")
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    out, lse = flashattn_ext.varlen_forward(*packed, starts, starts, 64, 64, return_lse=True)
    flashattn_ext.backward(out, *packed, out, lse, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=64,
                           max_seqlen_k=64, dropout_p=0.1, rng_seed=3)  # fmt: skip


@pytest.mark.parametrize(
    "offsets", [[5, 15, 30], [0, 40], [30, 5], [7, 7], [-3, 20], [10, 100], [12, 20, 4, 16]], ids=str
)
@pytest.mark.parametrize("D,slopes", [(17, False), (64, False), (9, True)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_packed_rows_of_no_sequence(dtype: torch.dtype, D: int, slopes: bool, offsets: list[int]) -> None:
    """For any offsets on the device, rows outside every sequence have the results of fully masked rows, over memory filled with NaN."""
    total, starts = 40, torch.tensor(offsets, dtype=torch.int32, device="cuda")
    q, k, v = leaves(total, 2, D, dtype=dtype)
    given = {"alibi_slopes": torch.rand(2, device="cuda", requires_grad=True)} if slopes else {}
    used = [torch.full((total, 2, D), torch.nan, device="cuda", dtype=dtype) for _ in range(6)]
    del used  # freed, so that the allocator hands it out again
    out, lse = flashattn_ext.varlen_forward(q, k, v, starts, starts, total, total, return_lse=True, **given)
    gradients = torch.autograd.grad(out, [q, k, v, *given.values()], torch.ones_like(out))
    owned = torch.zeros(total, dtype=torch.bool)
    for start, end in itertools.pairwise(offsets):
        owned[max(start, 0) : max(end, 0)] = True
    assert not out[~owned].any() and torch.isneginf(lse[:, ~owned]).all()
    assert torch.isfinite(lse[:, owned]).all() and out[owned].flatten(1).any(1).all()
    assert all(torch.isfinite(t).all() for t in gradients)
    assert not any(t[~owned].any() for t in gradients[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hints", [(1, 600), (2, 2000), (32, 512)], ids=str)
def test_few_queries_with_sequences_longer_than_the_hint(dtype: torch.dtype, hints: tuple[int, int]) -> None:
    """max_seqlen_q and max_seqlen_k only size the grid."""
    lengths_q, lengths_k = (70, 1, 3, 9), (900, 2000, 5000, 0)
    q = torch.randn(sum(lengths_q), 4, 64, device="cuda").to(dtype)
    k, v = (torch.randn(sum(lengths_k), 2, 64, device="cuda").to(dtype) for _ in range(2))
    starts = cu_seqlens(lengths_q, "cuda"), cu_seqlens(lengths_k, "cuda")
    out = flashattn_ext.varlen_forward(q, k, v, *starts, *hints, causal=True)
    expected = flashattn_ext.attention_reference(
        q.double(), k.double(), v.double(), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], causal=True
    )
    limit = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 2e-5)
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_more_queries_of_a_sequence_so_long_that_it_is_split(dtype: torch.dtype) -> None:
    q = torch.randn(2, 40, 2, 64, device="cuda").to(dtype)
    k, v = (torch.randn(2, 1 << 19, 1, 64, device="cuda").to(dtype) for _ in range(2))
    out = flashattn_ext.forward(q, k, v, causal=True)
    assert_same_bits(out[:1], flashattn_ext.forward(q[:1], k[:1], v[:1], causal=True))
    expected = flashattn_ext.attention_reference(q[1:].double(), k[1:].double(), v[1:].double(), causal=True)
    torch.testing.assert_close(out[1:].double(), expected, rtol=2e-2, atol=2e-4)


def test_offsets_that_overlap_stay_in_the_workspace() -> None:
    """Few queries, whose keys are split: sequences that share keys need more workspace than all keys do."""
    q = torch.randn(2, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(5000, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    starts_q, starts_k = (torch.tensor([0, len(t)] * 40, dtype=torch.int32, device="cuda") for t in (q, k))
    around = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.uint8) for _ in range(8)]
    del around[::2]  # the workspace lies between them
    out = flashattn_ext.varlen_forward(q, k, v, starts_q, starts_k, 2, 5000)
    assert out.shape == q.shape and all(bool((t == 7).all()) for t in around)


def test_calls_run_on_the_current_stream() -> None:
    q, k, v = leaves(2, 300, 4, 64)
    torch.cuda._sleep(1)  # the first use of a kernel loads it, which waits
    expected = flashattn_ext.forward(q * 1, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        scaled = q * 1
        out = flashattn_ext.forward(scaled, k, v)
        done = torch.cuda.Event()
        done.record()
    assert not done.query()  # no call waited for the sleeping stream
    stream.synchronize()
    assert_same_bits(out, expected)


def test_graph_replays_draw_fresh_masks() -> None:
    torch.manual_seed(1)
    q, k, v = leaves(1, 128, 2, 64)
    options = dict(dropout_p=0.5)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        torch.autograd.grad(flashattn_ext.forward(q, k, v, **options).sum(), (q, k, v))
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashattn_ext.forward(q, k, v, **options)
        dq, _, _ = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append((out.clone(), dq.clone()))
    for i in range(3):
        assert not torch.equal(seen[i][0], seen[i - 1][0]) and not torch.equal(seen[i][1], seen[i - 1][1])
    torch.manual_seed(1)
    first = flashattn_ext.forward(q, k, v, **options)
    torch.manual_seed(1)
    assert_same_bits(flashattn_ext.forward(q, k, v, **options), first)


def test_graph_replays_see_new_intervals() -> None:
    """The graph computes the extremes of a Mask: extremes cached before the capture would belong to the old intervals."""
    q, k, v = leaves(1, 300, 2, 64)
    masks = [flashattn_ext.Mask.chunked(size, 300, 300, device="cuda") for size in (7, 40, 300, 1)]
    mask = flashattn_ext.Mask(masks[0].intervals.clone())

    def step(mask: flashattn_ext.Mask) -> tuple[torch.Tensor, ...]:
        out = flashattn_ext.forward(q, k, v, mask=mask, causal=True)
        out = flashattn_ext.forward(out, k, v, mask=mask)
        return (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))

    graph, results = captured(lambda: step(mask))
    for other in masks:
        mask.intervals.copy_(other.intervals)
        graph.replay()
        for got, expected in zip(results, step(other), strict=True):
            torch.testing.assert_close(got, expected)
    mask.intervals.copy_(masks[1].intervals)  # calls outside the graph do not use the graph's extremes
    assert_same_bits(step(mask)[0], step(masks[1])[0])


def test_graph_replays_find_the_largest_logits_of_new_keys() -> None:
    starts = torch.tensor([0, 90, 300], dtype=torch.int32, device="cuda")
    q, k, v = (t.detach() for t in leaves(1, 300, 2, 64))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        dense = flashattn_ext.forward(q, k, v, causal=True, return_max_logits=True)[1]
        packed = flashattn_ext.varlen_forward(q[0], k[0], v[0], starts, starts, 300, 300, return_max_logits=True)[1]
        return dense, packed

    graph, results = captured(step)
    for _ in range(3):
        k.normal_()
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert_same_bits(got, expected)


def test_strides_beyond_32_bits() -> None:
    far = 2**31 + 64
    memory = torch.empty(far + 100 * 2 * 64, device="cuda", dtype=torch.float16)
    view = memory.as_strided((2, 100, 2, 64), (far, 128, 64, 1))
    view.normal_()
    assert_same_bits(flashattn_ext.forward(view, view, view), flashattn_ext.forward(*[view.contiguous()] * 3))


@pytest.mark.parametrize("H,D,deterministic,alone", [(32, 64, False, 64), (32, 64, True, 1), (4, 512, False, 1)])
def test_more_than_two_to_the_31_elements(H: int, D: int, deterministic: bool, alone: int) -> None:
    """Also more batch entries than a grid has rows. Rows of 16 queries keep the sums of dq, in whole tiles, within 80 GB.

    The last `alone` batch entries must have the same bits in a call of their own. Many short heads have a backward of their own
    (sm90/backward_short/heads.cuh) with other bits, except in deterministic calls. The call of 64 batch entries runs there, too: its 2048 heads are more
    than three for each multiprocessor.
    """
    B, S = 70000, 16
    q, k, v = leaves(B, S, H, D)
    out = flashattn_ext.forward(q, k, v, causal=True, deterministic=deterministic)
    grads = torch.autograd.grad(out, (q, k, v), out.detach())
    assert_same_bits(out[-1:], flashattn_ext.forward(*(t[-1:].detach() for t in (q, k, v)), causal=True))
    last = [t[-alone:].detach().requires_grad_() for t in (q, k, v)]
    expected = flashattn_ext.forward(*last, causal=True, deterministic=deterministic)
    assert_same_bits(out[-alone:], expected)
    for grad, ref in zip(grads, torch.autograd.grad(expected, last, expected.detach()), strict=True):
        assert_same_bits(grad[-alone:], ref)


def keys_of_a_step(family: str, head_dim: int, dropout: bool) -> int | None:
    """The tile of the 16-bit forward, which decides the order of sums. None where it depends on the GPU's shared memory."""
    row = row_of(family, "forward", head_dim, head_dim, dropout)
    if row is None or row.competing != row.tiles:
        return None
    return int(row.tiles[0][2 if family == "sm80" else 1])


@pytest.mark.skipif(not has_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
@pytest.mark.parametrize("head_dim", [64, 72, 128, 129, 192, 256, 320, 512])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3, "rng_seed": 7}, {"window_size": (100, 20)}])
def test_kernels_for_hopper_are_chosen_and_agree(head_dim: int, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHATTN_EXT_CUDA_PATH", raising=False)
    q, k, v = leaves(2, 768, 4, head_dim, dtype=torch.bfloat16)  # whole tiles: kBrief may have the other's step
    out, lse = flashattn_ext.forward(q, k, v, return_lse=True, **options)
    with flashattn_ext.use_backend("cuda-sm90"):
        chosen = flashattn_ext.forward(q, k, v, **options)
    assert_same_bits(out, chosen)
    with flashattn_ext.use_backend("cuda-sm80"):
        other, other_lse = flashattn_ext.forward(q, k, v, return_lse=True, **options)
    steps = {keys_of_a_step(name, head_dim, "dropout_p" in options) for name in ("sm80", "sm90")}
    if len(steps) == 2:
        assert not torch.equal(out, other)  # another order of sums
    torch.testing.assert_close(out, other, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, other_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not has_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
@pytest.mark.parametrize(
    "D,Dv,narrow", [(192, 128, True), (160, 96, True), (145, 128, True), (144, 128, False), (192, 129, False)]
)
def test_narrow_values_have_kernels_of_their_own(D: int, Dv: int, narrow: bool) -> None:
    """Key tiles of another size sum in another order: padding v with zeros beyond 128 columns changes bits."""
    q, k, v = leaves(2, 500, 4, D, dtype=torch.bfloat16)
    with torch.no_grad():
        v[..., Dv:] = 0
        with flashattn_ext.use_backend("cuda-sm90"):
            out, wide = (flashattn_ext.forward(q, k, values)[..., :Dv] for values in (v[..., :Dv], v))
    assert torch.equal(out, wide) != narrow
    torch.testing.assert_close(out, wide, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not has_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 129, 144, 160, 192, 256, 320, 512])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3, "rng_seed": 7}, {"window_size": (100, 20)}])
def test_gradients_of_the_kernels_for_hopper_agree(head_dim: int, options: dict) -> None:
    q, k, v = leaves(2, 500, 4, head_dim, dtype=torch.bfloat16)
    grad = torch.randn_like(q)
    grads = {}
    for name in ("cuda-sm80", "cuda-sm90"):
        with flashattn_ext.use_backend(name):
            grads[name] = torch.autograd.grad(flashattn_ext.forward(q, k, v, **options), (q, k, v), grad)
    pairs = list(zip(*grads.values(), strict=True))
    same_kernels = head_dim > 256 and "dropout_p" in options  # sm80's backward
    assert same_kernels or not all(torch.equal(*pair) for pair in pairs)  # other tiles, other order of sums
    for other, ours in pairs:
        torch.testing.assert_close(ours, other, atol=4e-2, rtol=2e-2)


MANY_SEQUENCES = {
    "causal": dict(Sq=512, Sk=512, causal=True),
    "full": dict(Sq=300, Sk=401),
    "more keys": dict(Sq=70, Sk=512, causal=True, use_lse=True),
    "more queries": dict(Sq=900, Sk=100),
    "rows that see no key": dict(Sq=300, Sk=200, causal=True),
    "three keys": dict(Sq=200, Sk=3),
    "no query heads": dict(Sq=130, Sk=200, Hq=0),
    "bounded on the right": dict(Sq=260, Sk=260, window_size=(-1, 100), sink_dtype=torch.float32),
    "bounded on the left": dict(Sq=260, Sk=260, window_size=(100, 0)),
    "groups": dict(Sq=200, Sk=200, Hq=16, causal=True, views=("packed", "transposed", "offset")),
}


@pytest.mark.parametrize("D,Dv", [(64, 64), (128, 128), (40, 64), (100, 128), (80, 96)])
@pytest.mark.parametrize("options", MANY_SEQUENCES.values(), ids=MANY_SEQUENCES.keys())
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_gradients_of_many_short_sequences(dtype: torch.dtype, options: dict, D: int, Dv: int) -> None:
    """With as many KV heads as a Hopper GPU has multiprocessors, a thread block computes whole heads."""
    heads = torch.cuda.get_device_properties("cuda").multi_processor_count
    check(Case(dtype=dtype, B=heads // 8, D=D, Dv=Dv, **{"Hq": 8, "Hk": 8, **options}), "cuda")


@pytest.mark.skipif(not runs_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_of_whole_heads(head_dim: int) -> None:
    """Their dq has the same bits in every run. Few sequences, and deterministic calls, whose bits may not depend on the batch, add
    in another order.
    """
    heads = 3 * torch.cuda.get_device_properties("cuda").multi_processor_count
    q, k, v = leaves(heads, 256, 1, head_dim, dtype=torch.bfloat16)
    grad = torch.randn_like(q)

    def dq(count: int, deterministic: bool = False) -> torch.Tensor:
        inputs = [t[:count].detach().requires_grad_() for t in (q, k, v)]
        out = flashattn_ext.forward(*inputs, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, inputs[0], grad[:count])[0]

    many = dq(heads)
    assert_same_bits(dq(heads), many)
    assert not torch.equal(dq(8), many[:8]) and not torch.equal(dq(heads, deterministic=True), many)
    assert_same_bits(dq(heads, deterministic=True)[:8], dq(8, deterministic=True))
    torch.testing.assert_close(dq(8), many[:8], atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not has_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
def test_first_call_of_a_thread() -> None:
    """A backward of whole heads may be the first use of the GPU in PyTorch's thread for backwards."""
    done = run_python("""
        import torch, flashattn_ext
        heads = torch.cuda.get_device_properties("cuda").multi_processor_count
        q, k, v = (torch.randn(heads, 256, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        free = [torch.empty(1 << 28, device="cuda"), *(torch.empty_like(q) for _ in range(8))]
        out = flashattn_ext.forward(q, k, v)
        grad = torch.randn_like(out)
        del free  # the backward allocates nothing from the driver
        gradients = torch.autograd.grad(out, (q, k, v), grad)
        assert all(t.isfinite().all() for t in gradients)
    """)
    assert done.returncode == 0, done.stderr


GROUPS = {
    "causal": dict(Sq=400, Sk=400, Hq=32, Hk=8, causal=True, use_lse=True),
    "window": dict(Sq=300, Sk=700, Hq=16, Hk=4, window_size=(100, 0), views=("packed", "transposed", "offset")),
    "bounded on the right": dict(Sq=260, Sk=260, Hq=64, Hk=8, window_size=(-1, 100), sink_dtype=torch.float32),
    "full": dict(Sq=150, Sk=401, Hq=6, Hk=3, views=("expanded", "offset", "padded")),
    "one KV head": dict(Sq=513, Sk=130, Hq=16, Hk=1, causal=True),
    "packed": dict(
        lengths_q=(150, 1, 0, 260), lengths_k=(170, 33, 20, 0), Hq=8, Hk=2, window_size=(100, 40), use_lse=True
    ),
    "packed causal": dict(lengths_q=(7, 300, 129), lengths_k=(7, 300, 257), Hq=8, Hk=1, causal=True),
}


@pytest.mark.parametrize("D,Dv", [(64, 64), (40, 24), (80, 72), (96, 90), (128, 128), (99, 128)])
@pytest.mark.parametrize("options", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_gradients_of_groups(dtype: torch.dtype, options: dict, D: int, Dv: int) -> None:
    """On Hopper the query heads of a group add up dk and dv in memory."""
    check(Case(dtype=dtype, D=D, Dv=Dv, **options), "cuda")


@pytest.mark.skipif(not runs_hoppers_kernels(), reason="needs a GPU of compute capability 9.0 and a build for 9.0a")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("Hq", "Hk", "causal", "adds"), [(8, 1, True, True), (2, 1, False, True), (1, 1, True, False)])
def test_groups_add_up_in_the_workspace(Hq: int, Hk: int, causal: bool, adds: bool, head_dim: int) -> None:
    """In fp32, if the call has groups and is not deterministic."""
    S = 8192  # sums of several MiB: the allocator counts blocks of up to 1 MiB more than it was asked for
    q = torch.randn(1, S, Hq, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, S, Hk, head_dim, device="cuda", dtype=torch.bfloat16)
    out, lse = flashattn_ext.forward(q, k, v, causal=causal, return_lse=True)

    def peak(deterministic: bool) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashattn_ext.backward(q, q, k, v, out, lse, causal=causal, deterministic=deterministic)
        return torch.cuda.max_memory_allocated() - before

    sums = 4 * (k.numel() + v.numel())
    assert (peak(False) - peak(True) > sums // 2) == adds


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 144, 256, 512])
@pytest.mark.parametrize("hint", [1, 130, 300])
def test_deterministic_gradients_of_sequences_longer_than_the_hint(head_dim: int, hint: int) -> None:
    """Key tiles add to dq in a fixed order, and the host's grid has no thread block for some of them."""
    q, k, v = leaves(1, 1000, 2, head_dim)
    starts = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")
    packed = [t[0] for t in (q, k, v)]
    for causal in (False, True):
        out = flashattn_ext.varlen_forward(*packed, starts, starts, hint, hint, causal=causal, deterministic=True)
        dense = flashattn_ext.forward(q, k, v, causal=causal, deterministic=True)
        assert_same_bits(out, dense[0])
        grads = torch.autograd.grad(out, (q, k, v), out.detach())
        for grad, ref in zip(grads, torch.autograd.grad(dense, (q, k, v), dense.detach()), strict=True):
            assert_same_bits(grad, ref)


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_gradients_of_many_heads_longer_than_the_hint(dtype: torch.dtype) -> None:
    """More heads than thread blocks that are resident: none may wait for a key tile of a thread block that has not started."""
    q, k, v = leaves(1, 1000, 400, 64, dtype=dtype)
    starts = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")
    packed = [t[0] for t in (q, k, v)]

    def gradients(hint: int) -> tuple[torch.Tensor, ...]:
        out = flashattn_ext.varlen_forward(*packed, starts, starts, hint, hint, causal=True, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), out.detach())

    for grad, ref in zip(gradients(130), gradients(1000), strict=True):
        assert_same_bits(grad, ref)


def test_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = leaves(1, 300, 2, 64)
    with flashattn_ext.use_backend("cuda-sm80"):
        expected = flashattn_ext.forward(q, k, v)
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "sm80")
    assert_same_bits(flashattn_ext.forward(q, k, v), expected)
    monkeypatch.setenv("FLASHATTN_EXT_CUDA_PATH", "sm70")
    with pytest.raises(
        RuntimeError, match=r"FLASHATTN_EXT_CUDA_PATH: 'sm70' is not the name of a CUDA backend; choose one of .*'sm80'"
    ):
        flashattn_ext.forward(q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("path", PATHS)
def test_deterministic_gradient_of_a_relative_bias(path: str, head_dim: int, dtype: torch.dtype) -> None:
    """Large and small gradients are summed exactly, so that thread blocks may add in any order."""
    inputs = leaves(3, 700, 4, head_dim, dtype=dtype)
    inputs.append(torch.randn(4, 161, device="cuda", requires_grad=True))
    dout = torch.randn_like(inputs[0])

    def gradients(scale: float, deterministic: bool = True) -> tuple[torch.Tensor, ...]:
        with flashattn_ext.use_backend(f"cuda-{path}"):
            out = flashattn_ext.forward(
                *inputs[:3],
                relative_bias=inputs[3],
                causal=True,
                dropout_p=0.2,
                rng_seed=3,
                deterministic=deterministic,
            )
            return torch.autograd.grad(out, inputs, dout * scale)

    expected = gradients(1)
    for _ in range(4):
        for got, same in zip(gradients(1), expected, strict=True):
            assert_same_bits(got, same)
    in_any_order = gradients(1, deterministic=False)[3]
    torch.testing.assert_close(expected[3], in_any_order, rtol=1e-4, atol=1e-4 * in_any_order.abs().max().item())
    if dtype == torch.float32:
        for scale in (2.0**60, 2.0**-60):
            assert_same_bits(gradients(scale)[3], expected[3] * scale)
    dout[0, 5, 1, 3] = torch.inf
    found = gradients(1)[3]
    assert not found[1].isfinite().all() and found[0].isfinite().all() and found[2:].isfinite().all()


def test_the_device_of_the_tensors_counts() -> None:
    """A call runs on the device of its tensors, not on the current device."""
    host = [torch.randn(2, 300, 4, 64) for _ in range(4)]
    results = []
    for index in range(torch.cuda.device_count()):
        *inputs, dout = [t.to(f"cuda:{index}") for t in host]
        inputs = [t.requires_grad_() for t in inputs]
        out = flashattn_ext.forward(*inputs, causal=True, dropout_p=0.2, rng_seed=3, deterministic=True)
        grads = torch.autograd.grad(out, inputs, dout)
        assert all(t.device == dout.device for t in (out, *grads))
        results.append([t.cpu() for t in (out, *grads)])
    assert torch.cuda.current_device() == 0
    for other in results[1:]:
        for t, expected in zip(other, results[0], strict=True):
            assert_same_bits(t, expected)


@pytest.mark.parametrize("path", PATHS)
def test_failed_launch_names_kernel_and_shape(path: str) -> None:
    done = run_python(
        """
        import torch, flashattn_ext
        q = torch.randn(2, 40, 4, 64, device="cuda", dtype=torch.float16)
        flashattn_ext.forward(q, q, q)
        torch._assert_async(torch.zeros(1, device="cuda"))  # every later call of CUDA fails
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            flashattn_ext.forward(q, q, q)
        """,
        FLASHATTN_EXT_CUDA_PATH=path,
    )
    assert re.search(
        r"CUDA kernel '[\w ]+' failed: .*assert.*\(B=2, Sq=40, Sk=40, Hq=4, Hk=4, D=64, Dv=64\)", done.stderr
    ), done.stderr


@pytest.mark.parametrize("packed", [False, True])
def test_the_largest_logits_in_a_graph(packed: bool) -> None:
    q, k = (torch.randn(2 * 100, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    starts = torch.tensor([0, 60, 200], dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        if packed:
            return flashattn_ext.varlen_forward(q, k, k, starts, starts, 140, 140, causal=True, return_max_logits=True)[
                1
            ]
        dense = [t.view(2, 100, 4, 64) for t in (q, k, k)]
        return flashattn_ext.forward(*dense, causal=True, return_max_logits=True)[1]

    graph, got = captured(call)
    for _ in range(2):
        q.normal_()
        k.normal_()
        graph.replay()
        torch.testing.assert_close(got, call(), rtol=0, atol=0)
