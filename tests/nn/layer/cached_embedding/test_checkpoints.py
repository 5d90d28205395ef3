"""Checkpoints of models with cached tables have whole tables, and states of all rows."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, SparseAdam

import colossalai
from colossalai.booster import Booster
from colossalai.checkpoint_io import (
    load_checkpoint,
    load_model,
    load_optimizer,
    parameter_names,
    save_checkpoint,
    save_model,
    save_optimizer,
)
from colossalai.core import global_context as gpc
from colossalai.nn.layer.cached_embedding import CachedEmbeddingBag
from tests.nn.layer.cached_embedding.rankers import KINDS, PLUGINS, Batch, batches, loss_of, make_rankers
from tests.nn.layer.cached_embedding.tables import DIM, NUM_ROWS, OPTIMIZERS, make_pair, weights_of
from tests.nn.layer.cached_embedding.tables import batches as id_batches
from tests.nn.layer.cached_embedding.test_doors import check_equal, make_optimizers, step
from tests.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

OTHER_KIND = {"columns": "columns", "one": "split", "split": "one"}


def train(booster: Booster, model: nn.Module, optimizers: list[Any], batch: Batch) -> None:
    own = batch.own
    for optimizer in optimizers:
        optimizer.zero_grad()
    booster.backward(loss_of(model(own.ids, own.dense), own.targets), optimizers[0])
    for optimizer in optimizers:
        optimizer.step()


def save(folder: Path, plugin: str, kind: str, name: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS[plugin]())
    reference, raw = make_rankers(kind)
    wanted = make_optimizers(name, reference)
    model, optimizers, *_ = booster.boost(raw, make_optimizers(name, raw))
    for batch in batches(6):
        train(booster, model, optimizers, batch)
        step(reference, wanted, batch)
    shard = kind == "one"
    booster.save_model(model, folder / "model", shard=shard)
    for number, optimizer in enumerate(optimizers):
        booster.save_optimizer(optimizer, folder / f"optimizer-{number}", shard=shard)
    for batch in batches(3, seed=1):  # saving has changed nothing
        train(booster, model, optimizers, batch)
        step(reference, wanted, batch)
    check_equal(reference, model.state_dict())
    gpc.destroy()


def load(folder: Path, plugin: str, kind: str, name: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS[plugin]())
    reference, raw = make_rankers(kind, cache_ratio=0.5)
    wanted = make_optimizers(name, reference)
    model, optimizers, *_ = booster.boost(raw, make_optimizers(name, raw))
    for batch in batches(6):
        step(reference, wanted, batch)
    train(booster, model, optimizers, next(batches(1, seed=2)))  # it is overwritten
    booster.load_model(model, folder / "model")
    check_equal(reference, model.state_dict())
    for number, optimizer in enumerate(optimizers):
        booster.load_optimizer(optimizer, folder / f"optimizer-{number}")
    for batch in batches(3, seed=1):
        train(booster, model, optimizers, batch)
        step(reference, wanted, batch)
    check_equal(reference, model.state_dict())
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [4, 1])
@pytest.mark.parametrize(("first", "second"), [("ddp", "gemini"), ("zero1", "fsdp"), ("gemini", "zero2")])
@pytest.mark.parametrize(
    ("kind", "name"), [("columns", "sparse_adam"), ("one", "row_wise"), ("split", "sparse_adam")]
)
def test_other_ranks_and_methods(
    kind: str, name: str, first: str, second: str, num_ranks: int, tmp_path: Path
) -> None:
    run_ranks(save, 2, tmp_path, first, kind, name)
    run_ranks(load, num_ranks, tmp_path, second, OTHER_KIND[kind], name)


def resume(folder: Path, kind: str) -> None:
    colossalai.launch_from_torch({})
    booster = Booster(plugin=PLUGINS["zero1"]())
    reference, raw = make_rankers(kind)
    wanted = make_optimizers("adagrad", reference)
    model, [optimizer], *_ = booster.boost(raw, make_optimizers("adagrad", raw))
    known = [*batches(6)]
    for batch in known[:3]:
        train(booster, model, [optimizer], batch)
        step(reference, wanted, batch)
    booster.save(folder, model, optimizer, step=3, save_async=True)
    for batch in known[:3]:
        train(booster, model, [optimizer], batch)
    resumed = booster.load(folder, model, optimizer)
    assert resumed is not None
    assert resumed.step == 3
    for batch in known[3:]:
        train(booster, model, [optimizer], batch)
        step(reference, wanted, batch)
    check_equal(reference, model.state_dict())
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_training_states(kind: str, tmp_path: Path) -> None:
    run_ranks(resume, 2, tmp_path, kind)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_process_without_a_plan(name: str, tmp_path: Path) -> None:
    reference, bag = make_pair()
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in (reference, bag)]

    def train_both(module: nn.Module, optimizer: Any, seed: int) -> None:
        for ids in id_batches(10, seed=seed):
            for each, stepped in ((reference, optimizers[0]), (module, optimizer)):
                stepped.zero_grad()
                each(ids).square().sum().backward()
                stepped.step()

    train_both(bag, optimizers[1], 0)
    save_model(bag, tmp_path / "model")
    save_optimizer(optimizers[1], tmp_path / "optimizer", param_names=parameter_names(bag))
    save_checkpoint(tmp_path / "both", 1, bag, optimizers[1])
    for has_one_file in (True, False):
        other = make_pair(0.5)[1]
        optimizer = OPTIMIZERS[name](other.parameters())
        if has_one_file:
            load_checkpoint(tmp_path / "both", other, optimizer)
        else:
            load_model(other, tmp_path / "model")
            load_optimizer(optimizer, tmp_path / "optimizer", param_names=parameter_names(other))
        train_both(other, optimizer, seed=1)
        assert torch.equal(other.weight, reference.weight)
        bag, optimizers[1] = other, optimizer
        if has_one_file:  # those of torch, at the same step
            load_checkpoint(tmp_path / "both", reference, optimizers[0])


def test_states_of_slots_are_not_saved(tmp_path: Path) -> None:
    bag = make_pair()[1]
    param = bag.cache_weight_mgr.param
    optimizer = SparseAdam(bag.parameters())
    # Those of another cache of the same size.
    optimizer.state[param] = {
        "step": 3,
        "exp_avg": torch.rand(param.shape),
        "exp_avg_sq": torch.rand(param.shape),
    }
    with pytest.raises(
        ValueError, match=r"load the state_dict\(\) of an optimizer that has made a step with it"
    ):
        save_optimizer(optimizer, tmp_path / "optimizer", param_names=parameter_names(bag))


def test_tables_with_different_numbers_of_steps(tmp_path: Path) -> None:
    reference, model = make_rankers("one")
    plain = SparseAdam(reference.tables.parameters())
    for tables in ([*reference.tables.children()], [reference.tables.table_1]):
        for table in tables:
            table(torch.tensor([[1, 2]])).sum().backward()
        plain.step()
        plain.zero_grad()
    save_optimizer(plain, tmp_path / "optimizer", param_names=parameter_names(reference))
    with pytest.raises(ValueError, match=r"tables of Par.* have different values of .* 'step', .*SplitCache"):
        load_optimizer(
            SparseAdam(model.tables.parameters()),
            tmp_path / "optimizer",
            param_names=parameter_names(model),
        )
    split = make_rankers("split")[1]
    optimizer = SparseAdam(split.tables.parameters())
    load_optimizer(optimizer, tmp_path / "optimizer", param_names=parameter_names(split))
    assert [state["step"] for state in optimizer.state.values()] == [1, 2, 1]


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    bag = make_pair()[1]
    optimizer = Adagrad(bag.parameters(), initial_accumulator_value=0.5)
    save_optimizer(optimizer, tmp_path / "optimizer", param_names={bag.cache_weight_mgr.param: "weight"})
    reference = nn.EmbeddingBag(NUM_ROWS, DIM)
    plain = Adagrad(reference.parameters(), lr=7)
    load_optimizer(plain, tmp_path / "optimizer", param_names=parameter_names(reference))
    assert torch.equal(plain.state[reference.weight]["sum"], torch.full((NUM_ROWS, DIM), 0.5))
    assert plain.param_groups[0]["lr"] == 0.01


def test_an_unfinished_file(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    bag = CachedEmbeddingBag(NUM_ROWS, DIM, sparse=True, cache_ratio=0.1, weight_path=path)
    save_model(bag, tmp_path / "model")
    saved = bag.weight.clone()
    optimizer = SGD(bag.parameters(), lr=0.1)
    for ids in id_batches(5):
        bag(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    killed = tmp_path / "killed.safetensors"
    shutil.copy(path, killed)
    bag.close()
    other = CachedEmbeddingBag(NUM_ROWS, DIM, sparse=True, cache_ratio=0.1, weight_path=killed)
    with pytest.raises(RuntimeError, match="has rows of different steps"):
        save_model(other, tmp_path / "wrong")
    with pytest.raises(ValueError, match="does not fit"):
        load_model(nn.EmbeddingBag(NUM_ROWS + 1, DIM), tmp_path / "model")
    load_model(other, tmp_path / "model")
    assert torch.equal(other.weight, saved)
    other.close()
    assert torch.equal(weights_of(killed), saved)
    with pytest.raises(ValueError, match=r"weight: \(400, 8\) .* in the checkpoint, \(401, 8\)"):
        load_model(CachedEmbeddingBag(NUM_ROWS + 1, DIM), tmp_path / "model")


def count_ranks(folder: Path) -> None:
    """All ranks take part: the state of a table is on one of them only."""
    colossalai.launch_from_torch({})
    _, raw = make_rankers("one")
    own = raw.state_dict(keep_vars=True)  # what this rank has, without communication
    assert 0 < sum(name.startswith("tables.") for name in own) < 3
    if dist.get_rank() == 0:
        assert "tables.table_1.weight" in own
    save_model(raw, folder / "model")
    assert len(torch.load(folder / "model")) == 9
    gpc.destroy()


@pytest.mark.dist
def test_keep_vars(tmp_path: Path) -> None:
    run_ranks(count_ranks, 2, tmp_path)
