"""Rows of batches in flight stay; batches end with their step, their gradient or their graph."""

import gc
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag
from tests.nn.layer.cached_embedding.tables import NUM_ROWS, OPTIMIZERS, backward, batches, make_pair, train

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


def distinct(number: int) -> torch.Tensor:
    """One bag of so many ids."""
    return torch.arange(number)[None]


def test_batches_without_a_step_are_not_evicted() -> None:
    _, bag = make_pair(20 / NUM_ROWS)
    outputs = [bag(distinct(15))]
    with pytest.raises(
        RuntimeError, match=r"has 6 distinct ids .* holds 20 rows, 15 of them pinned .*no_grad"
    ):
        bag(distinct(6) + 100)
    outputs.append(bag(distinct(5) + 100))
    outputs.clear()  # graphs that are gone
    bag(distinct(20) + 50)


def test_evaluation_pins_nothing() -> None:
    reference, bag = make_pair(20 / NUM_ROWS)
    with torch.no_grad():
        outputs = [bag(distinct(20) + 20 * number) for number in range(10)]
    assert torch.equal(torch.cat(outputs), reference(torch.arange(200).view(10, 20)))


@pytest.mark.parametrize("ends", ["step", "zero_grad"])
def test_a_gradient_pins_its_rows_until(ends: str) -> None:
    _, bag = make_pair(20 / NUM_ROWS)
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    backward(bag, distinct(20))
    with pytest.raises(RuntimeError, match=r"has 3 distinct ids .* holds 20 rows, 20 of them pinned"):
        bag(distinct(3) + 100)
    getattr(optimizer, ends)()
    bag(distinct(20) + 100)


def test_rows_of_a_failed_batch_are_as_before() -> None:
    reference, bag = make_pair(30 / NUM_ROWS)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    for number, ids in enumerate(batches(20)):
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            train(each, optimizer, [ids])
        with pytest.raises((RuntimeError, ValueError)):
            bag(distinct(31) if number % 2 else distinct(3) + NUM_ROWS)
    assert torch.equal(bag.weight, reference.weight)


def test_a_backward_after_the_step_of_its_batch_is_refused() -> None:
    _, bag = make_pair()
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    loss = bag(distinct(3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="call every backward before step"):
        loss.backward()


def test_a_gradient_that_stays_is_refused_when_rows_have_moved() -> None:
    reference, bag = make_pair(20 / NUM_ROWS)
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        backward(each, distinct(3))
        optimizer.step()
        optimizer.step()  # the rows are where they were
        backward(each, distinct(3))
        optimizer.step()
    assert torch.equal(bag.weight, reference.weight)
    with torch.no_grad():
        bag(distinct(20) + 50)
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) between"):
        optimizers[1].step()
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) between"):
        backward(bag, distinct(3))
    optimizers[1].zero_grad(set_to_none=False)
    train(bag, optimizers[1], [distinct(3)])


@pytest.mark.parametrize("zeroes", ["zero_grad", "zero_"])
@pytest.mark.parametrize("sparse", [True, False])
def test_gradients_that_are_set_to_zero_pin_nothing(zeroes: str, sparse: bool) -> None:
    _, bag = make_pair(30 / NUM_ROWS, sparse=sparse)
    for ids in batches(30):
        backward(bag, ids)
        if zeroes == "zero_grad":
            bag.zero_grad(set_to_none=False)
        else:
            next(bag.parameters()).grad.zero_()  # type: ignore[union-attr]
    assert bag.cache_weight_mgr.in_flight.is_empty


def test_a_table_goes_with_its_bag() -> None:
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    bag: CachedEmbeddingBag | None = make_pair()[1]
    optimizer = OPTIMIZERS["adagrad"](bag.parameters())  # type: ignore[union-attr]
    train(bag, optimizer, batches(3))  # type: ignore[arg-type]
    table = weakref.ref(bag.weight)  # type: ignore[union-attr]
    assert len(_global_optimizer_pre_hooks) == before + 1
    bag = None
    gc.collect()
    assert table() is None
    assert len(_global_optimizer_pre_hooks) == before


def test_steps_leave_nothing_behind() -> None:
    _, bag = make_pair()
    optimizer = OPTIMIZERS["sparse_adam"](bag.parameters())
    train(bag, optimizer, batches(20))
    optimizer.zero_grad()
    assert bag.cache_weight_mgr.in_flight.is_empty
    bag.cache_weight_mgr.reorder(range(NUM_ROWS), warmup_ratio=1.0)  # refuses batches in flight
    assert bag.cache_weight_mgr.cuda_available_row_num == 0
    assert sorted(bag.cache_weight_mgr.row_of.tolist()) == list(range(320, NUM_ROWS))


def test_only_changed_rows_are_written_back() -> None:
    _, bag = make_pair(20 / NUM_ROWS)
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    with torch.no_grad():
        for number in range(5):
            bag(distinct(20) + 20 * number)
    train(bag, optimizer, [distinct(7) + 80])
    with torch.no_grad():
        bag(distinct(20))
    assert bag.num_miss_history == [6, 20, 20, 20, 20, 0, 20]
    assert bag.num_hits_history == [14, 0, 0, 0, 0, 7, 0]
    assert bag.num_write_back_history == [0, 0, 0, 0, 0, 0, 7]
    assert bag.swap_in_bandwidth > 0
    assert bag.swap_out_bandwidth > 0


def test_skipped_steps_pin_nothing() -> None:
    """As under a loss scale: `zero_grad` comes after the next forward."""
    _, bag = make_pair(0.25)
    for ids in torch.arange(400).view(10, 10, 4):
        output = bag(ids)
        bag.zero_grad()
        output.sum().backward()
    bag.zero_grad()
    assert bag.cache_weight_mgr.in_flight.is_empty
