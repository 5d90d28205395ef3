"""Tables that ranks own have the bits of torch's bags in one process, with one cache or several."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer.cached_embedding import EvictionStrategy
from colossalai.nn.parallel.layers import (
    ParallelCachedEmbeddingBagTablewise,
    ParallelCachedEmbeddingBagTablewiseSpiltCache,
    ParallelCachedEmbeddingBagTablewiseSplitCache,
    TablewiseEmbeddingBagConfig,
)
from tests.nn.layer.cached_embedding.parallel.test_columns import fail, loss_of, part_of
from tests.nn.layer.cached_embedding.tables import OPTIMIZERS, OWN
from tests.ranks import run_ranks
from tests.tiers import once_and_pairs

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

SIZES, DIM = (60, 150, 90), 6
BEGINS = (0, 60, 210)
KINDS = {
    "one": ParallelCachedEmbeddingBagTablewise,
    "split": ParallelCachedEmbeddingBagTablewiseSplitCache,
}
ONCE = [
    (1, "one", "row_wise", EvictionStrategy.LFU, 1),
    (2, "one", "adagrad", EvictionStrategy.DATASET, None),
    (4, "one", "sparse_adam", EvictionStrategy.BELADY, 0),
    (2, "split", "row_wise", EvictionStrategy.LRU, 4),
    (4, "split", "sgd", EvictionStrategy.LFU, None),
]
VALUES = ((1, 2, 4), [*KINDS], [*OPTIMIZERS], [*EvictionStrategy], (None, 0, 1, 4))


class Bags(NamedTuple):
    """Bags of all tables, in the order of the tables."""

    ids: Tensor
    offsets: Tensor


def batches(number: int, num_bags: int = 5, *, has_last: bool = False) -> Iterator[Bags]:
    """Yield bags of 0 to 3 ids."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        sizes = torch.randint(0, 4, (len(SIZES), num_bags), generator=generator)
        ids = [
            begin + (rows * torch.rand(int(own.sum()), generator=generator) ** 3).long()
            for begin, rows, own in zip(BEGINS, SIZES, sizes, strict=True)
        ]
        ends = sizes.flatten().cumsum(0)
        offsets = torch.cat([ends[:1] * 0, ends if has_last else ends[:-1]])
        yield Bags(torch.cat(ids), offsets)


def make_pair(
    kind: str, ranks: tuple[int | None, ...] = (None, None, None), **options: Any
) -> tuple[nn.Module, Any]:
    """Return torch's bags, and the module of all ranks, with the same tables."""
    options = {"mode": "sum", "sparse": True, **options}
    torch.manual_seed(0)
    configs = [
        TablewiseEmbeddingBagConfig(rows, rows // 3, rank) for rows, rank in zip(SIZES, ranks, strict=True)
    ]
    bag = KINDS[kind](configs, DIM, **options)
    own = {key: value for key, value in options.items() if key not in OWN}
    reference = nn.ModuleDict(
        {f"table_{table}": nn.EmbeddingBag(rows, DIM, **own) for table, rows in enumerate(SIZES)}
    )
    reference.load_state_dict(bag.state_dict())  # torch's own
    return reference, bag


def run_torch(reference: nn.Module, batch: Bags, factors: Tensor | None = None) -> Tensor:
    """Return the bags of torch, (bags, tables * dim)."""
    outputs = []
    for table, (bag, begin, rows) in enumerate(zip(reference.children(), BEGINS, SIZES, strict=True)):
        assert isinstance(bag, nn.EmbeddingBag)
        num_bags = (len(batch.offsets) - bag.include_last_offset) // len(SIZES)
        is_own = (batch.ids >= begin) & (batch.ids < begin + rows)
        offsets = batch.offsets[table * num_bags :][: num_bags + bag.include_last_offset]
        first = int((batch.ids < begin).sum())
        outputs.append(
            bag(batch.ids[is_own] - begin, offsets - first, None if factors is None else factors[is_own])
        )
    return torch.cat(outputs, 1)


def run_bag(bag: Any, batch: Bags, *args: Any) -> Tensor:
    """Return the bags of this rank's part of the batch."""
    if isinstance(bag, ParallelCachedEmbeddingBagTablewise):
        output: Tensor = bag(*batch, *args, already_split_along_rank=False)
    else:
        output = bag(*batch, *args)
    return output


def step(reference: nn.Module, bag: nn.Module, optimizers: list[Optimizer], batch: Bags) -> None:
    """Make a step of both with the same batch; outputs have equal bits."""
    whole, output = run_torch(reference, batch), run_bag(bag, batch)
    assert torch.equal(part_of(whole), output)
    for optimizer in optimizers:
        optimizer.zero_grad()
    num_ranks = dist.get_world_size()
    (sum(loss_of(part) for part in whole.tensor_split(num_ranks)) / num_ranks).backward()
    loss_of(output).backward()
    for optimizer in optimizers:
        optimizer.step()


def check_equal(reference: nn.Module, bag: nn.Module) -> None:
    """Check that all tables have equal bits."""
    wanted, found = reference.state_dict(), bag.state_dict()
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def train_200_steps(kind: str, name: str, strategy: EvictionStrategy, depth: int | None) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind, evict_strategy=strategy)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]
    loader: Any = batches(200)
    if depth is not None:
        whole = {"already_split_along_rank": False} if kind == "one" else {}
        loader = bag.prefetch(loader, depth, lambda batch: batch.ids, **whole)
    for batch in loader:
        step(reference, bag, optimizers, batch)
    check_equal(reference, bag)
    gpc.destroy()


@pytest.mark.parametrize(
    ("num_ranks", "kind", "name", "strategy", "depth"),
    once_and_pairs(ONCE, *VALUES),
)
def test_200_steps_have_the_bits_of_torch(
    num_ranks: int, kind: str, name: str, strategy: EvictionStrategy, depth: int | None
) -> None:
    run_ranks(train_200_steps, num_ranks, kind, name, strategy, depth)


def use_options(kind: str) -> None:
    colossalai.launch_from_torch({})
    assert ParallelCachedEmbeddingBagTablewiseSpiltCache is KINDS["split"]
    for options in (
        {"mode": "mean", "padding_idx": -2},
        {"mode": "sum", "include_last_offset": True, "padding_idx": 0},
        {"mode": "max", "sparse": False},
    ):
        # The tables of a rank are not neighbours, and the ranks are not in the order of tables.
        reference, bag = make_pair(kind, (1, 0, 1), **options)
        optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
        for batch in batches(10, has_last=bag.include_last_offset):
            step(reference, bag, optimizers, batch)
        for batch in batches(2, 1, has_last=bag.include_last_offset):  # fewer bags than ranks
            step(reference, bag, optimizers, batch)
        check_equal(reference, bag)
    reference, bag = make_pair(kind, (0, 0, 0), padding_idx=1)
    rows = torch.arange(3)[:, None, None] * torch.tensor(BEGINS)[:, None, None] * 0 + torch.randint(
        60, (3, 4, 2)
    )
    rows = (rows + torch.tensor(BEGINS)[:, None, None]).view(12, 2)  # bags in rows, without offsets
    each_table = [
        table(rows.view(3, 4, 2)[number] - BEGINS[number])
        for number, table in enumerate(reference.children())
    ]
    whole = {"already_split_along_rank": False} if kind == "one" else {}
    assert torch.equal(bag(rows, **whole), part_of(torch.cat(each_table, 1)))
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_torch(kind: str) -> None:
    run_ranks(use_options, 2, kind)


def weigh_samples(kind: str) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind, padding_idx=0)
    batch = next(batches(1))
    factors = [torch.rand(batch.ids.shape, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    whole = run_torch(reference, batch, factors[0].requires_grad_())
    (sum(loss_of(part) for part in whole.tensor_split(2)) / 2).backward()
    output = run_bag(bag, batch, factors[1].requires_grad_(), lambda bags: bags.view(-1, 3, DIM))
    loss_of(output.flatten(1)).backward()
    torch.testing.assert_close(factors[1].grad, factors[0].grad)
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_samples_and_a_shape_hook(kind: str) -> None:
    run_ranks(weigh_samples, 2, kind)


def split_batches() -> None:
    """Each rank is given the ids of its own tables only, or their slots."""
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    reference, bag = make_pair("one", (0, 1, 1))
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (reference, bag)]
    for number, batch in enumerate(batches(20)):
        whole = run_torch(reference, batch)
        begin = int((batch.ids < 60).sum())
        if rank == 0:
            own = Bags(batch.ids[:begin], batch.offsets[:5])
        else:
            own = Bags(batch.ids[begin:] - 60, batch.offsets[5:] - begin)
        if number % 2:
            bag.set_cache_op(number % 4 == 1)
            slots = bag.cache_weight_mgr.prepare_ids(own.ids)
            output = bag(slots, own.offsets, cache_op=False)
            bag.set_cache_op(True)
        else:
            output = bag(*own)
        assert torch.equal(output, part_of(whole))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(loss_of(part) for part in whole.tensor_split(2)) / 2).backward()
        loss_of(output).backward()
        for optimizer in optimizers:
            optimizer.step()
    check_equal(reference, bag)
    gpc.destroy()


def test_batches_that_are_split_along_ranks() -> None:
    run_ranks(split_batches, 2)


def count_bytes(kind: str) -> None:
    colossalai.launch_from_torch({})
    _, bag = make_pair(kind, (0, 0, 1))
    with ledger() as book:
        output = run_bag(bag, next(batches(1)))
        forward = book.num_bytes("exchange")
        output.sum().backward()
    num_own = 2 - dist.get_rank()
    assert forward == (5 - len(output)) * num_own * DIM * 4
    assert book.num_bytes("exchange") - forward == len(output) * (3 - num_own) * DIM * 4
    assert book.count("exchange") == 2
    assert book.count("all_gather") == 1
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_docstring(kind: str) -> None:
    run_ranks(count_bytes, 2, kind)


def save(kind: str, path: Path) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind)
    for batch in batches(5):
        step(reference, bag, [SGD(each.parameters(), lr=0.1) for each in (reference, bag)], batch)
    state = bag.state_dict()  # by all ranks
    if dist.get_rank() == 0:
        torch.save(state, path)
    gpc.destroy()


def load(kind: str, path: Path) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind)
    state = torch.load(path)
    reference.load_state_dict(state)
    bag.load_state_dict(state)
    for batch in batches(5):
        step(reference, bag, [SGD(each.parameters(), lr=0.1) for each in (reference, bag)], batch)
    check_equal(reference, bag)
    del state["table_1.weight"]
    state["table_2.weight"] = torch.zeros(1, 1)
    with pytest.raises(RuntimeError) as caught:
        bag.load_state_dict({**state, "other": torch.zeros(1)})
    for part in (
        'Missing key(s) in state_dict: "table_1.weight"',
        "size mismatch for table_2.weight",
        'Unexpected key(s) in state_dict: "other"',
    ):
        assert part in str(caught.value)
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_of_another_number_of_ranks(kind: str, tmp_path: Path) -> None:
    run_ranks(save, 2, kind, tmp_path / "state")
    other = "split" if kind == "one" else "one"
    run_ranks(load, 4, kind, tmp_path / "state")
    run_ranks(load, 1, other, tmp_path / "state")


def make_mistakes(kind: str) -> None:
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    _, bag = make_pair(kind, (0, 0, 1))
    batch = next(batches(1))
    other = batch._replace(ids=batch.ids.clone())
    other.ids[0] = 500  # for table 0, of rank 0
    error, text = (
        (RuntimeError, "failed on rank 0 along dp")
        if rank
        else (ValueError, "id 500 is out of range for table_0")
    )
    with pytest.raises(error, match=text):
        run_bag(bag, other)
    other.ids[0] = BEGINS[1]  # an id of the next table
    error, text = (
        (RuntimeError, "failed on rank 0") if rank else (ValueError, "id 60 .* whose ids are from 0 to 59")
    )
    with pytest.raises(error, match=text):
        run_bag(bag, other)
    with pytest.raises(
        ValueError, match=r"was given different batches \(5 bags on rank 0, 4 bags on rank 1\)"
    ):
        run_bag(bag, batch if rank == 0 else next(batches(1, 4)))
    with pytest.raises(ValueError, match="a batch of 14 bags is not one of 3 tables"):
        run_bag(bag, batch._replace(offsets=batch.offsets[:14]))
    many = Bags(torch.arange(210, 270), torch.zeros(3, dtype=torch.int64))
    error, text = (RuntimeError, "60 distinct") if rank else (RuntimeError, "failed on rank 1")
    with pytest.raises(error, match=text):  # more than the cache of rank 1 holds
        run_bag(bag, many)
    loss_of(run_bag(bag, batch)).backward()  # the ranks still work together
    state = bag.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    SGD(bag.parameters(), lr=0.1).step()
    assert all(torch.equal(state[key], value) for key, value in before.items())  # of one step on all ranks
    if rank:
        own = bag.cached_embedding_bag_list[0] if kind == "split" else bag
        own.cache_weight_mgr.flush = fail
    with pytest.raises(
        RuntimeError, match="rows of several" if rank else r"state_dict\(\) of .* failed on rank 1"
    ):
        bag.state_dict()
    if kind == "one":
        with pytest.raises(
            ValueError, match=r"was given slots \(cache_op=False\), and the batch has all tables"
        ):
            bag(*batch, already_split_along_rank=False, cache_op=False)
        _, bag = make_pair(kind, (0, 0, 0))
        error, text = (
            (ValueError, "rank 1 along dp has none of the tables")
            if rank
            else (RuntimeError, "failed on rank 1")
        )
        with pytest.raises(error, match=text):
            bag(*batch)
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(kind: str) -> None:
    run_ranks(make_mistakes, 2, kind)


def run_a_rank_without_tables(kind: str) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind, (0, 0, 0))
    batch = next(batches(1))
    factors = [torch.ones(batch.ids.shape, requires_grad=True) for _ in range(2)]
    whole = run_torch(reference, batch, factors[0])
    (sum(loss_of(part) for part in whole.tensor_split(2)) / 2).backward()
    # Recomputed on both ranks, and a gradient of the factors on both.
    output = checkpoint(lambda: run_bag(bag, batch, factors[1]), use_reentrant=False)
    loss_of(output).backward()
    torch.testing.assert_close(factors[1].grad, factors[0].grad)
    options = {"already_split_along_rank": False} if kind == "one" else {}
    for depth, error in ((-1, ValueError), (1, TypeError)):
        with pytest.raises(error):
            bag.prefetch([] if depth < 0 else 5, depth, lambda batch: batch.ids, **options)
    loader = batches(3)
    for number, _ in enumerate(bag.prefetch(loader, 1, lambda batch: batch.ids, **options), 1):
        assert len([*loader] if number == 1 else []) == (1 if number == 1 else 0)  # one was read ahead
    with pytest.raises(ValueError, match="Adam is not known to change only the rows"):
        Adam(bag.parameters()).step()
    Booster(plugin=TorchDDPPlugin()).boost(bag, SGD(bag.parameters(), lr=0.1))  # on both ranks
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_tables(kind: str) -> None:
    run_ranks(run_a_rank_without_tables, 2, kind)


class _Model(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, batch: Bags) -> Tensor:
        return run_bag(self.bag, batch)


def freeze_tables(kind: str) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(kind, (0, 0, 1))
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (reference, bag)]
    for number in (0, 1):
        reference.get_submodule(f"table_{number}").requires_grad_(False)
    if dist.get_rank() == 0:  # all tables of a rank, of which others do not know
        bag.requires_grad_(False)
    for batch in batches(5):
        step(reference, bag, optimizers, batch)
    check_equal(reference, bag)
    pair = [TablewiseEmbeddingBagConfig(20, 10, rank) for rank in (0, 1)]  # torch refuses other shapes
    whole = DistributedDataParallel(_Model(KINDS[kind](pair, DIM, warmup_ratio=0.0)))
    with pytest.raises(RuntimeError, match=r"is in a DistributedDataParallel, .* wrap the dense layers only"):
        whole(Bags(torch.tensor([1, 21]), torch.tensor([0, 1])))
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tables(kind: str) -> None:
    run_ranks(freeze_tables, 2, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_the_bits_of_torch(kind: str) -> None:
    """With factors, and in bfloat16, where torch computes otherwise without padding."""
    generator = torch.Generator().manual_seed(0)
    for options in ({}, {"dtype": torch.bfloat16}):
        torch.manual_seed(0)
        bag = KINDS[kind](
            [TablewiseEmbeddingBagConfig(50), TablewiseEmbeddingBagConfig(20)],
            16,
            padding_idx=0,
            mode="sum",
            sparse=True,
            cache_ratio=1.0,
            **options,
        )
        ids = torch.cat(
            [
                torch.randint(50, (32, 10), generator=generator),
                50 + torch.randint(20, (32, 10), generator=generator),
            ]
        )
        factors = torch.randn(ids.shape, generator=generator).to(bag.state_dict()["table_0.weight"].dtype)
        outputs = []
        for table, own in enumerate(ids.chunk(2)):
            reference = nn.EmbeddingBag((50, 20)[table], 16, padding_idx=0, mode="sum", **options)
            reference.load_state_dict({"weight": bag.state_dict()[f"table_{table}.weight"]})
            outputs.append(reference(own - table * 50, None, factors.chunk(2)[table]))
        assert torch.equal(run_bag(bag, Bags(ids, None), factors), torch.cat(outputs, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_are_those_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    bag = KINDS[kind](
        [TablewiseEmbeddingBagConfig(5), TablewiseEmbeddingBagConfig(6)],
        4,
        mode="sum",
        include_last_offset=True,
        cache_ratio=1.0,
    )
    weight = torch.cat([*bag.state_dict().values()])
    ids = torch.tensor([1, 2, 3, 6, 7, 8])
    output = run_bag(bag, Bags(ids, torch.tensor([0, 2, 3, 4, 4])))  # two ids after the last bag
    assert torch.equal(
        output,
        torch.stack([torch.cat([weight[1] + weight[2], weight[6]]), torch.cat([weight[3], weight[6] * 0])]),
    )
    for offsets in ([1, 2, 3, 4, 4], [0, 2, 1, 4, 4], [0, 2, 3, 4, 999]):
        with pytest.raises(ValueError, match="offsets must rise from 0"):
            run_bag(bag, Bags(ids, torch.tensor(offsets)))


def test_tables_do_not_share_initial_weights() -> None:
    weight = torch.ones(3, 4, dtype=torch.float64)
    configs = [TablewiseEmbeddingBagConfig(3, initial_weight=weight)]
    bags = [KINDS[kind](configs, 4, mode="sum", cache_ratio=1.0) for kind in KINDS]
    for bag in bags:
        optimizer = SGD(bag.parameters(), lr=0.1)
        run_bag(bag, Bags(torch.tensor([[1]]), None)).sum().backward()  # type: ignore[arg-type]
        optimizer.step()
        assert bag.state_dict()["table_0.weight"].dtype == torch.float32
        assert bag.state_dict()["table_0.weight"].sum() == pytest.approx(12 - 0.4)
    assert weight.sum() == 12


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_tables(kind: str) -> None:
    table, make = TablewiseEmbeddingBagConfig, KINDS[kind]
    with pytest.raises(ValueError, match="two tables have the name 'users'"):
        make([table(10, name="users"), table(20, name="users")], 4)
    with pytest.raises(ValueError, match="padding_idx is 10, and table_1 has 5 rows"):
        make([table(20), table(5)], 4, padding_idx=10)
    with pytest.raises(
        ValueError, match=r"initial_weight of table_0 has the shape \(3, 3\); it must be .* \(3, 4\)"
    ):
        make([table(3, initial_weight=torch.zeros(3, 3))], 4)
    with pytest.raises(TypeError, match="initial_weight of table_0 is not a tensor"):
        make([table(3, initial_weight=[[1, 2, 3, 4]] * 3)], 4)
    with pytest.raises(ValueError, match="cache_ratio is 0; it must be above 0"):
        make([table(3)], 4, cache_ratio=0)
    with pytest.raises(ValueError, match="it has at least one row and one column"):
        make([table(3)], 0)
    with pytest.raises(ValueError, match=r"max_norm=1\.0: .*CachedEmbeddingBag.* writes back"):
        make([table(3)], 4, max_norm=1.0)
    for wrong in (None, 3, [3], {"a": table(3)}):
        with pytest.raises(TypeError, match="give a list with a TablewiseEmbeddingBagConfig for each"):
            make(wrong, 4)
    if kind == "one":
        with pytest.raises(TypeError, match="has several tables: give each"):
            make.from_pretrained(torch.zeros(3, 4))
        with pytest.raises(ValueError, match="tables are given twice"):
            make([table(1, initial_weight=torch.zeros(1, 1))], 1, _weight=torch.zeros(1, 1))
        with pytest.raises(ValueError, match="table 1 has no ids_freq_mapping, and others have"):
            make([table(2, ids_freq_mapping=[1, 2]), table(3)], 4)
        with pytest.raises(
            ValueError, match=r"_weight has the shape \(2, 4\); the tables of this rank have \(5, 4\)"
        ):
            make([table(2), table(3)], 4, _weight=torch.zeros(2, 4))
    else:
        for name in ("forward", "placement", "spare_weight", "_tables", "training"):
            with pytest.raises(ValueError, match=f"a table has the name '{name}', which is an attribute"):
                make([table(3, name=name)], 4)


def test_one_cache_begins_with_the_most_frequent_rows_of_all_tables() -> None:
    table = TablewiseEmbeddingBagConfig
    bag = ParallelCachedEmbeddingBagTablewise(
        [table(10, 2), table(10, 2, pooling_factor=2)], 4, warmup_ratio=1.0
    )
    assert sorted(bag.cache_weight_mgr.row_of.tolist()) == [0, 10, 11, 12]
    given = [table(10, 1, ids_freq_mapping=range(10)), table(10, 1, ids_freq_mapping=range(10, 20))]
    bag = ParallelCachedEmbeddingBagTablewise(given, 4, warmup_ratio=1.0)
    assert sorted(bag.cache_weight_mgr.row_of.tolist()) == [18, 19]
    padded = ParallelCachedEmbeddingBagTablewise(given, 4, padding_idx=0)
    assert len(padded.cache_weight_mgr.param) == 3  # the row of padding has a slot of its own


def test_initial_weights() -> None:
    table, weight = TablewiseEmbeddingBagConfig, torch.rand(3, 4)
    for make in KINDS.values():
        bag = make([table(2, name="a"), table(3, initial_weight=weight, name="b")], 4)
        assert torch.equal(bag.state_dict()["b.weight"], weight)
