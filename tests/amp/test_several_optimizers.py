"""Several optimizers of one model with a loss scale: whichever runs the backward, gradients are true."""

import copy
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from colossalai.amp import (
    DynamicLossScaler,
    NaiveFP16,
    OptimizerGroup,
    OptimizerWrapper,
    RepeatedOverflowError,
)
from tests.amp.twins import TwinsOfSeveral

pytestmark = pytest.mark.unit

INF = float("inf")
SCALE = 2.0**8


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Run(TwinsOfSeveral):
    """A model with two optimizers under one loss scale, and its twin in plain float32."""

    def __init__(self, *, master_weights: bool = False, **scaler_options: object) -> None:
        options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000, **scaler_options}
        group = OptimizerGroup(DynamicLossScaler(init_scale=SCALE, quiet=True, **options))
        twin = Pair()
        model = copy.deepcopy(twin)
        raw, plain = (
            [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (each.first, each.last)]
            for each in (model, twin)
        )
        names = {param: name for name, param in model.named_parameters()}
        masters = NaiveFP16().convert_model(model, float32_grads=False) if master_weights else None
        wrapped = [
            OptimizerWrapper(
                each, group=group, param_names=names, masters=masters and masters.replace_params(each)
            )
            for each in raw
        ]
        self.dtype = torch.float16 if master_weights else torch.float32
        # Two roundings of 2^-11 in each of some twenty operations; in float32 powers of two cost nothing.
        super().__init__(model, wrapped, twin, plain, 0.01 if master_weights else 1e-6)

    def backward(self, by: int, seed: int = 0, *, loss: Callable[[nn.Module, Tensor], Tensor] | None = None):
        """Run a backward on both sides; `by` says whose it is."""
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        loss = loss or (lambda model, x: model(x).float().square().mean())
        loss(self.twin, x).backward()
        self.optimizers[by].backward(loss(self.model, x.to(self.dtype)))

    def overflow(self, part: str) -> None:
        """Let a part's gradient be inf, as a value beyond float16 would."""
        getattr(self.model, part).weight.grad[0, 0] = INF


@pytest.fixture(params=[False, True], ids=["float32", "float16 with masters"])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(master_weights=request.param)


@pytest.mark.parametrize("part", ["first", "last"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_overflow_in_one_skips_all_once(run: Run, part: str, order: tuple[int, int]) -> None:
    run.zero_grad()
    run.backward(0)
    run.overflow(part)
    run.step(*order, skipped=True)
    assert [each.scaler.scale for each in run.optimizers] == [SCALE / 2] * 2
    assert [record.step for record in run.scaler.history] == [1]
    assert f"'{part}.weight'" in run.scaler.history[0].reason
    for step in range(3):
        run.zero_grad()
        run.backward(step % 2, step)
        run.step(*order)
    assert run.scaler.num_steps == 4


def test_the_scale_may_grow_between_two_steps() -> None:
    run = Run(growth_interval=1)
    for step in range(4):
        run.zero_grad()
        run.backward(0, step)
        run.step(0)
        assert run.scaler.scale == SCALE * 2 ** (step + 1)
        run.step(1)
        assert run.scaler.num_steps == step + 1


def only(part: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(model.first(x))
        if part == "first":
            return hidden.float().square().mean()
        return model.last(hidden.detach()).float().square().mean()

    return loss


def test_losses_by_turns(run: Run) -> None:
    """As two that play against each other: each backward is of one part, or leaves gradients in the other."""
    for step in range(4):
        run.zero_grad(1)
        run.backward(1, step, loss=only("last"))
        if step == 1:
            run.overflow("last")
        run.step(1, skipped=step == 1)
        run.zero_grad(0)
        run.backward(0, step)  # reaches `last`, too: inf stays inf there, and is no matter of this step
        run.step(0)
    assert run.scaler.scale == SCALE / 2
    assert run.scaler.num_steps == 8


def test_gradients_that_nobody_steps_with(run: Run) -> None:
    for step in range(3):
        run.zero_grad()
        run.backward(0, step)
        run.step(0)
    assert run.scaler.num_steps == 3


def test_gradients_that_wait_follow_the_scale(run: Run) -> None:
    """One steps every time, the other adds up three backwards, while the scale falls and grows."""
    run.scaler.growth_interval = 1
    run.zero_grad()
    run.backward(0, 0)
    run.step(0)  # grows
    run.zero_grad(0)
    run.backward(0, 1)
    run.overflow("first")
    run.step(0, skipped=True)  # falls; what waits in the other is good
    run.zero_grad(0)
    run.backward(1, 2)
    run.step(0)
    run.step(1)
    assert [record.scale / SCALE for record in run.scaler.history] == [2, 1, 2]  # the last two steps are one


def test_accumulation_of_both(run: Run) -> None:
    run.zero_grad()
    for step in range(3):
        run.backward(step % 2, step)
    run.step()
    run.zero_grad()
    run.backward(1, 3)
    run.backward(1, 4)
    run.overflow("last")
    run.step(skipped=True)
    run.zero_grad()
    run.backward(0, 5)
    run.step(1)
    run.step(0)


def test_clipping_is_of_true_gradients(run: Run) -> None:
    run.zero_grad()
    run.backward(0)
    for number, part in enumerate((run.twin.first, run.twin.last)):
        expected = nn.utils.clip_grad_norm_(part.parameters(), 0.05)
        norm = run.optimizers[number].clip_grad_by_norm(0.05)
        assert norm.item() == pytest.approx(expected.item(), rel=0.01)
    run.step()


def test_skips_of_both_are_one_skip() -> None:
    run = Run(max_consecutive_skips=2)
    run.zero_grad()
    run.backward(0)
    run.overflow("first")
    run.step(skipped=True)
    run.zero_grad()
    run.backward(0)
    run.overflow("last")
    with pytest.raises(RepeatedOverflowError, match="2 steps in a row"):
        run.step(skipped=True)


def test_an_old_state_loads() -> None:
    run = Run()
    for optimizer in run.optimizers:  # as each had a scaler of its own
        optimizer.scaler.load_state_dict({"scale": 4.0, "good_steps": 1, "overflows": 0})
    run.zero_grad()
    run.backward(1)
    run.step()
    assert run.scaler.state_dict()["scale"] == 4.0


def test_weights_of_losses_are_shared_and_the_gradients_of_each_are_divided_once():
    params = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2)]
    raw = [torch.optim.SGD([param], lr=1.0) for param in params]
    first = OptimizerWrapper(raw[0])
    last = OptimizerWrapper(raw[1], group=first.group)
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for scale, weight in ((1.0, 3), (5.0, 1)):
        first.backward(scale * (params[0] * params[1] * x).sum(), weight=weight)
    first.step()
    last.step()
    for param in params:
        torch.testing.assert_close(param.detach(), 1 - x * (3 * 1.0 + 1 * 5.0) / 4, rtol=1e-12, atol=1e-12)
    assert first.mean_loss.item() == last.mean_loss.item() == 3 * (3 * 1.0 + 5.0) / 4
    first.zero_grad()
    first.backward(params[0].sum())  # what `last` has is spent, and hears nothing of it
    last.zero_grad()
    last.backward(params[1].sum())
    last.step()
    assert last.mean_loss is None


def test_a_weight_needs_to_know_the_ranks():
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = OptimizerWrapper(torch.optim.SGD([param], lr=1.0))
    optimizer.backward((param.sum(), 2))
    optimizer.zero_grad()
    optimizer.group.ranks = object()
    with (
        patch("torch.distributed.get_world_size", return_value=2),
        pytest.raises(ValueError, match="has no replicas over which gradients are averaged"),
    ):
        optimizer.backward((param.sum(), 2))


def test_a_closure_leaves_means():
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = OptimizerWrapper(torch.optim.LBFGS([param], lr=1.0, max_iter=1))

    def closure():
        optimizer.zero_grad()
        loss = 10 * param.square().sum()
        optimizer.backward((loss, 10))
        return loss

    optimizer.step(closure)
    # The first step of L-BFGS is min(1, 1 / |g|) g; the gradient of the mean is 2.
    assert param.item() == pytest.approx(1 - 0.5 * 2)
    assert param.grad.item() == pytest.approx(2.0)
