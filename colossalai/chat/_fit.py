"""The loop of all methods that train on texts: boost, batches, steps, records, training states.

A batch is (data, labels): `data` are the arguments of the model's forward, `labels` what the loss needs
beside its output. A loss is a pair (sum, count), so that a step is that of the mean over all tokens, or all
pairs, of all ranks, microbatches and accumulated batches, however unevenly they have them.
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
"""Tokens of the texts that a step learns from, of all ranks; of a task that measures it."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What training gave.

    Attributes:
        model: The boosted model.
        optimizer: Its boosted optimizer.
        records: For each step made here, its number, seconds, loss and whatever the method measures: means
            over all ranks.
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper
    records: tuple[Record, ...] = field(repr=False)


class Criterion(Protocol):
    """The loss of a method."""

    def __call__(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return a sum and what it is to be divided by."""


class Rows(Protocol):
    """What torch takes for a dataset with a length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned.

    Attributes:
        rows: What is learned from.
        collate: Makes a batch of some rows. Among its labels is "counts": for each row of the batch whether
            it counts, all true; the criterion leaves out what does not.
        criterion: The loss.
        measures: What the criterion adds to.
        measured: Under which names.
        group: How many rows of a batch belong together: 2 for pairs.
        goes_through: Whether batches as they are read go through the model; else the method makes others.
        watch: Sees the record of each step, on every rank; what it returns ends the run on all of them, so it
            looks at nothing but what is the same there.
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
    """The steps of a run: who uses it makes a step, or several, of each of its `windows`; every rank does so.

    It is a context: loggers are open in it.

    Args:
        model: The boosted model.
        optimizer: Its boosted optimizer.
        booster: The parallel methods.
        task: What is learned.
        course: How long.
        steps_a_window: How many steps are made of the batches of one.
        companions: Further models that are trained beside it, with their optimizers, by the names of the
            folders that they are saved in, in that of the training states.

    Attributes:
        done: Steps that have been made, those before a resumption included.
        total: Steps that there will be.
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
        self._advance: Callable[[], None] = lambda: None  # the bar's, while there is one
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
        """Yield batches as they are read, as many at a time as are accumulated, until all steps are made."""
        self._model.train()
        with self._log.progress(self.total, self.done) as self._advance:
            windows = _windows(self._loader, self._course.accumulation, self._task, self._booster)
            while self.done < self.total:
                yield next(windows)
        self._log.end()

    def may_read_on(self, steps: int) -> bool:
        """Return whether the next window may be read before so many steps are made of this one.

        Not so where a training state is saved in between, which knows what was read, or nothing is left.
        """
        after = self.done + steps
        saves = self._course.save is not None
        return after < self.total and not (
            saves and after - self._saved >= (self._course.save_every or self.total)
        )

    def step(
        self, window: Sequence[Batch], *, more: Record = MappingProxyType({}), saves: bool = True
    ) -> None:
        """Learn from some batches at once.

        Args:
            window: The batches.
            more: What else is to be written down of this step.
            saves: Whether what was read is used up, so that a training state can go on behind it.

        Raises:
            Exception: The task's `watch` has returned one; records and a training state are written before.
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
            for name, (other, own) in self._companions.items():  # before the one that says what is complete
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
        """Return what came of it."""
        return FitResult(model=self._model, optimizer=self._optimizer, records=tuple(self._log.records))


def train(
    model: ModelWrapper, optimizer: OptimizerWrapper, *, booster: Booster, task: Task, course: Course
) -> FitResult:
    """Train a boosted model on batches as they are read; every rank calls it."""
    with FitLoop(model, optimizer, booster=booster, task=task, course=course) as loop:
        for window in loop.windows():
            loop.step(window)
    return loop.result()


def look(model: ModelWrapper, *, booster: Booster, task: Task, batch_size: int) -> Record:
    """Run all rows through a boosted model without learning; return the mean loss and what is measured."""
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
    """Return model and optimizer with the methods built in, if they have not been.

    Raises:
        ValueError: Only one of `model` and `optimizer` has been boosted, or `booster` accumulates by itself.
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
    """Return a model with the methods built in, if they have not been, that is not trained."""
    if isinstance(model, ModelWrapper):
        return model
    wrapped, *_ = booster.boost(model)
    return wrapped


@torch.no_grad()
def forward_only(
    model: nn.Module, data: Mapping[str, Any], read: Callable[[Any], Tensor], *, booster: Booster
) -> Tensor:
    """Return what is read off the output of a model in evaluation mode; all its ranks call it and know.

    Args:
        model: A model, boosted or not.
        data: Arguments of its forward, a batch.
        read: Takes the output, and returns a number for each token but the first, (batch, length - 1).
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
            all_reduce_in_place(found, ParallelMode.PIPELINE)  # of the last stage, and zeros of the others
        else:
            found = read(model(**data))
    return found


def all_known(found: Mapping[int, Sequence[float]], size: int, booster: Booster) -> list[list[float]]:
    """Return numbers of all rows, of which each rank knows some; every rank calls it.

    Args:
        found: For rows that this rank knows, two numbers.
        size: How many rows there are.
        booster: Where ranks reduce.
    """
    table = torch.zeros(size, 3, dtype=torch.float64)
    for number, values in found.items():
        table[number] = torch.tensor([1.0, *values], dtype=torch.float64)
    total = table.to(booster.device)
    all_reduce_in_place(total, ParallelMode.GLOBAL)  # (row, 3): tensor-parallel ranks know the same rows
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
    """Learn from some batches; return the mean loss of all ranks."""
    optimizer.zero_grad()
    # Losses are pairs: nothing is divided here, the optimizer takes the mean over all counts.
    for number, (data, labels) in enumerate(window):
        is_last = number == len(window) - 1  # gradients are exchanged once
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
    """Return how many tokens the rows of this rank have that count."""
    return sum(float(data["attention_mask"].sum(1) @ labels["counts"].long()) for data, labels in window)


def _loader(booster: Booster, task: Task, batch_size: int, *, seed: int | None) -> DataParallelLoader:
    """Return a loader of this rank's rows, in an order of the seed; None: as they are.

    Of a pipeline all batches have as many rows, so that microbatches are alike and pairs stay together.
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
    """Yield the batches of a pass.

    Where the rows do not divide by the replicas, some stand in for missing ones at the end of a pass, so that
    all replicas take part: they do not count.
    """
    replicas, replica = booster.mesh.axis_size("dp"), booster.mesh.axis_rank("dp")
    for data, labels in loader:
        in_hand = loader.in_hand  # asked before the next batch is read: after the last one it is of the pass
        assert in_hand is not None, "the rows have a number, and a batch has been handed out"
        own = (in_hand.of_all - replica + replicas - 1) // replicas  # rows are dealt out like cards
        labels["counts"][own * task.group :] = False
        yield data, labels


def _windows(loader: DataParallelLoader, size: int, task: Task, booster: Booster) -> Iterator[list[Batch]]:
    """Yield the batches of each step, pass after pass; the last window of a pass may be shorter."""
    while True:
        batches = _batches(loader, task, booster)
        while window := list(islice(batches, size)):
            yield window
