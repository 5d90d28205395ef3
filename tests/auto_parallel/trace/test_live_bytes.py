"""The walk over profiles peaks where real steps on the CPU do, in float32 and without a kernel's scratch.

Peaks of whole models are compared in `test_profile_ops.py`, with all else that profiles say of them.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from colossalai.auto_parallel.trace._live_bytes import live_bytes
from colossalai.auto_parallel.trace._profile_ops import profile_operations
from colossalai.auto_parallel.trace._trace import trace_model
from tests.auto_parallel.trace.cases import counted_bytes
from tests.auto_parallel.trace.comparison import ALLOWED

pytestmark = pytest.mark.unit

FEW_BYTES = 64  # the gradient of a loss and the like


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum()


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


PARTS = {
    "linear": lambda width: nn.Linear(width, width),
    "wide": lambda width: nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)),
    "norm": nn.LayerNorm,
    "dropout": lambda width: nn.Dropout(0.5),
    "relu": lambda width: nn.ReLU(),
    "view": lambda width: nn.Unflatten(1, (width // 2, 2)),
    "flat": lambda width: nn.Flatten(),
    "residual": lambda width: Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))),
    "twice": lambda width: Residual(Residual(nn.Tanh())),
}


some_chains = given(
    st.lists(st.sampled_from([name for name in PARTS if name not in ("view", "flat")]), max_size=5),
    st.sampled_from([8, 16]),
    st.integers(1, 20),
    st.booleans(),
)


@settings(max_examples=5)
@some_chains
def test_peaks_of_chains(names, width, rows, with_param_grads):
    check_peak(names, width, rows, with_param_grads)


@pytest.mark.long
@settings(max_examples=15)
@some_chains
def test_peaks_of_more_chains(names, width, rows, with_param_grads):
    check_peak(names, width, rows, with_param_grads)


def check_peak(names, width, rows, with_param_grads):
    layers = [PARTS[name](width) for name in ("linear", "view", "flat", *names, "linear")]
    model = nn.Sequential(*layers, Squares()).train()
    arguments = {"input": torch.rand(rows, width)}
    trace = trace_model(model, arguments)
    found = live_bytes(trace, profile_operations(trace), with_param_grads=with_param_grads)
    _, peak = counted_bytes(model, arguments, with_param_grads=with_param_grads)
    assert found == pytest.approx(peak, rel=ALLOWED, abs=FEW_BYTES)


def test_a_tied_weight_collects_its_gradient_to_the_end():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(200, 8)
            self.head = nn.Linear(8, 200, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids).tanh()).logsumexp(-1).sum()

    model, arguments = Tied(), {"ids": torch.zeros(4, dtype=torch.long)}
    trace = trace_model(model, arguments)
    profiles = profile_operations(trace)
    for with_param_grads in (False, True):
        _, peak = counted_bytes(model, arguments, with_param_grads=with_param_grads)
        found = live_bytes(trace, profiles, with_param_grads=with_param_grads)
        assert found == pytest.approx(peak, abs=FEW_BYTES)
        assert found > 3 * model.head.weight.nbytes  # two gradients and their sum


def test_a_branch_that_the_loss_does_not_need_keeps_what_it_saved():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.used(x).tanh()
            return hidden.sum(), self.unused(hidden).tanh()

    model, arguments = Two(), {"x": torch.rand(32, 16)}
    trace = trace_model(model, arguments)
    found = live_bytes(trace, profile_operations(trace))
    _, peak = counted_bytes(model, arguments, with_param_grads=False)
    assert found == pytest.approx(peak, abs=FEW_BYTES)


def test_a_recorded_run_has_the_same_peak():
    class Result:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Recorded(nn.Sequential):
        def forward(self, x: Tensor) -> tuple[Tensor, Result]:
            hidden = super().forward(x)
            return hidden.square().sum(), Result(hidden)

    model = Recorded(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.5), nn.Linear(32, 8))
    arguments = {"x": torch.rand(20, 8)}
    trace = trace_model(model, arguments)
    assert not trace.is_exact
    found = live_bytes(trace, profile_operations(trace))
    _, peak = counted_bytes(model, arguments, with_param_grads=False)
    assert found == pytest.approx(peak, rel=0.03)
