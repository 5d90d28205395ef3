"""Engine: a model, its optimizer and its criterion in one object, with the features of a config."""

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
    """The object from `colossalai.initialize`, used like a model, an optimizer and a criterion of PyTorch.

    Args:
        training_step: The assembled model and optimizer with accumulation and clipping.
        criterion: The loss function; it returns the mean over its batch, or a pair (sum, count).
        schedule: The schedule of `execute_schedule`.
        mesh: The ranks.
        device: The device of this rank.
        observers: The ranks that together have the losses and outputs of the whole batch, each part equally
            often. Default: the ranks along `dp` and, with a pipeline, its ranks.
        gradient_handlers: Handlers that synchronize gradients over the ranks, if DDP does not.
        lr_scheduler: The scheduler of `save` and `load`.
        train_dataloader: The loader whose position is saved and loaded, if it has one.
        settings: Settings of the run, written into a training state for its readers.
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
        """The model; `engine.model.unwrap()` is the given one."""
        return self.training_step.model

    @property
    def optimizer(self) -> OptimizerWrapper:
        """The optimizer; `engine.optimizer.unwrap()` is the given one."""
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
        """Number of microbatches in one optimizer step."""
        return self.training_step.accumulation_steps

    @property
    def loss_weight(self) -> torch.Tensor | None:
        """Weight of the loss of the last batch: number of labels of its mean; None if it was not given."""
        return self.training_step.loss_weight

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the last batch, None if it did not run through a pipeline."""
        return self.training_step.num_samples

    @property
    def sees_output(self) -> bool:
        """Whether this rank gets output and label: in a pipeline, the rank of the last stage."""
        return self.model.pipeline is None or self.model.pipeline.holds_last_stage

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.training_step.forward(*args, **kwargs)

    def backward(self, loss: GivenLoss, weight: Weight | None = None) -> None:
        """Run the backward of a microbatch's loss; it is divided here for accumulation.

        Args:
            loss: The mean over the microbatch, or a pair (sum, count).
            weight: Number of labels (or samples) of the mean. With it, or with pairs, a step is that of the
                mean over all labels, for any distribution over ranks and microbatches; without it, of the
                mean of the means. After the step `optimizer.mean_loss` is that mean.

        Raises:
            ValueError: `loss` is not a valid loss, `weight` is negative or not one number, or only some of
                the losses of a window have a weight.
        """
        self.training_step.backward(loss, weight)

    def step(self) -> bool:
        """End a microbatch; at the end of an accumulation window synchronize, clip and update the parameters.

        Returns:
            Whether the parameters were updated: False within a window, after an overflow, and without
            gradients.

        Raises:
            ValueError: With accumulation, there was no backward or `zero_grad` since the last step. Without,
                the remaining gradients are applied again, as in torch, and a line is logged.
        """
        return self.training_step.step()

    def zero_grad(self) -> None:
        """Clear the gradients; within an accumulation window they are kept."""
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
            forward_only: Skip the backward.
            return_loss: Compute and return the loss; needed for a backward.
            return_output_label: Return the output and the label; False frees them.

        Returns:
            Output, label and the mean loss of the batch (detached, not divided for accumulation); None for
            parts that were not requested. `loss_weight` is the number of labels of the mean, if the criterion
            returns a pair.

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
        """Save everything needed to resume the run, as `folder/step-<step>`; every rank calls it.

        That is model, optimizer, scheduler, loss scale, random states and the position in the data. Every
        rank writes its own part, so all of them must see the folder.

        Args:
            folder: The folder of the run's training states.
            step: The number of steps done.
            epoch: Epoch of the next batch, from 0. Default: the loader's.
            extra: Plain values of your own.
            lr_scheduler: The scheduler. Default: the scheduler given to `initialize`.
            dataloader: The loader of the training data. Default: the loader from `initialize`, if it has a
                position.
            save_async: Return when everything is copied to host memory, and write in the background. An error
                there is raised by the next step, or save, or `gpc.destroy()`, on every rank.
            keep_last: Number of training states to keep in the folder.
            every: Save only if `step` is a multiple.
            buffer_size: Largest buffer for writing on a rank, in MB, in addition to the saved tensors and to
                their copy in host memory with `save_async`.

        Returns:
            The path of the training state; None if it was not time.

        Raises:
            ValueError: `step`, `every`, `keep_last` or another option is out of range, a value cannot be
                saved, or an accumulation window is open.
            OSError: The training state cannot be written; on all ranks. The last `keep_last` ones remain.
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
        """Resume from the newest complete training state of a folder, or from a given one.

        It can have been saved under any other plan and number of ranks, and by a Booster.

        Args:
            folder: The folder, or a path that `save` returned.
            lr_scheduler: See `save`.
            dataloader: See `save`.
            buffer_size: Largest buffer for loading on a rank, in MB, in addition to the loaded tensors.

        Returns:
            Step, epoch and extra values of the training state; None if there is none.

        Raises:
            ValueError: All training states in `folder` are damaged, or the newest complete one lacks a part
                or has other names or shapes; nothing was overwritten.
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
            is_in_window=self.training_step.is_in_window,
            lr_scheduler=self.lr_scheduler if lr_scheduler is None else lr_scheduler,
            dataloader=with_position(self.train_dataloader) if dataloader is None else dataloader,
            settings=self.settings,
        )
