"""Parallel layers and models, built lazily or on the meta device: ranks get the slices of an eager build."""

import copy

import pytest
import torch
from torch import nn

import colossalai
import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext, is_lazy, materialize
from colossalai.tensor import spec_of
from tests.model_zoo.tiny import build
from tests.parity.table import MODES
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


class Layers(nn.Module):
    """Layers with the weights that they start from."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = col_nn.Embedding(16, 8, padding_idx=1)
        self.norm = col_nn.LayerNorm(8)
        self.linear = col_nn.Linear(8, 8)
        self.last = col_nn.Linear(8, 8)


def make(name: str) -> nn.Module:
    torch.manual_seed(7)
    return Layers() if name == "layers" else build(name, vocab_parallel_limit=1)


def compare(mode: str) -> int:
    """Compare all models in a mode; return how many parameters are slices."""
    colossalai.launch_from_torch(config={"parallel": {"tensor": MODES[mode]}}, verbose=False)
    num_slices = 0
    for name in ("layers", "gpt", "bert", "vit"):
        eager = make(name)
        with LazyInitContext():
            lazy = make(name)
        with torch.device("meta"):
            meta = make(name)
        assert all(param.is_meta and not is_lazy(param) for param in meta.parameters())
        copied = copy.deepcopy(lazy)
        for model in (lazy, copied):
            specs = [spec_of(param) for param in model.parameters()]
            assert all(is_lazy(param) for param in model.parameters())
            materialize(model)
            compare_parameters(model, eager)
            assert [spec_of(param) for param in model.parameters()] == specs
        num_slices += sum(spec is not None and bool(spec.axes) for spec in specs)
        assert [param.shape for param in meta.parameters()] == [param.shape for param in eager.parameters()]
    gpc.destroy()
    return num_slices


def compare_parameters(found: nn.Module, wanted: nn.Module) -> None:
    pairs = zip(found.named_parameters(), wanted.named_parameters(), strict=True)
    for (name, param), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(param, other), name
        assert param.stride() == other.stride(), name
        assert spec_of(param) == spec_of(other), name


@pytest.mark.parametrize("mode", ["1d", further("2d")])
def test_slices_are_those_of_an_eager_build(mode: str) -> None:
    counts = run_ranks(compare, MODES[mode]["size"], mode)
    assert min(counts) > 40, counts
