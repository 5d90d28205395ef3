"""The Engine: one object for a model, its optimizer and its criterion, with a config's features built in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colossalai.amp import GivenLoss, OptimizerWrapper, Weight
from colossalai.checkpoint_io import Stateful
from colossalai.context import Axis, Mesh, names_arguments
from colossalai.engine._gradient_handler import BaseGradientHandler
from colossalai.engine.schedule import BaseSchedule
from colossalai.runtime import (
    Criterion,
    ModelWrapper,
    Resumed,
    Run,
    TrainingStep,
    resume_run,
    save_run,
    with_position,
)


class Engine:
    """What `colossalai.initialize` returns; it is used as model, optimizer and criterion are used in PyTorch.

    Args:
        training_step: The assembled model and optimizer with accumulation and clipping.
        criterion: The loss function; it returns the mean over what it is given, or a pair (sum, count).
        schedule: How `execute_schedule` runs a batch.
        mesh: The ranks.
        device: The device of this rank.
        observers: The ranks whose losses and outputs together are those of the whole batch, each part seen
            equally often; default: those along `dp` and, where there is a pipeline, its ranks.
        gradient_handlers: What makes gradients equal over the ranks, if not DDP.
        lr_scheduler: The scheduler that `save` and `load` take along.
        train_dataloader: The loader whose position they take along, if it knows that.
        settings: How the run is set up, for people who read a training state.
    """

    def __init__(
        self,
        training_step: TrainingStep,
        criterion: Criterion | None,
        *,
        schedule: BaseSchedule,
        mesh: Mesh,
        device: torch.device,
        observers: Axis | None = None,
        gradient_handlers: Sequence[BaseGradientHandler] = (),
        lr_scheduler: Stateful | None = None,
        train_dataloader: Iterable[Any] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.training_step = training_step
        self.schedule = schedule
        self.mesh = mesh
        self.device = device
        self.observers = observers or mesh.axis(("dp", "pp") if self.model.pipeline else "dp")
        self.gradient_handlers = tuple(gradient_handlers)
        self.lr_scheduler = lr_scheduler
        self.train_dataloader = train_dataloader
        self.settings = dict(settings or {})
        self._criterion = criterion

    @property
    def model(self) -> ModelWrapper:
        """The model; `engine.model.unwrap()` is the one that was given."""
        return self.training_step.model

    @property
    def optimizer(self) -> OptimizerWrapper:
        """The optimizer; `engine.optimizer.unwrap()` is the one that was given."""
        return self.training_step.optimizer

    @property
    def criterion(self) -> Criterion:
        """The loss function.

        Raises:
            ValueError: The engine was made without a criterion.
        """
        if self._criterion is None:
            raise ValueError("there is no criterion: pass one to colossalai.initialize")
        return self._criterion

    @property
    def accumulation_steps(self) -> int:
        """Number of microbatches that make one optimizer step."""
        return self.training_step.accumulation_steps

    @property
    def loss_weight(self) -> torch.Tensor | None:
        """The weight of the loss of the last batch, what it is the mean over; None if nobody has said."""
        return self.training_step.loss_weight

    @property
    def num_samples(self) -> int | None:
        """The number of samples of the last batch, None if it did not run through a pipeline."""
        return self.training_step.num_samples

    @property
    def sees_output(self) -> bool:
        """Whether this rank gets output and label: in a pipeline, the one that holds the last stage."""
        return self.model.pipeline is None or self.model.pipeline.holds_last_stage

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.training_step.forward(*args, **kwargs)

    def backward(self, loss: GivenLoss, weight: Weight | None = None) -> None:
        """Run the backward of a microbatch's loss; the division for accumulation happens here.

        Args:
            loss: The mean over the microbatch, or a pair (sum, count).
            weight: What the mean is over, say the number of labels. With it, or with pairs, a step is that of
                the mean over all labels, however they are spread over ranks and microbatches; without it,
                of the mean of the means. After the step `optimizer.mean_loss` is that mean.

        Raises:
            ValueError: `loss` is not what a criterion returns, `weight` is negative or not one number, or
                only some of the losses of a window have one.
        """
        self.training_step.backward(loss, weight)

    def step(self) -> bool:
        """End a microbatch; at the end of an accumulation window synchronize, clip and update the parameters.

        Returns:
            Whether the parameters were updated: False within a window, after an overflow, and without
            gradients.

        Raises:
            ValueError: With accumulation, no backward or `zero_grad` came since the step before. Without,
                the gradients that are still there are applied again, as in torch, and a line is logged.
        """
        return self.training_step.step()

    def zero_grad(self) -> None:
        """Forget the gradients; within an accumulation window they are kept."""
        self.training_step.zero_grad()

    def train(self) -> None:
        """Put the model in training mode."""
        self.model.train()

    def eval(self) -> None:
        """Put the model in evaluation mode."""
        self.model.eval()

    def execute_schedule(
        self,
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """Take the next batch and run forward and, unless `forward_only`, backward.

        Args:
            data_iter: Iterator of batches.
            forward_only: Leave out the backward.
            return_loss: Compute and return the loss; needed for a backward.
            return_output_label: Return the output and the label; False frees them.

        Returns:
            Output, label and the mean loss of the batch (detached, not divided for accumulation); None for
            what was not asked for. `loss_weight` says what the mean is over, where the criterion returns a
            pair.

        Raises:
            StopIteration: `data_iter` has no more batches.
        """
        self.training_step.loss_weight = self.training_step.num_samples = None
        return self.schedule.forward_back_step(
            self, data_iter, forward_only, return_loss, return_output_label
        )

    @names_arguments
    def save(
        self,
        folder: str | Path,
        *,
        step: int,
        epoch: int | None = None,
        extra: Mapping[str, object] | None = None,
        lr_scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        save_async: bool = False,
        keep_last: int = 2,
        every: int = 1,
        buffer_size: float = 512,
    ) -> Path | None:
        """Save everything that the run needs to go on, as `folder/step-<step>`; every rank calls it.

        That is model, optimizer, scheduler, loss scale, random states and the position in the data. Every
        rank writes its own part, so all of them must see the folder.

        Args:
            folder: The folder of the run's training states.
            step: The number of steps done.
            epoch: The epoch that the next batch belongs to, from 0; default: that of the loader.
            extra: Plain values of your own.
            lr_scheduler: The scheduler; default: the one that went through `initialize`.
            dataloader: The loader of the training data; default: the one that `initialize` returned, if it
                knows its position.
            save_async: Return when everything is copied to host memory, and write in the background. An error
                there is raised by the next step, or save, or `gpc.destroy()`, on every rank.
            keep_last: How many training states stay in the folder.
            every: Save only where `step` is a multiple.
            buffer_size: The most memory, in MB, that writing takes on a rank beside what is saved, and beside
                the copy in host memory that `save_async` makes.

        Returns:
            The path of the training state; None if it was not time.

        Raises:
            ValueError: `step`, `every`, `keep_last` or another option is out of range, a value cannot be
                saved, or an accumulation window is under way.
            OSError: The training state cannot be written; on all ranks. The last `keep_last` ones stay.
        """
        run = self._run(lr_scheduler, dataloader)
        return save_run(
            folder,
            run,
            step=step,
            epoch=epoch,
            extra=extra,
            save_async=save_async,
            keep_last=keep_last,
            every=every,
            buffer_size=buffer_size,
        )

    @names_arguments
    def load(
        self,
        folder: str | Path,
        *,
        lr_scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        buffer_size: float = 512,
    ) -> Resumed | None:
        """Go on from the newest complete training state of a folder, or from the one that a path is.

        It may have been saved under any other plan and number of ranks, and by a Booster.

        Args:
            folder: The folder, or a path that `save` returned.
            lr_scheduler: See `save`.
            dataloader: See `save`.
            buffer_size: The most memory, in MB, that loading takes on a rank beside what is loaded.

        Returns:
            Step, epoch and extra values as they were saved; None if there is no training state.

        Raises:
            ValueError: All training states are damaged, or the newest complete one lacks a part or has other
                names or shapes; nothing was overwritten.
            OSError: The training state cannot be read.
        """
        resumed = resume_run(folder, self._run(lr_scheduler, dataloader), buffer_size=buffer_size)
        if resumed is not None:
            self.training_step.restart_window()
        return resumed

    def _run(self, lr_scheduler: Stateful | None, dataloader: Stateful | None) -> Run:
        return Run(
            model=self.model,
            optimizer=self.training_step.optimizer_or_none,
            lr_scheduler=self.lr_scheduler if lr_scheduler is None else lr_scheduler,
            dataloader=with_position(self.train_dataloader) if dataloader is None else dataloader,
            settings=self.settings,
            is_in_window=self.training_step.is_in_window,
        )
