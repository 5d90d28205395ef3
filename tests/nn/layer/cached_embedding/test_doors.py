"""A model with a cached table is refused by plans, before it is changed, and in jobs of several ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.core import global_context as gpc
from tests.nn.layer.cached_embedding.tables import make_pair
from tests.ranks import run_ranks

REFUSED = (
    r"0\.weight is the cache of CachedEmbeddingBag\(400, 8\), which no plan trains yet: .* loop of your own"
)


def refuse() -> None:
    colossalai.launch_from_torch({})
    model = nn.Sequential(make_pair()[1], nn.Linear(8, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=REFUSED):
        colossalai.initialize(model, optimizer)
    with pytest.raises(ValueError, match=REFUSED):
        Booster(plugin=TorchDDPPlugin()).boost(model, optimizer)
    gpc.destroy()


@pytest.mark.dist
def test_plans_refuse_it() -> None:
    run_ranks(refuse, 1)


def refuse_ranks() -> None:
    colossalai.launch_from_torch({})
    model = DistributedDataParallel(nn.Sequential(make_pair(sparse=False)[1], nn.Linear(8, 1)))
    with pytest.raises(
        RuntimeError, match=r"CachedEmbeddingBag\(400, 8\) is in a job of 2 ranks, .* in one process"
    ):
        model(torch.tensor([[1, 2]]))
    gpc.destroy()


@pytest.mark.dist
def test_ranks_are_refused() -> None:
    run_ranks(refuse_ranks, 2)
