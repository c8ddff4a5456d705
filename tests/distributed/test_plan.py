"""plan.py: every visible pair of a query and a key is in one call of one rank, and fully masked keys are not sent."""

from __future__ import annotations

import random

import pytest
import torch

from flashattn_ext.distributed.plan import DRAWN_KEYS, DRAWN_ROWS, Part, Plan, Rules, Side, plan_of
from flashattn_ext.distributed.sharding import Sharding, Span


def _drawn(seed: int, is_cross: bool) -> tuple[Side, Side, Rules, bool]:
    """Queries, keys, rules, and whether both are packed. In self-attention the keys are where the queries are."""
    draw = random.Random(seed)
    S, packed = draw.randint(1, 400), draw.random() < 0.5
    cuts = sorted(draw.randint(0, S) for _ in range(draw.randint(0, 5))) if packed else []
    causal = draw.random() < 0.5
    right = 0 if causal else draw.choice([-1, 0, 9, 100])
    rules = Rules(
        draw.choice([-1, 0, 30, 150]), right, causal, draw.random() < 0.3, draw.random() < 0.3, draw.random() < 0.3
    )
    sharding = Sharding(S, draw.choice([2, 3, 4]), draw.choice(["zigzag", "contiguous"]))
    queries = Side(sharding, (0, *cuts, S))
    if not is_cross:
        return queries, queries, rules, packed
    Sk = draw.choice([0, 1, S, draw.randint(1, 700)])
    cuts = sorted(draw.randint(0, Sk) for _ in cuts)
    return queries, Side(Sharding(Sk, sharding.ranks, sharding.kind), (0, *cuts, Sk)), rules, packed


def _visible(queries: Side, keys: Side, rules: Rules) -> torch.Tensor:
    """Which pairs forward() and varlen_forward() compute: rows and keys of a document are aligned at its end."""
    document, to_the_end = [], []
    for side in queries, keys:
        position, starts = torch.arange(side.sharding.seqlen), torch.tensor(side.documents)
        document.append(torch.searchsorted(starts, position, right=True) - 1)
        to_the_end.append(starts[document[-1] + 1] - position)
    distance = to_the_end[0][:, None] - to_the_end[1][None]
    visible = document[0][:, None] == document[1][None]
    if rules.window_left >= 0:
        visible &= distance >= -rules.window_left
    if rules.window_right >= 0:
        visible &= distance <= rules.window_right
    return visible


def _buffer_positions(sharding: Sharding, plan: Plan, step: int) -> torch.Tensor:
    """The position in the whole sequence of each row of a step's buffer."""
    positions = torch.full((plan.steps[step].keys,), -1)
    for s in (*plan.steps[step].own, *plan.steps[step].received):
        positions[s.target_row : s.target_row + s.rows] = _positions(sharding.spans(s.source))[
            s.source_row : s.source_row + s.rows
        ]
    return positions


def _positions(spans: tuple[Span, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(0), *(torch.arange(span.begin, span.end) for span in spans)])


@pytest.mark.parametrize("is_cross", [False, True])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_calls_cover_what_is_visible_once(seed: int, ring: bool, is_cross: bool) -> None:
    _cover_once(*_drawn(seed, is_cross), ring)


# Queries, keys and rules of calls that once computed other pairs.
CAUSAL = Rules(-1, 0, True, False, False, False)
CASES = {
    "a causal triangle of fewer keys than rows after a rectangle": (((0, 300), (0, 450)), CAUSAL, False),
    "documents that a mask takes, cut apart": (((0, 192, 256),) * 2, CAUSAL._replace(has_places=True), True),
}


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_calls_cover_what_is_visible_where_they_did_not(name: str, ring: bool) -> None:
    documents, rules, packed = CASES[name]
    _cover_once(*(Side(Sharding(of[-1], 2), of) for of in documents), rules, packed, ring)


def _cover_once(queries: Side, keys_side: Side, rules: Rules, packed: bool, ring: bool) -> None:
    covered = torch.zeros(queries.sharding.seqlen, keys_side.sharding.seqlen, dtype=torch.int64)
    for rank in range(queries.sharding.ranks):
        plan = plan_of(queries, keys_side, rank, rules, packed, ring)
        rows = _positions(queries.sharding.spans(rank))
        met: set[int] = set()
        for index, step in enumerate(plan.steps):
            keys = _buffer_positions(keys_side.sharding, plan, index)
            assert (keys >= 0).all()
            for part in step.parts:
                row, key = part.rows[0], part.keys[0]
                assert part.keys[0] == part.keys[1] or keys[key] == part.first_key
                _one_range_of_the_mask(part, keys, rules)
                assert all((r in met) != part.is_first for r in range(*part.rows))
                met |= set(range(*part.rows))
                for place in part.places:
                    count = place.last_row - place.row - part.added_rows
                    key_count = place.last_key - place.key - part.added_keys
                    _cover(covered, rows[row : row + count], keys[key : key + key_count], part)
                    row, key = row + count, key + key_count
                assert (row, key) == (part.rows[1], part.keys[1])
        in_documents = torch.tensor([r for r in range(len(rows)) if rows[r] < queries.documents[-1]])
        assert met == set(in_documents.tolist())  # a sink needs a call also for rows that see no key
    assert torch.equal(covered, _visible(queries, keys_side, rules).long())


def _one_range_of_the_mask(part: Part, keys: torch.Tensor, rules: Rules) -> None:
    """A call gets its Mask or bias as the range of the whole's keys from its first key on."""
    if rules.has_places:
        count = part.keys[1] - part.keys[0]
        assert torch.equal(keys[part.keys[0] : part.keys[1]], torch.arange(part.first_key, part.first_key + count))


def _cover(covered: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, part: object) -> None:
    """The pairs that a call of these rows and keys computes, by the rules of flashattn_ext.forward."""
    origin, (left, right) = part.origin, part.window
    Sq, Sk = len(rows), len(keys)
    shift = Sk - Sq
    if origin is not None and len(origin) > 2:
        shift = origin[2] + part.added_rows - origin[3] - part.added_keys + origin[4]
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
    for is_cross in (False, True):
        queries, keys, rules, packed = _drawn(seed, is_cross)
        rules = rules._replace(has_dropout=True)
        for rank in range(queries.sharding.ranks):
            for ring in (False, True):
                for step in plan_of(queries, keys, rank, rules, packed, ring).steps:
                    for part in step.parts:
                        assert part.origin is not None
                        _document, _head, *row_and_key = part.origin
                        assert all(n % of == 0 for n, of in zip(row_and_key, (DRAWN_ROWS, DRAWN_KEYS), strict=False))


@pytest.mark.parametrize("ring", [False, True])
def test_fully_masked_keys_are_not_sent(ring: bool) -> None:
    side = Side(Sharding(1024, 4, "contiguous"), (0, 1024))
    rules = Rules(100, 0, True, False, False, False)
    for rank in range(4):
        steps = plan_of(side, side, rank, rules, False, ring).steps
        assert {(s.source, s.rows) for step in steps for s in step.received} == ({(rank - 1, 100)} if rank else set())
        assert {taker for step in steps for taker, _ in step.sent} == ({rank + 1} if rank < 3 else set())


def test_a_causal_ring_makes_one_call_a_step() -> None:
    side = Side(Sharding(1024, 2), (0, 1024))
    rules = Rules(-1, 0, True, False, False, False)
    for rank in range(2):
        steps = plan_of(side, side, rank, rules, False, True).steps
        assert [len(step.parts) for step in steps] == [1, 1]
        assert steps[0].parts[0].rows == (0, 512) and steps[0].parts[0].causal and steps[0].is_own_part
        assert not steps[1].parts[0].causal


def test_zigzag_is_even_work() -> None:
    sharding = Sharding(4096, 4)
    pairs = [sum((span.begin + span.end + 1) * span.length for span in sharding.spans(rank)) for rank in range(4)]
    assert len(set(pairs)) == 1
