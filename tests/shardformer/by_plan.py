"""Runs of plain models under a `Plan`, whose buffers must be those of one process as well."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import colossalai
from colossalai.amp import Precision
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.communication import Ledger, ledger
from colossalai.context import Layout, relayout
from colossalai.core import global_context as gpc
from colossalai.runtime import ModelWrapper, Plan
from colossalai.tensor import spec_of
from tests.parity.training import SEED, Batch, Run, Task, whole

Build = Callable[[], nn.Module]
Criterion = Callable[[Any, Tensor], Tensor]


class ByPlan(Plugin):
    """Trains a model by a plan as it is."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, precision: Precision) -> Plan:
        """See the base class."""
        return self._plan


def sgd(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer under which a gradient that is off by a factor shows."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def images(*, batch: int = 8, size: int = 8) -> list[Batch]:
    """Return three batches of images, (batch, 3, size, size), that are not centered, and of five classes."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, 3, size, size)
    return [
        (torch.randn(shape, generator=generator) + 1.0, torch.randint(5, (batch,), generator=generator))
        for _ in range(3)
    ]


def build_plain(build: Build, layout: Layout) -> nn.Module:
    """Launch the job, build a model of plain layers in float64, then lay the ranks out."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(1024)
    model = build().double()
    relayout(layout)
    return model


def run_by_plan(
    build: Build,
    plan: Plan,
    *uncut: str,
    criterion: Criterion = nn.functional.cross_entropy,
    batches: Callable[[], Sequence[Batch]] = images,
    plugin: Callable[[], Plugin] | None = None,
    context: Callable[[], Any] = ExitStack,
    **options: Any,
) -> Run:
    """Return a run by a plan.

    Args:
        build: Returns the model, of plain layers.
        plan: The plan; a pipeline, and then the twin as well, takes each batch in microbatches.
        uncut: Words in the names of the matrices that are whole on every rank; all others must be cut.
        criterion: Loss of an output and labels.
        batches: See `Task`.
        plugin: See `Run`. Default: one for the plan.
        context: See `Task`.
        options: Other fields of the run.
    """
    buffers = Buffers(context, uncut)
    num_parts = 1 if plan.pipeline is None else plan.pipeline.num_microbatches
    task = Task(
        build=build,
        batches=batches,
        criterion=functools.partial(_same, criterion),
        optimizer=sgd,
        loss=functools.partial(_loss_of_twin, criterion, num_parts, buffers),
        context=buffers,
    )
    layout = plan.layout
    num_ranks = layout.pipeline * (layout.data or 1) * layout.tensor
    plugin = plugin or functools.partial(ByPlan, plan)
    return Run(**{"task": task, "num_ranks": num_ranks, "plugin": plugin, "check": buffers.keep, **options})


def _same(criterion: Criterion) -> Criterion:
    return criterion


def _loss_of_twin(
    criterion: Criterion, num_parts: int, buffers: "Buffers", twin: nn.Module, batch: Batch
) -> Tensor:
    """Return the mean loss of microbatches, each of which is that of all replicas."""
    buffers.twin = twin
    sizes = (gpc.data_parallel_size, num_parts, -1)  # each replica has a run of the batch
    x, y = (tensor.unflatten(0, sizes).transpose(0, 1).flatten(1, 2) for tensor in batch)
    losses = [criterion(twin(part), labels) for part, labels in zip(x, y, strict=True)]
    return torch.stack(losses).mean()


class Buffers:
    """Which matrices are cut, when a model is assembled; whether buffers are the twin's, at the end of a run.

    Args:
        context: Makes another context in which the run is made.
        uncut: See `run_by_plan`.
    """

    def __init__(self, context: Callable[[], Any], uncut: tuple[str, ...]) -> None:
        self._context, self._uncut = context, uncut
        self._models: list[nn.Module] = []
        self.twin: nn.Module | None = None

    def __call__(self) -> "Buffers":
        """Return the context of a run."""
        return self

    def keep(self, model: ModelWrapper) -> None:
        """See `Run.check`."""
        for name, param in model.unwrap().named_parameters():
            is_cut = (spec := spec_of(param)) is not None and bool(spec.axes)
            assert param.dim() < 2 or is_cut != any(word in name for word in self._uncut), name
        self._models = [model.unwrap()]

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(self._context())

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._stack.close()
        if kind is None:  # the first rank has the twin
            values: list[Any] = [None if self.twin is None else dict(self.twin.named_buffers())]
            dist.broadcast_object_list(values)
            for name, buffer in self._models[0].named_buffers():
                expected = values[0][name]
                torch.testing.assert_close(whole(buffer, buffer), expected, rtol=0, atol=1e-10, msg=name)


def first_step(run: Run) -> tuple[nn.Module, Ledger]:
    """Return the model after a forward and backward, and their collectives."""
    task, plugin = run.task, run.plugin()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    model = task.build()
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, task.optimizer(model.parameters()))
    part, num_parts = gpc.mesh.axis_rank("dp"), gpc.data_parallel_size
    x, labels = (tensor.chunk(num_parts)[part] for tensor in task.batches()[0])
    with ledger() as book:
        booster.backward(task.criterion()(boosted(x.double()), labels), optimizer)
    return boosted.unwrap(), book
