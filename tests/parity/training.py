"""A training run under parallel methods, by either door, compared with one process after every step.

A row of the parity table (tests/parity/table.py, and rows of rooms that have details of their own) is a
`Run`: a `Task`, which says what is trained, and how it is parallelized. `train` makes the run and tells every
equality of losses, gradients and parameters with one process.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import Plugin
from colossalai.core import global_context as gpc
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, Subject, check_parity
from colossalai.utils import get_current_device
from tests.ranks import run_ranks
from tests.turns import each_in_turn, grouped

Batch = tuple[Tensor, ...]
SEED = 3
ADAMW = partial(torch.optim.AdamW, lr=0.05)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and what it is trained on.

    Models are built with float64 as the default dtype, and trained with float32 as the default: a tensor that
    a method makes without a dtype loses digits there.

    Attributes:
        build: Returns the model of one process; it is called before anything is launched.
        batches: Returns the global batches, one for each step. The last tensor of a batch has the labels,
            those before are the inputs of the model.
        criterion: Returns the loss function of an output and labels; it is called where the model runs. None
            if the job has none; the plugin door then trains by `loss`.
        optimizer: Makes the optimizer of parameters.
        place: Returns the model of this rank, given that of one process; it is called in the launched job
            with the random state in which `build` was called. Default: that model itself.
        loss: Loss of one process over a batch. Default: that of `criterion`.
        cut: Returns what this rank takes of the batch of its replica.
        context: Makes a context in which the run is made, but for one that recomputes.
        tolerance: See `ParityCase`.
    """

    build: Callable[[], nn.Module]
    batches: Callable[[], Sequence[Batch]]
    criterion: Callable[[], Any] | None = nn.CrossEntropyLoss
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = ADAMW
    place: Callable[[Any], nn.Module] | None = None
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    cut: Callable[[Batch], Batch] | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    tolerance: float = 1e-10


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the table: a task under parallel methods.

    Attributes:
        task: What is trained.
        num_ranks: How many ranks there are.
        config: That of the config door. None: there is only the plugin door.
        plugin: Makes the plugin of the plugin door. With a config as well the run is made through both, in
            one job, and the losses must be equal bit for bit.
        booster: Options of the Booster beside the plugin.
        accumulation: How many microbatches an update has.
        max_norm: Maximum gradient norm. None: gradients are not clipped.
        clip_value: Maximum of each element of the gradients, by a call before each update. None: they are not
            clipped.
        syncs_always: Whether each microbatch of an update synchronizes the gradients. Only the plugin door
            can; a config then says only how the job is launched.
        check: Called with the model once it is assembled, at each door.
        backend: Of the communication. None: the launch chooses it.
    """

    task: Task
    num_ranks: int
    config: Mapping[str, Any] | None = None
    plugin: Callable[[], Plugin] | None = None
    booster: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    syncs_always: bool = False
    check: Callable[[Any], None] | None = None
    backend: str | None = None

    @property
    def launched(self) -> dict[str, Any]:
        """The config with which the job is launched."""
        if self.config is None and self.plugin is not None:
            return {}
        options = {"gradient_accumulation": self.accumulation, "clip_grad_norm": self.max_norm or 0.0}
        return copy.deepcopy({**options, **(self.config or {})})

    @property
    def has_config_door(self) -> bool:
        """Whether the run goes through the config door."""
        return self.plugin is None or (self.config is not None and not self.syncs_always)


def train(run: Run) -> list[float]:
    """Make a run on this rank; return the losses of its steps.

    The twin is built before there is a mode of layers.
    """
    task = run.task
    torch.manual_seed(SEED)
    with in_float64():
        plain = task.build()
    criterion = None if task.criterion is None else task.criterion()
    backend = {} if run.backend is None else {"backend": run.backend}
    colossalai.launch_from_torch(run.launched, verbose=False, **backend)
    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        build_optimizer=partial(_optimizer_of_twin, run),
        compute_loss=task.loss or (lambda model, batch: criterion(model(*batch[:-1]), batch[-1])),
        batches=task.batches(),
        max_norm=run.max_norm,
        device=get_current_device(),
        tolerance=task.tolerance,
    )
    recomputes = bool((run.config or {}).get("recompute"))
    with nullcontext() if recomputes else task.context():
        found = []
        if run.has_config_door:
            found.append(check_parity(case, partial(through_engine, run), **slice_of_batch()))
        if run.plugin is not None:
            plugin = run.plugin()
            plugin.configure()  # the mesh says which part of a batch a rank takes
            found.append(check_parity(case, partial(through_booster, run, plugin), **slice_of_batch()))
    assert run.plugin is not None or not run.syncs_always, "a step of the config door synchronizes once"
    assert found[0] == found[-1], "the doors differ"
    assert len(set(found[0])) == len(found[0]), f"nothing is learned: {found[0]}"
    if gpc.is_launched:
        gpc.destroy()
    return found[0]


def _optimizer_of_twin(run: Run, params: Iterable[nn.Parameter]) -> Optimizer:
    optimizer = run.task.optimizer(params)
    if run.clip_value is not None:
        optimizer.register_step_pre_hook(partial(_clip_elements, run.clip_value))
    return optimizer


def _clip_elements(bound: float, optimizer: Optimizer, *_: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    grads = [param.grad for param in params if param.grad is not None]
    share = torch.cat([(grad.abs() > bound).flatten() for grad in grads]).double().mean()
    assert 0.05 < share < 0.95, f"the bound changes {share:.0%} of the elements"
    for grad in grads:
        grad.clamp_(-bound, bound)


def through_engine(run: Run, twin: nn.Module) -> Subject:
    """The config door, in a job that was launched with the config of the run."""
    model, optimizer, criterion = _parts_of(run.task, twin)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    has_schedule = criterion is None or gpc.mesh.axis_size("pp") > 1

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=get_current_device())
        for inputs, labels in _microbatches(run.task, batch, engine.accumulation_steps):
            engine.zero_grad()
            if has_schedule:
                data = inputs if len(inputs) > 1 else inputs[0]
                _, _, loss = engine.execute_schedule(iter([(data, labels)]), return_output_label=False)
            else:
                loss = engine.criterion(engine(*inputs), labels)
                engine.backward(loss)
            if run.clip_value is not None:
                engine.optimizer.clip_grad_by_value(run.clip_value)
            engine.step()
            total += loss.detach() / engine.accumulation_steps
        return total

    return subject_of(run, engine.model, engine.optimizer, step)


def through_booster(run: Run, plugin: Plugin, twin: nn.Module) -> Subject:
    """The plugin door; all microbatches but the last run under `no_sync`, unless each is to synchronize."""
    booster = Booster(plugin=plugin, **run.booster)
    model, optimizer, criterion = _parts_of(run.task, twin)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    in_pipeline = gpc.mesh.axis_size("pp") > 1
    is_clipped_by_plugin = any(
        getattr(options, "max_norm", 0.0) for options in (plugin, getattr(plugin, "options", None))
    )

    def step(batch: Batch) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=get_current_device())
        optimizer.zero_grad()
        parts = _microbatches(run.task, batch, 1 if in_pipeline else run.accumulation)
        for number, (inputs, labels) in enumerate(parts, start=1):
            if in_pipeline:
                data = iter([(inputs if len(inputs) > 1 else inputs[0], labels)])
                loss = booster.execute_pipeline(data, model, criterion, optimizer, return_loss=True)["loss"]
            else:
                is_last = run.syncs_always or number == len(parts)
                with nullcontext() if is_last else booster.no_sync(model):
                    if criterion is None:
                        assert run.task.loss is not None, "there is no other loss"
                        loss = run.task.loss(model, (*inputs, labels)) / len(parts)
                    else:
                        loss = criterion(model(*inputs), labels) / len(parts)
                    booster.backward(loss, optimizer)
            total += loss.detach()
        if run.max_norm is not None and not is_clipped_by_plugin:
            optimizer.clip_grad_by_norm(run.max_norm)
        if run.clip_value is not None:
            optimizer.clip_grad_by_value(run.clip_value)
        optimizer.step()
        return total

    return subject_of(run, model, optimizer, step)


def _parts_of(task: Task, twin: nn.Module) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(SEED)
    with in_float64():
        model = twin if task.place is None else task.place(twin)
    criterion = None if task.criterion is None else task.criterion()
    return model, task.optimizer(model.parameters()), criterion


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _microbatches(task: Task, batch: Batch, num: int) -> list[tuple[Batch, Tensor]]:
    parts = zip(*(tensor.chunk(num) for tensor in batch), strict=True)
    cut = [part if task.cut is None else task.cut(part) for part in parts]
    return [(part[:-1], part[-1]) for part in cut]


def subject_of(run: Run | None, model: Any, optimizer: Any, step: Callable[[Batch], Any]) -> Subject:
    """Return an assembled model as the parity check sees it: whole values by the names of the plain model.

    Args:
        run: Whose `check` is called.
        model: The wrapped model.
        optimizer: Its optimizer; where ranks have slices of gradients it puts them together.
        step: See `Subject`.
    """
    if run is not None and run.check is not None:
        run.check(model)
    names = optimizer.param_names
    params = {names[param]: param for param in model.parameters()}
    whole_grads = getattr(optimizer.masters, "whole_grads", None)

    def gradients() -> dict[str, Tensor]:
        if whole_grads is not None:
            return {names[param]: whole(param, grad) for param, grad in whole_grads().items()}
        return {name: whole(param, param.grad) for name, param in params.items() if param.grad is not None}

    def parameters() -> dict[str, Tensor]:
        # Under FSDP `whole` gathers them one by one.
        has_dtensors = any(isinstance(param, DTensor) for param in params.values())
        with nullcontext() if has_dtensors else model.gathered():
            return {name: whole(param, param) for name, param in params.items()}

    return Subject(step=step, gradients=gradients, parameters=parameters)


def whole(param: Tensor, tensor: Any) -> Tensor:
    """Return the whole of a parameter, or of its gradient, of which a rank holds a slice."""
    spec = spec_of(param)
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone() if spec is None else spec.whole(tensor.detach()).clone()


def slice_of_batch() -> dict[str, int]:
    """Return which part of each batch this rank works on."""
    return {"slice_index": gpc.mesh.axis_rank("dp"), "num_slices": gpc.data_parallel_size}


def grouped_runs(rows: Iterable[Any]) -> list[Any]:
    """Return (number of ranks, runs) for `parametrize`; rows can be marked by `further` and `in_soak`."""
    return grouped(((row,) if isinstance(row, Run) else row for row in rows), lambda run: run.num_ranks)


def check_runs(num_ranks: int, runs: Sequence[tuple[Run]]) -> list[list[float]]:
    """Make runs, one after the other on the same ranks; return their losses."""
    return run_ranks(each_in_turn, num_ranks, train, list(runs))[0]
