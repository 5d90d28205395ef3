"""Older names that others' code imports: each does what its present-day counterpart does."""

import importlib
import random

import numpy as np
import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster.accelerator import Accelerator
from colossalai.booster.plugin import GeminiPlugin, gemini_plugin
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, TopKRouter
from colossalai.nn.optimizer import FusedAdam, fused_adam
from colossalai.nn.parallel import data_parallel
from colossalai.testing.random import seed_all
from colossalai.utils import clip_grad_norm, clip_grad_norm_fp32, colo_set_process_memory_fraction
from colossalai.utils import memory as utils_memory
from colossalai.utils.moe import get_moe_epsize_param_dict, sync_moe_model_param
from colossalai.zero import ZeroDDP
from colossalai.zero.gemini import GeminiManager, get_static_torch_model
from colossalai.zero.gemini.gemini_mgr import GeminiManager as OldManager
from colossalai.zero.gemini.utils import get_static_torch_model as old_static_model
from tests.ranks import run_ranks


@pytest.mark.unit
def test_rows_give_the_classes_of_the_package():
    assert gemini_plugin.GeminiPlugin is GeminiPlugin
    assert fused_adam.FusedAdam is FusedAdam
    assert data_parallel.ZeroDDP is ZeroDDP
    assert (OldManager, old_static_model) == (GeminiManager, get_static_torch_model)


@pytest.mark.unit
@pytest.mark.parametrize("module", ["colossalai.nn.parallel", "colossalai.nn.parallel.data_parallel"])
def test_colo_ddp_names_its_replacement_under_both_paths(module):
    sentence = rf"{module}\.ColoDDP is not there yet\. .*; take Booster\(plugin=TorchDDPPlugin\(\)\)"
    with pytest.raises(ImportError, match=sentence):
        exec(f"from {module} import ColoDDP", {})
    with pytest.raises(AttributeError, match=sentence):
        importlib.import_module(module).ColoDDP  # noqa: B018


def _params():
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    return params


@pytest.mark.unit
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_is_that_of_torch(norm_type):
    ours, theirs, older = _params(), _params(), _params()
    norm = clip_grad_norm(ours, 1.5, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, 1.5, norm_type)
    assert torch.allclose(norm.float(), expected)
    assert norm == clip_grad_norm_fp32(older, 1.5, norm_type)
    for own, other, third in zip(ours, theirs, older, strict=True):
        assert torch.allclose(own.grad, other.grad)
        assert torch.equal(own.grad, third.grad)


@pytest.mark.unit
def test_clip_grad_norm_refuses_a_norm_that_is_not_finite():
    params = _params()
    params[0].grad[1] = float("inf")
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
        clip_grad_norm(params, 1.0, error_if_nonfinite=True)
    assert torch.equal(params[1].grad, torch.full((2, 2), 2.0))
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_grad_norm(params, 0)


@pytest.mark.unit
def test_the_memory_fraction_is_that_of_the_accelerator(monkeypatch, capfd):
    for wrong in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match=f"ratio is {wrong}; it must be above 0 and at most 1"):
            colo_set_process_memory_fraction(wrong)
    monkeypatch.setattr(utils_memory, "get_current_device", lambda: torch.device("cpu"))
    colo_set_process_memory_fraction(0.5)
    assert "has no effect: this rank computes on the CPU" in capfd.readouterr().err

    calls = []

    class Module:
        set_per_process_memory_fraction = staticmethod(lambda *args: calls.append(args))

    device = torch.device("meta")
    monkeypatch.setattr(utils_memory, "get_current_device", lambda: device)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: {device: Module}[asked])
    colo_set_process_memory_fraction(0.25)
    assert calls == [(0.25, device)]


@pytest.mark.unit
def test_seed_all_seeds_each_generator(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)

    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_all(7)
    first = draw()
    assert draw() != first
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)
    seed_all(7, cuda_deterministic=True)
    assert draw() == first
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)


@pytest.mark.unit
def test_an_accelerator_moves_a_model():
    model = nn.Linear(2, 2)
    assert Accelerator("cpu").configure_model(model) is model
    assert model.weight.device.type == "cpu"
    with pytest.raises(ValueError, match=r"device is 'tpu'; it must be one of \['cpu'"):
        Accelerator("tpu")


def _experts():
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), MoeLayer(4, 2, TopKRouter(1), FFNExperts(2, 4, 8)))
    by_size = get_moe_epsize_param_dict(model)
    experts = list(model[1].experts.parameters())
    assert set(by_size) == {1, 2}
    assert {id(param) for param in by_size[2]} == {id(param) for param in experts}
    assert sum(map(len, by_size.values())) == len(list(model.parameters()))

    with torch.no_grad():
        for param in model.parameters():
            param.fill_(rank)
    sync_moe_model_param(model)
    # Ranks 0 and 2 hold one expert, 1 and 3 the other: each pair has the values of its first rank.
    assert all((param == rank % 2).all() for param in experts)
    assert all((param == 0).all() for param in by_size[1])


@pytest.mark.dist
def test_parameters_of_experts():
    run_ranks(_experts, 4)
