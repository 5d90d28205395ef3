"""A bag whose columns are on several ranks has the bits of torch's in one process."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer.cached_embedding import EvictionStrategy, ParallelCachedEmbeddingBag
from colossalai.nn.optimizer import RowWiseAdagrad
from tests.nn.layer.cached_embedding.tables import DIM, NUM_ROWS, OPTIMIZERS, OWN, batches
from tests.ranks import run_ranks
from tests.tiers import once_and_pairs

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

COLUMN_WISE = ("sgd", "adagrad", "sparse_adam")
ONCE = [
    (1, "sgd", EvictionStrategy.LFU, 0.1, 4),
    (2, "adagrad", EvictionStrategy.DATASET, 0.06, 0),
    (4, "sparse_adam", EvictionStrategy.LRU, 1.0, None),
    (2, "sparse_adam", EvictionStrategy.BELADY, 0.1, 1),
]
VALUES = ((1, 2, 4), COLUMN_WISE, [*EvictionStrategy], (0.06, 0.1, 1.0), (None, 0, 1, 4))


def make_pair(**options: Any) -> tuple[nn.EmbeddingBag, ParallelCachedEmbeddingBag]:
    """Return torch's bag and the one of all ranks with the same table."""
    options = {"mode": "sum", "sparse": True, "cache_ratio": 0.2, **options}
    own = {key: options.pop(key) for key in (*OWN, "cache_ratio") if key in options}
    torch.manual_seed(0)
    reference = nn.EmbeddingBag(NUM_ROWS, DIM, **options)
    torch.manual_seed(0)
    return reference, ParallelCachedEmbeddingBag(NUM_ROWS, DIM, **options, **own)


def part_of(whole: Tensor) -> Tensor:
    """Return this rank's part of the bags."""
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()]


def loss_of(output: Tensor) -> Tensor:
    """Return a loss of the bags of one part of the batch."""
    return (output * torch.linspace(0.5, 2, output.numel()).view_as(output)).square().sum()


def step(reference: nn.Module, bag: nn.Module, optimizers: list[Optimizer], *args: Any) -> None:
    """Make a step of both with the same batch; outputs have equal bits."""
    whole, output = reference(*args), bag(*args)
    assert torch.equal(part_of(whole), output)
    for optimizer in optimizers:
        optimizer.zero_grad()
    num_ranks = dist.get_world_size()
    (sum(loss_of(part) for part in whole.tensor_split(num_ranks)) / num_ranks).backward()
    loss_of(output).backward()
    for optimizer in optimizers:
        optimizer.step()


def columns_of(whole: Tensor) -> Tensor:
    """Return the columns of this rank."""
    return whole.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def check_equal(reference: nn.EmbeddingBag, bag: ParallelCachedEmbeddingBag) -> None:
    """Check that whole tables, and the columns of this rank, have equal bits."""
    assert torch.equal(bag.state_dict()["weight"], reference.weight)
    assert torch.equal(bag.weight, columns_of(reference.weight))


def train_200_steps(name: str, strategy: EvictionStrategy, ratio: float, depth: int | None) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(
        cache_ratio=ratio, evict_strategy=strategy, ids_freq_mapping=torch.arange(NUM_ROWS).flip(0)
    )
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]
    loader = batches(200) if depth is None else bag.prefetch(batches(200), depth=depth)
    for ids in loader:
        step(reference, bag, optimizers, ids)
    check_equal(reference, bag)
    wanted, found = (each.state_dict()["state"].get(0, {}) for each in optimizers)
    assert wanted.keys() == found.keys()
    for key, value in wanted.items():
        own = columns_of(value) if isinstance(value, Tensor) and value.dim() else value
        torch.testing.assert_close(found[key], own, rtol=0, atol=0)
    if ratio < 1:
        assert sum(bag.num_write_back_history) > 300
    gpc.destroy()


@pytest.mark.parametrize(
    ("num_ranks", "name", "strategy", "ratio", "depth"),
    once_and_pairs(ONCE, *VALUES),
)
def test_200_steps_have_the_bits_of_torch(
    num_ranks: int, name: str, strategy: EvictionStrategy, ratio: float, depth: int | None
) -> None:
    run_ranks(train_200_steps, num_ranks, name, strategy, ratio, depth)


def use_options() -> None:
    colossalai.launch_from_torch({})
    offsets = torch.tensor([0, 3, 3, 10, 17])
    for options in (
        {"mode": "mean", "padding_idx": -3},
        {"mode": "sum", "include_last_offset": True, "padding_idx": 0},
        {"mode": "sum", "dtype": torch.bfloat16},
        {"mode": "max", "sparse": False},
    ):
        reference, bag = make_pair(**options)
        optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
        for ids in batches(10):
            ids[0, :2] = torch.tensor([0, NUM_ROWS - 3])
            where = torch.cat([offsets, torch.tensor([24])]) if bag.include_last_offset else offsets
            step(reference, bag, optimizers, ids.flatten().int(), where.int())
            step(reference, bag, optimizers, ids[:1])  # fewer bags than ranks
        check_equal(reference, bag)
        with torch.no_grad():  # in parts, in which the ranks agree
            bag.overflow, ids = "split", torch.arange(NUM_ROWS).view(40, 10)
            assert torch.equal(bag(ids), part_of(reference(ids)))
    gpc.destroy()


def test_options_of_torch() -> None:
    run_ranks(use_options, 4)


def accumulate() -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(cache_ratio=0.5)
    bag = copy.deepcopy(bag).float()
    optimizers = [OPTIMIZERS["sparse_adam"](each.parameters()) for each in (reference, bag)]
    for number, (left, right) in enumerate(zip(batches(20), batches(20, seed=1), strict=True)):
        whole, output = (each(left) * each(right) + each(left) for each in (reference, bag))
        (sum(loss_of(part) for part in whole.tensor_split(2)) / 2).backward()
        loss_of(output).backward()
        if number % 4 == 3:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    check_equal(reference, bag)
    gpc.destroy()


def test_accumulation_over_a_table_that_is_used_twice() -> None:
    run_ranks(accumulate, 2)


def weigh_samples() -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(sparse=False)
    ids = next(batches(1))
    factors = [torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    (
        sum(loss_of(part) for part in reference(ids, None, factors[0].requires_grad_()).tensor_split(2)) / 2
    ).backward()
    output = bag(ids, None, factors[1].requires_grad_(), lambda bags: bags.view(6, 2, 2), gather_dim=2)
    assert output.shape == (3, 2, 4)
    loss_of(torch.cat([output[..., :2].reshape(3, 4), output[..., 2:].reshape(3, 4)], 1)).backward()
    torch.testing.assert_close(factors[1].grad, factors[0].grad)  # on each rank that of the mean loss
    gpc.destroy()


def test_weights_of_samples_and_a_shape_hook() -> None:
    run_ranks(weigh_samples, 2)


def train_dense_layers() -> None:
    """The bag, and a linear layer under DDP, have the values of one process."""
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")  # without a launch: the ranks are those of torch
    reference, bag = make_pair()
    head = nn.Linear(DIM, 1)
    for param in head.parameters():
        nn.init.constant_(param, 0.1)
    dense, own_head = copy.deepcopy(head), DistributedDataParallel(head)
    whole = SGD([*reference.parameters(), *dense.parameters()], lr=0.01)
    parts = SGD([*bag.parameters(), *own_head.parameters()], lr=0.01)
    for ids in batches(20, (8, 4)):
        targets = ids.remainder(3).sum(1, keepdim=True).double()
        for optimizer in (whole, parts):
            optimizer.zero_grad()
        (dense(reference(ids)) - targets).square().mean().backward()
        (own_head(bag(ids)) - part_of(targets)).square().mean().backward()
        for optimizer in (whole, parts):
            optimizer.step()
    torch.testing.assert_close(bag.state_dict()["weight"], reference.weight.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(head.weight, dense.weight, rtol=1e-10, atol=1e-10)
    dist.destroy_process_group()


def test_dense_layers_under_ddp() -> None:
    run_ranks(train_dense_layers, 2)


def count_bytes() -> None:
    colossalai.launch_from_torch({})
    _, bag = make_pair()
    num_bags = 6
    with ledger() as book:
        output = bag(next(batches(1, (num_bags, 4))))
        forward = book.num_bytes("exchange")
        output.sum().backward()
    elements = (num_bags - len(output)) * DIM / 4
    assert forward == elements * 4
    assert book.num_bytes("exchange") - forward == len(output) * DIM * 3 / 4 * 4
    assert book.count("exchange") == 2
    assert book.count("all_gather") == 1
    gpc.destroy()


def test_bytes_are_those_of_the_docstring() -> None:
    run_ranks(count_bytes, 4)


def save(path: Path) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair()
    optimizers = [OPTIMIZERS["adagrad"](each.parameters()) for each in (reference, bag)]
    for ids in batches(10):
        step(reference, bag, optimizers, ids)
    state = bag.state_dict()  # by all ranks
    if dist.get_rank() == 0:
        torch.save({"bag": state, "reference": reference.state_dict()}, path)
    buffer = io.BytesIO()
    torch.save(optimizers[1].state_dict(), buffer)
    buffer.seek(0)
    other = make_pair(cache_ratio=0.5)[1]
    other.load_state_dict(state)
    optimizer = OPTIMIZERS["adagrad"](other.parameters())
    optimizer.load_state_dict(torch.load(buffer))
    for ids in batches(10, seed=1):  # resumed, with another cache
        step(reference, other, [optimizers[0], optimizer], ids)
    check_equal(reference, other)
    gpc.destroy()


def load(path: Path) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair()
    saved = torch.load(path)
    reference.load_state_dict(saved["bag"])  # torch's own
    bag.load_state_dict(saved["reference"])
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (reference, bag)]
    for ids in batches(10):
        step(reference, bag, optimizers, ids)
    check_equal(reference, bag)
    gpc.destroy()


def test_a_state_dict_of_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path / "state")
    run_ranks(load, 4, tmp_path / "state")
    run_ranks(load, 1, tmp_path / "state")


def train_in_files(folder: Path) -> None:
    colossalai.launch_from_torch({})
    reference, bag = make_pair(weight_path=folder / "table.safetensors")
    reference.load_state_dict(bag.state_dict())
    optimizers = [SGD(each.parameters(), lr=0.1) for each in (reference, bag)]
    for ids in batches(10):
        step(reference, bag, optimizers, ids)
    check_equal(reference, bag)
    bag.close()
    gpc.destroy()


def open_by_others(folder: Path) -> None:
    colossalai.launch_from_torch({})
    with pytest.raises(ValueError, match=r"table-0000.-of-00002\.safetensors is a table of another number"):
        make_pair(weight_path=folder / "table.safetensors")
    gpc.destroy()


def miss_a_file(folder: Path) -> None:
    colossalai.launch_from_torch({})
    with pytest.raises(ValueError, match=r"is there on rank 1 along dp, and missing on rank 0: restore it"):
        make_pair(weight_path=folder / "table.safetensors")
    gpc.destroy()


def test_a_file_for_each_rank(tmp_path: Path) -> None:
    run_ranks(train_in_files, 2, tmp_path)
    run_ranks(train_in_files, 2, tmp_path)  # goes on
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "table-00000-of-00002.safetensors",
        "table-00001-of-00002.safetensors",
    ]
    run_ranks(open_by_others, 1, tmp_path)
    run_ranks(open_by_others, 4, tmp_path)
    (tmp_path / "table-00000-of-00002.safetensors").unlink()
    run_ranks(miss_a_file, 2, tmp_path)


def fail() -> None:
    raise RuntimeError("rows of several steps")


def make_mistakes() -> None:
    colossalai.launch_from_torch({})
    rank = dist.get_rank()
    _, bag = make_pair()
    ids = next(batches(1))
    with pytest.raises(ValueError, match=r"different batches \(5 bags on rank 0, 6 bags on rank 1\): pass"):
        bag(ids[rank - 1 :] if rank else ids[1:])
    for other in (ids.roll(rank), torch.tensor([[rank * 2], [1 - rank]]), ids.view(12, 2) if rank else ids):
        with pytest.raises(ValueError, match="different batches"):
            bag(other)
    with pytest.raises(ValueError, match=r"different batches \(the per_sample_weights differ in values"):
        bag(ids, None, torch.full(ids.shape, 1.0 + rank))
    with pytest.raises(ValueError, match="the per_sample_weights differ in values, shape or requires_grad"):
        bag(ids, None, torch.ones(ids.shape, requires_grad=rank == 0))
    for wrong in (torch.tensor(1), [1, 2]):  # of one rank
        with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)):
            bag(wrong if rank else ids)
    with (
        torch.set_grad_enabled(rank == 0),
        pytest.raises(RuntimeError, match=r"under torch.no_grad\(\) on rank 1"),
    ):
        bag(ids)
    error, text = (
        (ValueError, "is out of range for Parallel") if rank else (RuntimeError, "failed on rank 1 along dp")
    )
    with pytest.raises(error, match=text):
        bag(ids + rank * NUM_ROWS)
    for dim in (1, 2):
        with pytest.raises(ValueError, match=f"scatter_dim={dim} and gather_dim=-1 must be two dimensions"):
            bag(ids, scatter_dim=dim)
    loss_of(bag(ids)).backward()  # the ranks still work together
    with pytest.raises(ValueError, match=r"RowWiseAdagrad has one sum for each row .* on several ranks: use"):
        RowWiseAdagrad(bag.parameters()).step()
    with pytest.raises(ValueError, match=r"ParallelCachedEmbeddingBag\(10, 3\) has 3 columns, .* 2 ranks"):
        ParallelCachedEmbeddingBag(10, 3)
    with pytest.raises(ValueError, match=r"_weight has the shape \(400, 4\); it must be .* \(400, 8\)"):
        ParallelCachedEmbeddingBag(NUM_ROWS, DIM, _weight=bag.weight)
    if rank:
        bag.cache_weight_mgr.flush = fail  # as with a file that was left by a killed process
    with pytest.raises(
        RuntimeError, match="rows of several" if rank else r"state_dict\(\) of .* failed on rank 1"
    ):
        bag.state_dict()
    _, bag = make_pair()
    model = nn.Sequential(bag, nn.Linear(DIM, 1))
    empty = nn.Sequential(make_pair(warmup_ratio=0.0)[1], nn.Linear(DIM, 1))  # nothing to copy
    for each in (model, empty):
        with pytest.raises(
            RuntimeError, match=r"is in a DistributedDataParallel, .* wrap the dense layers only"
        ):
            DistributedDataParallel(each)(ids)
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="it has at least one row and one column"):
            ParallelCachedEmbeddingBag(*shape)
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(make_mistakes, 2)


def share_sequences() -> None:
    bag = ParallelCachedEmbeddingBag(NUM_ROWS, DIM)
    colossalai.launch_from_torch({"parallel": {"sequence": {"size": 2}}})
    with pytest.raises(
        RuntimeError, match="was made in a job of 1 ranks, and this one has 2: launch the job"
    ):
        bag(next(batches(1)))
    with pytest.raises(ValueError, match="sequence parallelism cannot be combined"):
        ParallelCachedEmbeddingBag(NUM_ROWS, DIM)
    gpc.destroy()


def test_jobs_of_other_ranks() -> None:
    run_ranks(share_sequences, 2)


def use_tensor_parallelism() -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}})
    _, bag = make_pair()
    reference = nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum")
    reference.load_state_dict(bag.state_dict())
    ids = next(batches(1))
    assert bag.weight.shape == (NUM_ROWS, DIM // 2)  # over dp, not tp
    assert torch.equal(bag(ids), reference(ids).tensor_split(2)[dist.get_rank() // 2])
    gpc.destroy()


def test_with_tensor_parallelism() -> None:
    run_ranks(use_tensor_parallelism, 4)
