"""Calls that together run every CUDA kernel, for compute-sanitizer; some have invalid cu_seqlens, Mask extremes, lists of blocks, lengths or
block tables.

python tools/sanitizer_calls.py [DTYPE...]      default: float16 bfloat16 float32
"""

from __future__ import annotations

import itertools
import sys

import torch

import flashattn_ext

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (40, 64, 96, 128, 129, 192, 256, 320, 500)
INVALID_STARTS = ([0, 30, 70], [0, 500, -7], [-3, 40, 1000], [70, 30, 2], [2**31 - 1, -(2**31), 5])


def leaves(dtype: torch.dtype, head_dim: int, *shape: int) -> list[torch.Tensor]:
    """q with 4 heads and k, v with 2 heads; `shape` holds the dimensions before the heads."""
    sizes = [(*shape, heads, head_dim) for heads in (4, 2, 2)]
    return [torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for size in sizes]


def random_mask(keys: int, heads: int, *, packed: bool, invalid: bool) -> flashattn_ext.Mask:
    """Random intervals; with `invalid` their extremes are random and do not match them."""
    shape = (heads, keys, 2) if packed else (1, heads, keys, 2)
    mask = flashattn_ext.Mask(torch.randint(-20, keys + 20, shape, dtype=torch.int32, device="cuda"))
    if invalid:
        mask.extremes().random_(-(2**31), 2**31 - 1)
    return mask


def call_with_masks(dtype: torch.dtype, head_dim: int) -> int:
    """Runs dense and packed calls with a Mask; returns the number of calls."""
    choices = list(itertools.product((0.0, 0.3), (False, True), (False, True), (1, 4)))
    for dropout_p, deterministic, invalid, heads in choices:
        options = dict(dropout_p=dropout_p, deterministic=deterministic, rng_seed=1)
        q, k, v = leaves(dtype, head_dim, 1, 150)
        mask = random_mask(150, heads, packed=False, invalid=invalid)
        out = flashattn_ext.forward(q[:, :70], k, v, causal=invalid, mask=mask, **options)
        torch.autograd.grad(out.float().sum(), (q, k, v))
        q, k, v = leaves(dtype, head_dim, 70)
        cu = torch.tensor([-3, 40, 1000] if invalid else [0, 30, 70], dtype=torch.int32, device="cuda")
        mask = random_mask(70, heads, packed=True, invalid=invalid)
        out = flashattn_ext.varlen_forward(q, k, v, cu, cu, 20, 20, mask=mask, **options)
        torch.autograd.grad(out.float().sum(), (q, k, v))
    return 2 * len(choices)


def call_with_block_masks(dtype: torch.dtype, head_dim: int) -> int:
    """Runs dense calls with a BlockMask; returns the number of calls. Lists are not invalid in deterministic calls, which would not end."""
    orders = ({"deterministic": True}, {"invalid": True}, {})
    choices = list(itertools.product(orders, (1, 4), (0.0, 5.0)))
    for order, heads, softcap in choices:
        q, k, v = leaves(dtype, head_dim, 1, 300)
        visible = torch.rand(1, heads, 200, 300, device="cuda") < 0.5
        visible[..., :128, 128:256] = True
        visible[..., 128:, :128] = False
        mask = flashattn_ext.BlockMask.from_dense(visible)
        if "invalid" in order:
            mask.lists.random_(-5, 50)
        deterministic = "deterministic" in order
        out = flashattn_ext.forward(
            q[:, :200], k, v, causal=heads == 1, softcap=softcap, mask=mask, deterministic=deterministic
        )
        torch.autograd.grad(out.float().sum(), (q, k, v))
    return len(choices)


def call_with_biases(dtype: torch.dtype, head_dim: int) -> int:
    """Runs dense calls with softcap and biases, some with a Mask, and packed calls with every bias they support; returns the number of calls."""

    def leaf(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=of, requires_grad=True)

    calls = 0
    shapes = ((1, 4, 70, 151), (1, 1, 70, 151), (1, 4, 1, 151), (1, 4, 70, 160))
    for shape, wide, dropout_p, softcap in itertools.product(shapes, (False, True), (0.0, 0.3), (0.0, 5.0)):
        q, k, v = leaves(dtype, head_dim, 1, shape[-1])
        options = dict(
            alibi_slopes=leaf(4), relative_bias=leaf(4, 41), bias=leaf(*shape, of=torch.float32 if wide else dtype)
        )
        mask = random_mask(shape[-1], 4, packed=False, invalid=False) if softcap and dropout_p else None
        out = flashattn_ext.forward(
            q[:, :70], k, v, causal=wide, softcap=softcap, dropout_p=dropout_p, mask=mask, deterministic=wide, **options
        )
        torch.autograd.grad(out.float().sum(), (q, k, v, *options.values()))
        calls += 1
    for starts in ([0, 30, 70], *INVALID_STARTS):
        q, k, v = leaves(dtype, head_dim, 70)
        cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
        biases = dict(alibi_slopes=leaf(2, 4), relative_bias=leaf(4, 21))
        out = flashattn_ext.varlen_forward(q, k, v, cu, cu, 20, 20, softcap=3.0, window_size=(20, 5), **biases)
        torch.autograd.grad(out.float().sum(), (q, k, v, *biases.values()))
        calls += 1
    return calls


def call_with_caches(dtype: torch.dtype, head_dim: int) -> int:
    """Runs decoding calls with and without pages, some with invalid lengths and block tables; returns the number of calls."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    choices = list(itertools.product((1, 20, 130), (0, 16), (0, 3), (False, True)))
    for Sq, page_size, num_splits, invalid in choices:
        rows = page_size or 400
        k_cache, v_cache = (normal(25 if page_size else 2, rows, 2, head_dim) for _ in range(2))
        table = torch.randint(-9 if invalid else 0, 99 if invalid else 25, (2, 25), dtype=torch.int32, device="cuda")
        rotary_dim = min(head_dim, 32) // 2
        with torch.inference_mode():  # the host does not read lengths here: invalid ones reach the kernels
            flashattn_ext.flash_attn_with_kvcache(
                normal(2, Sq, 32, head_dim), k_cache, v_cache, normal(2, Sq, 2, head_dim), normal(2, Sq, 2, head_dim),
                normal(400, rotary_dim), normal(400, rotary_dim), integers(2**31 - 1, -5) if invalid else integers(250, 17),
                block_table=table if page_size else None, cache_leftpad=integers(900, 3) if invalid else None, causal=True,
                softcap=5.0 if num_splits else 0.0, alibi_slopes=torch.rand(32, device="cuda"), num_splits=num_splits,
            )  # fmt: skip
    k_cache, v_cache = (normal(2, 1300, 2, head_dim) for _ in range(2))
    lengths = integers(1290, 700)
    with torch.inference_mode():
        flashattn_ext.flash_attn_with_kvcache(
            normal(2, 20, 32, head_dim), k_cache, v_cache, cache_seqlens=lengths, causal=True
        )
    return len(choices) + 1


def call_with_few_queries(dtype: torch.dtype, head_dim: int) -> int:
    """Runs calls with few queries for many keys: forwards, dense and packed, some with invalid cu_seqlens, and dense backwards.

    Returns the number of calls.
    """
    starts = [[0, 1300, 1303, 2000], [0, 2000, 0, 2000], [-3, 5000, 700, 2000], [2**31 - 1, -(2**31), 5, 900]]
    rows = (1, 5, 20)
    for Sq in rows:
        q, k, v = (t.detach() for t in leaves(dtype, head_dim, 2, 2000))
        flashattn_ext.forward(q[:, :Sq], k, v, causal=True)
        cu_q = torch.tensor([0, Sq, Sq, 2 * Sq], dtype=torch.int32, device="cuda")
        for start in starts:
            cu_k = torch.tensor(start, dtype=torch.int32, device="cuda")
            flashattn_ext.varlen_forward(
                q[0, : 2 * Sq], k[0], v[0], cu_q, cu_k, Sq, 1300, causal=True, window_size=(1000, 0)
            )
    packed_rows = (2, 17, 64)  # for each query head; two heads share keys and values
    for Sq in packed_rows:
        q, k, v = leaves(dtype, head_dim, 2, 1500)
        torch.autograd.grad(flashattn_ext.forward(q[:, :Sq], k, v, causal=True).float().sum(), (q, k, v))
    return len(rows) * (1 + len(starts)) + len(packed_rows)


def call_with_short_sequences(dtype: torch.dtype, head_dim: int) -> int:
    """Runs many short heads, more than three for each multiprocessor, and packed sequences that are longer than max_seqlen says, some
    with invalid cu_seqlens; returns the number of calls.
    """
    lengths = (64, 200)
    for S in lengths:
        q, k, v = leaves(dtype, head_dim, 256, S)
        torch.autograd.grad(flashattn_ext.forward(q, k, v, causal=S == 200).float().sum(), (q, k, v))
    starts = ([0, 200, 230, 270], [-3, 40, 1000, 20])
    hints = tuple(itertools.product(starts, (16, 40), ({}, {"softcap": 3.0, "dropout_p": 0.3, "rng_seed": 1})))
    for start, hint, options in hints:
        q, k, v = leaves(dtype, head_dim, 270)
        cu = torch.tensor(start, dtype=torch.int32, device="cuda")
        out = flashattn_ext.varlen_forward(q, k, v, cu, cu, hint, hint, causal=hint == 40, **options)
        torch.autograd.grad(out.float().sum(), (q, k, v))
    return len(lengths) + len(hints)


def call_with_few_tiles(dtype: torch.dtype, head_dim: int) -> int:
    """Runs forwards in tiles of few keys: with work for every multiprocessor, and with less; returns the number of calls."""
    shapes = tuple(itertools.product((1, 40), (300, 700), (False, True)))
    for batch, S, is_causal in shapes:
        q, k, v = (t.detach() for t in leaves(dtype, head_dim, batch, S))
        flashattn_ext.forward(q, k, v, causal=is_causal)
    return len(shapes)


def call_invariantly(dtype: torch.dtype, head_dim: int) -> int:
    """Runs invariant calls: forward and backward, dense and packed, a prefill in chunks and decoding; returns the number of calls."""
    options = dict(causal=True, invariant=True)
    q, k, v = leaves(dtype, head_dim, 1, 300)
    torch.autograd.grad(flashattn_ext.forward(q, k, v, **options).float().sum(), (q, k, v))
    cu = torch.tensor([0, 130, 300], dtype=torch.int32, device="cuda")
    flashattn_ext.varlen_forward(q[0], k[0], v[0], cu, cu, 170, 170, **options)
    lengths = torch.tensor([290], dtype=torch.int32, device="cuda")
    rows = (1, 20, 130)
    with torch.inference_mode():
        for Sq in rows:
            flashattn_ext.flash_attn_with_kvcache(q[:, :Sq], k, v, cache_seqlens=lengths, **options)
    return 2 + len(rows)


def call_with_derivatives(dtype: torch.dtype, head_dim: int) -> int:
    """Runs the double backward of dense and packed calls, which has the kernels of both derivatives; returns the number of calls."""

    def differentiate_twice(out: torch.Tensor, *inputs: torch.Tensor) -> None:
        first = torch.autograd.grad(out.float().square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(t.float().square().sum() for t in first), inputs)

    plain = list(itertools.product((dict(causal=True), dict(window_size=(20, 5))), (False, True)))
    for mask, deterministic in plain:  # the kernels of wgmma, over several tiles of keys and queries
        q, k, v = leaves(dtype, head_dim, 1, 150)
        differentiate_twice(flashattn_ext.forward(q, k, v, deterministic=deterministic, **mask), q, k, v)
        q, k, v = leaves(dtype, head_dim, 300)
        cu = torch.tensor([0, 130, 300], dtype=torch.int32, device="cuda")
        out = flashattn_ext.varlen_forward(q, k, v, cu, cu, 170, 170, deterministic=deterministic, **mask)
        differentiate_twice(out, q, k, v)
    choices = list(itertools.product((0.0, 0.3), (False, True)))
    for dropout_p, deterministic in choices:
        options = dict(causal=True, dropout_p=dropout_p, deterministic=deterministic, rng_seed=1)
        alibi_slopes = torch.rand(4, device="cuda", requires_grad=True) if deterministic else None
        for packed in (False, True):
            q, k, v = leaves(dtype, head_dim, *((70,) if packed else (1, 70)))
            cu = torch.tensor([0, 30, 70] if deterministic else [0, 500, -7], dtype=torch.int32, device="cuda")
            if packed:
                out = flashattn_ext.varlen_forward(q, k, v, cu, cu, 20, 20, alibi_slopes=alibi_slopes, **options)
            else:
                out = flashattn_ext.forward(q, k, v, alibi_slopes=alibi_slopes, softcap=3.0, **options)
            differentiate_twice(out, q, k, v)
    return 2 * (len(plain) + len(choices))


def call_with_fp8(head_dim: int) -> int:
    """Runs forward and decoding calls in fp8; returns the number of calls."""

    def elements(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    descales = {f"descale_{name}": torch.rand(2, 2, device="cuda") for name in "qkv"}
    choices = list(itertools.product((1, 20, 130), (0, 16), (False, True)))
    for Sq, page_size, is_causal in choices:
        q, k, v = (elements(2, rows, heads, head_dim) for rows, heads in ((Sq, 32), (400, 2), (400, 2)))
        flashattn_ext.forward(q, k, v, causal=is_causal, softcap=0.0 if page_size else 3.0, **descales)
        pages = 50 if page_size else 2
        caches = [elements(pages, page_size or 400, 2, head_dim) for _ in range(2)]
        new = [torch.randn(2, Sq, 2, head_dim, device="cuda").bfloat16() for _ in range(2)]
        table = torch.randperm(50, device="cuda").view(2, 25).int() if page_size else None
        lengths = torch.tensor([250, 17], dtype=torch.int32, device="cuda")
        flashattn_ext.flash_attn_with_kvcache(
            q.bfloat16() if is_causal else q, *caches, *new, cache_seqlens=lengths, block_table=table, causal=is_causal,
            **{name: descale for name, descale in descales.items() if name != "descale_q" or not is_causal},
        )  # fmt: skip
    return 2 * len(choices)


def main() -> None:
    calls = 0
    dtypes = [getattr(torch, name) for name in sys.argv[1:] or DTYPES]
    for dtype, head_dim in itertools.product(dtypes, HEAD_DIMS):
        for dropout_p, deterministic in itertools.product((0.0, 0.3), (False, True)):
            q, k, v = leaves(dtype, head_dim, 1, 150)
            sink = torch.randn(4, device="cuda", requires_grad=True)
            out = flashattn_ext.forward(
                q[:, :70], k, v, causal=True, dropout_p=dropout_p, sink=sink, deterministic=deterministic
            )
            torch.autograd.grad(out.float().sum(), (q, k, v, sink))
            calls += 1
        for starts in INVALID_STARTS:
            q, k, v = leaves(dtype, head_dim, 70)
            cu = torch.tensor(starts, dtype=torch.int32, device="cuda")
            out, lse = flashattn_ext.varlen_forward(q, k, v, cu, cu, 20, 20, return_lse=True, window_size=(20, 5))
            torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
            calls += 1
        calls += call_with_masks(dtype, head_dim)
        calls += call_with_block_masks(dtype, head_dim)
        calls += call_with_biases(dtype, head_dim)
        calls += call_with_caches(dtype, head_dim)
        calls += call_with_few_queries(dtype, head_dim)
        calls += call_invariantly(dtype, head_dim)
        if head_dim <= 128:
            calls += call_with_short_sequences(dtype, head_dim)
            calls += call_with_few_tiles(dtype, head_dim)
        if head_dim <= 256:
            calls += call_with_derivatives(dtype, head_dim)
        if dtype == torch.bfloat16:
            calls += call_with_fp8(head_dim)
    flashattn_ext.dropout_mask(2, 3, 17, 19, 0.3, 1, "cuda")
    torch.cuda.synchronize()
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
