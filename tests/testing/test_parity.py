"""The parity check itself: it passes DDP and FSDP as torch has them, and catches planted errors."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.testing import ParityCase, Subject, check_parity, full_gradients, full_parameters
from tests.ranks import RanksError, run_ranks

NUM_STEPS = 3


def _build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _compute_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def _case(**changes: Any) -> ParityCase:
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(NUM_STEPS)
    ]
    arguments = {
        "build_model": _build_model,
        "build_optimizer": partial(torch.optim.AdamW, lr=0.1),
        "compute_loss": _compute_loss,
        "batches": batches,
    }
    return ParityCase(**{**arguments, **changes})


def _subject(model: nn.Module, *, max_norm: float | None = None, lr: float = 0.1) -> Subject:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        optimizer.zero_grad()
        loss = _compute_loss(model, batch)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return loss

    return Subject(
        step=step, gradients=partial(full_gradients, model), parameters=partial(full_parameters, model)
    )


def _ddp(model: nn.Module, **options: float) -> Subject:
    return _subject(nn.parallel.DistributedDataParallel(model), **options)


def _fsdp(model: nn.Module, **options: float) -> Subject:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2])
    return _subject(fully_shard(model), **options)


def _forgets_to_reduce(model: nn.Module) -> Subject:
    return _subject(model)


def _half_each(model: nn.Module) -> Subject:
    """As in a pipeline: each rank speaks for its part of the model, and only the last knows the loss."""
    whole, rank = _ddp(model), dist.get_rank()

    def part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor for name, tensor in tensors.items() if name.startswith("0." if rank == 0 else "2.")
        }

    def step(batch: tuple[Tensor, ...]) -> Tensor | None:
        loss = whole.step(batch).detach().clone()
        dist.all_reduce(loss)
        return loss / 2 if rank == 1 else None

    return Subject(
        step=step,
        gradients=lambda: part(whole.gradients()),
        parameters=lambda: part(whole.parameters()),
    )


def _loses_a_gradient(model: nn.Module) -> Subject:
    whole = _ddp(model)
    return dataclasses.replace(whole, gradients=lambda: dict(list(whole.gradients().items())[1:]))


def _check(apply: Callable[..., Subject], max_norm: float | None = None) -> list[float]:
    dist.init_process_group("gloo")
    options = {} if max_norm is None else {"max_norm": max_norm}
    return check_parity(_case(**options), partial(apply, **options))


@pytest.mark.dist
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("apply", [_ddp, _fsdp])
def test_torch_agrees(apply: Callable[..., Subject], max_norm: float | None) -> None:
    losses = run_ranks(_check, 2, apply, max_norm)
    assert losses[0] == losses[1]
    assert len(losses[0]) == NUM_STEPS
    assert losses[0][0] > losses[0][-1]


@pytest.mark.dist
def test_ranks_may_hold_parts() -> None:
    assert len(run_ranks(_check, 2, _half_each)) == 2


@pytest.mark.dist
@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (_forgets_to_reduce, r"step 0: the gradient of 0.weight differs by"),
        (_loses_a_gradient, r"step 0: the gradients: missing on all ranks \['0.weight'\]"),
    ],
)
def test_planted_errors_between_ranks(apply: Callable[..., Subject], message: str) -> None:
    with pytest.raises(RanksError, match=message):
        run_ranks(_check, 2, apply)


def _calls_of_the_twin() -> tuple[int, bool]:
    """Return how often this rank trains a twin that draws numbers, and whether its own state is kept."""
    dist.init_process_group("gloo")
    calls = []

    def draws(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        calls.append(torch.rand(1))
        return _compute_loss(model, batch)

    state = torch.get_rng_state()
    check_parity(_case(compute_loss=draws), _ddp)
    return len(calls), torch.equal(state, torch.get_rng_state())


@pytest.mark.dist
def test_the_first_rank_trains_the_twin() -> None:
    assert run_ranks(_calls_of_the_twin, 2) == [(NUM_STEPS, True), (0, True)]


@pytest.mark.unit
def test_one_process() -> None:
    state = torch.get_rng_state()
    assert len(check_parity(_case(), _subject)) == NUM_STEPS
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"max_norm": 0.1}, {}, "step 0: the gradient of 0.weight differs"),
        ({}, {"lr": 0.1 + 1e-8}, "step 0: the parameter of 0.weight differs"),
        (
            {"compute_loss": lambda model, batch: (1 + 1e-9) * _compute_loss(model, batch)},
            {},
            "step 0: the loss differs",
        ),
    ],
)
def test_planted_errors_in_one_process(changes: dict, options: dict, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_parity(_case(**changes), partial(_subject, **options))


@pytest.mark.unit
def test_a_nan_is_an_error() -> None:
    def broken(model: nn.Module) -> Subject:
        whole = _subject(model)
        return dataclasses.replace(whole, step=lambda batch: whole.step(batch) * float("nan"))

    with pytest.raises(AssertionError, match="the loss differs by nan"):
        check_parity(_case(), broken)


@pytest.mark.unit
def test_no_rank_knows_the_loss() -> None:
    whole = _subject(_build_model())
    with pytest.raises(AssertionError, match="no rank has the loss"):
        check_parity(_case(), lambda _: dataclasses.replace(whole, step=lambda _: None))


@pytest.mark.unit
def test_uneven_slices() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 3 equal slices"):
        check_parity(_case(), _subject, slice_index=0, num_slices=3)


@pytest.mark.unit
def test_wrappers_do_not_change_names() -> None:
    model = _build_model()
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})
    assert list(full_parameters(wrapped)) == [name for name, _ in model.named_parameters()]
