"""Gradients between backward and step: clipping by value, those of no optimizer, and when they are sent."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.optimizer import FusedLAMB
from tests.ranks import run_ranks
from tests.zero.training import Net, Twins, batch_of, plugin

pytestmark = pytest.mark.dist


def clipped_by_value(stage: int) -> None:
    """A bound that half of the elements exceed, and a norm that changes every element."""
    colossalai.launch_from_torch({}, verbose=False)
    twins = Twins(plugin(stage), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(3):
        twins.zero_grad()
        twins.backward(batch_of(step))
        params = list(twins.twin.parameters())
        grads = torch.cat([param.grad.flatten() for param in params])
        bound, max_norm = grads.abs().median().item(), 0.5 * grads.norm().item()
        norm = nn.utils.clip_grad_norm_(params, max_norm)
        nn.utils.clip_grad_value_(params, bound)
        assert twins.optimizer.clip_grad_by_norm(max_norm) == pytest.approx(norm.item())
        twins.optimizer.clip_grad_by_value(bound)
        twins.step(step)
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_is_that_of_one_process(stage: int) -> None:
    run_ranks(clipped_by_value, 2, stage)


def held_by_none(stage: int) -> None:
    """Their gradients are this rank's own, add up until somebody forgets them, and are not sent."""
    colossalai.launch_from_torch({}, verbose=False)
    rank = gpc.mesh.axis("dp").rank
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=True)
    booster = Booster(plugin=plugin(stage))
    raw = model
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD([model.bias], lr=0.5))
    before = raw.weight.detach().clone()
    with ledger() as book:
        for times in (1, 2):
            optimizer.zero_grad()
            booster.backward(model(torch.full((1, 3), 1.0 + rank)).sum(), optimizer)
            optimizer.step()
            assert torch.equal(raw.weight.grad, torch.full((2, 3), times * (1.0 + rank)))
    assert book.num_bytes("reduce_scatter") == 2 * raw.bias.nbytes / 2
    assert torch.equal(raw.weight, before)
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_parameters_that_no_optimizer_holds(stage: int) -> None:
    run_ranks(held_by_none, 2, stage)


def during_the_backward(stage: int, overlap: bool) -> None:
    """Buckets are on their way before the gradient of the first layer, the last one to come, is there."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    raw = Net()
    sent_before = []
    booster = Booster(plugin=plugin(stage, overlap_communication=overlap))
    with ledger() as book:
        raw.first.weight.register_post_accumulate_grad_hook(
            lambda _: sent_before.append(book.num_bytes("reduce_scatter"))
        )
        model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
        booster.backward(model(batch_of(0).float()).square().mean(), optimizer)
        sent = book.num_bytes("reduce_scatter")
        optimizer.step()
        assert sent == book.num_bytes("reduce_scatter")
    assert sent_before[0] > sent / 4 if overlap else sent_before[0] == 0
    assert sent > 0
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_are_sent_while_the_backward_runs(stage: int, overlap: bool) -> None:
    run_ranks(during_the_backward, 2, stage, overlap)


def own_clipping() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = Net()
    with pytest.raises(ValueError, match=r"FusedLAMB clips to max_grad_norm=1\.0"):
        Booster(plugin=plugin(1)).boost(model, FusedLAMB(model.parameters()))
    gpc.destroy()


def test_an_optimizer_that_clips_by_what_a_rank_holds_is_refused() -> None:
    run_ranks(own_clipping, 2)
