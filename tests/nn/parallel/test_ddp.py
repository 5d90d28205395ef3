"""Replicated data parallelism: the order of the sums is that of the first step, in a resumed run, too."""

import copy

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

STEPS, SAVED_AT = 5, 2


class Net(nn.Module):
    """Layers that are not applied in the order in which they are built, a tied one and a frozen one."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 13)
        self.middle = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.embed = nn.Embedding(11, 13)
        self.again = nn.Linear(13, 7, bias=False)
        self.again.weight = nn.Parameter(self.head.weight.detach().t().contiguous())
        self.spare = nn.Linear(13, 5)
        self.norm = nn.BatchNorm1d(13)
        self.tied = self.middle[0]

    def forward(self, ids, use_spare=True):
        x = self.embed(ids).sum(1)
        for layer in (*self.middle, self.tied):
            x = torch.tanh(self.frozen(layer(x)))
        x = self.head(self.again(self.norm(x)))
        return self.spare(x) if use_spare else x


def batch_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (6, 4), generator=generator)


def train(plugin, steps, start=None, *, use_spare=True):
    """Train from a start, or from the seed; return losses and, before each step, all states."""
    torch.manual_seed(3)
    raw = Net()
    optimizer = torch.optim.AdamW(raw.parameters(), lr=0.01)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(raw, optimizer)
    if start is not None:
        model.load_state_dict(start[0])
        optimizer.unwrap().load_state_dict(
            copy.deepcopy(start[1])
        )  # which would take the tensors as they are
    states = []
    for step in steps:
        states.append(copy.deepcopy((raw.state_dict(), optimizer.unwrap().state_dict())))
        optimizer.zero_grad()
        booster.backward(model(batch_of(step, gpc.get_global_rank()), use_spare).square().mean(), optimizer)
        optimizer.step()
    states.append(copy.deepcopy((raw.state_dict(), optimizer.unwrap().state_dict())))
    return states


def is_same(found, expected):
    assert found[0].keys() == expected[0].keys()
    same = all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])
    moments = [[s["exp_avg"] for s in state[1]["state"].values()] for state in (found, expected)]
    assert len(moments[0]) == len(moments[1]) > 5
    return same and all(map(torch.equal, *moments))


def resume(options):
    colossalai.launch_from_torch({}, verbose=False)
    use_spare = not options.get("find_unused_parameters", False)
    whole = train(TorchDDPPlugin(**options), range(STEPS), use_spare=use_spare)
    rest = train(TorchDDPPlugin(**options), range(SAVED_AT, STEPS), whole[SAVED_AT], use_spare=use_spare)
    gpc.destroy()
    return [is_same(*pair) for pair in zip(rest, whole[SAVED_AT:], strict=True)]


OPTIONS = [{}, {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("world_size", [further(2), 3, further(4)])  # of two summands there is one order
def test_a_resumed_run_adds_up_in_the_same_order(world_size):
    same = [[True] * (STEPS - SAVED_AT + 1)] * world_size
    assert run_each(world_size, resume, [(options,) for options in OPTIONS]) == [same] * len(OPTIONS)


def calls_of_hooks():
    """Return how often hooks of a parameter were called by `boost`, and by a backward after it."""
    colossalai.launch_from_torch({}, verbose=False)
    model = nn.Linear(2, 2)
    calls = []
    model.weight.register_hook(lambda _: calls.append("before"))
    model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    removed = model.bias.register_post_accumulate_grad_hook(calls.append)
    boosted, *_ = Booster(plugin=TorchDDPPlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    by_boost = [*calls]
    removed.remove()
    boosted(torch.ones(1, 2)).sum().backward()
    gpc.destroy()
    return by_boost, calls


def test_boost_calls_no_hook_of_a_users_parameter():
    assert run_ranks(calls_of_hooks, 2) == [([], ["before", "after"])] * 2
