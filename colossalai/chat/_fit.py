"""Training loop of all text methods: boost, batches, steps, records, training states.

A batch is (data, labels): `data` are the arguments of the model's forward, `labels` the further inputs of the
loss. A loss is a pair (sum, count): a step uses the mean over all tokens, or all pairs, of all ranks,
microbatches and accumulated batches, also when these differ in size.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from colossalai.amp import OptimizerWrapper
from colossalai.booster import Booster
from colossalai.chat._course import Course
from colossalai.chat._records import Measures, Record, RunLog
from colossalai.checkpoint_io import step_folder
from colossalai.communication import all_reduce_in_place
from colossalai.context import ParallelMode
from colossalai.runtime import DataParallelLoader, ModelWrapper
from colossalai.tensor import evaluation_mode

Batch = tuple[dict[str, Any], dict[str, Any]]
TRAINING_RATE = "tokens_per_second_training"
"""Tokens trained on per second over all ranks; for tasks that measure it."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of training.

    Attributes:
        model: The boosted model.
        optimizer: Its boosted optimizer.
        records: For each step of this run its number, seconds, loss and the metrics of the method: means over
            all ranks.
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper
    records: tuple[Record, ...] = field(repr=False)


class Criterion(Protocol):
    """The loss of a method."""

    def __call__(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return a sum and its divisor."""


class Rows(Protocol):
    """A dataset of torch with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training task.

    Attributes:
        rows: The dataset.
        collate: Makes a batch of rows. Its labels have the entry "counts": for each row whether it counts,
            all True; the criterion ignores rows that do not.
        criterion: The loss.
        measures: Metrics, to which the criterion adds.
        measured: Names of the metrics.
        group: Number of consecutive rows of a batch that belong together: 2 for pairs.
        goes_through: Whether the model runs on the batches as they are read; else the method makes others.
        watch: Called with the record of each step on every rank. A returned error ends the run on all of
            them, so it must depend only on values that are the same on all ranks.
    """

    rows: Rows
    collate: Callable[[Sequence[Any]], Batch]
    criterion: Criterion
    measures: Measures
    measured: tuple[str, ...] = ()
    group: int = 1
    goes_through: bool = True
    watch: Callable[[Record], Exception | None] = lambda record: None


class FitLoop:
    """Steps of a run: the caller makes one or several of each of its `windows`; collective.

    A context manager: loggers are open inside it.

    Args:
        model: The boosted model.
        optimizer: Its boosted optimizer.
        booster: The parallel methods.
        task: The task.
        course: The course.
        steps_a_window: Number of steps on the batches of one window.
        companions: Further trained models with their optimizers, by the names of their folders inside the
            folder of training states.

    Attributes:
        done: Number of completed steps, including those before a resumption.
        total: Total number of steps.
    """

    def __init__(
        self,
        model: ModelWrapper,
        optimizer: OptimizerWrapper,
        *,
        booster: Booster,
        task: Task,
        course: Course,
        steps_a_window: int = 1,
        companions: Mapping[str, tuple[ModelWrapper, OptimizerWrapper]] = MappingProxyType({}),
    ) -> None:
        self._model, self._optimizer, self._booster = model, optimizer, booster
        self._companions = companions
        self._task, self._course = task, course
        self._loader = _loader(booster, task, course.batch_size, seed=course.seed)
        self.total = course.num_steps(len(self._loader), steps_a_window)
        self.done = 0
        if course.resume is not None:
            resumed = booster.load(course.resume, model, optimizer, course.lr_scheduler, self._loader)
            self.done = 0 if resumed is None else resumed.step
            for name, (other, own) in companions.items() if resumed is not None else ():
                booster.load(Path(course.resume, name, step_folder(self.done)), other, own)
        self._saved = self.done
        self._advance: Callable[[], None] = lambda: None  # replaced by the progress bar while it is open
        writes = booster.mesh.rank == 0
        self._log = RunLog(
            course.log if writes else None,
            first=self.done,
            shows_progress=course.shows_progress and writes,
            loggers=course.loggers if writes else (),
        )

    def __enter__(self) -> Self:
        self._log.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._log.__exit__(*error)

    def windows(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step, as many as are accumulated, until all steps are made."""
        self._model.train()
        with self._log.progress(self.total, self.done) as self._advance:
            windows = _windows(self._loader, self._course.accumulation, self._task, self._booster)
            while self.done < self.total:
                yield next(windows)
        self._log.end()

    def may_read_on(self, steps: int) -> bool:
        """Return whether the next window may be read before `steps` steps on this one.

        False if a training state, with the position in the data, is saved in between, or if no steps are
        left.
        """
        after = self.done + steps
        saves = self._course.save is not None
        return after < self.total and not (
            saves and after - self._saved >= (self._course.save_every or self.total)
        )

    def step(
        self, window: Sequence[Batch], *, more: Record = MappingProxyType({}), saves: bool = True
    ) -> None:
        """Make a step on several batches.

        Args:
            window: The batches.
            more: Further entries of the step's record.
            saves: Whether the batches are used up, so that a training state can be saved after this step.

        Raises:
            Exception: The task's `watch` has returned one; records and a training state are written first.
        """
        started, course, task = time.monotonic(), self._course, self._task
        loss = step_of(
            window,
            self._model,
            self._optimizer,
            booster=self._booster,
            criterion=task.criterion,
            max_norm=course.max_norm,
        )
        if course.lr_scheduler is not None:
            course.lr_scheduler.step()
        self.done += 1
        if TRAINING_RATE in task.measured:
            task.measures.add_rate(TRAINING_RATE, _num_tokens(window), time.monotonic() - started)
        measured = task.measures.take(task.measured, self._booster.device)
        seconds = time.monotonic() - started
        record = {"step": self.done, "loss": loss, **measured, **more, "seconds": seconds}
        self._log.add(record, epoch=self._loader.epoch)
        problem = task.watch(record)
        is_time = self.done >= self.total or self.done - self._saved >= (course.save_every or self.total)
        if course.save is not None and ((is_time and saves) or problem is not None):
            self._saved = self.done
            for name, (other, own) in self._companions.items():  # first: the main state marks completeness
                self._booster.save(Path(course.save, name), other, own, step=self.done)
            self._booster.save(
                course.save, self._model, self._optimizer, course.lr_scheduler, self._loader, step=self.done
            )
        self._advance()
        if course.on_step is not None:
            course.on_step(record)
        if problem is not None:
            self._log.end()
            raise problem

    def result(self) -> FitResult:
        """Return the result of the run."""
        return FitResult(model=self._model, optimizer=self._optimizer, records=tuple(self._log.records))


def train(
    model: ModelWrapper, optimizer: OptimizerWrapper, *, booster: Booster, task: Task, course: Course
) -> FitResult:
    """Train a boosted model on batches as they are read; collective."""
    with FitLoop(model, optimizer, booster=booster, task=task, course=course) as loop:
        for window in loop.windows():
            loop.step(window)
    return loop.result()


def look(model: ModelWrapper, *, booster: Booster, task: Task, batch_size: int) -> Record:
    """Run all rows through a boosted model without training; return the mean loss and the metrics."""
    loader = _loader(booster, task, batch_size, seed=None)

    def criterion(output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        loss, count = task.criterion(output, labels)
        task.measures.add(count, loss=loss)
        return loss, count

    with evaluation_mode(model), torch.no_grad():
        for data, labels in _batches(loader, task, booster):
            if model.pipeline is not None:
                booster.execute_pipeline(iter([(data, labels)]), model, criterion)
            else:
                criterion(model(**data), labels)
    return task.measures.take(("loss", *task.measured), booster.device)


def boost(booster: Booster, model: nn.Module, optimizer: Optimizer) -> tuple[ModelWrapper, OptimizerWrapper]:
    """Boost a model and its optimizer, unless they have been boosted.

    Raises:
        ValueError: Only one of `model` and `optimizer` has been boosted, or `booster` accumulates gradients.
    """
    if booster.gradient_accumulation > 1:
        raise ValueError(
            f"the booster has gradient_accumulation={booster.gradient_accumulation}: leave it out there, and "
            "pass accumulation=... to fit"
        )
    if isinstance(model, ModelWrapper) and isinstance(optimizer, OptimizerWrapper):
        return model, optimizer
    if isinstance(model, ModelWrapper) or isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            "only one of model and optimizer has been boosted: pass both as they are, or both boosted"
        )
    wrapped, boosted, *_ = booster.boost(model, optimizer)
    return wrapped, boosted


def boost_for_looking(booster: Booster, model: nn.Module) -> ModelWrapper:
    """Boost a model for evaluation, unless it has been boosted."""
    if isinstance(model, ModelWrapper):
        return model
    wrapped, *_ = booster.boost(model)
    return wrapped


@torch.no_grad()
def forward_only(
    model: nn.Module, data: Mapping[str, Any], read: Callable[[Any], Tensor], *, booster: Booster
) -> Tensor:
    """Run a model in evaluation mode and return numbers read from its output; collective over its ranks.

    Args:
        model: A model, boosted or not.
        data: Arguments of its forward, a batch.
        read: Maps the output to one number per token but the first, (batch, length - 1).
        booster: Its parallel methods.
    """
    with evaluation_mode(model):
        if isinstance(model, ModelWrapper) and model.pipeline is not None:
            output = booster.execute_pipeline(
                iter([dict(data)]), model, return_loss=False, return_outputs=True
            )["outputs"]
            wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
            found = torch.zeros(data["input_ids"][:, 1:].shape, dtype=wide, device=booster.device)
            if output is not None:
                found += read(output)
            all_reduce_in_place(found, ParallelMode.PIPELINE)  # values of the last stage, zeros of the others
        else:
            found = read(model(**data))
    return found


def all_known(found: Mapping[int, Sequence[float]], size: int, booster: Booster) -> list[list[float]]:
    """Combine numbers of rows that different ranks have computed; collective.

    Args:
        found: Two numbers for each row of this rank.
        size: Number of all rows.
        booster: The booster with the ranks.
    """
    table = torch.zeros(size, 3, dtype=torch.float64)
    for number, values in found.items():
        table[number] = torch.tensor([1.0, *values], dtype=torch.float64)
    total = table.to(booster.device)
    all_reduce_in_place(total, ParallelMode.GLOBAL)  # (row, 3): tensor-parallel ranks add the same rows
    means: list[list[float]] = (total[:, 1:] / total[:, :1]).tolist()
    return means


def step_of(
    window: Sequence[Batch],
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    *,
    booster: Booster,
    criterion: Criterion,
    max_norm: float | None = None,
) -> float:
    """Make a step on several batches; return the mean loss over all ranks."""
    optimizer.zero_grad()
    # Losses are pairs: the optimizer divides by the sum of all counts.
    for number, (data, labels) in enumerate(window):
        is_last = number == len(window) - 1  # synchronize gradients in the last backward only
        with nullcontext() if is_last else booster.no_sync(model):
            if model.pipeline is not None:
                booster.execute_pipeline(iter([(data, labels)]), model, criterion, optimizer)
            else:
                booster.backward(criterion(model(**data), labels), optimizer)
    if max_norm is not None:
        optimizer.clip_grad_by_norm(max_norm)
    optimizer.step()
    loss = optimizer.mean_loss
    assert loss is not None, "losses are pairs, of which a mean is known"
    return float(loss)


def _num_tokens(window: Sequence[Batch]) -> float:
    """Return the number of tokens in this rank's rows that count."""
    return sum(float(data["attention_mask"].sum(1) @ labels["counts"].long()) for data, labels in window)


def _loader(booster: Booster, task: Task, batch_size: int, *, seed: int | None) -> DataParallelLoader:
    """Return a loader of this rank's rows, shuffled by the seed; None for the given order.

    With a pipeline all batches have the same number of rows, so that microbatches are equal and pairs stay
    together.
    """
    if booster.plan.pipeline is None or not task.goes_through:
        collate = task.collate
    else:
        parts = booster.plan.pipeline.num_microbatches
        if task.group > 1 and batch_size % parts:
            raise ValueError(
                f"batch_size={batch_size} and num_microbatches={parts}: pairs are not torn apart, so give a "
                "batch size that is a multiple"
            )

        def collate(rows: Sequence[Any]) -> Batch:
            missing = batch_size - len(rows)
            data, labels = task.collate([*rows, *[rows[-1]] * missing])
            labels["counts"][len(rows) * task.group :] = False
            return data, labels

    return booster.plugin.prepare_dataloader(
        cast("Dataset[Any]", task.rows),
        batch_size=batch_size,
        shuffle=seed is not None,
        seed=seed or 0,
        collate_fn=collate,
    )


def _batches(loader: DataParallelLoader, task: Task, booster: Booster) -> Iterator[Batch]:
    """Yield the batches of one epoch.

    If the number of rows is not a multiple of the replicas, padding rows, which do not count, make all
    replicas take part in the last batch.
    """
    replicas, replica = booster.mesh.axis_size("dp"), booster.mesh.axis_rank("dp")
    for data, labels in loader:
        last_batch = loader.last_batch  # read before the loader replaces it for the next batch
        assert last_batch is not None, "the rows have a number, and a batch has been handed out"
        own = (last_batch.of_all - replica + replicas - 1) // replicas  # rows are assigned round-robin
        labels["counts"][own * task.group :] = False
        yield data, labels


def _windows(loader: DataParallelLoader, size: int, task: Task, booster: Booster) -> Iterator[list[Batch]]:
    """Yield the batches of each step, epoch after epoch; the last window of an epoch may be shorter."""
    while True:
        batches = _batches(loader, task, booster)
        while window := list(islice(batches, size)):
            yield window
