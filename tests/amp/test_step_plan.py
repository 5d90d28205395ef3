"""Step plan: made again when users put other parameters into the groups of an optimizer."""

import pytest
import torch
from torch import nn

from colossalai.amp import DynamicLossScaler, OptimizerGroup, OptimizerWrapper

pytestmark = pytest.mark.unit


def params_with_grads(number: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.full((2,), float(each + 1))) for each in range(number)]
    for param in params:
        param.grad = param.detach().clone()
    return params


def norm_of(params: list[nn.Parameter]) -> float:
    return torch.linalg.vector_norm(torch.cat([param.grad for param in params])).item()


def test_the_plan_is_kept_while_the_groups_are_the_same() -> None:
    optimizer = OptimizerWrapper(torch.optim.SGD(params_with_grads(2), lr=1.0))
    plan = optimizer.gradients.current_plan()
    optimizer.clip_grad_by_norm(1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.gradients.current_plan() is plan
    optimizer.add_param_group({"params": params_with_grads(1)})
    assert optimizer.gradients.current_plan() is not plan


@pytest.mark.parametrize("change", ["added", "removed", "replaced"])
def test_norms_and_clipping_follow_the_groups(change: str) -> None:
    params = params_with_grads(3)
    optimizer = OptimizerWrapper(torch.optim.SGD(params[:2], lr=1.0))
    assert optimizer.clip_grad_by_norm(1e3).item() == pytest.approx(norm_of(params[:2]))
    optimizer.step()
    if change == "added":
        optimizer.add_param_group({"params": params[2:]})
        held = params
    else:
        held = params[:1] if change == "removed" else params[1:]
        optimizer.param_groups = [{**optimizer.param_groups[0], "params": held}]
    others = [param for param in params if param not in set(held)]
    expected, kept = norm_of(held), [param.grad.clone() for param in others]
    assert optimizer.clip_grad_by_norm(0.1).item() == pytest.approx(expected)
    assert norm_of(held) == pytest.approx(0.1, rel=1e-4)
    for param, grad in zip(others, kept, strict=True):
        assert torch.equal(param.grad, grad)


def test_an_overflow_in_an_added_parameter_skips_the_step() -> None:
    first, added = params_with_grads(2)
    scaler = DynamicLossScaler(init_scale=4.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=10)
    optimizer = OptimizerWrapper(torch.optim.SGD([first], lr=1.0), group=OptimizerGroup(scaler))
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [added]})
    optimizer.backward(first.sum() + added.sum())
    added.grad[0] = float("inf")
    optimizer.step()
    assert not optimizer.stepped
    assert first.tolist() == [1.0, 1.0]
