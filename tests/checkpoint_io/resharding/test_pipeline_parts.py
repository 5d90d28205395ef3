"""Checkpoints of a model whose parts are on different ranks, as under a pipeline."""

import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import colossalai
from colossalai import checkpoint_io
from colossalai.checkpoint_io import TrainingState, load_training_state, parameter_names, save_training_state
from colossalai.checkpoint_io._state import set_tied_names
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

CUTS = {1: [(0, 4)], 2: [(0, 1), (1, 4)], 4: [(0, 1), (1, 2), (2, 3), (3, 4)]}


def whole() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(3, 4))
    layers[3].weight = layers[0].weight  # tied, as an embedding and a head
    return layers


def part(start: int, end: int) -> nn.Sequential:
    """Return some layers under the names that they have in the whole."""
    layers = whole()
    mine = nn.Sequential(OrderedDict((str(number), layers[number]) for number in range(start, end)))
    if end == 4 and start > 0:
        set_tied_names(mine[-1].weight, ("0.weight", "3.weight"))
    return mine


def trained(module: nn.Sequential) -> torch.optim.Optimizer:
    """Return an optimizer, with a second group, after a step in which every gradient tells its name."""
    names = parameter_names(module)
    optimizer = grouped(names, lrs=(0.1, 0.2))
    for param, name in names.items():
        param.grad = torch.full_like(param, 1.0 + sum(map(ord, name)) % 7)
    optimizer.step()
    return optimizer


def grouped(params: Iterable[nn.Parameter], *, lrs: tuple[float, float]) -> torch.optim.Optimizer:
    """Return an optimizer of matrices and of vectors; a group may be empty on a rank."""
    params = list(params)
    optimizer = torch.optim.AdamW(params)
    group = optimizer.param_groups[0]
    matrices, vectors = (
        [param for param in params if (param.dim() > 1) == wanted] for wanted in (True, False)
    )
    optimizer.param_groups = [
        {**group, "params": matrices, "lr": lrs[0]},
        {**group, "params": vectors, "lr": lrs[1]},
    ]
    return optimizer


def save(path: Path) -> None:
    colossalai.launch_from_torch({"parallel": {"pipeline": int(os.environ["WORLD_SIZE"])}}, verbose=False)
    module = part(*CUTS[gpc.pipeline_parallel_size][gpc.mesh.axis_rank("pp")])
    optimizer = trained(module)
    checkpoint_io.save_model(module, path / "model")
    checkpoint_io.save_checkpoint(path / "legacy.pt", 3, module, optimizer)
    save_training_state(path / "states", TrainingState(model=module, optimizer=optimizer), step=1)
    gpc.destroy()


def load(path: Path) -> None:
    colossalai.launch_from_torch({"parallel": {"pipeline": int(os.environ["WORLD_SIZE"])}}, verbose=False)
    where = CUTS[gpc.pipeline_parallel_size][gpc.mesh.axis_rank("pp")]
    wanted = whole()
    expected, states = wanted.state_dict(), states_by_name(wanted, trained(wanted))
    for what in ("file", "state"):
        module = part(*where)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
        optimizer = grouped(module.parameters(), lrs=(1.0, 1.0))
        if what == "file":
            assert checkpoint_io.load_checkpoint(path / "legacy.pt", module, optimizer) == 3
        else:
            load_training_state(
                path / "states" / "step-00000001", TrainingState(model=module, optimizer=optimizer)
            )
        for name, value in module.state_dict().items():
            assert torch.equal(value, expected[name]), (what, name)
        for name, state in states_by_name(module, optimizer).items():
            assert torch.equal(state["exp_avg"], states[name]["exp_avg"]), (what, name)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    gpc.destroy()


def states_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[param] for param, name in parameter_names(module).items()}


@pytest.mark.parametrize("saving", [2, further(4)])
def test_any_number_of_parts_loads_any_other(saving: int, tmp_path: Path) -> None:
    """In every format it is in test_formats; here with buffers, and with groups that are empty on a rank."""
    run_ranks(save, saving, tmp_path)
    for loading in CUTS:
        run_ranks(load, loading, tmp_path)
    assert set(torch.load(tmp_path / "model")) == set(whole().state_dict())


def lacking(path: Path) -> str:
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, verbose=False)
    rank = gpc.mesh.axis_rank("pp")
    module = part(*CUTS[2][rank])
    if rank == 1:
        module.add_module("4", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"2 missing in the checkpoint: 4.weight, 4.bias") as raised:
        checkpoint_io.load_model(module, path / "model")
    gpc.destroy()
    return str(raised.value)


def test_what_no_part_has_is_named(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)
    messages = run_ranks(lacking, 2, tmp_path)
    assert messages[0].startswith("rank 1: ")
    assert "unexpected" not in messages[0]
