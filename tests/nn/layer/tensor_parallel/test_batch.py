"""A rank's part of a batch, sums over the batch, and their gradients."""

import pytest
import torch

from colossalai.communication import ledger
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer import parallel_2d, parallel_2p5d, parallel_3d, restart
from tests.nn.modes import MODES, TOLERANCE, distance, launch, run_in_turn, slice_like
from tests.tiers import further

pytestmark = pytest.mark.dist

SPLIT = {
    "2d": parallel_2d.split_batch_2d,
    "2.5d": parallel_2p5d.split_batch_2p5d,
    "3d": parallel_3d.split_batch_3d,
}
REDUCE = {
    "2d": parallel_2d.reduce_by_batch_2d,
    "2.5d": parallel_2p5d.reduce_by_batch_2p5d,
    "3d": parallel_3d.reduce_by_batch_3d,
}


def both(name):
    """The mean over a batch of a function of each part, and its gradient, as in one process."""
    mode = launch(name)
    axes = restart(mode).batch
    torch.manual_seed(0)
    whole = torch.randn(8, 3)
    x = whole.clone().requires_grad_()
    part = SPLIT[mode](x)
    cut = restart(mode)
    wanted_part = slice_like(whole, type(cut)(batch=axes))
    errors = [distance(part, wanted_part), distance(SPLIT[mode](whole.t(), 1), wanted_part.t())]
    total = REDUCE[mode](part.square().sum())
    mean = REDUCE[mode](part.square().sum(), reduce_mean=True)
    num_parts = gpc.mesh.axis_size(axes)
    errors += [distance(total, whole.square().sum()), distance(mean * num_parts, total)]
    (total + mean).backward()
    return max(*errors, distance(x.grad, 2 * whole * (1 + 1 / num_parts)))


def tensor_3d(name):
    launch(name)
    x = torch.arange(12.0).view(2, 6).requires_grad_()
    modes = (ParallelMode.PARALLEL_3D_INPUT, ParallelMode.PARALLEL_3D_WEIGHT, ParallelMode.PARALLEL_3D_OUTPUT)
    for parallel_mode in modes:
        part = parallel_3d.split_tensor_3d(x, -1, parallel_mode)
        rank = gpc.get_local_rank(parallel_mode)
        assert torch.equal(part, x.chunk(2, -1)[rank])
        (gradient,) = torch.autograd.grad(part, x, torch.full_like(part, float(rank)))
        assert gradient.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]] * 2
    with ledger() as book, pytest.raises(ValueError, match=r"split_tensor_3d cuts dimension 0 of \(5,\)"):
        parallel_3d.split_tensor_3d(torch.ones(5), 0, ParallelMode.PARALLEL_3D_INPUT)
    assert book.count() == 0


def refusals(name):
    launch(name)
    with ledger() as book:
        with pytest.raises(
            ValueError, match=r"split_batch_2d cuts dimension 0 of .* is 7, which the 2 ranks along col"
        ):
            parallel_2d.split_batch_2d(torch.ones(7, 2))
        with pytest.raises(ValueError, match=r"split_batch_3d needs a job .*mode='3d'.* is '2d'"):
            parallel_3d.split_batch_3d(torch.ones(8, 2))
        with pytest.raises(ValueError, match=r"reduce_by_batch_2p5d needs a job .*mode='2.5d'"):
            parallel_2p5d.reduce_by_batch_2p5d(torch.ones(8, 2))
        with pytest.raises(ValueError, match=r"split_tensor_3d needs a job .*mode='3d'"):
            parallel_3d.split_tensor_3d(torch.ones(8), 0, ParallelMode.PARALLEL_3D_INPUT)
    assert book.count() == 0


OF_ONE_MODE = {"2d": [refusals], "3d": [tensor_3d]}


@pytest.mark.parametrize("name", ["2d", further("2.5d"), "3d"])
def test_parts_and_sums(name):
    """And a tensor over any axis of 3d, and what is refused before any collective."""
    errors, *_ = run_in_turn(MODES[name]["size"], name, both, *OF_ONE_MODE.get(name, []))
    assert max(errors) < TOLERANCE
