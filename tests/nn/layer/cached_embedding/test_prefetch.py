"""Rows of the next batches come before their lookup, and results do not depend on it."""

import copy
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from colossalai.nn.layer.cached_embedding import CachedEmbedding, CachedEmbeddingBag, EvictionStrategy
from tests.nn.layer.cached_embedding.tables import (
    DIM,
    NUM_ROWS,
    OPTIMIZERS,
    backward,
    batches,
    check_equal,
    make_pair,
    train,
    weights_of,
)

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


def histories(bag: CachedEmbeddingBag) -> tuple[list[int], list[int], list[int]]:
    return bag.num_hits_history, bag.num_miss_history, bag.num_write_back_history


def distinct(number: int, first: int = 0) -> Tensor:
    """One bag of so many ids."""
    return torch.arange(first, first + number)[None]


def _num_moved_at_best(all_rows: list[set[int]], cached: set[int], num_slots: int) -> int:
    """Return how many rows enter if those of the furthest next use leave."""
    number = 0
    for step, rows in enumerate(all_rows):

        def next_use(row: int, begin: int = step + 1) -> int:
            return next(
                (later for later in range(begin, len(all_rows)) if row in all_rows[later]), len(all_rows)
            )

        number += len(rows - cached)
        others = sorted(cached - rows, key=next_use)
        cached = rows | {*others[: num_slots - len(rows)]}
    return number


def test_all_batches_known_move_as_few_rows_as_possible() -> None:
    _, bag = make_pair(0.08, evict_strategy=EvictionStrategy.BELADY, warmup_ratio=0)
    ids = [*batches(60)]
    train(bag, OPTIMIZERS["sgd"](bag.parameters()), bag.prefetch(ids, depth=60))
    best = _num_moved_at_best([{*each.flatten().tolist()} for each in ids], set(), 32)
    assert sum(bag.num_miss_history) == best
    assert sum(bag.num_hits_history) == sum(len(each.unique()) for each in ids) - best


@pytest.mark.parametrize("strategy", EvictionStrategy)
def test_a_window_moves_fewer_rows_and_the_same_in_each_run(strategy: EvictionStrategy) -> None:
    found = []
    for depth in (None, 4, 4):
        _, bag = make_pair(0.08, evict_strategy=strategy)
        loader = batches(80) if depth is None else bag.prefetch(batches(80), depth=depth)
        train(bag, OPTIMIZERS["sparse_adam"](bag.parameters()), loader)
        found.append(histories(bag))
    assert found[1] == found[2]
    assert sum(found[1][1]) < 0.95 * sum(found[0][1])
    assert [sum(each) for each in zip(*found[1][:2], strict=True)] == [
        sum(each) for each in zip(*found[0][:2], strict=True)
    ]


def test_reads_are_made_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    _, bag = make_pair(0.1)
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))
    names: list[tuple[str, str]] = []
    for name in ("read", "write"):
        method = getattr(rows, name)

        def call(self: Any, *args: Any, name: str = name, method: Any = method) -> Any:
            names.append((name, threading.current_thread().name))
            return method(self, *args)

        monkeypatch.setattr(rows, name, call)
    train(bag, OPTIMIZERS["sgd"](bag.parameters()), bag.prefetch(batches(20)))
    moved = [*names]
    assert ("read", "MainThread") in moved[:1]  # those of the first batch
    assert {thread.split("_")[0] for _, thread in moved[1:]} == {"cached-rows"}
    assert {name for name, _ in moved[1:]} == {"read", "write"}
    for thread in threading.enumerate():  # it ends with the loop
        if thread.name.startswith("cached-rows"):
            thread.join()


class Use(NamedTuple):
    """A use of a bag within an iteration of a prefetched loader."""

    kind: str
    ids: list[int]


@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from([*OPTIMIZERS]), strategy=st.sampled_from(EvictionStrategy))
def test_any_use_in_a_loop(data: st.DataObject, kind: str, strategy: EvictionStrategy) -> None:
    reference, bag = make_pair(20 / NUM_ROWS, evict_strategy=strategy)
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (reference, bag)]
    one_batch = st.lists(st.integers(0, 40), min_size=1, max_size=6)
    ids = [torch.tensor([each]) for each in data.draw(st.lists(one_batch, min_size=3, max_size=8))]
    kinds = st.sampled_from(("evaluate", "write", "state_dict", "discard", "load", "reorder", "skip"))
    num_microbatches = data.draw(st.integers(1, 3))
    for number, batch in enumerate(bag.prefetch(ids, depth=data.draw(st.integers(0, 5))), 1):
        assert batch is ids[number - 1]
        for use in data.draw(st.lists(kinds, max_size=2)):
            _use(use, reference, bag, optimizers, torch.tensor([data.draw(one_batch)]))
            if use == "skip":
                break
        else:
            outputs = [each(batch) for each in (reference, bag)]
            assert torch.equal(*outputs)
            for output in outputs:
                output.square().sum().backward()
        if number % num_microbatches == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert bag.cache_weight_mgr.window is None
    check_equal(reference, bag, *optimizers)


def _use(
    kind: str,
    reference: nn.EmbeddingBag,
    bag: CachedEmbeddingBag,
    optimizers: list[torch.optim.Optimizer],
    ids: Tensor,
) -> None:
    if kind == "evaluate":
        with torch.inference_mode():
            assert torch.equal(reference(ids), bag(ids))
    elif kind == "discard":
        assert torch.equal(reference(ids), bag(ids))
    elif kind == "write":
        for each in (reference, bag):
            with torch.no_grad():
                each.weight[ids[0, 0]] += 1
    elif kind == "state_dict":
        check_equal(reference, bag, *optimizers)
    elif kind == "load":
        state = {"weight": torch.rand(NUM_ROWS, DIM)}
        for each in (reference, bag):
            each.load_state_dict(state)
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif kind == "reorder" and bag.cache_weight_mgr.in_flight.is_empty:
        bag.cache_weight_mgr.reorder(torch.rand(NUM_ROWS), 0.5 * (ids[0, 0].item() % 2))


def test_accumulation_keeps_rows_of_all_microbatches() -> None:
    reference, bag = make_pair(0.2)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    for each, optimizer, loader in zip(
        (reference, bag), optimizers, (batches(24), bag.prefetch(batches(24), depth=2)), strict=True
    ):
        for number, ids in enumerate(loader, 1):
            backward(each, ids)
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    check_equal(reference, bag, *optimizers)


def test_parts_of_a_batch_and_several_tables() -> None:
    """A batch has ids of two tables, and those of the first one in two parts."""
    pairs = [make_pair(0.15), make_pair(0.1)]
    optimizers = [[OPTIMIZERS["sgd"](bag.parameters()) for bag in pair] for pair in pairs]
    loader = TensorDataset(torch.stack([*batches(30)]), torch.stack([*batches(30, seed=1)]))
    first, second = (pair[1] for pair in pairs)
    prefetched = second.prefetch(
        first.prefetch(loader, depth=2, ids=lambda batch: [batch[0][:3], batch[0][3:]]),
        ids=lambda batch: batch[1],
    )
    assert len(prefetched) == 30
    for left, right in prefetched:
        for side in range(2):
            one, other = (pair[side] for pair in pairs)
            (torch.cat([one(left[:3]), one(left[3:])]) * other(right) / 20).square().sum().backward()
        for optimizer in chain.from_iterable(optimizers):
            optimizer.step()
            optimizer.zero_grad()
    for pair, own in zip(pairs, optimizers, strict=True):
        check_equal(*pair, *own)
    for number_of_lookups, bag in ((60, first), (30, second)):
        assert len(bag.num_miss_history) == number_of_lookups
        assert min(bag.num_hits_history) >= 0
    reads = second.cache_weight_mgr.swap_in_bandwidth
    assert reads > 0


def test_attributes_of_the_loader_and_epochs() -> None:
    reference, bag = make_pair(0.1)
    data = TensorDataset(torch.cat([*batches(20)]))
    loader = DataLoader(data, batch_size=6, num_workers=2, persistent_workers=False)
    prefetched = bag.prefetch(loader, ids=lambda batch: batch[0])
    assert (len(prefetched), prefetched.batch_size, prefetched.dataset) == (20, 6, data)
    with pytest.raises(AttributeError, match="DataLoader"):
        prefetched.missing  # noqa: B018
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
    for each, optimizer, source in zip((reference, bag), optimizers, (loader, prefetched), strict=True):
        for epoch in range(3):
            train(each, optimizer, (ids for (ids,) in islice(source, 5 if epoch == 1 else None)))
    check_equal(reference, bag, *optimizers)


@pytest.mark.parametrize("depth", [0, 3])
def test_errors_come_with_their_batch(depth: int) -> None:
    _, bag = make_pair(20 / NUM_ROWS)

    def failing() -> Iterator[Tensor]:
        yield distinct(10)
        yield distinct(21)
        yield distinct(1, NUM_ROWS)
        yield distinct(10, 50)
        raise OSError("no more data")

    iterator = iter(bag.prefetch(failing(), depth=depth))
    bag(next(iterator))
    for error, message in (
        (RuntimeError, r"21 distinct ids .* holds 20 rows"),
        (ValueError, f"id {NUM_ROWS} is out of range"),
    ):
        with torch.no_grad():
            ids = next(iterator)
            with pytest.raises(error, match=message):
                bag(ids)
            bag(distinct(3, 60))
    assert torch.equal(next(iterator), distinct(10, 50))
    with pytest.raises(OSError, match="no more data"):
        next(iterator)


def test_arguments() -> None:
    _, bag = make_pair()
    with pytest.raises(ValueError, match="depth is -1"):
        bag.prefetch([], depth=-1)
    with pytest.raises(ValueError, match=r"depth is 1.5; it must be a number of batches"):
        bag.prefetch([], depth=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ids is 'ids'; it must be a function"):
        bag.prefetch([], ids="ids")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ids of type torch\.float32"):
        next(iter(bag.prefetch([distinct(3).float()])))
    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        next(iter(bag.prefetch([distinct(3)], ids=lambda batch: next(iter([])))))
    with pytest.raises(TypeError, match=r"int cannot be iterated"):
        bag.prefetch(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prefetch found dict .* give ids"):
        next(iter(bag.prefetch([{"ids": distinct(3)}])))  # type: ignore[list-item]
    with pytest.raises(ValueError, match="overflow is 'parts'; it must be 'error' or 'split'"):
        CachedEmbeddingBag(10, 4, overflow="parts")


def test_a_write_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, bag = make_pair(0.08)
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))
    write, failures = rows.write, [True] * 4  # two of the thread, and the main thread makes them again

    def fail(self: Any, *args: Any) -> None:
        if failures:
            failures.pop()
            raise OSError("the disk is full")
        write(self, *args)

    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    train(reference, optimizers[0], batches(30))
    monkeypatch.setattr(rows, "write", fail)
    all_ids, done = [*batches(30)], 0
    while done < 30:
        with nullcontext() if not failures else pytest.raises(OSError, match="the disk is full"):
            for ids in bag.prefetch(all_ids[done:]):
                train(bag, optimizers[1], [ids])
                done += 1
    assert not failures
    check_equal(reference, bag, *optimizers)


def test_a_fork_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the thread has not written yet are written by both; the fork has no thread."""
    reference, bag = make_pair(0.1)
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))
    read, num_reads = rows.read, [0]
    is_waiting, has_forked = threading.Event(), threading.Event()

    def wait_for_the_fork(self: Any, *args: Any) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            num_reads[0] += 1
            if num_reads[0] == 5:  # for the sixth batch
                is_waiting.set()
                has_forked.wait()
        return read(self, *args)

    monkeypatch.setattr(rows, "read", wait_for_the_fork)
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), batches(10))
    pid = 0
    for number, ids in enumerate(bag.prefetch(batches(10)), 1):
        train(bag, optimizer, [ids])
        if number == 5:
            is_waiting.wait()  # else the fork's own thread would make the fifth read
            pid = os.fork()
            if pid != 0:
                has_forked.set()
    if pid == 0:
        os._exit(torch.equal(bag.weight, reference.weight))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    check_equal(reference, bag)


def test_a_table_in_a_file(tmp_path: Path) -> None:
    reference, bag = make_pair(0.08, weight_path=tmp_path / "table")
    optimizers = [OPTIMIZERS["row_wise"](each.parameters()) for each in (reference, bag)]
    train(reference, optimizers[0], batches(40))
    train(bag, optimizers[1], bag.prefetch(batches(40)))
    check_equal(reference, bag, *optimizers)
    del bag, optimizers
    gc.collect()
    assert torch.equal(weights_of(tmp_path / "table"), reference.weight)


def test_a_closed_table_ends_its_loop(tmp_path: Path) -> None:
    bag = make_pair(0.08, weight_path=tmp_path / "table")[1]
    iterator = iter(bag.prefetch(batches(10)))
    next(iterator)
    bag.close()
    with pytest.raises(RuntimeError, match="was closed"):
        next(iterator)


def test_copies_in_a_loop() -> None:
    reference, bag = make_pair(0.1)
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    for number, ids in enumerate(bag.prefetch(batches(12))):
        if number == 6:
            bag = copy.deepcopy(bag)
            made = OPTIMIZERS["sgd"](bag.parameters())
        train(reference, optimizer, [ids])
        if number < 6:
            train(bag, OPTIMIZERS["sgd"](bag.parameters()), [ids])
        else:
            train(bag, made, [ids])
    check_equal(reference, bag)


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "mean", "padding_idx": 3}, {"include_last_offset": True}, {"mode": "max", "sparse": False}],
)
def test_a_batch_in_parts(options: dict[str, Any]) -> None:
    reference, bag = make_pair(20 / NUM_ROWS, overflow="split", **options)
    ids = torch.cat([*batches(10)])
    with torch.no_grad():
        assert torch.equal(bag(ids), reference(ids))
        offsets = torch.tensor([0, 3, 3, 20, 21, 30, 44, 60])
        with_end = torch.cat([offsets, torch.tensor([60])]) if bag.include_last_offset else offsets
        factors = torch.rand(60) if bag.mode == "sum" else None
        flat = ids.flatten()[:60]
        assert torch.equal(bag(flat, with_end, factors), reference(flat, with_end, factors))
        assert bag.num_miss_history[-1] > 0
        with pytest.raises(
            ValueError, match=r"offsets must rise from 0 to at most the number of ids, 60, .* \[0, 50, 3\]"
        ):
            bag(flat, torch.tensor([0, 50, 3]))
        with pytest.raises(RuntimeError, match=r"21 distinct ids .* holds 20 rows.*: raise cache_ratio"):
            bag(distinct(21))
    with pytest.raises(RuntimeError, match=r"under torch.no_grad\(\) only"):
        bag(ids)


def test_ids_in_parts() -> None:
    torch.manual_seed(0)
    reference = nn.Embedding(NUM_ROWS, DIM)
    embedding = CachedEmbedding(
        NUM_ROWS, DIM, cache_ratio=10 / NUM_ROWS, _weight=reference.weight, overflow="split"
    )
    ids = torch.stack([*batches(5)])
    embedding.register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():
        assert torch.equal(embedding(ids), 2 * reference(ids))


def test_rows_of_the_window_stay_in_an_evaluation() -> None:
    """They leave after all others, those of the furthest batch first."""
    _, bag = make_pair(30 / NUM_ROWS, warmup_ratio=0, evict_strategy=EvictionStrategy.LRU)
    with torch.no_grad():
        iterator = iter(bag.prefetch([distinct(10), distinct(10, 10), distinct(10, 20)], depth=2))
        for ids in ([next(iterator)], [distinct(20, 10)]):
            bag(ids[0])
        before = bag.cache_weight_mgr.row_of.clone()
        assert sorted(before.tolist()) == [*range(30)]
        bag(distinct(4, 100))
        left = {*range(30)} - {*bag.cache_weight_mgr.row_of.tolist()}
        assert len(left) == 4
        assert left <= {*range(20, 30)}


def test_histories_with_an_evaluation_before_the_lookup() -> None:
    """Rows that leave before their lookup are read again."""
    _, bag = make_pair(10 / NUM_ROWS, warmup_ratio=0)
    with torch.no_grad():
        for ids in bag.prefetch([distinct(4), distinct(4, 4)]):
            for first in (0, 4, 0):
                bag(distinct(8, 100 + first))
            bag(ids[:, :2])
            bag(ids)
    assert [sum(each) for each in zip(*histories(bag)[:2], strict=True)] == 2 * [8, 8, 8, 2, 4]
    assert bag.num_miss_history[3:5] == [2, 2]
    assert min(bag.num_hits_history) == 0


def test_a_change_of_the_table_before_the_lookup() -> None:
    _, bag = make_pair()
    weight = bag.weight
    with torch.no_grad():
        for ids in bag.prefetch([distinct(3)]):
            weight.data[1] = 7.0
            assert torch.equal(bag(ids)[0], weight[:3].sum(0))


def test_an_emptied_cache_before_the_lookup() -> None:
    reference, bag = make_pair()
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
    for number, ids in enumerate(bag.prefetch(batches(6))):
        if number % 2:
            bag.cache_weight_mgr.reorder(warmup_ratio=0)
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            train(each, optimizer, [ids])
    check_equal(reference, bag)


def test_slots_of_the_user_are_a_copy() -> None:
    reference, bag = make_pair()
    with torch.no_grad():
        for ids in bag.prefetch(batches(3)):
            bag.set_cache_op(False)
            slots = bag.cache_weight_mgr.prepare_ids(ids)
            bag(slots)
            slots.fill_(0)
            bag.set_cache_op()
            assert torch.equal(bag(ids), reference(ids))


def test_another_thread_that_reads_the_loader_is_refused() -> None:
    _, bag = make_pair()
    iterator = iter(bag.prefetch(batches(3)))
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(next(iterator)))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="read by another thread than that of this forward"):
        bag(found[0])
    bag(next(iterator))


def test_a_stream_in_pieces_loses_no_batch() -> None:
    _, bag = make_pair()
    loader = bag.prefetch(iter([*range(NUM_ROWS)]), ids=lambda number: torch.tensor([number]))
    assert bool(loader)
    parts = [[*islice(loader, 10)] for _ in range(3)]
    assert [*parts[0], *parts[1], *parts[2], *loader] == [*range(NUM_ROWS)]
    with pytest.raises(TypeError, match="list_iterator"):
        len(loader)


def test_a_loader_that_fills_its_tensors_again_is_refused() -> None:
    _, bag = make_pair()

    def refill() -> Iterator[Tensor]:
        ids = distinct(3)
        for number in range(3):
            yield ids.fill_(number)

    with pytest.raises(RuntimeError, match="must return new tensors for each batch"):
        [*bag.prefetch(refill(), depth=1)]


class Counting:
    """A loader with a setting."""

    epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        yield distinct(3, self.epoch)


def test_settings_of_the_loader() -> None:
    _, bag = make_pair()
    loader: Any = bag.prefetch(Counting())
    loader.epoch = 5
    assert torch.equal(next(iter(loader)), distinct(3, 5))


def test_a_loop_that_ends_as_garbage() -> None:
    """Its window is closed at any time, by the thread of another loop, too."""
    reference, bag = make_pair(0.1)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(30):
            loop: dict[str, Any] = {"batches": iter(bag.prefetch(batches(4, seed=number)))}
            loop["itself"] = loop
            train(bag, optimizers[1], islice(loop["batches"], 3))
            train(reference, optimizers[0], islice(batches(4, seed=number), 3))
    finally:
        gc.set_threshold(*threshold)
    del loop
    gc.collect()
    check_equal(reference, bag)


def test_a_loop_after_the_main_thread() -> None:
    """A process whose last line starts a thread goes on there."""
    script = """
import threading, torch
from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag

def train():
    threading.main_thread().join()
    bag = CachedEmbeddingBag(100, 4, mode="sum", cache_ratio=0.1)
    with torch.no_grad():
        sums = [bag(ids).sum() for ids in bag.prefetch(torch.arange(100).view(20, 1, 5))]
    print(torch.allclose(sum(sums), bag.weight.sum(), atol=1e-4))

threading.Thread(target=train).start()
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n", found.stderr


def test_an_earlier_loop_that_ends_leaves_the_window_of_the_next() -> None:
    _, bag = make_pair()
    earlier, later = iter(bag.prefetch(batches(5))), iter(bag.prefetch(batches(5)))
    next(earlier)
    next(later)
    window = bag.cache_weight_mgr.window
    earlier.close()  # type: ignore[attr-defined]
    assert bag.cache_weight_mgr.window is window is not None
    later.close()  # type: ignore[attr-defined]
    assert bag.cache_weight_mgr.window is None


def test_rows_that_are_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, bag = make_pair(10 / NUM_ROWS, evict_strategy=EvictionStrategy.LRU)
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))
    write, read, has_read = rows.write, rows.read, threading.Event()

    def write_late(self: Any, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            has_read.wait(0.02)  # of the main thread, which waits for this write
        write(self, *args)

    def read_early(self: Any, *args: Any) -> Tensor:
        values = read(self, *args)
        if threading.current_thread() is threading.main_thread():
            has_read.set()
        return values

    monkeypatch.setattr(rows, "write", write_late)
    monkeypatch.setattr(rows, "read", read_early)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    for number, ids in enumerate(bag.prefetch([distinct(8, 10 * number) for number in range(6)], depth=1)):
        before = distinct(8, 10 * number - 10)  # they have left for `ids`
        has_read.clear()
        if number in (1, 3):
            with torch.no_grad():
                assert torch.equal(bag(before), reference(before))
        elif number:
            sums, wanted = (each.state_dict()["state"][0]["sum"] for each in reversed(optimizers))
            assert torch.equal(sums[before], wanted[before])
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            train(each, optimizer, [ids])
    check_equal(reference, bag)


def test_the_thread_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can collect garbage, whose end reads a table."""
    reference, bag = make_pair(0.1)
    rows = type(bag.cache_weight_mgr.new_rows((1, 1), torch.float32))
    read = rows.read

    def wait_and_read(self: Any, *args: Any) -> Tensor:
        bag.cache_weight_mgr.wait_for_moves()
        return read(self, *args)

    monkeypatch.setattr(rows, "read", wait_and_read)
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), batches(10))
    train(bag, OPTIMIZERS["sgd"](bag.parameters()), bag.prefetch(batches(10)))
    check_equal(reference, bag)


class Unsteady:
    """An iterator of ten batches that fails before the fifth, once."""

    number = 0
    has_failed = False

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.number == 4 and not self.has_failed:
            self.has_failed = True
            raise OSError("try again")
        if self.number == 10:
            raise StopIteration
        self.number += 1
        return torch.tensor([self.number - 1])


def test_an_iterator_goes_on_after_its_error() -> None:
    _, bag = make_pair()
    loader = bag.prefetch(Unsteady())
    loop = iter(loader)
    assert [next(loop).item() for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="try again"):
        next(loop)
    assert [ids.item() for ids in loader] == [4, 5, 6, 7, 8, 9]
    assert [*loader] == []
