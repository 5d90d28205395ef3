"""The indices of bags, made anew or out of those of the step before: the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference.paging._bags import BagIndices, BagsMemo

pytestmark = pytest.mark.unit
SIZE = 4
KNOWN = (2, 3, 4, None)


def indices(sequences: list[tuple[list[int], int]], memo: BagsMemo | None) -> BagIndices:
    """Return the indices of queries at the last positions of sequences, each (blocks, position)."""
    width = max(at // SIZE + 1 for _, at in sequences)
    table = np.array([(blocks[: at // SIZE + 1] + blocks[:1] * width)[:width] for blocks, at in sequences])
    at = np.array([at for _, at in sequences])
    own = np.array([blocks[at // SIZE] * SIZE + at % SIZE for blocks, at in sequences])
    return BagIndices.of(table, at, np.zeros(len(at), np.int64), own, KNOWN, SIZE, memo)


def seen(found: BagIndices) -> list[list[list[int]]]:
    """Return for each query and head the rows of values that are seen, and check the rest."""
    at, hidden = found.at, found.hidden
    assert (hidden == (found.positions > at[:, None])).all()
    return [
        [row[~hide].tolist() for row in heads] for heads, hide in zip(found.value_rows, hidden, strict=True)
    ]


@settings(max_examples=50)
@given(st.data())
def test_indices_that_go_on_are_those_that_are_made_anew(data: st.DataObject) -> None:
    check_going_on(data)


@pytest.mark.long
@settings(max_examples=300)
@given(st.data())
def test_any_of_many_indices_that_go_on(data: st.DataObject) -> None:
    check_going_on(data)


def check_going_on(data: st.DataObject) -> None:
    memo = BagsMemo()
    fresh_block = iter(range(1000)).__next__
    sequences = [
        ([fresh_block() for _ in range(12)], data.draw(st.integers(0, 20)))
        for _ in range(data.draw(st.integers(1, 5)))
    ]
    for _ in range(12):
        memo.begin_step()
        made, new = indices(sequences, memo), indices(sequences, None)
        assert seen(made) == seen(new)
        for name in ("key_rows", "key_starts", "value_starts", "positions", "table", "at"):
            np.testing.assert_array_equal(getattr(made, name), getattr(new, name))
        # Rows that are not seen are those of keys that are there: their probability is 0, not that of a NaN.
        for query, (blocks, at) in enumerate(sequences):
            own = {blocks[p // SIZE] * SIZE + p % SIZE for p in range(at + 1)}
            assert set((made.value_rows[query] // KNOWN[0]).reshape(-1).tolist()) <= own
        what = data.draw(st.sampled_from(["go on", "go on", "go on", "leave", "join", "again", "skip"]))
        if what == "leave" and len(sequences) > 1:
            sequences.pop(data.draw(st.integers(0, len(sequences) - 1)))
        elif what == "join":
            sequences.append(([fresh_block() for _ in range(12)], data.draw(st.integers(0, 20))))
        elif what == "again":  # preempted, and back in other blocks
            place = data.draw(st.integers(0, len(sequences) - 1))
            sequences[place] = ([fresh_block() for _ in range(12)], sequences[place][1])
        waits = data.draw(st.integers(0, len(sequences) - 1)) if what == "skip" else None
        sequences = [
            (blocks, min(at + (place != waits), 12 * SIZE - 1))
            for place, (blocks, at) in enumerate(sequences)
        ]


def test_what_a_step_uses_is_not_changed_by_the_same_step() -> None:
    memo = BagsMemo()
    memo.begin_step()
    first = indices([([3, 5], 4)], memo)
    before = first.value_rows.copy()
    second = indices([([3, 5], 5)], memo)  # it would go on from the first
    assert second is not first
    np.testing.assert_array_equal(first.value_rows, before)
    memo.begin_step()
    assert indices([([3, 5], 6)], memo) is second
