"""Ranks that are given their own parts of a batch have the bits of torch in one process."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.parallel.layers import ParallelCachedEmbeddingBag
from tests.nn.layer.cached_embedding.parallel.test_columns import loss_of
from tests.nn.layer.cached_embedding.parallel.test_tablewise import BEGINS, DIM, SIZES, Bags
from tests.nn.layer.cached_embedding.parallel.test_tablewise import make_pair as make_tables
from tests.nn.layer.cached_embedding.rankers import PLUGINS, make_rankers
from tests.nn.layer.cached_embedding.rankers import loss_of as error_of
from tests.nn.layer.cached_embedding.tables import OPTIMIZERS
from tests.nn.layer.cached_embedding.test_doors import check_equal, make_optimizers
from tests.ranks import run_ranks
from tests.tiers import once_and_pairs

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

ONCE = [
    (2, "columns", "sparse_adam", 1),
    (4, "columns", "sgd", None),
    (1, "one", "adagrad", 0),
    (4, "one", "row_wise", 4),
    (2, "split", "row_wise", 1),
    (4, "split", "sparse_adam", 0),
]
KINDS = ("columns", "one", "split")
VALUES = ((1, 2, 4), KINDS, [*OPTIMIZERS], (None, 0, 1, 4))


def make_pair(kind: str, **options: Any) -> tuple[nn.Module, Any]:
    """Return bags of torch, and the module of all ranks, with the same tables."""
    if kind != "columns":
        # With 4 ranks one has no tables; those of rank 1 are not neighbours.
        ranks = (1, 0, 1) if dist.is_initialized() and dist.get_world_size() > 1 else (0, 0, 0)
        return make_tables(kind, ranks, local_batches=True, **options)
    options = {"mode": "sum", "sparse": True, **options}
    torch.manual_seed(0)
    bag = ParallelCachedEmbeddingBag(sum(SIZES), 8, cache_ratio=0.5, local_batches=True, **options)
    reference = nn.EmbeddingBag(sum(SIZES), 8, **options)
    reference.load_state_dict(bag.state_dict())
    return reference, bag


def parts_of(number: int, *, has_last: bool = False) -> Iterator[list[Bags]]:
    """Yield batches of each rank, of 0 to 5 samples, which have 0 to 3 ids of each table."""
    generator = torch.Generator().manual_seed(0)
    for step in range(number):
        parts = []
        for rank in range(dist.get_world_size()):
            sizes = torch.randint(0, 4, (len(SIZES), (step + 2 * rank) % 6), generator=generator)
            ids = [
                begin + (rows * torch.rand(int(own.sum()), generator=generator) ** 3).long()
                for begin, rows, own in zip(BEGINS, SIZES, sizes, strict=True)
            ]
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.flatten().cumsum(0)])
            parts.append(Bags(torch.cat(ids), ends if has_last else ends[:-1]))
        yield parts


def run_torch(reference: nn.Module, batch: Bags, factors: Tensor | None = None) -> Tensor:
    """Return the bags of one part in one process, (samples, tables * dim), or (bags, dim) of one table."""
    if isinstance(reference, nn.EmbeddingBag):
        whole: Tensor = reference(*batch, factors)
        return whole
    tables = [*reference.children()]
    has_last = tables[0].include_last_offset
    num_bags = (len(batch.offsets) - bool(has_last)) // len(tables)
    ends = [*batch.offsets.tolist(), *([] if has_last else [len(batch.ids)])]
    outputs = []
    for number, (table, begin) in enumerate(zip(tables, BEGINS, strict=True)):
        bounds = ends[number * num_bags :][: num_bags + 1]
        own = slice(bounds[0], bounds[-1])
        offsets = torch.tensor(bounds if has_last else bounds[:-1], dtype=torch.int64) - bounds[0]
        outputs.append(table(batch.ids[own] - begin, offsets, None if factors is None else factors[own]))
    return torch.cat(outputs, 1)


def run_torch_on_all(reference: nn.Module, parts: list[Bags]) -> list[Tensor]:
    """Return the bags of each part, looked up together: rows have one gradient, in the order of the ranks."""
    tables = [reference] if isinstance(reference, nn.EmbeddingBag) else [*reference.children()]
    has_last = tables[0].include_last_offset
    sizes = []
    of_tables: list[list[tuple[Tensor, Tensor]]] = [[] for _ in tables]
    for part in parts:
        ends = part.offsets if has_last else torch.cat([part.offsets, torch.tensor([len(part.ids)])])
        lengths = ends.diff().view(len(tables), -1)
        sizes.append(lengths.shape[1])
        for table, own in enumerate(zip(lengths, part.ids.split(lengths.sum(1).tolist()), strict=True)):
            of_tables[table].append(own)
    outputs = []
    for table, own in enumerate(of_tables):
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), *(lengths for lengths, _ in own)]).cumsum(0)
        begin = BEGINS[table] if len(tables) > 1 else 0
        ids = torch.cat([ids for _, ids in own]) - begin
        outputs.append(tables[table](ids, ends if has_last else ends[:-1]))
    return [*torch.cat(outputs, 1).split(sizes)]


def train(kind: str, name: str, depth: int | None, options: dict[str, Any]) -> None:
    colossalai.launch_from_torch({})
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    reference, bag = make_pair(kind, **options)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]
    loader: Any = parts_of(24, has_last=bag.include_last_offset)
    if depth is not None:
        loader = bag.prefetch(loader, depth, lambda parts: parts[rank].ids)
    for parts in loader:
        wanted, output = run_torch_on_all(reference, parts), bag(*parts[rank])
        assert torch.equal(wanted[rank], output)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(loss_of(each) for each in wanted) / num_ranks).backward()
        loss_of(output).backward()
        for optimizer in optimizers:
            optimizer.step()
    check_equal(reference, bag.state_dict(), 0.0)
    gpc.destroy()


@pytest.mark.parametrize(("num_ranks", "kind", "name", "depth"), once_and_pairs(ONCE, *VALUES))
def test_training_has_the_bits_of_torch(num_ranks: int, kind: str, name: str, depth: int | None) -> None:
    if (kind, name) == ("columns", "row_wise"):
        name = "adagrad"  # whole rows are needed
    run_ranks(train, num_ranks, kind, name, depth, {})


def use_options(kind: str) -> None:
    for options in (
        {"mode": "mean", "padding_idx": -2},
        {"mode": "sum", "include_last_offset": True, "padding_idx": 0},
        {"mode": "max", "sparse": False},
    ):
        train(kind, "adagrad", None, options)
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    reference, bag = make_pair(kind)
    # Bags in rows, whose width is that of the part's longest bag.
    ids = torch.arange(3 * 2 * (3 - rank), dtype=torch.int32).view(3 * 2, -1) % 50
    if kind != "columns":
        ids += torch.tensor(BEGINS).repeat_interleave(2)[:, None].int()
    wanted = run_torch(reference, Bags(ids.flatten().long(), torch.arange(6) * ids.shape[1]))
    assert torch.equal(bag(ids), wanted)
    with torch.no_grad():
        assert torch.equal(bag(ids), wanted)
    _, bag = make_pair(kind, include_last_offset=True)
    offsets = torch.arange(7) * ids.shape[1]
    more = torch.cat([ids.flatten(), ids[0]])  # ids after the last bag, of one rank
    output = bag(more if rank else ids.flatten(), offsets)
    assert torch.equal(output, bag(ids.flatten(), offsets))
    assert "local_batches=True" in repr(bag) or kind == "split"
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_torch(kind: str) -> None:
    run_ranks(use_options, 2, kind)


def weigh_samples(kind: str, hook: bool) -> None:
    """The gradient of factors is that of this rank's loss, which `DistributedDataParallel` averages."""
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    reference, bag = make_pair(kind)
    part = [*parts_of(4)][-1][rank]
    factors = [torch.rand(part.ids.shape, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    wanted = run_torch(reference, part, factors[0].requires_grad_())
    output = bag(*part, factors[1].requires_grad_())
    assert torch.equal(output, wanted)
    for each in (wanted, output):
        loss_of(each).backward()
    torch.testing.assert_close(factors[1].grad, factors[0].grad)
    if hook:  # of the bags of each part, whose number differs
        args = (None, lambda bags: bags.view(-1, 3, bags.shape[1]).transpose(0, 1))
        output = bag(*part, *args, scatter_dim=1)
        assert torch.equal(output, run_torch(reference, part).view(-1, 3, 8).transpose(0, 1))
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_samples_and_a_shape_hook(kind: str) -> None:
    run_ranks(weigh_samples, 4, kind, kind == "columns")


def count_bytes(kind: str) -> None:
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    _, bag = make_pair(kind)
    parts = [*parts_of(4)][-1]
    with ledger() as book:
        output = bag(*parts[rank])
    sizes = [part.offsets.numel() for part in parts]
    if kind == "columns":
        ids = 8 * (sizes[rank] + len(parts[rank].ids))
        rows = sum(sizes[1 - rank : 2 - rank]) * 4 * 4  # the other's bags of this rank's columns
    else:  # rank 0 has the second table, rank 1 the two others
        own_ids, num_own = parts[rank].ids, (1, 2)[rank]
        is_second = (own_ids >= BEGINS[1]) & (own_ids < BEGINS[2])
        sent = (~is_second if rank == 0 else is_second).sum()
        ids = 8 * (sizes[rank] // 3 * (3 - num_own) + int(sent))
        rows = sizes[1 - rank] // 3 * num_own * DIM * 4
    assert book.num_bytes("exchange") == ids + rows
    assert len(output) == sizes[rank] // (1 if kind == "columns" else 3)
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_docstring(kind: str) -> None:
    run_ranks(count_bytes, 2, kind)


def samples() -> TensorDataset:
    """Return samples of the rankers: ids, (samples, tables, 3), features, targets and numbers."""
    generator = torch.Generator().manual_seed(0)
    ids = [
        begin + torch.randint(rows, (22, 1, 3), generator=generator)
        for begin, rows in zip((0, 60, 210), (60, 150, 90), strict=True)
    ]
    features = torch.rand(22, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.cat(ids, 1), features, features.sum(1), torch.arange(22))


def of_tables(ids: Tensor) -> Tensor:
    """Return ids of samples in the order of the tables."""
    return ids.transpose(0, 1).reshape(-1, 3)


def train_by_a_loader(plugin: str, kind: str) -> None:
    """A loader of a plugin, as for any model, and its results by `gather_for_metrics`."""
    colossalai.launch_from_torch({})
    made = PLUGINS[plugin]()
    booster = Booster(plugin=made)
    reference, raw = make_rankers(kind, local_batches=True, cache_ratio=0.8)
    dataset = samples()
    wanted = make_optimizers("sparse_adam", reference)
    loader = made.prepare_dataloader(dataset, batch_size=4, shuffle=True, drop_last=True)
    model, optimizers, _, loader, _ = booster.boost(
        raw, make_optimizers("sparse_adam", raw), dataloader=loader
    )

    table: Any = raw.tables if kind != "columns" else next(iter(raw.tables.children()))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for own, dense, targets, numbers in table.prefetch(loader, ids=lambda batch: of_tables(batch[0])):
            order = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
            dist.all_gather(order, numbers)
            whole = [each[torch.cat(order)] for each in dataset.tensors]
            for optimizer in (*wanted, *optimizers):
                optimizer.zero_grad()
            error_of(reference(of_tables(whole[0]), whole[1]), whole[2]).backward()
            booster.backward(error_of(model(of_tables(own), dense), targets), optimizers[0])
            for optimizer in (*wanted, *optimizers):
                optimizer.step()
    check_equal(reference, model.state_dict())
    loader = made.prepare_dataloader(dataset, batch_size=4)  # of 22 samples, the last batch is shorter
    model.eval()
    scores = []
    with torch.no_grad():
        for own, dense, *_ in loader:
            scores.append(booster.gather_for_metrics(model(of_tables(own), dense), loader))
        expected = reference(of_tables(dataset.tensors[0]), dataset.tensors[1])
    torch.testing.assert_close(torch.cat(scores), expected, rtol=1e-10, atol=1e-10)
    gpc.destroy()


@pytest.mark.parametrize(
    ("plugin", "kind"), [("ddp", "columns"), ("zero2", "one"), ("gemini", "split"), ("fsdp", "one")]
)
def test_a_loader_of_a_plugin(plugin: str, kind: str) -> None:
    run_ranks(train_by_a_loader, 2, plugin, kind)


def read_a_loader_ahead() -> None:
    """A loader counts the batches of the loop: for windows of accumulation, results and checkpoints."""
    colossalai.launch_from_torch({})
    records = []
    for depth in (None, 0, 4):
        plugin = PLUGINS["ddp"]()
        booster = Booster(plugin=plugin, gradient_accumulation=2)
        _, raw = make_rankers("one", local_batches=True, cache_ratio=0.8)
        loader = plugin.prepare_dataloader(samples(), batch_size=4, shuffle=True)
        table = raw.tables
        model, [optimizer], _, loader, _ = booster.boost(raw, make_optimizers("sgd", raw), dataloader=loader)
        record: list[Any] = []
        for _ in range(2):
            ahead = loader
            if depth is not None:
                ahead = table.prefetch(loader, depth, lambda batch: of_tables(batch[0]))
            for own, dense, targets, numbers in ahead:  # 3 batches: a window of 2, and one of 1
                booster.backward(error_of(model(of_tables(own), dense), targets), optimizer)
                optimizer.step()
                optimizer.zero_grad()
                record += [loader.state_dict(), booster.gather_for_metrics(numbers).tolist()]
            record.append(loader.state_dict())
        records.append((record, model.state_dict()))
    (wanted, state), *others = records
    for record, other in others:
        assert record == wanted
        for key, value in state.items():
            assert torch.equal(other[key], value), key
    gpc.destroy()


def test_counts_of_a_loader_that_is_read_ahead() -> None:
    run_ranks(read_a_loader_ahead, 2)


def count_misses() -> None:
    """The window has the rows that the lookup needs, with one row of padding for all tables."""
    colossalai.launch_from_torch({})
    generator = torch.Generator().manual_seed(0)
    begins = torch.tensor(BEGINS)[:, None, None]
    parts = [
        [torch.randint(60, (3, 2, 4), generator=generator) + begins for _ in range(2)] for _ in range(12)
    ]
    misses = []
    for is_local in (True, False):
        _, bag = make_tables("one", (1, 0, 1), padding_idx=0, warmup_ratio=0.0, local_batches=is_local)
        loader = [(part[dist.get_rank()] if is_local else torch.cat(part, 1)).flatten(0, 1) for part in parts]
        whole = {} if is_local else {"already_split_along_rank": False}
        with torch.no_grad():
            for ids in bag.prefetch(loader, 2, **whole):
                bag(ids, **whole)
        misses.append(bag.num_miss_history)
    assert misses[0] == misses[1]
    gpc.destroy()


def test_windows_are_those_of_whole_batches() -> None:
    run_ranks(count_misses, 2)


class _Failing:
    """A loader of batches that ends early, or fails."""

    def __init__(self, number: int, failure: Exception | None = None) -> None:
        self.number, self.failure = number, failure

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.number):
            yield torch.tensor([1, 70, 220])
        if self.failure is not None:
            raise self.failure


class _Closed:
    """A loader that cannot begin."""

    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("no file")


def read(loader: Iterable[Tensor], seen: list[Tensor]) -> None:
    """Read a loader, and keep the batches that came before an error."""
    for batch in loader:
        seen.append(batch)


def read_different_loaders(kind: str) -> None:
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    _, bag = make_pair(kind)
    _, other = make_pair("columns")
    alone = ParallelCachedEmbeddingBag(sum(SIZES), 8, cache_ratio=0.5)  # of whole batches
    for depth in (0, 2):
        for chained in (False, True):
            for number, failure, text in (
                (3 + rank, None, r"has ended on rank 0 along dp, and goes on on rank 1: give all ranks as m"),
                (3, RuntimeError("no disk") if rank else None, r"no disk"),
                (3 - rank, ValueError("bad line") if rank else None, r"bad line"),
            ):
                loader: Any = _Failing(number, failure)
                if chained:
                    loader = other.prefetch(loader, depth)
                seen: list[Tensor] = []
                with pytest.raises((RuntimeError, ValueError), match=text):
                    read(bag.prefetch(loader, depth), seen)
                assert len(seen) == 3 - (text == "bad line"), text
    with pytest.raises((TypeError, RuntimeError), match="prefetch found int for the ids of a batch"):
        next(iter(bag.prefetch(_Failing(2), 1, lambda batch: 1 if rank else batch)))
    with pytest.raises((TypeError, RuntimeError), match="prefetch found int for the ids of a batch"):
        next(iter(alone.prefetch(bag.prefetch(_Failing(2), 1), 1, lambda batch: 1 if rank else batch)))
    with pytest.raises((OSError, RuntimeError), match="no file"):
        next(iter(bag.prefetch(_Closed() if rank else _Failing(2), 1)))
    ahead = bag.prefetch(iter(_Failing(2 + 2 * rank)), 0)
    for number in (2, 0):  # again for the next loop
        seen = []
        with pytest.raises(RuntimeError, match=r"has ended on rank 0 along dp, and goes on on rank 1"):
            read(ahead, seen)
        assert len(seen) == number
    with pytest.raises(
        RuntimeError,
        match=r"do different things \(the next batch of the loader of .* on rank 0, the batch of",
    ):
        bag(torch.tensor([[1], [70], [220]])) if rank else next(iter(bag.prefetch(_Failing(2))))
    assert [len(batch) for batch in bag.prefetch(_Failing(2), 1)] == [3, 3]  # the ranks still work together
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_loaders_of_different_lengths(kind: str) -> None:
    run_ranks(read_different_loaders, 2, kind)


def make_mistakes(kind: str) -> None:
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    _, bag = make_pair(kind)
    ids, offsets = torch.tensor([1, 70, 220]), torch.arange(3)
    ones = torch.ones(3)
    for args, text in (
        ((ids + 1000 * rank, offsets), "is out of range for"),
        ((ids.double() if rank else ids, offsets), "ids are of type torch.float64; they must be a tensor"),
        ((ids, None if rank else offsets), r"have the shape \(3,\)"),
        (
            (ids, offsets / 2 if rank else offsets),
            "offsets are of type torch.float32; they must be a tensor of",
        ),
        (
            (ids, [0, 1, 2] if rank else offsets),
            "offsets are of type list; they must be a tensor of torch.int64",
        ),
        ((ids, offsets[None] if rank else offsets), r"offsets have the shape \(1, 3\); it must be \(bags,\)"),
        (
            (ids, offsets, ones.double() if rank else ones),
            "are of type torch.float64, and the table is of torch.float32",
        ),
        ((ids, offsets.flip(0) if rank else offsets), r"offsets must rise from 0 to at most .* 3, and are"),
        (
            (ids, offsets, torch.ones(2 + (not rank))),
            r"per_sample_weights have the shape \(2,\), and the i",
        ),
        ((ids, offsets, None if rank else ones), r"\(some without a gradient on rank 0, no per_sample_weig"),
        (
            (ids, offsets, ones.clone().requires_grad_(rank == 1)),
            "some without a gradient on rank 0, some with a gradient on rank 1",
        ),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            bag(*args)
    if kind != "columns":
        with pytest.raises((ValueError, RuntimeError), match="a batch of 2 bags is not one of 3 tables"):
            bag(ids, offsets[: 3 - rank])
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(RuntimeError, match=r"under torch.no_grad\(\) on r"),
    ):
        bag(ids, offsets)
    if kind == "one":
        with pytest.raises(
            (ValueError, RuntimeError), match="local_batches=True, so a batch has all tables for the samples"
        ):
            bag(ids, offsets, already_split_along_rank=rank == 1)
        with pytest.raises(ValueError, match="local_batches=True, so a batch has all tables for the samples"):
            bag.prefetch([], already_split_along_rank=True)
        assert torch.equal(bag(ids, offsets, already_split_along_rank=False), bag(ids, offsets))
    if kind != "split":
        bag.set_cache_op(False)
        with pytest.raises(ValueError, match=r"was given slots \(cache_op=False\), which other ranks do not"):
            bag(ids, offsets)
        bag.set_cache_op(True)
    if kind == "columns":
        last = make_pair(kind, include_last_offset=True)[1]
        with pytest.raises(
            (ValueError, RuntimeError), match=r"offsets have the shape \(0,\); it must be .*\+ 1"
        ):
            last(ids, offsets[:0] if rank else offsets)
        with pytest.raises(
            ValueError, match=r"different batches \(6 bags on rank 0, 4 bags on rank 1\): give"
        ):
            bag(ids, offsets, None, lambda bags: bags if rank == 0 else bags[:2])
    loss_of(bag(ids, offsets)).backward()  # the ranks still work together
    gpc.destroy()


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes(kind: str) -> None:
    run_ranks(make_mistakes, 2, kind)
