"""Models under a `Plan` that cuts by name, trained as one process trains them."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.communication import Ledger, ledger
from colossalai.context import Layout, relayout
from colossalai.core import global_context as gpc
from colossalai.runtime import ModelWrapper, Plan, TrainingStep, assemble
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, Subject, check_parity
from colossalai.zero import ZeroReplicas
from tests.parity.subjects.pipeline import slice_of_batch
from tests.parity.training import whole
from tests.parity.subjects.zero import subject_of

Criterion = Callable[[Any, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, ...]]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer under which a gradient that is off by a factor shows."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def images(*, batch: int = 8, size: int = 8) -> Batches:
    """Return three batches of images, (batch, 3, size, size), that are not centered, and of five classes."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, 3, size, size)
    return [
        (torch.randn(shape, generator=generator) + 1.0, torch.randint(5, (batch,), generator=generator))
        for _ in range(3)
    ]


def build_plain(build: Callable[[], nn.Module], layout: Layout) -> nn.Module:
    """Launch the job, build a model of plain layers in float64, then lay the ranks out."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(1024)
    model = build().double()
    relayout(layout)
    return model


@dataclass(frozen=True)
class Trained:
    """What `train` leaves.

    Attributes:
        model: The assembled model.
        twin: What one process has trained.
        book: The collectives of the first step.
    """

    model: ModelWrapper
    twin: nn.Module
    book: Ledger


def train(
    build: Callable[[], nn.Module],
    criterion: Criterion,
    batches: Batches,
    *,
    layout: Layout,
    uncut: tuple[str, ...],
    **options: Any,
) -> Trained:
    """Train by a plan, each step as one process does it; buffers must agree as well.

    Args:
        build: Returns the model, of plain layers.
        criterion: Loss of an output and labels.
        batches: One for each step; a pipeline, and then the twin as well, takes each in microbatches.
        layout: That of the plan.
        uncut: Words in the names of the matrices that are whole on every rank; all others must be cut.
        options: The other fields of the plan.
    """
    model = build_plain(build, layout)
    plan = Plan(layout=layout, **options)
    num_parts = 1 if plan.pipeline is None else plan.pipeline.num_microbatches
    # The first rank trains the twin; on the others there is one to be told its values.
    twins: list[nn.Module] = [] if dist.get_rank() == 0 else [copy.deepcopy(model).double()]
    books: list[Ledger] = []

    def loss_of_twin(twin: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        twins.append(twin)
        # A microbatch is that of all replicas, each of which has a run of the batch.
        sizes = (gpc.data_parallel_size, num_parts, -1)
        x, y = (tensor.unflatten(0, sizes).transpose(0, 1).flatten(1, 2) for tensor in batch)
        losses = [criterion(twin(part), labels) for part, labels in zip(x, y, strict=True)]
        return torch.stack(losses).mean()

    case = ParityCase(
        build_model=lambda: model, build_optimizer=sgd, compute_loss=loss_of_twin, batches=batches
    )
    wrapped, optimizer = None, None

    def apply(model: nn.Module) -> Subject:
        nonlocal wrapped, optimizer
        own = sgd(model.parameters())
        wrapped, optimizer = assemble(plan, model, own, mesh=gpc.mesh, device=torch.device("cpu"))
        names = optimizer.param_names
        for param, name in names.items():
            is_cut = (spec := spec_of(param)) is not None and bool(spec.axes)
            assert param.dim() < 2 or is_cut != any(word in name for word in uncut), name
        step = TrainingStep(wrapped, optimizer)

        def run(batch: tuple[Tensor, ...]) -> Tensor | None:
            optimizer.zero_grad()
            with ledger() as book:
                if plan.pipeline is not None:
                    loss = step.run_pipeline(batch[0], batch[1], criterion).loss
                else:
                    loss = criterion(step.forward(batch[0]), batch[1])
                    step.backward(loss)
            books.append(book)
            step.step()
            return loss

        def parameters() -> dict[str, Tensor]:
            for each in itertools.chain(twins[0].parameters(), twins[0].buffers()):
                dist.broadcast(each.detach(), 0)
            for name, buffer in wrapped.unwrap().named_buffers():
                expected = twins[0].get_buffer(name)
                torch.testing.assert_close(whole(buffer, buffer), expected, rtol=0, atol=1e-10, msg=name)
            return {name: whole(param, param) for param, name in names.items()}

        if isinstance(plan.data, ZeroReplicas):  # whose optimizer has slices
            in_slices = subject_of(wrapped, optimizer, run)
            return replace(in_slices, parameters=lambda: parameters() and in_slices.parameters())
        return Subject(
            step=run,
            gradients=lambda: {
                name: whole(param, param.grad) for param, name in names.items() if param.grad is not None
            },
            parameters=parameters,
        )

    losses = check_parity(case, apply, **slice_of_batch())
    assert len(set(losses)) == len(losses)
    return Trained(wrapped, twins[0], books[0])
