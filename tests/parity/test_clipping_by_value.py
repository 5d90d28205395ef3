"""Clipping every element of the gradients, where layers are cut and where stages are: as in one process."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import colossalai
import colossalai.nn as col_nn
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, check_parity
from tests.parity.subjects import pipeline, tensor
from tests.parity.test_pipeline import case_of
from tests.parity.test_tensor_parallel import VOCAB, build, double, loss_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


class ClippedSGD(torch.optim.SGD):
    """What the twin uses: elements are clipped before each step, some and not all of them."""

    def __init__(self, params: Any, *, bound: float) -> None:
        super().__init__(params, lr=0.5)
        self.bound = bound

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        grads = [param.grad for param in self.param_groups[0]["params"] if param.grad is not None]
        share = torch.cat([(grad.abs() > self.bound).flatten() for grad in grads]).double().mean()
        assert 0.05 < share < 0.95, f"the bound changes {share:.0%} of the elements"
        for grad in grads:
            grad.clamp_(-self.bound, self.bound)
        return super().step(closure)


def of_both_sides(case: ParityCase, bound: float) -> tuple[ParityCase, ParityCase]:
    """Return the case as the twin and as the subject run it, whose optimizer knows nothing of the bound."""
    plain = partial(torch.optim.SGD, lr=0.5)
    return replace(case, build_optimizer=partial(ClippedSGD, bound=bound)), replace(
        case, build_optimizer=plain
    )


def on_tensor_parallel_ranks(bound: float) -> None:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(VOCAB, (8, 3), generator=generator) for _ in range(2)) for _ in range(3)]
    options = {"tied": False, "vocab_parallel": True}
    case = ParityCase(
        build_model=partial(double, **options), build_optimizer=None, compute_loss=loss_of, batches=batches
    )
    twins, ours = of_both_sides(case, bound)
    criterion = partial(col_nn.CrossEntropyLoss, label_smoothing=0.1)
    apply = partial(tensor.through_engine, ours, partial(build, **options), criterion, clip_value=bound)
    check_parity(twins, apply, slice_index=0, num_slices=1)
    gpc.destroy()


def test_on_tensor_parallel_ranks() -> None:
    run_ranks(on_tensor_parallel_ranks, 2, 0.01)


def in_a_pipeline(bound: float) -> None:
    config = {"parallel": {"pipeline": {"size": 2, "partition": "balanced"}}, "NUM_MICRO_BATCHES": 4}
    colossalai.launch_from_torch(config, verbose=False)
    twins, ours = of_both_sides(case_of(), bound)
    check_parity(twins, partial(pipeline.through_engine, ours, clip_value=bound), **pipeline.slice_of_batch())
    gpc.destroy()


def test_in_a_pipeline() -> None:
    run_ranks(in_a_pipeline, 2, 0.01)
