"""Covering arrays: few cases in which every combination of values of any two (or three) parameters still occurs.

Most faults show in one value, or in two that meet (Kuhn, Wallace and Gallo 2004, "Software fault interactions and implications for
software testing"). All cases run under `pytest --exhaustive`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import zlib
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


def of_pairs(cases: Sequence[Sequence[Hashable]], name: str) -> list[int]:
    """The indices, in ascending order, of cases that hold every pair of values that occurs in `cases`.

    Args:
        cases: the values of each case, one for each parameter.
        name: of what the cases are; with their number it decides which of equal choices is taken.

    Source: the greedy set cover; a gain is counted again only when its case comes up (Minoux 1978, "Accelerated greedy algorithms").
    """
    pairs = [
        {(a, b, case[a], case[b]) for a, b in itertools.combinations(range(len(case)), 2)} or {tuple(case)}
        for case in cases
    ]
    missing = set().union(*pairs)
    order = [zlib.crc32(f"{name} {n}".encode()) for n in range(len(cases))]
    heap = [(-len(of_case), order[n], n) for n, of_case in enumerate(pairs)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        _, tie, n = heapq.heappop(heap)
        gain = len(pairs[n] & missing)
        if heap and -gain > heap[0][0]:
            heapq.heappush(heap, (-gain, tie, n))
        elif gain:
            chosen.append(n)
            missing -= pairs[n]
    return sorted(chosen)


def of_triples(names: Sequence[str], fit: Callable[[set[str]], bool], share: float = 0.4) -> list[tuple[str, ...]]:
    """Sets of names in which every three names that fit together are present or absent in each way that fits.

    Args:
        names: what may be present.
        fit: whether a set of names may be present together; a subset of a set that fits has to fit.
        share: of names in a set that is tried.

    Source: the greedy choice among random candidates of AETG (Cohen, Dalal, Fredman and Patton 1997).
    """
    draw = random.Random(0)
    triples = list(itertools.combinations(range(len(names)), 3))
    ways = [[way >> place & 1 for place in range(3)] for way in range(8)]

    def present(triple: Sequence[int], way: Sequence[int]) -> set[int]:
        return {i for i, on in zip(triple, way, strict=True) if on}

    def named(chosen: set[int]) -> set[str]:
        return {names[i] for i in chosen}

    # [triple, way]: whether no set so far has the names of the triple in this way.
    missing = torch.tensor([[fit(named(present(triple, way))) for way in ways] for triple in triples])
    places, rows, sets = torch.tensor(triples), torch.arange(len(triples)), []

    def ways_of(chosen: set[int]) -> Tensor:
        is_chosen = torch.tensor([i in chosen for i in range(len(names))])
        return (is_chosen[places] * torch.tensor([1, 2, 4])).sum(1)

    while missing.any():
        left = missing.nonzero().tolist()
        best: set[int] = set()
        best_gain = 0
        for _ in range(40):
            # Each candidate begins with a combination that is missing, so that every step covers at least one.
            triple, way = left[draw.randrange(len(left))]
            chosen = present(triples[triple], ways[way])
            others = [i for i in range(len(names)) if i not in triples[triple]]
            draw.shuffle(others)
            for i in others:
                if draw.random() < share and fit(named(chosen | {i})):
                    chosen.add(i)
            gain = int(missing[rows, ways_of(chosen)].sum())
            if gain > best_gain:
                best, best_gain = chosen, gain
        missing[rows, ways_of(best)] = False
        sets.append(tuple(names[i] for i in sorted(best)))
    return sets
