"""The map of slots against a model of twenty lines, over any sequence of batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.nn.layer.cached_embedding import EvictionStrategy, SlotMap

pytestmark = pytest.mark.unit

NUM_ROWS = 12


class Model:
    """Rows of a cache as a set, and what each strategy knows of them."""

    def __init__(self, strategy: EvictionStrategy, frequencies: list[int]) -> None:
        self.strategy = strategy
        self.rows: set[int] = set()
        self.last: dict[int, int] = {}
        self.counts = dict.fromkeys(range(NUM_ROWS), 0)
        self.order = sorted(range(len(frequencies)), key=lambda row: (-frequencies[row], row))

    def priority(self, row: int) -> tuple[int, int]:
        if self.strategy is EvictionStrategy.LRU:
            return self.last[row], 0
        if self.strategy is EvictionStrategy.LFU or (
            self.strategy is EvictionStrategy.BELADY and not self.order
        ):
            return self.counts[row], self.last[row]
        return -self.order.index(row), 0

    def use(
        self,
        ids: set[int],
        pinned: set[int],
        left: set[int],
        later: list[set[int]],
        *,
        time: int,
        num_slots: int,
    ) -> None:
        """Check the rows that have left: the order of rows of equal priority is free."""

        def key(row: int) -> tuple[int, tuple[int, int]]:
            distance = next((number for number, rows in enumerate(later) if row in rows), len(later))
            return -distance, self.priority(row)

        can_leave = self.rows - ids - pinned
        num_leaving = max(len(self.rows | ids) - num_slots, 0)
        assert left <= can_leave
        assert sorted(map(key, left)) == sorted(map(key, can_leave))[:num_leaving]
        self.rows = self.rows - left | ids
        for row in ids:
            self.last[row] = time
            self.counts[row] += 1


@settings(max_examples=60)
@given(data=st.data(), strategy=st.sampled_from(EvictionStrategy), num_slots=st.integers(1, NUM_ROWS))
def test_rows_in_slots(data: st.DataObject, strategy: EvictionStrategy, num_slots: int) -> None:
    frequencies = data.draw(st.lists(st.integers(0, 5), min_size=NUM_ROWS, max_size=NUM_ROWS))
    if strategy is EvictionStrategy.BELADY and data.draw(st.booleans()):
        frequencies = []
    slots, model = SlotMap(NUM_ROWS, num_slots, strategy=strategy), Model(strategy, frequencies)
    if frequencies:
        slots.order_by(torch.tensor(frequencies))
    content = [-1] * num_slots  # by what enters and leaves alone
    pinned: list[torch.Tensor] = []
    for time in range(1, data.draw(st.integers(1, 8)) + 1):
        ids = torch.tensor(data.draw(st.lists(st.integers(0, NUM_ROWS - 1), max_size=8)), dtype=torch.int64)
        pinned_rows = {int(slots.row_of[slot]) for each in pinned for slot in each}
        if len(set(ids.tolist()) | pinned_rows) > num_slots:
            with pytest.raises(
                RuntimeError, match=f"{len(set(ids.tolist()))} distinct ids .* {num_slots} rows"
            ):
                slots.plan(ids)
            continue
        before = slots.row_of.clone()
        later = data.draw(st.lists(st.sets(st.integers(0, NUM_ROWS - 1)), max_size=3))
        exchange = slots.plan(ids, later=[torch.tensor([*each], dtype=torch.int64) for each in later])
        after = slots.slots_after(exchange, ids)
        assert torch.equal(slots.row_of, before)
        slots.apply(exchange)
        used = slots.slots_of(ids)
        distinct = slots.distinct(used)
        slots.count(distinct)
        left = set(exchange.leaving.tolist())
        assert torch.equal(used, after)
        model.use(set(ids.tolist()), pinned_rows, left, later, time=time, num_slots=num_slots)
        assert sorted(slots.row_of[distinct].tolist()) == sorted(set(ids.tolist()))
        assert [content[slot] for slot in exchange.left_slots] == exchange.leaving.tolist()
        for slot, row in zip(exchange.slots.tolist(), exchange.entering.tolist(), strict=True):
            content[slot] = row
        assert content == slots.row_of.tolist()
        assert [content[slot] for slot in used] == ids.tolist()
        assert {row for row in content if row >= 0} == model.rows
        if data.draw(st.booleans()):
            slots.pin(distinct)
            pinned.append(distinct)
        elif pinned:
            slots.unpin(pinned.pop(0))
    for each in pinned:
        slots.unpin(each)
    assert not slots.num_pins.any()


@pytest.mark.parametrize("fixed", [None, 0, 7])
def test_the_most_frequent_rows_fill_it(fixed: int | None) -> None:
    slots = SlotMap(NUM_ROWS, 5, strategy=EvictionStrategy.LFU, fixed=fixed)
    slots.order_by(torch.tensor([5, 9, 1, 1, 8, 7, 0, 0, 0, 0, 0, 6]))
    slots.apply(slots.plan_filling(4))
    wanted = [row for row in (1, 4, 5, 11, 0) if row != fixed][:4]
    assert sorted(row for row in slots.row_of.tolist() if row not in (-1, fixed)) == sorted(wanted)
    slots.clear()
    assert slots.num_empty == (5 if fixed is None else 4)
    slots.apply(slots.plan(torch.tensor([1, 2, 3, 4])))
    assert slots.num_empty == (1 if fixed is None else 0)


def test_a_window_that_fills_the_cache_leaves_the_order() -> None:
    """Its rows take slots that were not among the coldest."""
    slots = SlotMap(64, 8, strategy=EvictionStrategy.DATASET)

    def use(ids: list[int], later: list[int]) -> list[int]:
        exchange = slots.plan(torch.tensor(ids), later=[torch.tensor(later, dtype=torch.int64)])
        slots.apply(exchange)
        slots.count(slots.distinct(slots.slots_of(torch.tensor(ids))))
        return sorted(exchange.leaving.tolist())

    assert use([*range(8)], []) == []
    assert use([20], []) == [7]
    assert use([*range(21, 26)], [0, 1, 2, 3]) == [3, 4, 5, 6, 20]
    assert use([8], []) == [25]
