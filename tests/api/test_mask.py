"""flashattn_ext.Mask: every constructor against the dense matrix that follows from its description."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from flashattn_ext import Mask, ops


def positions(Sq: int, Sk: int) -> tuple[Tensor, Tensor]:
    """Position of every query [Sq, 1] and key [1, Sk], aligned at the bottom right."""
    return torch.arange(Sq)[:, None] + Sk - Sq, torch.arange(Sk)[None]


def test_documents_are_runs_of_equal_ids() -> None:
    ids = torch.tensor([[3, 3, 1, 1, 1, 3], [0, 1, 2, 2, 2, 2]])
    run = torch.cat([torch.zeros(2, 1, dtype=torch.long), (ids[:, 1:] != ids[:, :-1]).cumsum(1)], 1)
    expected = run[:, :, None] == run[:, None, :]
    assert torch.equal(Mask.documents(ids).dense(6)[:, 0], expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_by_lengths_hides_keys_from_all_rows(side: str) -> None:
    lengths = torch.tensor([0, 2, 5])
    seen = torch.arange(5) < lengths[:, None]
    seen = seen if side == "right" else seen.flip(1)
    assert torch.equal(Mask.padding(lengths, side, 5).dense(4)[:, 0], seen[:, None].expand(3, 4, 5))
    assert torch.equal(
        Mask.padding(lengths, side).intervals, Mask.padding(lengths, side, 5).intervals
    )  # the longest length


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_by_an_attention_mask_hides_its_zeros(dtype: torch.dtype) -> None:
    seen = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    assert torch.equal(Mask.padding(seen.to(dtype)).dense(3)[:, 0], seen.bool()[:, None].expand(2, 3, 5))


def test_a_padding_mask_of_one_dimension_is_a_mask_of_all_rows() -> None:
    """Bools are not lengths."""
    seen = torch.tensor([True, False, True, True, False])
    mask = Mask.padding(seen)
    assert mask.intervals.shape == (1, 1, 5, 2)
    assert torch.equal(mask.dense(3)[0, 0], seen.expand(3, 5))
    assert torch.equal(Mask.padding(seen[None], Sk=5).intervals, mask.intervals)
    assert Mask.padding(torch.ones(2, 0).bool()).intervals.shape == (2, 1, 0, 2)


@pytest.mark.parametrize("Sq,Sk", [(5, 5), (3, 6), (6, 3)])
def test_a_prefix_is_seen_by_all_and_the_rest_causally(Sq: int, Sk: int) -> None:
    lengths = torch.tensor([0, 2, 7])
    row, key = positions(Sq, Sk)
    expected = (key < lengths[:, None, None]) | (key <= row)
    assert torch.equal(Mask.prefix_lm(lengths, Sq, Sk).dense(Sq)[:, 0], expected)


@pytest.mark.parametrize("Sq,Sk", [(9, 9), (4, 9), (9, 4)])
@pytest.mark.parametrize("size", [1, 3, 20])
def test_chunks_see_themselves(size: int, Sq: int, Sk: int) -> None:
    row, key = positions(Sq, Sk)
    expected = torch.div(row, size, rounding_mode="floor") == key // size
    assert torch.equal(Mask.chunked(size, Sq, Sk).dense(Sq)[0, 0], expected)


def test_blocks_see_each_other_over_causal_text() -> None:
    ids = torch.tensor([[-1, 0, 0, -1, 1, 1, 2, -1]])
    row, key = positions(8, 8)
    same = (ids[0, :, None] == ids[0, None]) & (ids[0] >= 0)
    assert torch.equal(Mask.blocks(ids).dense(8)[0, 0], same | (key <= row))


@pytest.mark.parametrize("left,right", [(-1, 0), (2, 1), (0, -1), (-1, -1), (0, 0)])
@pytest.mark.parametrize("global_keys", [0, 2])
def test_a_window_with_keys_that_all_rows_see(left: int, right: int, global_keys: int) -> None:
    for Sq, Sk in ((7, 7), (3, 8), (8, 3)):
        row, key = positions(Sq, Sk)
        expected = torch.ones(Sq, Sk, dtype=torch.bool)
        if left >= 0:
            expected &= key >= row - left
        if right >= 0:
            expected &= key <= row + right
        expected |= key < global_keys
        assert torch.equal(Mask.window(left, right, Sq, Sk, global_keys).dense(Sq)[0, 0], expected)


LARGE = [2**31 - 1, 2**31, 2**62, sys.maxsize - 1, sys.maxsize]


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("Sq,Sk", [(4, 4), (4, 9), (9, 4)])
def test_sizes_beyond_every_row_are_unbounded(large: int, Sq: int, Sk: int) -> None:
    for sides, unbounded in (
        ((large, 0), (-1, 0)),
        ((0, large), (0, -1)),
        ((large, large), (-1, -1)),
        ((2, large), (2, -1)),
    ):
        got, expected = (Mask.window(*pair, Sq, Sk).dense(Sq) for pair in (sides, unbounded))
        assert torch.equal(got, expected), sides
    assert Mask.window(0, 0, Sq, Sk, global_keys=large).dense(Sq).all()
    assert Mask.chunked(large, Sq, Sk).dense(Sq).equal(Mask.chunked(99, Sq, Sk).dense(Sq))
    lengths = torch.tensor([large, -large, 2])
    for side in ("right", "left"):
        few = torch.tensor([Sk, 0, 2])
        assert Mask.padding(lengths, side, Sk=Sk).dense(Sq).equal(Mask.padding(few, side, Sk=Sk).dense(Sq))
    prefix = Mask.prefix_lm(torch.tensor([large, -large]), Sq, Sk)
    assert prefix.dense(Sq).equal(Mask.prefix_lm(torch.tensor([99, 0]), Sq, Sk).dense(Sq))


def test_nodes_of_a_tree_see_themselves_and_their_ancestors() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        path, parents = [], []
        for node in range(17):
            keep = int(torch.randint(len(path) + 1, (), generator=generator))
            path = path[:keep]
            parents.append(path[-1] if path else -1)
            path.append(node)
        expected = torch.eye(17, dtype=torch.bool)
        for node in range(17):
            if parents[node] >= 0:
                expected[node] |= expected[parents[node]]
        assert torch.equal(Mask.tree(torch.tensor(parents)).dense(17)[0, 0], expected)


@pytest.mark.parametrize("nodes", [1, 2, 3, 64, 100, 129])
def test_a_tree_that_is_one_chain_is_causal(nodes: int) -> None:
    """The search for the end of a subtree has to reach every depth."""
    assert torch.equal(
        Mask.tree(torch.arange(nodes) - 1).dense(nodes)[0, 0], torch.ones(nodes, nodes, dtype=torch.bool).tril()
    )


@pytest.mark.parametrize("parents", [[1, -1], [-1, 0, 0, 1], [-1, -1, 0], [-1, 2, 1], [-2, 0]])
def test_a_tree_that_is_not_in_depth_first_order_is_rejected(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents: expected nodes in depth-first order"):
        Mask.tree(torch.tensor(parents))


@pytest.mark.parametrize("causal,n", [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_flashmask_hides_what_its_columns_say(causal: bool, n: int) -> None:
    """Random columns: columns that are one interval agree with the dense mask; the error names the first other column."""
    generator = torch.Generator().manual_seed(n)
    S, accepted = 6, 0
    row, key = positions(S, S)
    for _ in range(300):
        hidden = torch.randint(0, S + 1, (1, 2, S, n), generator=generator, dtype=torch.int32)
        if n == 4:  # the lower range below the upper one, as the representation has it
            hidden = hidden.sort(-1).values[..., [2, 3, 0, 1]]
            if torch.rand((), generator=generator) < 0.5:  # ranges that end at the edges leave one interval
                hidden[..., 1], hidden[..., 2] = S, 0
        column = hidden[0].unbind(-1)
        if causal:
            visible = ~((row >= column[0][:, None]) & (row < (column[1][:, None] if n == 2 else S))) & (key <= row)
        elif n == 2:
            visible = ~((row >= column[0][:, None]) | (row < column[1][:, None]))
        else:
            lower = (row >= column[0][:, None]) & (row < column[1][:, None])
            upper = (row >= column[2][:, None]) & (row < column[3][:, None])
            visible = ~(lower | upper)
        count = visible.sum(1)
        first = torch.where(visible, row, S).amin(1)
        last = torch.where(visible, row + 1, 0).amax(1)
        split = (count > 0) & (last - first != count)
        if split.any():
            head, at = split.nonzero()[0].tolist()
            with pytest.raises(ValueError, match=f"key {at} of batch entry 0, head {head} are not a single interval"):
                Mask.from_flashmask(hidden, causal)
            continue
        accepted += 1
        found = Mask.from_flashmask(hidden, causal).dense(S)[0]
        assert torch.equal(found & (key <= row) if causal else found, visible)
    assert accepted


def test_dense_masks_of_intervals_come_back() -> None:
    intervals = torch.tensor([[[[0, 4], [2, 2], [3, 1], [1, 3], [-5, 99]]]], dtype=torch.int32)
    dense = Mask(intervals).dense(4)
    assert dense[0, 0].T.tolist() == [[True] * 4, [False] * 4, [False] * 4, [False, True, True, False], [True] * 4]
    assert torch.equal(Mask.from_dense(dense).dense(4), dense)


def test_a_dense_mask_with_a_gap_is_rejected_with_its_key() -> None:
    visible = torch.ones(2, 3, 5, 4, dtype=torch.bool)
    visible[1, 2, 1, 3] = False
    with pytest.raises(ValueError, match="key 3 of batch entry 1, head 2 are not a single interval"):
        Mask.from_dense(visible)


def test_and_shows_what_both_show() -> None:
    a = Mask.documents(torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]))
    b = Mask(torch.randint(0, 5, (1, 4, 4, 2), dtype=torch.int32))
    c = Mask(torch.randint(0, 5, (2, 2, 4, 2), dtype=torch.int32))
    assert torch.equal((a & b).dense(4), a.dense(4) & b.dense(4))
    assert torch.equal((c & b).dense(4), c.dense(4).repeat_interleave(2, 1) & b.dense(4))


def test_density_is_the_visible_share() -> None:
    mask = Mask(torch.randint(-3, 9, (2, 3, 7, 2), dtype=torch.int32))
    torch.testing.assert_close(mask.density(6), mask.dense(6).double().mean())


@pytest.mark.parametrize("shape", [(1, 1, 0, 2), (0, 1, 4, 2), (2, 0, 2)])
def test_density_without_pairs_is_zero(shape: tuple[int, ...]) -> None:
    assert Mask(torch.zeros(shape, dtype=torch.int32)).density(4) == 0
    assert Mask.chunked(3, 4, 4).density(0) == 0


def test_a_mask_travels_as_a_tree_of_its_tensor() -> None:
    mask = Mask.chunked(2, 4, 4)
    leaves, spec = _pytree.tree_flatten({"mask": mask})
    assert leaves[0] is mask.intervals
    assert torch.equal(_pytree.tree_unflatten(leaves, spec)["mask"].dense(4), mask.dense(4))


def test_a_picture_in_the_terminal() -> None:
    assert Mask.documents(torch.tensor([[0, 0, 1, 1]])).show(4) == "##..\n..##"
    assert Mask.documents(torch.tensor([[0, 0, 1, 1]])).show() == "##..\n..##"
    assert Mask.chunked(2, 8, 8).show(8, columns=4) == "++..\n..++"
    assert Mask.chunked(3, 4, 4).show(4, columns=2) == "++"


def test_a_picture_as_a_figure() -> None:
    figure = Mask.chunked(3, 5, 7).show(5, figure=True)
    (drawn,) = figure.axes[0].images
    assert torch.equal(torch.from_numpy(drawn.get_array().data).bool(), Mask.chunked(3, 5, 7).dense(5)[0, 0])


@pytest.mark.parametrize(
    "make,error,words",
    [
        (lambda: Mask([[0, 1]]), TypeError, "intervals: expected a torch.Tensor, got list"),
        (lambda: Mask(torch.zeros(1, 1, 4, 2)), TypeError, "intervals: expected dtype int32, got torch.float32"),
        (lambda: Mask(torch.zeros(1, 4, 3, dtype=torch.int32)), ValueError, "intervals: expected shape"),
        (
            lambda: Mask.documents(torch.zeros(4, dtype=torch.long)),
            ValueError,
            r"ids: expected shape \[batch, seqlen\]",
        ),
        (lambda: Mask.documents(torch.zeros(1, 4)), TypeError, "ids: expected an integer or bool dtype"),
        (lambda: Mask.padding(torch.tensor([2], device="meta")), ValueError, "Sk: expected the number of keys"),
        (lambda: Mask.padding(torch.tensor([2]), "middle", 4), ValueError, "side: expected 'right' or 'left'"),
        (
            lambda: Mask.padding(torch.ones(2, 4).bool(), "left"),
            ValueError,
            r"side: expected None .*\[2, 4\].*got 'left'",
        ),
        (lambda: Mask.padding(torch.ones(2, 4).long(), Sk=6), ValueError, "Sk: expected None or the 4 keys .*got 6"),
        (lambda: Mask.padding(torch.ones(4).bool(), Sk=6), ValueError, "Sk: expected None or the 4 keys .*got 6"),
        (
            lambda: Mask.prefix_lm(torch.ones(4).bool(), 4, 4),
            TypeError,
            "prefix_lengths: expected an integer dtype, got torch.bool",
        ),
        (lambda: Mask.tree(torch.ones(4).bool()), TypeError, "parents: expected an integer dtype, got torch.bool"),
        (lambda: Mask.blocks(torch.ones(1, 4).bool()), TypeError, "ids: expected an integer dtype, got torch.bool"),
        (lambda: Mask.chunked(0, 4, 4), ValueError, "size: expected at least 1, got 0"),
        (lambda: Mask.window(-2, 0, 4, 4), ValueError, r"left: expected at least -1 \(unbounded\), got -2"),
        (lambda: Mask.window(1, 0, 4, 4, global_keys=-1), ValueError, "global_keys: expected at least 0, got -1"),
        (lambda: Mask.chunked(2.5, 4, 4), TypeError, "size: expected an int, got float 2.5"),
        (lambda: Mask.prefix_lm(torch.tensor([1]), 4, -4), ValueError, "Sk: expected at least 0, got -4"),
        (lambda: Mask.chunked(2, 4, 4) & 3, TypeError, "unsupported operand"),
        (
            lambda: Mask(torch.zeros(2, 1, 4, 2).int()) & Mask(torch.zeros(3, 1, 4, 2).int()),
            ValueError,
            "cannot combine intervals",
        ),
        (lambda: Mask.chunked(2, 4, 4) & Mask.chunked(2, 4, 5), ValueError, "cannot combine intervals"),
        (lambda: Mask.from_dense(torch.ones(1, 1, 2, 2)), TypeError, "visible: expected dtype bool"),
        (lambda: Mask.from_dense([[True]]), TypeError, "visible: expected a torch.Tensor, got list"),
        (
            lambda: Mask.from_flashmask([[1]], True),
            TypeError,
            "startend_row_indices: expected a torch.Tensor, got list",
        ),
        (
            lambda: Mask.from_flashmask(torch.zeros(1, 1, 4, 1).int(), "no"),
            TypeError,
            "causal: expected True or False, got str 'no'",
        ),
        (lambda: Mask.chunked(2, 4, 4).show(columns=0), ValueError, "columns: expected at least 1, got 0"),
        (lambda: Mask.chunked(2, 4, 4).show(head=2), ValueError, "head: expected an index from -1 to 0 .*got 2"),
        (lambda: Mask.chunked(2, 4, 4).show(batch=2), ValueError, "batch: expected an index from -1 to 0 .*got 2"),
        (lambda: Mask.chunked(2, 4, 4).dense(-1), ValueError, "Sq: expected at least 0, got -1"),
        (lambda: Mask.chunked(2, 4, 4).density(-1), ValueError, "Sq: expected at least 0, got -1"),
        (
            lambda: Mask.from_flashmask(torch.zeros(1, 1, 4, 1, dtype=torch.int32), False),
            ValueError,
            "2 or 4",
        ),
    ],
)
def test_wrong_arguments_are_named(make, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def extremes_of(pairs: list[list[int]]) -> list[int]:
    """any_first, any_last, all_first, all_last of some keys: csrc/rules/mask.h."""
    largest = 2**31 - 1
    rows = [(max(first, 0), max(last, 0)) for first, last in pairs]
    rows = [(first, last) if first < last else (largest, 0) for first, last in rows]
    firsts, lasts = zip(*rows, strict=True)
    return [min(firsts), max(lasts), max(firsts), min(lasts)]


@pytest.mark.parametrize("Sk", [0, 1, 15, 16, 17, 1023, 1024, 1025, 2500])
def test_extremes_are_those_of_16_and_of_1024_keys(device: str, Sk: int) -> None:
    intervals = torch.randint(-10, Sk + 10, (2, 3, Sk, 2), dtype=torch.int32)
    intervals[0, 0, :1] = torch.tensor([-(2**31), 2**31 - 1])
    intervals[0, 1, :1] = torch.tensor([2**31 - 1, -(2**31)])
    intervals[:, 2, :20] = 0
    got = Mask(intervals.to(device)).extremes()
    assert got.dtype == torch.int32 and got.is_contiguous()
    for head, found in zip(intervals.flatten(0, 1).tolist(), got.flatten(0, 1).tolist(), strict=True):
        assert found == [extremes_of(head[at : at + size]) for size in (16, 1024) for at in range(0, Sk, size)]


def test_extremes_are_made_once_until_intervals_are_written_to(device: str) -> None:
    mask = Mask.chunked(4, 40, 40, device=device)
    first = mask.extremes()
    assert mask.extremes() is first
    new = Mask.chunked(7, 40, 40, device=device)
    mask.intervals.copy_(new.intervals)
    assert torch.equal(mask.extremes(), new.extremes()) and mask.extremes() is not first


def test_extremes_of_tensors_that_do_not_tell_when_they_change() -> None:
    with torch.inference_mode():
        mask = Mask.chunked(4, 40, 40)
        mask.extremes()
        new = Mask.chunked(7, 40, 40)
        mask.intervals.copy_(new.intervals)
        assert torch.equal(mask.extremes(), new.extremes())


def test_a_graph_that_is_captured_computes_its_own_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay computes extremes from the intervals at that time; extremes computed outside must not be captured."""
    place = [(1, 0)]
    monkeypatch.setattr(ops, "place_of_work", lambda device: place[0])
    mask = Mask.chunked(4, 40, 40)
    outside = mask.extremes()
    place[0] = (1, 5)
    captured = mask.extremes()
    assert captured is not outside and mask.extremes() is captured
    place[0] = (1, 6)
    assert mask.extremes() is not captured
    place[0] = (1, 0)
    after = mask.extremes()
    place[0] = (2, 0)  # another stream does not wait for the first one
    assert mask.extremes() is not after


def saved_and_loaded(mask: Mask) -> Mask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_and_loaded]
)
def test_a_copy_has_no_extremes_of_the_original(copied: Callable[[Mask], Mask]) -> None:
    """A copy's intervals count versions from 0 again, so that copied extremes would look up to date."""
    mask = Mask.chunked(4, 40, 40)
    mask.intervals.add_(0)  # version 1, which the copy reaches as well
    mask.extremes()
    other = copied(mask)
    new = Mask.chunked(7, 40, 40)
    other.intervals.copy_(new.intervals)
    assert torch.equal(other.extremes(), new.extremes())
    if copied is not copy.copy:  # a shallow copy shares the intervals
        assert torch.equal(mask.extremes(), Mask.chunked(4, 40, 40).extremes())


def test_a_mask_can_be_copied_and_saved() -> None:
    mask = Mask.chunked(4, 40, 40)
    mask.extremes()
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):
        assert torch.equal(other.intervals, mask.intervals) and torch.equal(other.extremes(), mask.extremes())
    assert mask.to("meta").device.type == "meta"
