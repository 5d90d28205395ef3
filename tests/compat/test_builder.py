"""Modules built from configs, and the part of a pipeline rank of them."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.builder import _pipeline as pipeline
from colossalai.builder import (
    build_from_config,
    build_from_registry,
    build_gradient_handler,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
)
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import DataParallelGradientHandler
from colossalai.pipeline.stages import _partition
from colossalai.pipeline.stages._chunks import ChunkList
from colossalai.registry import LAYERS, LOSSES, MODELS
from tests.ranks import run_ranks

CONFIG = [
    {"type": "Linear", "in_features": 4, "out_features": 8},
    {"type": "ReLU"},
    {"type": "Linear", "in_features": 8, "out_features": 8},
    {"type": "Linear", "in_features": 8, "out_features": 2},
]


@pytest.mark.unit
def test_without_a_job_it_is_the_whole_model():
    model = build_pipeline_model_from_cfg(CONFIG)
    assert model(torch.ones(1, 4)).shape == (1, 2)
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert list(build_pipeline_model(layers).state_dict()) == ["0.weight", "0.bias"]


@pytest.mark.unit
def test_build_from_config():
    assert build_from_config(nn.Linear, {"in_features": 2, "out_features": 3}).weight.shape == (3, 2)
    with pytest.raises(ValueError, match="must be a dict"):
        build_from_config(nn.Linear, [2, 3])
    with pytest.raises(ValueError, match="cannot be called"):
        build_from_config(None, {})


@pytest.mark.unit
def test_documented_names():
    assert pipeline.partition_uniform is _partition.partition_uniform
    assert pipeline.partition_balanced is _partition.partition_balanced
    assert pipeline.build_pipeline_model is build_pipeline_model
    handler = build_gradient_handler({"type": "DataParallelGradientHandler"}, nn.Linear(1, 1), None)
    assert isinstance(handler, DataParallelGradientHandler)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([{"in_features": 2}], "does not name a class to build"),
        ([{"type": "Linaer"}], "did you mean 'Linear'"),
        ({"type": "Linear", "in_features": 1, "out_features": 1}, "not an nn.Sequential"),
        ([{"type": "ReLU"}], "cannot be split|1 items"),
    ],
)
def test_mistakes_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        build_pipeline_model_from_cfg(config, num_chunks=2)


def _build_in_a_job(num_chunks, method, by_name):
    colossalai.launch_from_torch(config={"parallel": {"pipeline": 2}}, verbose=False)
    torch.manual_seed(0)
    config = CONFIG
    if by_name:

        @MODELS.register_module
        def OurNet(width):
            return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

        config = {"type": "OurNet", "width": 2}
    model = build_pipeline_model_from_cfg(config, num_chunks, method, verbose=True)
    result = isinstance(model, ChunkList), dict(model.state_dict())
    gpc.destroy()
    return result


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_chunks", "method", "by_name", "expected"),
    [
        (1, "uniform", False, (["0"], ["2", "3"])),
        (1, "balanced", True, (["0", "1"], ["2", "3"])),
        (2, "uniform", False, (["0", "2"], ["3"])),
    ],
)
def test_each_rank_gets_its_layers(num_chunks, method, by_name, expected):
    results = run_ranks(_build_in_a_job, 2, num_chunks, method, by_name)
    held = [[name.partition(".")[0] for name in state if name.endswith("weight")] for _, state in results]
    assert tuple(held) == expected
    assert all(is_list == (num_chunks > 1) for is_list, _ in results)
    if not by_name:
        torch.manual_seed(0)
        whole = build_pipeline_model_from_cfg(CONFIG).state_dict()
        assert all(torch.equal(v, whole[name]) for _, state in results for name, v in state.items())


@pytest.mark.unit
def test_build_from_registry():
    loss = build_from_registry({"type": "MSELoss", "reduction": "sum"}, LOSSES)
    assert loss(torch.ones(3), torch.zeros(3)) == 3
    for config, registry, message in [
        ({"label_smoothing": 0.1}, LOSSES, "does not name a class to build: write dict"),
        ({"type": "CrossEntropyLos"}, LOSSES, "CrossEntropyLoss"),
        ({"type": "Linear", "in_features": 2, "out": 3}, LAYERS, "does not fit Linear: .*out"),
        ({"type": "Linear"}, "layers", "the registry is 'layers'; it must be one such as"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_from_registry(config, registry)
