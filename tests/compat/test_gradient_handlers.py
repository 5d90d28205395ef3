"""Gradients averaged in flat buckets: every type, every size, parameters without a gradient."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.engine.gradient_handler import (
    DataParallelGradientHandler,
    SequenceParallelGradientHandler,
    _handlers,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3))
        self.b = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.unused_on_rank_0 = nn.Parameter(torch.zeros(5))
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.c = nn.Parameter(torch.zeros(3, 2))
        self.scalar = nn.Parameter(torch.zeros(()))


def fill(model, rank):
    for index, param in enumerate(model.parameters()):
        if param.requires_grad:
            param.grad = torch.full_like(param, float((rank + 1) * 10**index))
    model.c.grad = model.c.grad.t().contiguous().t()  # not in the layout of its parameter
    if rank == 0:
        model.unused_on_rank_0.grad = None


def averaged(handler, config, bucket_bytes):
    colossalai.launch_from_torch(config, verbose=False)
    _handlers.BUCKET_BYTES = bucket_bytes
    model = Mixed()
    fill(model, gpc.get_global_rank())
    with ledger() as book:
        handler(model, torch.optim.SGD(model.parameters(), lr=1.0)).handle_gradient()
    assert model.frozen.grad is None
    return [param.grad.unique().tolist() for param in model.parameters() if param.requires_grad], book.count()


@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(2**20, 2), (44, 3), (1, 5)])
def test_means_over_data(bucket_bytes, num_buckets):
    expected = [[1.5], [15.0], [100.0], [15000.0], [150000.0]]  # of a, b, the one unused on a rank, c, scalar
    found = run_ranks(averaged, 2, DataParallelGradientHandler, {}, bucket_bytes)
    assert found == [(expected, num_buckets)] * 2


def test_means_over_sequence_and_data():
    config = {"parallel": {"tensor": {"size": 2, "mode": "sequence"}}}
    expected = [[2.5], [25.0], [225.0], [25000.0], [250000.0]]  # over four ranks
    assert run_ranks(averaged, 4, SequenceParallelGradientHandler, config, 2**20) == [(expected, 2)] * 4


def refused():
    colossalai.launch_from_torch({}, verbose=False)
    model = Mixed()
    handler = SequenceParallelGradientHandler(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="SEQUENCE_DP is not part of this job"):
        handler.handle_gradient()


def test_a_job_without_sequences_is_refused():
    run_ranks(refused, 1)
