"""What a cached table cannot do is refused, with what to do instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag, CachedParamMgr
from tests.nn.layer.cached_embedding.tables import NUM_ROWS, backward, batches, make_pair

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_ratio": 0}, "cache_ratio is 0; it must be above 0"),
        ({"cache_ratio": 1.5}, "cache_ratio is 1.5; .* at most 1"),
        ({"max_norm": 1.0}, "max_norm=1.0: .* leave it out"),
        ({"ids_freq_mapping": [1, 2]}, r"has the shape \(2,\), .* 10 rows"),
        ({"warmup_ratio": 2}, "warmup_ratio is 2; it must be from 0 to 1"),
        ({"evict_strategy": "lfu"}, "evict_strategy is 'lfu'; it must be an EvictionStrategy"),
        ({"buffer_size": -1}, "buffer_size is -1"),
        ({"mode": "avg"}, "mode is 'avg'; it must be one of 'sum', 'mean', 'max'"),
        ({"mode": "max", "sparse": True}, "mode='max' has no sparse gradients in torch: use sparse=False"),
        ({"mode": "max", "scale_grad_by_freq": True}, "scale_grad_by_freq needs mode='sum' or 'mean', as in"),
        ({"padding_idx": 10}, "padding_idx is 10"),
        ({"_weight": torch.zeros(3, 3)}, r"_weight has the shape \(3, 3\); .* \(10, 4\)"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CachedEmbeddingBag(10, 4, **options)


def test_ids() -> None:
    _, bag = make_pair(name="users")
    for wrong in (NUM_ROWS, -1):
        with pytest.raises(
            ValueError, match=f"id {wrong} is out of range for users, which has {NUM_ROWS} rows"
        ):
            bag(torch.tensor([[0, wrong]]))
    with pytest.raises(TypeError, match=r"users are of type torch.float32"):
        bag(torch.tensor([[1.0]]))
    with pytest.raises(
        RuntimeError, match=r"has 100 distinct ids for users, and its cache holds 80 rows: raise"
    ):
        bag(torch.arange(100)[None])


class _Unknown(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad.coalesce(), alpha=-0.1)


class _RowWise(_Unknown):
    is_row_wise = True


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Adam, r"Adam is not known to change only the rows .* use one of SGD, .* is_row_wise = True"),
        (AdamW, "AdamW is not known"),
        (_Unknown, "_Unknown is not known"),
        (lambda params: SGD(params, lr=0.1, momentum=0.9), "SGD with momentum=0.9 changes every row"),
        (lambda params: Adagrad(params, weight_decay=0.1), "Adagrad with weight_decay=0.1 changes every row"),
    ],
)
def test_optimizers_that_change_every_row(make: Callable[..., Optimizer], message: str) -> None:
    _, bag = make_pair()
    before = bag.weight.clone()
    optimizer = make(bag.parameters())
    backward(bag, next(batches(1)))
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(bag.weight, before)


def test_an_optimizer_of_ones_own() -> None:
    reference, bag = make_pair()
    for ids in batches(10):
        for each in (reference, bag):
            each.zero_grad()
            backward(each, ids)
            _RowWise(each.parameters()).step()
    assert torch.equal(bag.weight, reference.weight)


def test_a_closure() -> None:
    _, bag = make_pair()
    optimizer = SGD(bag.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"call backward\(\), then step\(\)"):
        optimizer.step(lambda: backward(bag, next(batches(1))))


def test_slots_that_were_not_prepared() -> None:
    _, bag = make_pair()
    bag.set_cache_op(False)
    ids = next(batches(1))
    with pytest.raises(RuntimeError, match=r"prepare_ids\(ids\), which has not been called"):
        bag(ids)
    slots = bag.cache_weight_mgr.prepare_ids(ids)
    with pytest.raises(ValueError, match="call it in the same order"):
        bag(slots + 1)
    bag(slots)


def test_a_table_that_was_changed_beside_newer_rows() -> None:
    _, bag = make_pair()
    table = bag.weight
    optimizer = SGD(bag.parameters(), lr=0.1)
    backward(bag, next(batches(1)))
    optimizer.step()
    nn.init.zeros_(table)
    trained = next(bag.parameters()).detach().clone()
    with pytest.raises(RuntimeError, match=r"which keep their values: read the attribute `weight` again"):
        bag(next(batches(1)))
    rows = next(batches(1)).unique()
    assert torch.equal(bag.weight[rows], trained[bag.cache_weight_mgr.slots_of(rows)])
    assert bag.weight.any(1).sum() == len(rows)


def test_a_state_dict_of_another_shape() -> None:
    _, bag = make_pair()
    before = bag.weight.clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: .* table is \(400, 8\)"):
        bag.load_state_dict({"weight": torch.zeros(3, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        bag.load_state_dict({})
    assert torch.equal(bag.weight, before)


def test_a_manager_by_itself() -> None:
    with pytest.raises(ValueError, match="cuda_row_num is 11; it must be from 1 to the 10 rows"):
        CachedParamMgr(torch.zeros(10, 4), 11)
    with pytest.raises(ValueError, match=r"the shape \(10,\)"):
        CachedParamMgr(torch.zeros(10))
    manager = CachedParamMgr(torch.arange(20.0).view(10, 2), 4)
    slots = manager.prepare_ids(torch.tensor([9, 3, 9]))
    assert manager.cuda_cached_weight[slots].tolist() == [[18, 19], [6, 7], [18, 19]]
