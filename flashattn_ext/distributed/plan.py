"""Which keys each rank needs, and which attention calls it makes with them: pure arithmetic, the same on every rank.

The exchanges `allgather` and `ring` leave the queries where they are. A step brings the keys of some ranks into a buffer, and a list of
calls covers every pair of a query and a key there that causal and window allow. `allgather` has one step with the keys of
all ranks, `ring` one step for each rank. Keys that are masked for every query of this rank are not transferred.

Queries and keys are two sequences, which are one in self-attention. Positions are counted in three ways: in the whole sequence, within a
document (a packed call has several, a dense call has one), and as indices into a buffer, which are called rows and keys. Document i of the
queries attends to document i of the keys, and row r there is aligned with key r + shift, where the shift of a document is the
number by which it has more keys than rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ..dropout_padding import DRAWN_KEYS, DRAWN_ROWS
from .communication import Segment
from .sharding import GRANULE, Sharding, Span


class Rules(NamedTuple):
    """The options of a call that decide which keys a query sees, and whether a score depends on its position."""

    window_left: int
    window_right: int  # 0 with causal
    causal: bool
    has_distances: bool  # alibi_slopes or relative_bias: a score depends on the distance of its row and key
    has_places: bool  # bias or mask: a score depends on the positions of its row and key
    has_dropout: bool

    @property
    def is_free(self) -> bool:
        """Whether a visible score does not depend on its position."""
        return not (self.has_distances or self.has_places or self.has_dropout)

    def keys_of(self, first: int, last: int, length: int, shift: int) -> tuple[int, int]:
        """Keys of a document that its rows [first, last) may see; none if the end is not after the beginning.

        With dropout the range begins at a multiple of GRANULE. length: keys of the document.
        """
        begin = 0 if self.window_left < 0 else max(0, first + shift - self.window_left)
        end = length if self.window_right < 0 else min(length, last + shift + self.window_right)
        return (begin // GRANULE * GRANULE if self.has_dropout and begin < end else begin), end


class Side(NamedTuple):
    """The queries or the keys of the whole call: how they are split, and where their documents are."""

    sharding: Sharding
    documents: tuple[int, ...]  # the start of each in the whole sequence, then the end of the last

    def length(self, document: int) -> int:
        return self.documents[document + 1] - self.documents[document]

    def lengths(self) -> list[int]:
        return [self.length(document) for document in range(len(self.documents) - 1)]

    def documents_in(self, begin: int, end: int) -> Iterator[int]:
        """The documents that have a position in [begin, end)."""
        for index, (first, last) in enumerate(pairwise(self.documents)):
            if max(first, begin) < min(last, end):
                yield index


class Place(NamedTuple):
    """Rows and keys of one document: their positions within it."""

    document: int
    row: int
    last_row: int  # exclusive, like every end in this file
    key: int
    last_key: int


@dataclass(frozen=True)
class Part:
    """One attention call: rows of the local queries against keys of a step's buffer.

    `places` has one entry, or in a call of packed sequences one for each document; the documents are contiguous in both buffers.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    first_key: int  # position of the first key in the whole sequence
    causal: bool
    window: tuple[int, int]
    origin: tuple[int, ...] | None
    is_first: bool  # whether this is the first call for these rows; that call includes the sink
    places: tuple[Place, ...]
    # Padding rows in front of `rows` and fully masked keys in front of `keys`, so that the origin of the call is one that the
    # dropout generator of the GPU kernels accepts.
    added_rows: int = 0
    added_keys: int = 0


@dataclass(frozen=True)
class Step:
    """Keys that arrive together."""

    keys: int  # rows of the buffer
    own: tuple[Segment, ...]  # rows that this rank copies from its own part
    received: tuple[Segment, ...]
    sent: tuple[tuple[int, Segment], ...]  # (destination rank, rows)
    parts: tuple[Part, ...]
    is_own_part: bool  # the buffer is this rank's own part, used without a copy


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]
    merges: bool  # whether the keys of some row are spread over more than one call


@lru_cache(maxsize=256)
def plan_of(queries: Side, keys: Side, rank: int, rules: Rules, is_packed: bool, ring: bool) -> Plan:
    """The steps of a rank. Both sides have as many documents and ranks."""
    return _Planner(queries, keys, rank, rules, is_packed).plan(ring)


class _Planner:
    def __init__(self, queries: Side, keys: Side, rank: int, rules: Rules, is_packed: bool) -> None:
        self.queries = queries
        self.keys = keys
        self.rank = rank
        self.rules = rules
        self.is_packed = is_packed

    def plan(self, ring: bool) -> Plan:
        ranks = self.queries.sharding.ranks
        # Step t brings the keys of rank - t, so that at every step each rank sends to one rank and receives from one.
        groups = [[(self.rank - t) % ranks] for t in range(ranks)] if ring else [list(range(ranks))]
        met: set[int] = set()
        merges = False
        steps = []
        for t, sources in enumerate(groups):
            spans, segments = self._buffer(self.rank, sources)
            takers = [(self.rank + t) % ranks] if ring else [r for r in range(ranks) if r != self.rank]
            sent = [
                (taker, segment)
                for taker in takers
                if taker != self.rank
                for segment in self._buffer(taker, [self.rank] if ring else list(range(ranks)))[1]
                if segment.source == self.rank
            ]
            rows = self.queries.sharding.spans(self.rank)
            pieces = [piece for span in rows for piece in self._pieces(span, spans, met)]
            merges = merges or any(not piece.is_first for piece in pieces)
            own = tuple(s for s in segments if s.source == self.rank)
            received = tuple(s for s in segments if s.source != self.rank)
            keys = sum(span.length for span in spans)
            whole = not received and keys == self.keys.sharding.length(self.rank)
            steps.append(Step(keys, own, received, tuple(sent), tuple(self._joined(pieces)), whole))
        return Plan(tuple(steps), merges)

    # --- keys -----------------------------------------------------------------------------------------------------------

    def _rows_and_keys(self, span: Span) -> Iterator[Place]:
        """The rows of a span of queries in each of its documents, and the keys that these may see; there may be none."""
        for document in self.queries.documents_in(span.begin, span.end):
            first, length = self.queries.documents[document], self.keys.length(document)
            row, last_row = max(0, span.begin - first), min(self.queries.length(document), span.end - first)
            shift = length - self.queries.length(document)
            yield Place(document, row, last_row, *self.rules.keys_of(row, last_row, length, shift))

    def _wanted(self, rank: int) -> list[tuple[int, int]]:
        """Positions of the keys that the queries of a rank may see, as disjoint ranges with gaps between them."""
        ranges = []
        for span in self.queries.sharding.spans(rank):
            for place in self._rows_and_keys(span):
                first = self.keys.documents[place.document]
                if place.key < place.last_key:
                    ranges.append((first + place.key, first + place.last_key))
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(ranges):
            if joined and begin <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((begin, end))
        return joined

    def _buffer(self, rank: int, sources: Sequence[int]) -> tuple[list[Span], list[Segment]]:
        """What `rank` receives from the ranks `sources`: the spans of its buffer, and the segments that fill it."""
        found = [
            (max(begin, span.begin), min(end, span.end), source, span)
            for begin, end in self._wanted(rank)
            for source in sources
            for span in self.keys.sharding.spans(source)
            if max(begin, span.begin) < min(end, span.end)
        ]
        spans: list[Span] = []
        segments, at = [], 0
        for begin, end, source, span in sorted(found):
            segments.append(Segment(source, span.at + begin - span.begin, at, end - begin))
            if spans and spans[-1].end == begin:
                spans[-1] = spans[-1]._replace(end=end)
            else:
                spans.append(Span(begin, end, at))
            at += end - begin
        return spans, segments

    # --- calls ----------------------------------------------------------------------------------------------------------

    def _pieces(self, rows: Span, buffer: list[Span], met: set[int]) -> list[Part]:
        """One call for each document in a span of queries and each span of keys; `met` holds the first rows of earlier calls.

        Rows that see no key at all have one call without keys, because a sink is all that they see.
        """
        pieces: list[Part] = []
        for seen in self._rows_and_keys(rows):
            first = self.keys.documents[seen.document]
            at = rows.at + self.queries.documents[seen.document] + seen.row - rows.begin
            if seen.key >= seen.last_key and at not in met:
                pieces.append(self._piece(seen._replace(key=0, last_key=0), at, 0, first, True))
                met.add(at)
            of_document: list[Part] = []
            for span in buffer:
                key, last_key = max(seen.key, span.begin - first), min(seen.last_key, span.end - first)
                if key >= last_key:
                    continue
                place = seen._replace(key=key, last_key=last_key)
                keys_at = span.at + first + key - span.begin
                piece = self._piece(place, at, keys_at, first + key, at not in met)
                met.add(at)
                if of_document and (joined := self._joined_keys(of_document[-1], piece)):
                    of_document[-1] = joined
                else:
                    of_document.append(piece)
            pieces += of_document
        return pieces

    def _piece(self, place: Place, at: int, keys_at: int, first_key: int, is_first: bool) -> Part:
        rules = self.rules
        document, row, last_row, key, last_key = place
        shift = self.keys.length(document) - self.queries.length(document)
        is_aligned = last_row + shift == last_key
        sees_left = rules.window_left < 0 or key >= last_row - 1 + shift - rules.window_left
        sees_right = rules.window_right < 0 or last_key - 1 <= row + shift + rules.window_right
        # Whole packed documents keep the window of the options, so that one call can take several of them. All other pieces get
        # the simplest equivalent window.
        causal = rules.causal and (is_aligned or not sees_right)
        window = (-1 if sees_left else rules.window_left, -1 if rules.causal or sees_right else rules.window_right)
        if self.is_packed and is_aligned:
            window = rules.window_left, -1 if rules.causal else rules.window_right
        is_anywhere = not causal and window == (-1, -1) and not rules.has_distances
        origin: tuple[int, ...] | None = (document, 0, row, key, shift)
        if is_aligned or is_anywhere:  # the default alignment, last row with last key, is right
            if row == 0 and key == 0:
                origin = (document, 0) if rules.has_dropout else None
            elif not (rules.has_dropout or rules.has_places):
                origin = None
        added_rows = added_keys = 0
        if rules.has_dropout and origin is not None and len(origin) > 2:
            added_rows, added_keys = row % DRAWN_ROWS, key % DRAWN_KEYS
            origin = (document, 0, row - added_rows, key - added_keys, shift)
            place = place._replace(row=row - added_rows, key=key - added_keys)
        return Part(
            (at, at + last_row - row), (keys_at, keys_at + last_key - key), first_key, causal, window, origin, is_first,
            (place,), added_rows, added_keys,
        )  # fmt: skip

    def _joined_keys(self, a: Part, b: Part) -> Part | None:
        """One call for the same rows and the keys of both, or None where that would change the result."""
        simple = self.rules.is_free and a.origin is None and b.origin is None and a.window == b.window == (-1, -1)
        if not simple or a.causal or a.keys[1] != b.keys[0]:
            return None
        if b.causal and b.keys[1] - b.keys[0] < b.rows[1] - b.rows[0] - 1:  # the first row would see fewer keys of a
            return None
        return _larger(b, b.rows, (a.keys[0], b.keys[1]), a.first_key, a.is_first)

    def _joined(self, pieces: list[Part]) -> Iterator[Part]:
        """Merges pieces, in the order of their rows, into fewer equivalent calls."""
        join = self._joined_documents if self.is_packed else self._joined_rows
        before: Part | None = None
        counts: dict[int, int] = {}
        for piece in pieces:
            counts[piece.rows[0]] = counts.get(piece.rows[0], 0) + 1
        for piece in pieces:
            alone = counts[piece.rows[0]] == 1 or self.is_packed
            joined = join(before, piece) if before is not None and alone else None
            if joined is None and before is not None:
                yield before
            before = joined or piece
            if not alone:
                yield piece
                before = None
        if before is not None:
            yield before

    def _joined_rows(self, a: Part, b: Part) -> Part | None:
        simple = self.rules.is_free and a.origin is None and b.origin is None and a.window == b.window == (-1, -1)
        if not simple or a.rows[1] != b.rows[0] or a.is_first != b.is_first or a.causal != b.causal:
            return None
        # A causal triangle continues in b's keys; a rectangle has the same keys.
        added_keys = b.rows[1] - b.rows[0] if a.causal else 0
        if a.keys[0] != b.keys[0] or b.keys[1] - a.keys[1] != added_keys:
            return None
        return _larger(b, (a.rows[0], b.rows[1]), b.keys, a.first_key, a.is_first)

    def _joined_documents(self, a: Part, b: Part) -> Part | None:
        """One call of packed sequences for consecutive documents, or None where that would change the result."""
        follows = a.rows[1] == b.rows[0] and a.keys[1] == b.keys[0]
        alike = (a.causal, a.window, a.is_first) == (b.causal, b.window, b.is_first)
        if not follows or not alike or b.places[0].document != a.places[-1].document + 1:
            return None
        # A Mask is given to a call as one range of the whole's keys, which keys on both sides of a gap are not.
        if self.rules.has_places and b.first_key != a.first_key + a.keys[1] - a.keys[0]:
            return None
        both_free = a.origin is None and b.origin is None
        both_drop = a.origin is not None and b.origin is not None and len(a.origin) == len(b.origin) == 2
        if not (both_free or both_drop):
            return None
        return replace(a, rows=(a.rows[0], b.rows[1]), keys=(a.keys[0], b.keys[1]), places=a.places + b.places)


def _larger(part: Part, rows: tuple[int, int], keys: tuple[int, int], first_key: int, is_first: bool) -> Part:
    """`part`, a call of one document, with more rows or keys; its scores do not depend on positions, which are numbered from 0."""
    place = Place(part.places[0].document, 0, rows[1] - rows[0], 0, keys[1] - keys[0])
    return replace(part, rows=rows, keys=keys, first_key=first_key, is_first=is_first, places=(place,))
