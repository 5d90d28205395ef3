"""Cut models on ranks of their own: tensor-parallel ones, and the memory that building a stage takes."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

import colossalai
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.pipeline.stages._split_model import cut_model
from tests.harness.allocations import Allocations
from tests.pipeline.stages.chain import check_cut
from tests.pipeline.stages.models import TEXT, ZOO
from tests.tiers import further
from tests.turns import run_each


def _cut_with_tensor_parallel(name, mode, size):
    """Cut a tensor-parallel model, chain its stages on each rank; return where its parts went."""
    config = {"parallel": {"tensor": {"size": size, "mode": mode}}}
    colossalai.launch_from_torch(config=config, verbose=False)
    # Without dropout: a rank draws it from a state of its own, which goes on from model to model.
    case = replace(ZOO[name], build=lambda: ZOO[name].build().eval())
    stages = check_cut(case, 2)
    parts = [sorted({name.partition(".")[0] for name, _ in stage.named_parameters()}) for stage in stages]
    gpc.destroy()
    return parts


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "size", "names"), [("1d", 2, ("gpt", "bert")), further("2d", 4, ("vit",))])
def test_tensor_parallel_models_are_cut_without_a_trial(mode, size, names):
    found = run_each(size, _cut_with_tensor_parallel, [(name, mode, size) for name in names])
    for name, by_rank in zip(names, found, strict=True):
        behind = ["head"] if name == "bert" else ["head", "norm"]
        assert by_rank == [[["blocks", "embedding"], ["blocks", *behind]]] * size


def _building_of_a_stage(*, lazily: bool) -> tuple[int, int]:
    """Return the most bytes of tensors while a stage is built and cut, and those of the stage."""
    shape = {**TEXT, "hidden_size": 512, "num_layers": 8}
    with Allocations(with_objects=False) as building:
        with LazyInitContext() if lazily else nullcontext():
            model = GPT(GPTConfig(**shape))
        stage = LazyInitContext.materialize(cut_model(model, 4, [1]))
        del model
    return building.tensors, sum(param.nbytes for param in stage.parameters())


@pytest.mark.unit
def test_a_lazily_built_stage_never_takes_the_memory_of_the_others():
    lazy_peak, own = _building_of_a_stage(lazily=True)
    eager_peak, _ = _building_of_a_stage(lazily=False)
    assert own > 20 * 2**20
    assert own <= lazy_peak < 1.1 * own < 4 * own <= eager_peak
