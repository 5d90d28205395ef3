"""States of gradients: the moves that are legal, and backwards that add to gradients that were read."""

import copy

import pytest
import torch
from torch import nn

from colossalai.amp import (
    DynamicLossScaler,
    LossScaler,
    NaiveFP16,
    OptimizerGroup,
    OptimizerWrapper,
    Precision,
    PureBF16,
)
from colossalai.amp._gradient_state import MOVES, GradEvent, GradState

pytestmark = pytest.mark.unit


def test_all_states_can_be_reached_and_left() -> None:
    reached = {GradState.EMPTY}
    for _ in GradState:
        reached |= {after for state in reached for after in MOVES[state].values()}
    assert reached == set(GradState)
    for moves in MOVES.values():
        assert moves[GradEvent.BACKWARD] is GradState.SCALED
        assert moves[GradEvent.FORGET] is GradState.EMPTY


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (GradState.SCALED, GradEvent.DIVIDE),  # before it is decided
        (GradState.TRUE, GradEvent.DIVIDE),  # a second time
        (GradState.OVERFLOWED, GradEvent.DIVIDE),
        (GradState.ACCEPTED, GradEvent.STEP),  # with the scale in them
        (GradState.STALE, GradEvent.STEP),  # without a decision
        (GradState.TRUE, GradEvent.REJECT),
    ],
)
def test_illegal_moves_name_state_and_event(state: GradState, event: GradEvent) -> None:
    gradients = OptimizerWrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)).gradients
    gradients.state = state
    with pytest.raises(AssertionError, match=f"{state.name} cannot {event.name}"):
        gradients.move(event)


def scaler() -> LossScaler:
    return DynamicLossScaler(init_scale=2.0**8, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000)


class Case:
    """A layer with an optimizer, and its twin in plain float32."""

    def __init__(self, precision: Precision | None, loss_scaler: LossScaler | None) -> None:
        torch.manual_seed(0)
        self.twin = nn.Linear(6, 3)
        self.model = copy.deepcopy(self.twin)
        self.plain = torch.optim.SGD(self.twin.parameters(), lr=0.1)
        raw = torch.optim.SGD(self.model.parameters(), lr=0.1)
        masters = precision and precision.convert_model(self.model, float32_grads=False).replace_params(raw)
        self.optimizer = OptimizerWrapper(raw, group=OptimizerGroup(loss_scaler), masters=masters or None)
        self.dtype = next(self.model.parameters()).dtype

    def backward(self, seed: int) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        self.twin(x).square().mean().backward()
        self.optimizer.backward(self.model(x.to(self.dtype)).float().square().mean())

    def step(self) -> None:
        self.plain.step()
        self.optimizer.step()
        assert self.optimizer.stepped
        for expected, param in zip(self.twin.parameters(), self.model.parameters(), strict=True):
            # Roundings of bfloat16 are up to 2^-9 of a value, a few after one another.
            error = 1e-6 if self.dtype is torch.float32 else 2e-2
            torch.testing.assert_close(param.float(), expected, rtol=error, atol=error)


@pytest.fixture(
    params=[(None, None), (None, scaler), (PureBF16(), None), (NaiveFP16(), scaler)],
    ids=["float32", "float32 with a scale", "bfloat16 masters", "float16 masters with a scale"],
)
def case(request: pytest.FixtureRequest) -> Case:
    precision, make_scaler = request.param
    return Case(precision, make_scaler and make_scaler())


def test_a_backward_adds_to_clipped_gradients(case: Case) -> None:
    case.backward(0)
    nn.utils.clip_grad_norm_(case.twin.parameters(), 0.01)
    case.optimizer.clip_grad_by_norm(0.01)
    case.backward(1)
    case.step()


def test_a_backward_adds_to_gradients_of_the_step_before(case: Case) -> None:
    for seed in range(3):
        case.backward(seed)
        nn.utils.clip_grad_norm_(case.twin.parameters(), 0.1)
        case.optimizer.clip_grad_by_norm(0.1)
        case.step()


def test_a_backward_adds_to_gradients_that_a_user_has_assigned(case: Case) -> None:
    for expected, param in zip(case.twin.parameters(), case.model.parameters(), strict=True):
        expected.grad = torch.full_like(expected, 0.5)
        param.grad = torch.full_like(param, 0.5)
    case.backward(0)
    case.step()


def test_a_backward_adds_to_gradients_that_a_user_has_assigned_after_a_step(case: Case) -> None:
    case.backward(0)
    case.step()
    for expected, param in zip(case.twin.parameters(), case.model.parameters(), strict=True):
        expected.grad = torch.full_like(expected, 0.25)
        param.grad = torch.full_like(param, 0.25)
    case.backward(1)
    case.step()
