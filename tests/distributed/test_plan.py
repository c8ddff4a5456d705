"""plan.py: every visible pair of a query and a key is in one call of one rank, and fully masked keys are not sent."""

from __future__ import annotations

import random

import pytest
import torch

from flashattn_ext.distributed.plan import DRAWN_KEYS, DRAWN_ROWS, Plan, Rules, plan_of
from flashattn_ext.distributed.sharding import Sharding, Span


def _drawn(seed: int) -> tuple[Sharding, tuple[int, ...], Rules, bool]:
    draw = random.Random(seed)
    S, packed = draw.randint(1, 400), draw.random() < 0.5
    cuts = sorted(draw.randint(0, S) for _ in range(draw.randint(0, 5))) if packed else []
    causal = draw.random() < 0.5
    right = 0 if causal else draw.choice([-1, 0, 9, 100])
    rules = Rules(
        draw.choice([-1, 0, 30, 150]), right, causal, draw.random() < 0.3, draw.random() < 0.3, draw.random() < 0.3
    )
    sharding = Sharding(S, draw.choice([2, 3, 4]), draw.choice(["zigzag", "contiguous"]))
    return sharding, (0, *cuts, S), rules, packed


def _visible(S: int, documents: tuple[int, ...], rules: Rules) -> torch.Tensor:
    position = torch.arange(S)
    starts = torch.tensor(documents)
    document = torch.searchsorted(starts, position, right=True) - 1
    distance = position[None] - position[:, None]
    visible = document[:, None] == document[None]
    if rules.window_left >= 0:
        visible &= distance >= -rules.window_left
    if rules.window_right >= 0:
        visible &= distance <= rules.window_right
    return visible


def _buffer_positions(sharding: Sharding, rank: int, plan: Plan, step: int) -> torch.Tensor:
    """The position in the whole sequence of each row of a step's buffer."""
    positions = torch.full((plan.steps[step].keys,), -1)
    for s in (*plan.steps[step].own, *plan.steps[step].received):
        positions[s.target_row : s.target_row + s.rows] = _positions(sharding.spans(s.source))[
            s.source_row : s.source_row + s.rows
        ]
    return positions


def _positions(spans: tuple[Span, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(span.begin, span.end) for span in spans)])


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_calls_cover_what_is_visible_once(seed: int, ring: bool) -> None:
    sharding, documents, rules, packed = _drawn(seed)
    S = sharding.seqlen
    covered = torch.zeros(S, S, dtype=torch.int64)
    for rank in range(sharding.ranks):
        plan = plan_of(sharding, rank, documents, rules, packed, ring)
        rows = _positions(sharding.spans(rank))
        met: set[int] = set()
        for index, step in enumerate(plan.steps):
            keys = _buffer_positions(sharding, rank, plan, index)
            assert (keys >= 0).all()
            for part in step.parts:
                row, key = part.rows[0], part.keys[0]
                assert keys[key] == part.first_key or len(keys) == 0
                assert all((r in met) != part.is_first for r in range(*part.rows))
                met |= set(range(*part.rows))
                for place in part.places:
                    count = place.last_row - place.row - part.added_rows
                    key_count = place.last_key - place.key - part.added_keys
                    _cover(covered, rows[row : row + count], keys[key : key + key_count], part)
                    row, key = row + count, key + key_count
                assert (row, key) == (part.rows[1], part.keys[1])
    assert torch.equal(covered, _visible(S, documents, rules).long())


def _cover(covered: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, part: object) -> None:
    """The pairs that a call of these rows and keys computes, by the rules of flashattn_ext.forward."""
    origin, (left, right) = part.origin, part.window
    Sq, Sk = len(rows), len(keys)
    shift = Sk - Sq
    if origin is not None and len(origin) == 4:
        shift = origin[2] + part.added_rows - origin[3] - part.added_keys
    distance = torch.arange(Sk)[None] - (torch.arange(Sq) + shift)[:, None]
    visible = torch.ones(Sq, Sk, dtype=torch.bool)
    if part.causal:
        right = 0
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    covered[rows[:, None], keys[None]] += visible.long()


@pytest.mark.parametrize("seed", range(30))
def test_gpus_can_draw_dropout_where_calls_begin(seed: int) -> None:
    """Packed sequences are cut anywhere: origins are multiples of the GPU generator's block of rows and keys."""
    sharding, documents, rules, packed = _drawn(seed)
    rules = rules._replace(has_dropout=True)
    for rank in range(sharding.ranks):
        for ring in (False, True):
            for step in plan_of(sharding, rank, documents, rules, packed, ring).steps:
                for part in step.parts:
                    assert part.origin is not None
                    _document, _head, *row_and_key = part.origin
                    assert all(n % of == 0 for n, of in zip(row_and_key, (DRAWN_ROWS, DRAWN_KEYS), strict=False))


@pytest.mark.parametrize("ring", [False, True])
def test_fully_masked_keys_are_not_sent(ring: bool) -> None:
    sharding = Sharding(1024, 4, "contiguous")
    rules = Rules(100, 0, True, False, False, False)
    for rank in range(4):
        steps = plan_of(sharding, rank, (0, 1024), rules, False, ring).steps
        assert {(s.source, s.rows) for step in steps for s in step.received} == ({(rank - 1, 100)} if rank else set())
        assert {taker for step in steps for taker, _ in step.sent} == ({rank + 1} if rank < 3 else set())


def test_a_causal_ring_makes_one_call_a_step() -> None:
    sharding = Sharding(1024, 2)
    rules = Rules(-1, 0, True, False, False, False)
    for rank in range(2):
        steps = plan_of(sharding, rank, (0, 1024), rules, False, True).steps
        assert [len(step.parts) for step in steps] == [1, 1]
        assert steps[0].parts[0].rows == (0, 512) and steps[0].parts[0].causal and steps[0].is_own_part
        assert not steps[1].parts[0].causal


def test_zigzag_is_even_work() -> None:
    sharding = Sharding(4096, 4)
    pairs = [sum((span.begin + span.end + 1) * span.length for span in sharding.spans(rank)) for rank in range(4)]
    assert len(set(pairs)) == 1
