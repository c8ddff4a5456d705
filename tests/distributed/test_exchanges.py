"""distributed.attention: several ranks compute the results of one device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from exchange_jobs import DistributedCase, compare
from rank_pool import RankPool

MODES = ("ulysses", "allgather", "ring")
SHARDINGS = ("zigzag", "contiguous")


def _agrees(pool: RankPool, case: DistributedCase) -> None:
    if case.ranks > pool.ranks:
        pytest.skip(f"{case.ranks} ranks wanted")
    if pool.device != "cpu":
        case = replace(case, device=pool.device, dtype=torch.float32)
    pool.run(compare, case)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_compute_what_one_computes(pool: RankPool, ranks: int, mode: str, sharding: str) -> None:
    case = DistributedCase(ranks=ranks, mode=mode, sharding=sharding, S=512, options={"causal": True})
    _agrees(pool, case)
    _agrees(pool, replace(case, options={}, use_lse=False))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"options": {"causal": True, "window_size": (40, -1)}},
    "window to both sides": {"options": {"window_size": (100, 30)}},
    "softcap and sink": {"sink": True, "options": {"causal": True, "softcap": 2.0}},
    "smooth softmax": {"options": {"smooth_softmax": True, "softmax_scale": 0.3}},
    "dropout": {"options": {"causal": True, "dropout_p": 0.3, "rng_seed": 5}},
    "dropout in a window": {"options": {"window_size": (70, 9), "dropout_p": 0.3, "rng_seed": 5, "origin": (3, 2)}},
    "alibi": {"alibi": "batch", "options": {"causal": True}},
    "relative bias": {"relative": 20, "options": {}},
    "bias": {"bias": "bhq", "sink": True, "options": {"causal": True}},
    "bias of keys": {"bias": "h", "options": {}},
    "bias that heads share": {"bias": "q", "options": {}},
    "documents": {"mask": "documents", "options": {"causal": True}},
    "a mask of each head": {"mask": "heads", "sink": True, "options": {"dropout_p": 0.2, "rng_seed": 1}},
    "bhsd": {"layout": "bhsd", "options": {"causal": True}},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_the_same(pool: RankPool, name: str, mode: str) -> None:
    """Lengths that do not divide evenly: of 300 positions two ranks have 172 and 128; with four ranks some chunks are empty."""
    case = DistributedCase(ranks=2, mode=mode, S=300, **OPTIONS[name])
    _agrees(pool, case)
    _agrees(pool, replace(case, ranks=4, sharding="contiguous"))


@pytest.mark.parametrize("bias", ["bhq", "q", "bh"])
@pytest.mark.parametrize("mode", MODES)
def test_a_bias_where_a_rank_has_one_row(pool: RankPool, mode: str, bias: str) -> None:
    """A bias of one row on that rank is either the row of its query or a row for all queries."""
    case = DistributedCase(ranks=2, mode=mode, sharding="contiguous", S=65, bias=bias, options={"causal": True})
    _agrees(pool, case)
    _agrees(pool, replace(case, S=1))
    _agrees(pool, replace(case, ranks=4, S=129))


PACKED: dict[str, dict[str, Any]] = {
    "causal": {"options": {"causal": True}},
    "both directions": {"sink": True, "options": {}},
    "window": {"alibi": "batch", "options": {"causal": True, "window_size": (30, -1)}},
    "window to both sides": {"relative": 9, "options": {"window_size": (50, 20)}},
    "dropout": {"options": {"causal": True, "dropout_p": 0.3, "rng_seed": 5}},
    "mask": {"mask": "heads", "options": {"causal": True}},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_go_over_ranks(pool: RankPool, name: str, mode: str) -> None:
    lengths = (1, 70, 0, 130, 3, 1, 60, 20)
    case = DistributedCase(ranks=2, mode=mode, S=300, lengths=lengths, **PACKED[name])
    _agrees(pool, case)
    _agrees(pool, replace(case, ranks=4, sharding="contiguous"))
    _agrees(pool, replace(case, S=620, lengths=(*lengths, 320)))
    _agrees(pool, replace(case, S=620, lengths=(30, 590)))  # both chunks of a rank hold a part of one document


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_of_another_sequence(pool: RankPool, name: str, mode: str) -> None:
    """More keys than queries; fewer, where the first rows of a causal call see none; and no keys."""
    case = DistributedCase(ranks=2, mode=mode, S=300, Sk=450, **OPTIONS[name])
    _agrees(pool, case)
    _agrees(pool, replace(case, ranks=4, S=450, Sk=200, sharding="contiguous"))
    _agrees(pool, replace(case, S=129, Sk=1))
    if not case.mask:
        _agrees(pool, replace(case, S=100, Sk=0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PACKED)
def test_packed_keys_of_another_length(pool: RankPool, name: str, mode: str) -> None:
    lengths, lengths_k = (1, 70, 0, 130, 3, 1, 60, 20), (40, 20, 60, 300, 0, 1, 2, 90)
    case = DistributedCase(ranks=2, mode=mode, S=300, Sk=520, lengths=lengths, lengths_k=lengths_k, **PACKED[name])
    _agrees(pool, case)
    _agrees(pool, replace(case, ranks=4, sharding="contiguous"))
    _agrees(pool, replace(case, S=620, lengths=(30, 590), Sk=200, lengths_k=(150, 50)))


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_of_documents_whose_keys_are_cut_apart(pool: RankPool, mode: str) -> None:
    """A rank's first document ends before its second begins: between their keys are keys of other ranks."""
    case = DistributedCase(ranks=2, mode=mode, S=256, lengths=(192, 64), mask="heads", options={"causal": True})
    _agrees(pool, case)


@pytest.mark.parametrize(("heads_q", "heads_k"), [(4, 1), (6, 3), (12, 6), (8, 8)])
def test_key_heads_that_do_not_divide(pool: RankPool, heads_q: int, heads_k: int) -> None:
    ranks = 4 if heads_q % 4 == 0 else 2
    _agrees(pool, DistributedCase(ranks=ranks, Hq=heads_q, Hk=heads_k, S=128, options={"causal": True}))


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_bits(pool: RankPool, mode: str) -> None:
    _agrees(pool, DistributedCase(ranks=2, mode=mode, dtype=torch.bfloat16, options={"causal": True}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alibi", ["heads", "batch"])
@pytest.mark.parametrize("lengths", [None, (100, 156)])
def test_sixteen_bit_gradients_of_distances(
    pool: RankPool, mode: str, alibi: str, lengths: tuple[int, ...] | None
) -> None:
    """Calls on a part of a row's keys receive the centres of the whole row (csrc/rules/bias.h), which are added once."""
    case = DistributedCase(
        ranks=2, mode=mode, dtype=torch.bfloat16, alibi=alibi, relative=5, lengths=lengths, sink=True
    )
    _agrees(pool, replace(case, options={"causal": True}))


def _drawn(seed: int) -> DistributedCase:
    """Any mix of options, in any lengths."""
    draw = random.Random(seed)
    heads_k = draw.choice([1, 2, 3, 4])
    ranks = draw.choice([2, 4])
    heads_q = heads_k * draw.choice([1, 2, 4])
    modes = MODES if heads_q % ranks == 0 else MODES[1:]
    S, packed = draw.randint(1, 500), draw.random() < 0.4
    lengths, left = [], S
    while packed and left > 0 and len(lengths) < 12:
        lengths.append(min(left, draw.choice([0, 1, 5, 64, 100, 200])))
        left -= lengths[-1]
    options: dict[str, Any] = {"causal": draw.random() < 0.6}
    if draw.random() < 0.4:
        options["window_size"] = (draw.choice([-1, 0, 17, 90]), draw.choice([-1, 0, 33]))
    if draw.random() < 0.3:
        options |= {"dropout_p": 0.25, "rng_seed": draw.randint(0, 99)}
    if draw.random() < 0.2:
        options["softcap"] = 1.5
    has_sink = draw.random() < 0.3
    if not has_sink and draw.random() < 0.2:
        options["smooth_softmax"] = True
    is_cross = draw.random() < 0.4
    keys = [draw.choice([0, 1, 9, 64, 150]) for _ in lengths]
    return DistributedCase(
        Sk=sum(keys) + draw.choice([0, 3]) if packed and is_cross else draw.randint(1, 500) if is_cross else None,
        lengths_k=tuple(keys) if packed and is_cross else None, ranks=ranks, mode=draw.choice(modes), sharding=draw.choice(SHARDINGS), B=draw.choice([1, 2]), S=S, Hq=heads_q, Hk=heads_k,
        lengths=tuple(lengths) if packed else None, sink=has_sink, alibi=draw.choice([None, None, "heads", "batch"]),
        relative=draw.choice([None, None, 7]), bias=None if packed else draw.choice([None, None, "", "b", "h", "bhq"[: draw.randint(1, 3)]]),
        mask=draw.choice([None, None, "documents", "heads"]), use_lse=draw.random() < 0.5, seed=seed, options=options,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_options(pool: RankPool, seed: int) -> None:
    _agrees(pool, _drawn(seed))
