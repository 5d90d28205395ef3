"""Tensor-parallel models: saved in one mode, loaded in another, opened by plain torch."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Adafactor, AdamW, Optimizer

import colossalai
import colossalai.nn as col_nn
from colossalai.checkpoint_io import (
    TrainingState,
    load_model,
    load_optimizer,
    load_training_state,
    parameter_names,
    save_model,
    save_optimizer,
    save_training_state,
)
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.layer import Cut, current_cut, next_linear, restart
from colossalai.tensor import cut_dims, spec_of
from colossalai.utils import load_checkpoint, save_checkpoint
from colossalai.zero import declare_elementwise
from tests.checkpoint_io.resharding.test_fsdp import FORMATS
from tests.parity.tasks import TORCH, LayerNet
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

TENSOR: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "dp": None,
    "1d": {"size": 2, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}
NUM_RANKS = {"plain": 1, "dp": 2, "1d": 4, "2d": 4, "2.5d": 8, "3d": 8}  # 1d is with dp 2
SIZES = (8, 16, 24, 8)
TOLERANCE = 1e-10  # float64: modes sum in different orders
FEW = ("plain", "1d", "2d")  # the modes of the first cells
KINDS = ((True, True), (True, False), (False, True), (False, False))  # tied, vocabulary-parallel
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def launch(name: str) -> None:
    tensor = TENSOR[name.removesuffix(" x dp")]
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}} if tensor else {}, verbose=False)


def make(seed: int) -> tuple[nn.Sequential, Cut, Cut]:
    """Return a model of the launched mode, and the cuts of its input and its output."""
    torch.manual_seed(seed)
    x = restart(gpc.tensor_mode)
    layers = [next_linear(a, b, mode=gpc.tensor_mode) for a, b in itertools.pairwise(SIZES)]
    y = current_cut(gpc.tensor_mode)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double(), x, y


def make_twin(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def data(step: int, cut: Cut | None = None) -> torch.Tensor:
    """Return the whole of a step's batch, or this rank's slice of it: over dp, then as the mode cuts it."""
    generator = torch.Generator().manual_seed(step)
    whole = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    if cut is None:
        return whole
    return cut_dims(whole.shape, (("edp", *cut.batch), cut.features), gpc.mesh).cut(whole)


def train(parts: tuple[nn.Module, Cut, Cut], optimizer: Optimizer, *, steps: range) -> None:
    """Take steps towards reproducing the input, with the gradient of the mean over the whole batch."""
    model, x, y = parts
    engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
    share = data(0).numel() / gpc.data_parallel_size
    for step in steps:
        engine.zero_grad()
        engine.backward((engine(data(step, x)) - data(step, y)).square().sum() / share)
        engine.step()


def train_twin(model: nn.Module, optimizer: Optimizer, *, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (model(data(step)) - data(step)).square().mean().backward()
        optimizer.step()


def twin_after(num_steps: int) -> dict[str, dict[str, torch.Tensor]]:
    model = make_twin(seed=1)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    train_twin(model, optimizer, steps=range(num_steps))
    return {
        name: {"value": param.detach(), **optimizer.state[param]} for name, param in model.named_parameters()
    }


def whole_values(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Gather parameters and states, in torch's order, by the specs alone."""
    found = {}
    for name, param in model.named_parameters():
        spec = spec_of(param)
        assert spec is not None
        tensors = {"value": param.detach(), **optimizer.state[param]}
        found[name] = {key: spec.whole(item) if item.ndim else item for key, item in tensors.items()}
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            torch.testing.assert_close(found[name][key], value, rtol=0, atol=atol)


def values_in(file: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read a checkpoint with torch alone."""
    content = torch.load(file, weights_only=True)
    states = content["optimizer"]["state"]
    return {name: {"value": value, **states.get(name, {})} for name, value in content["model"].items()}


def save(name: str, folder: Path) -> None:
    launch(name)
    parts = make(seed=1)
    optimizer = AdamW(parts[0].parameters(), **OPTIONS)
    train(parts, optimizer, steps=range(2))
    save_checkpoint(folder / f"{name}.pt", 2, parts[0], optimizer)


def load_all(name: str, folder: Path, saved_by: tuple[str, ...]) -> None:
    """Load what some modes saved, and take a step; all ranks have all files."""
    launch(name)
    expected = twin_after(3)
    for number, file in enumerate((folder / f"{other}.pt" for other in saved_by), start=2):
        parts = make(seed=number)
        optimizer = AdamW(parts[0].parameters())
        assert load_checkpoint(file, parts[0], optimizer) == 2
        assert_equal(whole_values(parts[0], optimizer), values_in(file), atol=0)
        train(parts, optimizer, steps=range(2, 3))
        assert_equal(whole_values(parts[0], optimizer), expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each mode leaves its checkpoint, after two steps, for all tests."""
    return tmp_path_factory.mktemp("modes")


def saved(folder: Path, names: tuple[str, ...]) -> Path:
    """Have modes save that have not yet."""
    for name in names:
        if not (folder / f"{name}.pt").exists():
            run_ranks(save, NUM_RANKS[name], name, folder)
    return folder


def cells(*firsts: str) -> list[Any]:
    """Return the modes, of which those that are no first ones are long."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name not in firsts)) for name in NUM_RANKS]


@pytest.mark.parametrize("name", cells(*FEW))
def test_a_checkpoint_is_that_of_one_process(name: str, folder: Path) -> None:
    assert_equal(values_in(saved(folder, (name,)) / f"{name}.pt"), twin_after(2), atol=TOLERANCE)


def test_slices_load_slices_of_another_mode(folder: Path) -> None:
    run_ranks(load_all, NUM_RANKS["2d"], "2d", saved(folder, FEW), FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", NUM_RANKS)
def test_every_mode_loads_every_mode(name: str, folder: Path) -> None:
    every = tuple(NUM_RANKS)
    run_ranks(load_all, NUM_RANKS[name], name, saved(folder, every), every)


def save_in_every_format(folder: Path) -> None:
    launch("2d")
    parts = make(seed=1)
    model = parts[0]
    optimizer = AdamW(model.parameters(), **OPTIONS)
    train(parts, optimizer, steps=range(2))
    local = {name: value.shape for name, value in model.state_dict().items()}
    assert local["0.weight"] == (4, 8)  # as with any module, a state dict is what this rank has
    for name, options in FORMATS.items():
        save_model(model, folder / f"{name}-model", **options)
        save_optimizer(optimizer, folder / f"{name}-optim", param_names=parameter_names(model), **options)
    save_training_state(folder, TrainingState(model=model, optimizer=optimizer), step=2)


def load_every_format(name: str, folder: Path) -> None:
    launch(name)
    expected = twin_after(2)
    for number, name in enumerate(FORMATS, start=2):
        model = make(seed=number)[0]
        optimizer = AdamW(model.parameters())
        with ledger() as book:
            load_model(model, folder / f"{name}-model")
            load_optimizer(optimizer, folder / f"{name}-optim", param_names=parameter_names(model))
        assert not book.entries  # each rank cuts its own slices
        assert_equal(whole_values(model, optimizer), expected, atol=TOLERANCE)
    model = make(seed=9)[0]
    optimizer = AdamW(model.parameters())
    (state,) = folder.glob("step-*")
    load_training_state(state, TrainingState(model=model, optimizer=optimizer))
    assert_equal(whole_values(model, optimizer), expected, atol=TOLERANCE)


def test_all_formats(tmp_path: Path) -> None:
    run_ranks(save_in_every_format, 4, tmp_path)
    shards = sorted((tmp_path / "safetensors-shards-model").glob("*.safetensors"))
    assert len(shards) > 1
    index = json.loads((tmp_path / "safetensors-shards-model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(param.nbytes for param in make_twin(seed=2).parameters())
    model = make_twin(seed=2)
    model.load_state_dict({name: value for shard in shards for name, value in load_file(shard).items()})
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), twin_after(2)[name]["value"], rtol=0, atol=TOLERANCE)
    run_ranks(load_every_format, 4, "1d", tmp_path)


def pass_on(name: str, folder: Path) -> None:
    """Load a model of all kinds of layers that one process saved, and save it again."""
    launch(name)
    for tied, vocab_parallel in KINDS:
        restart(gpc.tensor_mode)
        model = LayerNet(col_nn, tied=tied, cuts_vocabulary=vocab_parallel)
        optimizer = AdamW(model.parameters())
        load_checkpoint(folder / f"{tied}.pt", model, optimizer)
        if name != "plain":
            assert any(param.shape != value.shape for param, value in wholes(model))
        save_checkpoint(folder / f"{name}-{tied}-{vocab_parallel}.pt", 1, model, optimizer)


def wholes(model: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    specs = [(param, spec_of(param)) for param in model.parameters()]
    return [(param, spec.whole(param.detach())) for param, spec in specs if spec is not None]


@pytest.mark.parametrize("name", [cell for cell in cells("1d") if cell.values != ("dp",)])
def test_embeddings_norms_and_heads_pass_through_every_mode_unchanged(name: str, tmp_path: Path) -> None:
    for tied in (True, False):
        model = LayerNet(TORCH, tied=tied, cuts_vocabulary=False)
        optimizer = AdamW(model.parameters())
        model(torch.arange(6).view(2, 3)).square().sum().backward()
        optimizer.step()
        save_checkpoint(tmp_path / f"{tied}.pt", 1, model, optimizer)
    run_ranks(pass_on, NUM_RANKS[name], name, tmp_path)
    for tied, vocab_parallel in KINDS:
        again = tmp_path / f"{name}-{tied}-{vocab_parallel}.pt"
        assert_equal(values_in(again), values_in(tmp_path / f"{tied}.pt"), atol=0)


class Factored(Adafactor):
    """An optimizer with states of rows and columns that a user has declared to be elementwise, wrongly."""


declare_elementwise(Factored)


def refuse_states_of_other_shapes(folder: Path) -> None:
    launch("2d")
    parts = make(seed=1)
    model = parts[0]
    train(parts, optimizer := Factored(model.parameters()), steps=range(1))
    with pytest.raises(
        ValueError, match=r"the state of '0.weight', .* holds row_var \(4, 1\), col_var \(1, 8\)"
    ):
        save_checkpoint(folder / "other.pt", 1, model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"0.weight .* how to cut row_var \(16, 1\), col_var \(1, 8\)"):
        load_checkpoint(folder / "adafactor.pt", model, Factored(model.parameters()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_states_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    model = make_twin(seed=1)
    optimizer = Adafactor(model.parameters())
    train_twin(model, optimizer, steps=range(1))
    save_checkpoint(tmp_path / "adafactor.pt", 1, model, optimizer)
    run_ranks(refuse_states_of_other_shapes, 4, tmp_path)
    assert not (tmp_path / "other.pt").exists()


def through_fsdp(name: str, file: Path) -> None:
    launch(name)
    model = make(seed=2)[0]
    fully_shard(model, mesh=gpc.mesh.device_mesh("dp"))
    optimizer = AdamW(model.parameters())
    load_checkpoint(file, model, optimizer)
    save_checkpoint(file.with_suffix(f".{name}"), 1, model, optimizer)


@pytest.mark.parametrize(
    "name", ["1d", *(pytest.param(n, marks=pytest.mark.long) for n in ("dp", "2d x dp"))]
)
def test_passing_through_fsdp_changes_nothing(name: str, tmp_path: Path) -> None:
    twin, file = make_twin(seed=1), tmp_path / "twin.pt"
    optimizer = AdamW(twin.parameters())
    train_twin(twin, optimizer, steps=range(1))
    save_checkpoint(file, 1, twin, optimizer)
    run_ranks(through_fsdp, {"dp": 2, "1d": 4, "2d x dp": 8}[name], name, file)
    assert_equal(values_in(file.with_suffix(f".{name}")), values_in(file), atol=0)
