"""Writes of users to the table, the cache, gradients and states: they count, or are refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag
from tests.nn.layer.cached_embedding.tables import (
    DIM,
    NUM_ROWS,
    OPTIMIZERS,
    backward,
    batches,
    check_equal,
    make_pair,
    train,
)

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.mark.parametrize(
    "write",
    [
        lambda table, values: table.data.copy_(values),
        lambda table, values: table.detach().numpy().__setitem__(slice(None), values.numpy()),
        nn.init.constant_,
    ],
    ids=["data", "numpy", "init"],
)
def test_writes_to_the_table(write: Callable[[Tensor, Tensor], object]) -> None:
    reference, bag = make_pair()
    train(bag, OPTIMIZERS["sgd"](bag.parameters()), batches(3))
    values = torch.tensor(2.0) if write is nn.init.constant_ else torch.rand(NUM_ROWS, DIM)
    for each in (reference, bag):
        write(each.weight, values)
        train(each, OPTIMIZERS["sgd"](each.parameters()), batches(3))
    check_equal(reference, bag)


@pytest.mark.parametrize("by_data", [True, False])
def test_a_loop_without_an_optimizer(by_data: bool) -> None:
    reference, bag = make_pair(30 / NUM_ROWS)
    for ids in batches(20):
        for each in (reference, bag):
            backward(each, ids)
            param = next(each.parameters())
            (param.data if by_data else param.detach()).sub_(param.grad.coalesce(), alpha=0.1)  # type: ignore[union-attr]
            each.zero_grad()
    torch.testing.assert_close(bag.weight, reference.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("write", ["init", "decay", "average"])
def test_writes_to_every_row_of_the_cache_are_undone(write: str) -> None:
    _, bag = make_pair(0.1)
    before = bag.weight.detach().clone()
    if write == "average":
        average = AveragedModel(bag)
        average.update_parameters(bag)
        with torch.no_grad():
            bag(torch.arange(100, 130)[None])
        average.update_parameters(bag)
        bag = average.module
    for param in bag.parameters() if write != "average" else ():
        nn.init.zeros_(param) if write == "init" else param.detach().mul_(0.9)
    with pytest.raises(RuntimeError, match="write to the attribute `weight`, the whole table"):
        bag(torch.tensor([[0, 1]]))
    assert torch.equal(bag.weight, before)
    bag(torch.tensor([[0, 1]]))


def test_loading_between_a_backward_and_zero_grad() -> None:
    reference, bag = make_pair()
    state = make_pair(1.0)[1].double().state_dict()
    for each in (reference, bag):
        backward(each, next(batches(1)))
        each.load_state_dict(state)
        each.zero_grad()
        train(each, OPTIMIZERS["sgd"](each.parameters()), batches(3))
    check_equal(reference, bag)


def test_freezing_by_the_attribute() -> None:
    reference, bag = make_pair()
    for frozen in (True, False):
        for each in (reference, bag):
            each.weight.requires_grad = not frozen
            assert each(next(batches(1))).requires_grad == (not frozen)
            assert each.weight.requires_grad == (not frozen)


def test_a_loss_of_the_table_is_refused() -> None:
    _, bag = make_pair()
    optimizer = SGD(bag.parameters(), lr=0.1)
    (bag(next(batches(1))).sum() + bag.weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="a loss was computed with the attribute `weight`"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"the whole table: give it the parameters\(\)"):
        SGD([bag.weight], lr=0.1).step()


def test_another_parameter_is_refused() -> None:
    _, bag = make_pair()
    ids = next(batches(1))
    with pytest.raises(RuntimeError, match=r"was replaced, .* in place, or call load_state_dict"):
        torch.func.functional_call(bag, {"weight": torch.zeros(80, DIM)}, (ids,))
    bag(ids)
    bag.weight = nn.Parameter(torch.zeros(NUM_ROWS, DIM))
    with pytest.raises(RuntimeError, match=r"was replaced"):
        bag(ids)


@pytest.mark.parametrize("way", ["backward", "autograd.grad", "again"])
def test_gradients_that_were_kept(way: str) -> None:
    _, bag = make_pair(30 / NUM_ROWS)
    (param,), kept = bag.parameters(), []
    optimizer = SGD([param], lr=0.1)
    for ids in batches(6):
        if way == "autograd.grad":
            kept += torch.autograd.grad(bag(ids).sum(), [param])
            continue
        backward(bag, ids)
        kept.append(param.grad.clone())  # type: ignore[union-attr]
        if way == "again":
            optimizer.step()
        optimizer.zero_grad()
    param.grad = kept[0]
    with pytest.raises(RuntimeError, match="others can be in their slots now"):
        optimizer.step()


def test_gradients_of_autograd() -> None:
    reference, bag = make_pair(30 / NUM_ROWS)
    for each in (reference, bag):
        (param,) = each.parameters()
        optimizer = OPTIMIZERS["adagrad"]([param])
        for ids in batches(20):
            (param.grad,) = torch.autograd.grad(each(ids).square().sum(), [param])
            optimizer.step()
        (grad,) = torch.autograd.grad(each(next(batches(1))).square().sum(), [param])
        param.detach().add_(grad.coalesce(), alpha=-0.1)
    torch.testing.assert_close(bag.weight, reference.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_in_the_backward(name: str) -> None:
    reference, bag = make_pair(0.3)
    optimizers = []
    for each in (reference, bag):
        optimizers.append(OPTIMIZERS[name](each.parameters()))

        def step(_: Tensor, optimizer: Optimizer = optimizers[-1]) -> None:
            optimizer.step()
            optimizer.zero_grad()

        next(each.parameters()).register_post_accumulate_grad_hook(step)
        for ids in batches(20):
            ((each(ids) + each(ids.flip(0)[:, :2])) / 10).square().sum().backward()
    check_equal(reference, bag, *optimizers)


@pytest.mark.parametrize("way", ["autograd.grad", "inputs", "frozen", "hook"])
def test_backwards_without_a_gradient_pin_nothing(way: str) -> None:
    _, bag = make_pair(60 / NUM_ROWS)
    (param,) = bag.parameters()
    factors = torch.ones(6, 4, requires_grad=True)
    if way == "frozen":
        bag.requires_grad_(False)
    elif way == "hook":
        param.register_hook(lambda grad: 1 / 0)
    for ids in batches(40):
        total = bag(ids, per_sample_weights=factors).sum()
        if way == "autograd.grad":
            torch.autograd.grad(total, [param])
        elif way == "hook":
            with pytest.raises(ZeroDivisionError):
                total.backward()
        else:
            total.backward(inputs=None if way == "frozen" else [factors])
    del total
    assert bag.cache_weight_mgr.in_flight.is_empty


@pytest.mark.parametrize("ratio", [0.1, 1.0])
@pytest.mark.parametrize("name", ["adagrad", "sparse_adam", "row_wise"])
def test_a_copy_with_its_optimizer(name: str, ratio: float) -> None:
    reference, bag = make_pair(ratio)
    pairs: list[tuple[nn.Module, Optimizer]] = []
    for each in (reference, bag):
        optimizer = OPTIMIZERS[name](each.parameters())
        train(each, optimizer, batches(10))
        pairs.append(copy.deepcopy((each, optimizer)))
        states = copy.deepcopy(optimizer.state_dict())
    if ratio < 1:
        with pytest.raises(ValueError, match=r"has 40 rows and not the 400 of .*: load the state_dict\(\)"):
            train(*pairs[1], batches(1))
        pairs[1][1].load_state_dict(states)
    for each, optimizer in pairs:
        train(each, optimizer, batches(10, seed=1))
    check_equal(pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])


@pytest.mark.parametrize("after_backward", [True, False])
def test_states_that_were_cleared(after_backward: bool) -> None:
    reference, bag = make_pair(0.1)
    optimizers = [OPTIMIZERS["sparse_adam"](each.parameters()) for each in (reference, bag)]
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        train(each, optimizer, batches(10))
        if after_backward:
            optimizer.zero_grad()
            backward(each, next(batches(1, seed=2)))
        optimizer.state.clear()
        if after_backward:
            optimizer.step()
        train(each, optimizer, batches(10, seed=1))
    check_equal(reference, bag, *optimizers)


def test_states_of_an_optimizer_before_its_first_step() -> None:
    reference, bag = make_pair(0.1)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    optimizers[1].load_state_dict(OPTIMIZERS["adagrad"](make_pair(0.3)[1].parameters()).state_dict())
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        train(each, optimizer, batches(10))
    check_equal(reference, bag, *optimizers)


def test_states_of_another_table() -> None:
    _, bag = make_pair(0.1)
    optimizer = OPTIMIZERS["adagrad"](bag.parameters())
    other = nn.EmbeddingBag(120, DIM, mode="sum", sparse=True)
    made = OPTIMIZERS["adagrad"](other.parameters())
    train(other, made, [torch.tensor([[1, 2]])])
    optimizer.load_state_dict(made.state_dict())
    backward(bag, next(batches(1)))
    with pytest.raises(ValueError, match=r"'sum' has 120 rows and not the 400"):
        optimizer.step()


def test_a_step_that_fails_in_the_middle() -> None:
    for ratio in (0.1, 1.0):
        reference, bag = make_pair(ratio)
        optimizers = []
        for each in (reference, bag):
            other = nn.Parameter(torch.ones(2))
            optimizer = OPTIMIZERS["sparse_adam"]([*each.parameters(), other])
            optimizers.append(optimizer)
            backward(each, next(batches(1, seed=5)))
            other.grad = torch.ones(2)  # SparseAdam takes sparse ones only
            with pytest.raises(RuntimeError, match="does not support dense"):
                optimizer.step()
            other.grad = None
            train(each, optimizer, batches(20))
        check_equal(reference, bag, *optimizers)


def test_it_is_an_embedding_bag_of_its_own_table() -> None:
    table = torch.rand(10, DIM)
    bag = CachedEmbeddingBag.from_pretrained(table, mode="sum", cache_ratio=0.5)
    assert bag.weight.data_ptr() == table.data_ptr()
    assert not bag.weight.requires_grad
    expanded = CachedEmbeddingBag(
        10, DIM, _weight=torch.zeros(1, DIM).expand(10, DIM), mode="sum", sparse=True
    )
    train(expanded, SGD(expanded.parameters(), lr=0.1), [torch.tensor([[1]])])
