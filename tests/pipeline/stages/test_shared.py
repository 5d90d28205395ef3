"""Weights shared by pipeline stages stay equal, through the wrapper and for the ties of a cut model."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import colossalai
from colossalai.context import Axis, Mesh
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import PipelineSharedModuleGradientHandler, build_gradient_handler
from colossalai.pipeline.stages._split_model import cut_model
from colossalai.pipeline.stages._stage import tied_parameters
from colossalai.pipeline.stages._tied_weights import (
    PipelineSharedModuleWrapper,
    is_shared_copy,
    share_of,
    share_parameter,
    shared_axis,
    sync_shared_grads,
)
from tests.ranks import run_ranks


def launch(pipeline):
    colossalai.launch_from_torch(config={"parallel": {"pipeline": pipeline}}, verbose=False)
    return gpc.mesh.axis("pp")


def _train_shared(ranks, steps, in_place):
    """Train a shared weight, a shared module and one of a rank's own; return what happens to them."""
    pp = launch(3)
    torch.manual_seed(10 + pp.rank)
    weight, own = nn.Parameter(torch.randn(2, 2).t()), nn.Parameter(torch.randn(2))
    module = nn.Linear(2, 1)
    wrapper = PipelineSharedModuleWrapper(ranks)
    if pp.rank in ranks:  # the others may call it, too
        wrapper.register_parameter(weight)
    wrapper.register_module(module)
    params = [own, *module.parameters(), weight]
    optimizer = torch.optim.SGD(params, lr=0.1)
    handler = build_gradient_handler(
        {"type": "PipelineSharedModuleGradientHandler"}, nn.ParameterList(params), optimizer
    )
    assert isinstance(handler, PipelineSharedModuleGradientHandler)
    history = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=not in_place)
        (weight.sum() * (pp.rank + 1) + own.sum()).backward()
        if pp.rank == 0:  # elsewhere the module is not used
            module(torch.ones(1, 2)).sum().backward()
        sync_shared_grads(reversed(params))
        handler.handle_gradient()  # the same again: it must not sum twice
        history.append((weight.grad.clone(), own.grad.clone(), module.weight.grad))
        optimizer.step()
    result = weight.detach(), module.weight.detach(), history, [is_shared_copy(p) for p in params]
    gpc.destroy()
    return result


def summed_and_let_go() -> bool:
    pp = launch(2)
    weight = nn.Parameter(torch.ones(4))
    share_parameter(weight, shared_axis(pp, [0, 1]))
    weight.sum().backward()
    sync_shared_grads([weight])
    seen = StorageWeakRef(weight.grad.untyped_storage())
    gc.collect()
    sync_shared_grads([weight])  # it is known as long as it is there
    assert weight.grad.tolist() == [2.0] * 4
    weight.grad = None
    gpc.destroy()
    return seen.expired()


@pytest.mark.dist
def test_a_summed_gradient_is_not_kept() -> None:
    assert run_ranks(summed_and_let_go, 2) == [True, True]


@pytest.mark.dist
@pytest.mark.parametrize("in_place", [False, True])
def test_shared_weights_stay_equal(in_place):
    first, middle, last = run_ranks(_train_shared, 3, [2, 0], 3, in_place)
    torch.manual_seed(10)
    drawn = torch.randn(2, 2).t()
    assert torch.equal(first[0], last[0])
    assert torch.equal(first[1], last[1])
    # ranks 0 and 2 give gradients 1 and 3, three times with lr 0.1
    torch.testing.assert_close(first[0], drawn - 3 * 0.1 * 4)
    assert not torch.equal(first[0], middle[0])
    for shared, own, module in first[2] + last[2]:
        assert torch.equal(shared, torch.full((2, 2), 4.0))
        assert torch.equal(own, torch.ones(2))
        assert torch.equal(module, torch.ones(1, 2))
    assert torch.equal(middle[2][0][0], torch.full((2, 2), 2.0))
    assert first[3] == [False] * 4
    assert last[3] == [False, True, True, True]
    assert middle[3] == [False] * 4


def _two_wrappers():
    """Two wrappers whose ranks overlap, registered in other orders on the two; return the gradients."""
    pp = launch(3)
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first, second = PipelineSharedModuleWrapper([0, 1]), PipelineSharedModuleWrapper([1, 2])
    first.register_parameter(a)
    second.register_parameter(b)
    ((a * 1).sum() + (b * 10).sum()).backward()
    sync_shared_grads([b, a] if pp.rank == 1 else [a, b])
    grads = a.grad.item(), b.grad.item()
    gpc.destroy()
    return grads


@pytest.mark.dist
def test_overlapping_wrappers():
    assert run_ranks(_two_wrappers, 3) == [(2.0, 10.0), (2.0, 20.0), (1.0, 20.0)]


def _ties_of_a_cut_model():
    """Share the ties of a cut model whose copies differ; return the tied weight and its gradient."""
    from tests.pipeline.stages.models import ZOO

    pp = launch(2)
    stage = cut_model(ZOO["gpt"].build(), 2, [pp.rank])
    ((tied, stages),) = tied_parameters(stage)
    with torch.no_grad():
        tied.mul_(pp.rank + 1)
    axis = shared_axis(pp, stages)  # stage s is on rank s
    share_parameter(tied, axis)
    tied.grad = torch.full_like(tied, pp.rank + 1.0)
    sync_shared_grads(stage.parameters())
    result = tied.detach().clone(), tied.grad.unique().tolist(), is_shared_copy(tied)
    gpc.destroy()
    return result


@pytest.mark.dist
def test_ties_of_a_cut_model():
    first, last = run_ranks(_ties_of_a_cut_model, 2)
    assert torch.equal(first[0], last[0])
    assert first[1] == last[1] == [3.0]
    assert (first[2], last[2]) == (False, True)


def axis_of(rank):
    return Axis("pp", (0, 1, 2), Mesh({"pp": 3}, rank=rank))


@pytest.mark.unit
def test_who_takes_part():
    axis = shared_axis(axis_of(2), [2, 0, 2])
    assert axis is not None
    assert axis.ranks == (0, 2)
    assert shared_axis(axis_of(1), [0, 2]) is None
    assert shared_axis(axis_of(1), [1, 1]) is None
    with pytest.raises(ValueError, match=r"pipeline ranks \[0, 3\] of a pipeline of 3 ranks"):
        shared_axis(axis_of(1), [0, 3])


@pytest.mark.unit
def test_one_rank_shares_with_nobody():
    param = nn.Parameter(torch.ones(1))
    sync_shared_grads([param])
    assert share_of(param) is None
    assert param.grad is None
    assert not is_shared_copy(param)


@pytest.mark.unit
def test_a_parameter_without_memory_cannot_be_shared():
    with pytest.raises(ValueError, match="materialize the model first"):
        share_parameter(nn.Parameter(torch.ones(1, device="meta")), axis_of(0))
