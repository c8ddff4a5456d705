"""covering.py, which decides what the other tests run."""

from __future__ import annotations

import itertools

import covering
import pytest


def pairs_of(cases: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {(a, b, case[a], case[b]) for case in cases for a, b in itertools.combinations(range(len(cases[0])), 2)}


@pytest.mark.parametrize("sizes", [(4, 3), (3, 3, 3, 3), (5, 2, 7, 2)], ids=str)
def test_every_pair_of_values_remains(sizes: tuple[int, ...]) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    cases = [case for case in cases if case[0] != case[1] or len(sizes) == 2]  # some pairs never occur
    chosen = [cases[n] for n in covering.of_pairs(cases, "name")]
    assert pairs_of(chosen) == pairs_of(cases)
    largest, second = sorted(sizes)[-1:-3:-1]
    assert len(chosen) <= largest * second * 1.5
    assert covering.of_pairs(cases, "name") == covering.of_pairs(cases, "name")


def test_one_parameter_keeps_every_value() -> None:
    assert covering.of_pairs([("a",), ("b",), ("a",)], "name") in ([0, 1], [1, 2])


def test_every_three_names_that_fit_occur_in_every_way() -> None:
    names, exclusive = "abcdefgh", {"a", "b"}
    sets = [set(chosen) for chosen in covering.of_triples(names, lambda chosen: not exclusive <= chosen)]
    assert not any(exclusive <= chosen for chosen in sets)
    for triple in itertools.combinations(names, 3):
        for way in itertools.product((False, True), repeat=3):
            present = {name for name, on in zip(triple, way, strict=True) if on}
            found = any(chosen & set(triple) == present for chosen in sets)
            assert found != (exclusive <= present), (triple, way)
