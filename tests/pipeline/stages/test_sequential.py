"""An `nn.Sequential` cut into parts, and the names in a list of chunks."""

import copy

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io._model import model_state
from colossalai.checkpoint_io._state import parameter_names
from colossalai.pipeline.stages._chunks import ChunkList
from colossalai.pipeline.stages._layer_list import cut_sequential

pytestmark = pytest.mark.unit


def whole():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)]
    return nn.Sequential(*layers)


def cut(model, rank, size=2, **options):
    return cut_sequential(model, num_chunks=options.pop("num_chunks", 1), size=size, rank=rank, **options)


def test_layers_keep_their_numbers_and_their_result():
    model = whole()
    parts = [cut(model, rank) for rank in range(2)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    x = torch.randn(3, 4)
    assert torch.equal(parts[1](parts[0](x)), copy.deepcopy(model)(x))


def test_balanced_follows_the_parameters():
    assert list(cut(whole(), 1, method="uniform")._modules) == ["3", "4", "5"]
    assert list(cut(whole(), 1, method="balanced")._modules) == ["4", "5"]
    heavy_end = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 50), nn.Linear(50, 90))
    assert list(cut(heavy_end, 1, method="balanced")._modules) == ["3"]


def test_a_layer_that_stands_there_twice_counts_twice():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    assert list(cut(model, 1)._modules) == ["2", "3"]


def test_several_chunks_have_names_without_prefix():
    model = whole()
    chunks = cut(model, 1, num_chunks=3)
    assert isinstance(chunks, ChunkList)
    own = {"1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"}
    assert set(dict(chunks.named_parameters())) == own
    assert dict(chunks.named_parameters())["5.weight"] is model[5].weight
    buffers = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(dict(chunks.named_buffers())) == buffers
    assert set(chunks.state_dict()) == own | buffers
    assert set(model_state(chunks).tensors) == own | buffers
    assert parameter_names(chunks)[model[3].weight] == "3.weight"
    assert chunks.get_parameter("5.bias") is model[5].bias
    assert chunks.get_submodule("3") is model[3]
    assert chunks.get_buffer("1.running_mean") is model[1].running_mean
    assert {name for name, _ in chunks.named_modules()} == {"", "1", "3", "5"}
    assert len(list(chunks.parameters())) == 6
    with pytest.raises(AttributeError, match="none of the 3 chunks"):
        chunks.get_parameter("0.weight")


def test_chunks_load_the_state_that_they_save():
    state = cut(whole(), 1, num_chunks=3).state_dict()
    other = cut(nn.Sequential(*(copy.deepcopy(layer) for layer in whole())), 1, num_chunks=3)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    other.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_chunks_load_strictly():
    chunks = cut(whole(), 1, num_chunks=3)
    state = dict(chunks.state_dict())
    taken = state.pop("3.weight")
    state["9.weight"] = taken
    with pytest.raises(RuntimeError, match=r"missing \['3.weight'\], unexpected \['9.weight'\]"):
        chunks.load_state_dict(state)
    report = chunks.load_state_dict(state, strict=False)
    assert report.missing_keys == ["3.weight"]
    assert report.unexpected_keys == ["9.weight"]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="is not an nn"):
        cut(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="'median'; it must be"):
        cut(whole(), 0, method="median")
    with pytest.raises(ValueError, match="6 items cannot be split into 8"):
        cut(whole(), 0, size=4, num_chunks=2)
