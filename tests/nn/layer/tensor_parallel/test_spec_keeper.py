"""Parameters keep their specs, whatever torch does to them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colossalai
from colossalai.core import global_context as gpc
from colossalai.nn.layer import next_linear, restart
from colossalai.tensor import global_grad_norm, spec_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def make() -> nn.Sequential:
    restart(gpc.tensor_mode)
    torch.manual_seed(1)
    model = nn.Sequential(next_linear(8, 16, mode=gpc.tensor_mode), next_linear(16, 8, mode=gpc.tensor_mode))
    model.append(nn.Linear(8, 8))  # a layer of torch's, replicated
    return model


def from_meta(model: nn.Module) -> nn.Module:
    return model.to("meta").to_empty(device="cpu")


def overwritten(model: nn.Module) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def swapped(model: nn.Module) -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict(make().state_dict(), assign=True)
    return model


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(make().state_dict())
    return model


def replaced(model: nn.Sequential) -> nn.Module:
    for layer in model[:2]:
        layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        layer.bias = nn.Parameter(torch.zeros_like(layer.bias))
    return model


WAYS: list[Callable[[nn.Sequential], nn.Module]] = [
    copy.deepcopy,
    lambda model: copy.deepcopy(copy.deepcopy(model)),
    nn.Module.double,
    lambda model: model.to("cpu", torch.bfloat16),
    from_meta,
    overwritten,
    swapped,
    assigned,
    loaded,
    replaced,
    lambda model: DistributedDataParallel(model, process_group=gpc.mesh.group("dp")).module,
    lambda model: copy.deepcopy(DistributedDataParallel(model, process_group=gpc.mesh.group("dp")).module),
]


def keep() -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    gpc.mesh.group("tp")  # copies must do without copying a process group
    for way in WAYS:
        model = make()
        specs = [spec_of(param) for param in model.parameters()]
        assert [spec is None for spec in specs] == [False] * 4 + [True] * 2
        assert [spec_of(param) for param in way(model).parameters()] == specs


def test_specs_stay() -> None:
    run_ranks(keep, 4)


def train_a_copy() -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    x = torch.ones(4, 8)
    norms = []
    model = make()
    for each in (model, copy.deepcopy(model)):
        each(x).sum().backward()
        norms.append(global_grad_norm(each.parameters()))
    assert torch.equal(*norms)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert twin[0].mesh is model[0].mesh
    assert model[0].weight.any()


def test_a_copy_has_its_own_values_and_the_same_norm() -> None:
    run_ranks(train_a_copy, 2)


def share_and_misfit() -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    model = make()
    twin = make()
    model[0].weight = twin[0].weight  # shared with a layer that is cut alike
    assert spec_of(model[0].weight) is spec_of(twin[0].weight)
    pair = copy.deepcopy(nn.ModuleList([model, twin]))
    assert pair[0][0].weight is pair[1][0].weight
    assert spec_of(pair[0][0].weight) == spec_of(twin[0].weight)
    model[1].bias = None
    assert copy.deepcopy(model)[1].bias is None
    with pytest.raises(ValueError, match=r"a slice of shape \(16, 8\) where the spec has \(8, 8\)"):
        model[0].weight = nn.Parameter(torch.zeros(16, 8))


def test_shared_and_unfitting_parameters() -> None:
    run_ranks(share_and_misfit, 2)
