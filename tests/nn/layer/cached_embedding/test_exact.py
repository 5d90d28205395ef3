"""A cached table has the bits of torch's, with the states of its optimizer, whatever is evicted."""

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
)
from tests.tiers import further

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

FREQUENCIES = torch.arange(NUM_ROWS).flip(0)
RATIOS = (0.06, 0.1, 1.0)
DEPTHS = (0, 1, 4)
ONCE = [
    *zip(
        ("sgd", "adagrad", "sparse_adam", "row_wise", "sgd"),
        (*EvictionStrategy, EvictionStrategy.LRU),
        (0.06, 0.1, 0.06, 1.0, 0.1),
        (None, 1, 4, 4, 0),
        strict=True,
    )
]
CELLS = [*itertools.product(OPTIMIZERS, EvictionStrategy, RATIOS, (None, *DEPTHS))]


@pytest.mark.parametrize(
    ("name", "strategy", "ratio", "depth"),
    [*ONCE, *(further(*each) for each in CELLS if each not in ONCE)],
)
def test_200_steps_have_the_bits_of_torch(
    name: str, strategy: EvictionStrategy, ratio: float, depth: int | None
) -> None:
    reference, bag = make_pair(ratio, evict_strategy=strategy, ids_freq_mapping=FREQUENCIES)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]
    loader = batches(200) if depth is None else bag.prefetch(batches(200), depth=depth)
    assert train(reference, optimizers[0], batches(200)) == train(bag, optimizers[1], loader)
    check_equal(reference, bag, *optimizers)
    if ratio < 1:  # rows have left with changes, and come back
        assert sum(bag.num_write_back_history) > 300
        assert sum(bag.num_miss_history) > 300
        assert sum(bag.num_hits_history) > 300


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulation_over_a_table_that_is_used_twice(name: str) -> None:
    reference, bag = make_pair(0.5)
    bag.cpu().float()  # changes nothing
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]
    pairs = list(zip(batches(40), batches(40, seed=1), strict=True))
    for number, (left, right) in enumerate(pairs):
        for each in (reference, bag):
            ((each(left) * each(right) + each(left)) / 20).square().sum().backward()
        if number % 4 == 3:
            for each, optimizer in zip((reference, bag), optimizers, strict=True):
                next(each.parameters()).grad.mul_(0.3)  # as clipping does
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 8 == 7)
    assert reference.weight.isfinite().all()
    check_equal(reference, bag, *optimizers)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation(use_reentrant: bool) -> None:
    reference, bag = make_pair(0.3)
    optimizers = [OPTIMIZERS["sparse_adam"](each.parameters()) for each in (reference, bag)]
    for left, right in zip(batches(20), batches(20, seed=1), strict=True):
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            one = torch.ones((), requires_grad=True)
            parts = [
                checkpoint(lambda x, ids, each=each: each(ids) * x, one, ids, use_reentrant=use_reentrant)
                for ids in (left, right)
            ]
            (parts[0] * parts[1]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    check_equal(reference, bag, *optimizers)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "mean", "padding_idx": -3},
        {"mode": "sum", "include_last_offset": True, "padding_idx": 0},
        {"mode": "mean", "buffer_size": 3},
        {"mode": "sum", "dtype": torch.bfloat16},
        {"mode": "max", "sparse": False},
    ],
)
def test_options_of_torch(options: dict[str, Any]) -> None:
    reference, bag = make_pair(0.3, **options)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    offsets = torch.tensor([0, 3, 3, 10, 24] if bag.include_last_offset else [0, 3, 3, 10])
    for ids in batches(30):
        ids[0, 0] = 0
        ids[0, 1] = NUM_ROWS - 3
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            flat, where = ids.flatten().int(), offsets.int()
            each(flat, where).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    check_equal(reference, bag, *optimizers)


def test_weights_of_samples_have_gradients() -> None:
    reference, bag = make_pair(0.5)
    bag.cache_weight_mgr.param.requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for ids, later in zip(batches(10), batches(10, seed=1), strict=True):
        factors = torch.rand(ids.shape, generator=generator)
        grads = []
        for each in (reference, bag):
            own = factors.clone().requires_grad_()
            output = each(ids, per_sample_weights=own)
            each(later)  # moves rows; those of `output` stay
            output.square().sum().backward()
            grads.append(own.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def test_an_embedding() -> None:
    torch.manual_seed(0)
    reference = nn.Embedding(NUM_ROWS, DIM, padding_idx=5, sparse=True)
    torch.manual_seed(0)
    embedding = CachedEmbedding(NUM_ROWS, DIM, padding_idx=5, sparse=True, cache_ratio=0.1)
    optimizers = [OPTIMIZERS["sparse_adam"](each.parameters()) for each in (reference, embedding)]
    for each, optimizer in zip((reference, embedding), optimizers, strict=True):
        train(each, optimizer, batches(50))
    check_equal(reference, embedding, *optimizers)


def test_an_embedding_that_is_used_three_times() -> None:
    """The gradient of a sum is expanded: torch joins such entries, and adds the later ones to the front."""
    torch.manual_seed(0)
    reference = nn.Embedding(NUM_ROWS, DIM, sparse=True)
    torch.manual_seed(0)
    embedding = CachedEmbedding(NUM_ROWS, DIM, sparse=True, cache_ratio=0.3)
    for each in (reference, embedding):
        optimizer = OPTIMIZERS["sgd"](each.parameters())
        for ids in batches(20):
            parts = [each(ids[:, :width] // (9 * width)).sum() * width for width in (2, 3, 4)]
            (parts[0] * 0.3 + parts[1] * 0.7 + parts[2]).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_equal(reference, embedding)


def test_dense_gradients() -> None:
    """Equal to rounding: torch adds equal ids in an order that depends on the ids."""
    reference, bag = make_pair(0.2, sparse=False)
    reference, bag = reference.double(), bag.double()
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        train(each, optimizer, batches(50))
    torch.testing.assert_close(bag.weight, reference.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_gradients_divided_by_counts(ratio: float) -> None:
    """Those of `torch.nn.Embedding`; the bag of torch 2.13 divides by counts of other ids on a CPU."""
    _, bag = make_pair(ratio, sparse=False, scale_grad_by_freq=True)
    reference = nn.Embedding(NUM_ROWS, DIM, scale_grad_by_freq=True, _weight=bag.weight.clone())
    factors = torch.linspace(0.5, 2, 6)[:, None]
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
    for ids in batches(5):
        (reference(ids).sum(1) * factors).square().sum().backward()
        (bag(ids) * factors).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(bag.weight, reference.weight.detach())


def test_a_run_goes_on_in_torch_and_back_under_another_ratio() -> None:
    reference, bag = make_pair(0.1)
    optimizer = OPTIMIZERS["sparse_adam"](reference.parameters())
    train(reference, optimizer, batches(60))
    saved: Any = None
    for number, ratio in enumerate((0.1, 1.0, None, 0.3)):  # None: torch's own
        made = (
            nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) if ratio is None else make_pair(ratio)[1]
        )
        own = OPTIMIZERS["sparse_adam"](made.parameters())
        if saved is None:
            made.load_state_dict(bag.state_dict())
        else:
            memory = io.BytesIO(saved)
            state = torch.load(memory)
            made.load_state_dict(state["model"])
            own.load_state_dict(state["optimizer"])
        train(made, own, list(batches(60))[15 * number : 15 * number + 15])
        memory = io.BytesIO()
        torch.save({"model": made.state_dict(), "optimizer": own.state_dict()}, memory)
        saved = memory.getvalue()
    check_equal(reference, made, optimizer, own)


def test_loading_states_into_an_optimizer_that_has_made_steps() -> None:
    reference, bag = make_pair(0.1)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    saved = []
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        train(each, optimizer, batches(20))
        saved.append(copy.deepcopy((each.state_dict(), optimizer.state_dict())))
        train(each, optimizer, batches(20, seed=2))
        each.load_state_dict(saved[-1][0])
        optimizer.load_state_dict(saved[-1][1])
        train(each, optimizer, batches(20, seed=3))
    check_equal(reference, bag, *optimizers)


def test_copies_are_apart() -> None:
    reference, bag = make_pair(0.1)
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    train(bag, optimizer, batches(10))
    before = bag.weight.clone()
    memory = io.BytesIO()
    torch.save(bag, memory)
    memory.seek(0)
    for copied in (copy.deepcopy(bag), torch.load(memory, weights_only=False)):
        assert isinstance(copied, CachedEmbeddingBag)
        assert next(copied.parameters()) is copied.cache_weight_mgr.param
        reference.load_state_dict(copied.state_dict())
        for each in (reference, copied):
            train(each, OPTIMIZERS["sgd"](each.parameters()), batches(10, seed=1))
        check_equal(reference, copied)
        assert torch.equal(bag.weight, before)


def test_changes_in_place_of_the_table_and_of_the_cache() -> None:
    reference, bag = make_pair(0.1)
    for ids in batches(5):
        for each in (reference, bag):
            each.zero_grad()
            backward(each, ids)
            param = next(each.parameters())
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.1)  # no optimizer
    check_equal(reference, bag)
    for each in (reference, bag):
        torch.manual_seed(3)
        nn.init.uniform_(each.weight)
    ids = next(batches(1))
    assert torch.equal(bag(ids), reference(ids))


class Scaled(CachedEmbeddingBag):
    """A subclass with a parameter, a buffer and a module of its own."""

    def __init__(self, cache_ratio: float) -> None:
        super().__init__(NUM_ROWS, DIM, mode="sum", sparse=True, cache_ratio=cache_ratio)
        self.bias = nn.Parameter(torch.rand(DIM))
        self.register_buffer("scale", torch.rand(1))
        self.head = nn.Linear(2, 2)


def test_a_state_dict_of_a_subclass() -> None:
    first, second = Scaled(0.1), Scaled(0.5)
    hooks: list[str] = []
    second.register_load_state_dict_pre_hook(lambda _, state, *rest: hooks.extend(state))
    second.load_state_dict(first.state_dict())
    assert hooks == ["weight", "bias", "scale", "head.weight", "head.bias"]
    assert [name for name, _ in second.named_parameters()] == ["weight", "bias", "head.weight", "head.bias"]
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias", "scale"'):
        second.load_state_dict({"weight": first.weight}, strict=True)
    missing, unexpected = second.load_state_dict({"other": first.weight}, strict=False)
    assert (set(missing), unexpected) == ({*first.state_dict()}, ["other"])


def test_another_default_device() -> None:
    reference = make_pair()[0]
    with torch.device("meta"):
        bag = CachedEmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True, cache_ratio=0.1, device="cpu")
        assert CachedEmbeddingBag(NUM_ROWS, DIM).weight.device.type == "cpu"
        bag.load_state_dict(reference.state_dict())
        optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (reference, bag)]
        all_ids = list(batches_on_host(10))
        for each, optimizer in zip((reference, bag), optimizers, strict=True):
            for ids in all_ids:
                optimizer.zero_grad()
                each(ids).square().sum().backward()
                optimizer.step()
        check_equal(reference, bag, *optimizers)


def batches_on_host(number: int) -> list[Tensor]:
    """Return batches whatever the default device is."""
    with torch.device("cpu"):
        return list(batches(number))


def test_casts() -> None:
    reference, bag = make_pair(0.1)
    optimizer = OPTIMIZERS["sgd"](bag.parameters())
    train(bag, optimizer, batches(5))
    reference.load_state_dict(bag.state_dict())
    for each in (reference, bag):
        each.double()
        train(each, OPTIMIZERS["sgd"](each.parameters()), batches(5))
    assert bag.weight.dtype == torch.float64
    check_equal(reference, bag)


def test_a_compiled_model() -> None:
    reference, bag = make_pair(0.2)
    model = torch.compile(nn.Sequential(bag, nn.Tanh()), backend="eager")
    for ids in batches(3):
        assert torch.equal(model(ids), reference(ids).tanh())


def test_prepared_batches() -> None:
    reference, bag = make_pair(0.3)
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    train(reference, optimizers[0], batches(20))
    bag.set_cache_op(False)
    waiting: list[Tensor] = []
    for ids in batches(20):
        waiting.append(bag.cache_weight_mgr.prepare_ids(ids))
        if len(waiting) == 2:  # one batch ahead
            train(bag, optimizers[1], [waiting.pop(0)])
    train(bag, optimizers[1], waiting)
    check_equal(reference, bag, *optimizers)


def test_a_first_step_of_all_slots() -> None:
    """No slot has the value then that the states of other rows begin with."""
    reference, bag = make_pair(10 / NUM_ROWS)
    optimizers = [OPTIMIZERS["row_wise"](each.parameters()) for each in (reference, bag)]
    ids = [torch.arange(10)[None], torch.arange(10)[None] + 10]
    for each, optimizer in zip((reference, bag), optimizers, strict=True):
        train(each, optimizer, ids)
    check_equal(reference, bag, *optimizers)
