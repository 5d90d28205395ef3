"""RowWiseAdagrad against its formula, with dense and sparse gradients."""

import copy

import pytest
import torch
from torch import nn

from colossalai.nn.optimizer import RowWiseAdagrad

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_steps_are_those_of_the_formula(sparse: bool, start: float) -> None:
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
    optimizer = RowWiseAdagrad(embedding.parameters(), lr=0.1, eps=1e-8, initial_accumulator_value=start)
    weight, sums = embedding.weight.detach().clone(), torch.full((10,), start, dtype=torch.float64)
    for _ in range(5):
        ids = torch.randint(0, 10, (6,), generator=generator)
        factors = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        (embedding(ids) * factors).sum().backward()
        optimizer.step()
        for row in set(ids.tolist()):
            grad = factors[ids == row].sum(0)
            sums[row] += (grad * grad).mean()
            weight[row] -= 0.1 * grad / (sums[row].sqrt() + 1e-8)
    torch.testing.assert_close(embedding.weight.detach(), weight, rtol=1e-12, atol=1e-12)
    state = optimizer.state[embedding.weight]["sum"]
    assert state.shape == (10, 1)
    torch.testing.assert_close(state.flatten(), sums, rtol=1e-12, atol=1e-12)


def test_a_state_dict_goes_on() -> None:
    first = nn.Parameter(torch.ones(3, 2))
    second = copy.deepcopy(first)
    optimizers = [RowWiseAdagrad([param], lr=0.1) for param in (first, second)]
    first.grad = torch.arange(6.0).view(3, 2)
    optimizers[0].step()
    second.data.copy_(first.data)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for param, optimizer in zip((first, second), optimizers, strict=True):
        param.grad = torch.ones(3, 2)
        assert optimizer.step(lambda: 2.0) == 2.0
    assert torch.equal(first, second)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="lr=-1 is out of range"):
        RowWiseAdagrad([nn.Parameter(torch.ones(2, 2))], lr=-1)
    with pytest.raises(ValueError, match=r"the shape \(2,\), .* torch.optim.Adagrad"):
        RowWiseAdagrad([nn.Parameter(torch.ones(2))])
