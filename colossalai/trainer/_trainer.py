"""The Trainer: the training loop over an Engine, with hooks at every turn.

A training iteration is zero_grad, execute_schedule, step; everything else (metrics, schedules, checkpoints,
logs) is a hook. The loop does not depend on any particular hook.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from colossalai.communication import all_reduce_in_place
from colossalai.context import names_arguments
from colossalai.engine import Engine
from colossalai.engine.schedule import BaseSchedule
from colossalai.logging import DistributedLogger, get_dist_logger
from colossalai.tensor import evaluation_mode
from colossalai.trainer._base_hook import BaseHook
from colossalai.trainer._batch import num_samples
from colossalai.trainer._loss_watch import LossWatch
from colossalai.trainer._metric import MetricTable
from colossalai.trainer._progress import Advance, show_progress
from colossalai.trainer._timer import MultiTimer
from colossalai.trainer.hooks import resume_state


class Trainer:
    """Trains, tests and runs the model of an engine.

    Args:
        engine: The engine that `colossalai.initialize` returned.
        schedule: Schedule of a batch; the engine's own if not given.
        timer: Measures "Train-step", "Train-epoch", "Test-step" and "Test-epoch", the steps anew in every
            epoch. Measuring waits for the accelerator after every step; without a timer nothing waits.
        logger: Writes the progress if there is no terminal.
        nan_loss: Reaction to a NaN or infinite loss of a training iteration: "warn" of the first one, with
            step and rank; "stop" with a `NanLossError` on all ranks; or "ignore".

    Raises:
        ValueError: `engine`, `schedule` or `timer` is of another type, or `nan_loss` is unknown.

    Attributes:
        engine: The engine.
        timer: The timer, switched off if none was given.
        states: Values that hooks share: "lr" and "step_metrics" (the text next to the progress bar).
        metrics: The metrics of "train" and of "test", filled by hooks.
        hooks: The attached hooks in the order in which they run: by priority, those of the same one as given.
        cur_epoch: Number of complete training epochs. Set it (and `cur_step`) to go on with an earlier run.
        cur_step: Number of complete training iterations.
        max_epochs: Number of epochs after which `fit` ends, None before it.
        max_steps: Number of iterations after which `fit` ends, None without a limit.
        steps_per_epoch: Number of batches of the training loader, None if it does not know.
        batch_samples: Number of samples in the batch of this rank that is being run.
        train_dataloader: The training loader of the last `fit`, None before it.
        test_dataloader: Its test loader, None without one.
        stop_reason: Reason to end the training before its last epoch, if a hook has requested it.
        loss_weight: Weight of the mean loss of this rank's last batch: the count of a criterion that returns
            (sum, count), otherwise the number of samples.
        optimizer_stepped: Whether the last iteration updated the parameters: not so within a window of
            gradient accumulation and after an overflow.
    """

    @names_arguments
    def __init__(
        self,
        engine: Engine,
        schedule: BaseSchedule | None = None,
        timer: MultiTimer | None = None,
        logger: DistributedLogger | None = None,
        *,
        nan_loss: str = "warn",
    ) -> None:
        _check_engine(engine)
        if isinstance(schedule, type):
            raise ValueError(
                f"schedule is {schedule!r:.80}; it must be an object such as NonPipelineSchedule()"
            )
        if timer is not None and not isinstance(timer, MultiTimer):
            raise ValueError(f"timer is {timer!r:.80}; it must be a MultiTimer()")
        self.engine = engine
        if schedule is not None:
            engine.schedule = schedule
        self.timer = MultiTimer(on=False) if timer is None else timer
        self.states: dict[str, Any] = {}
        self.metrics = {phase: MetricTable(engine.observers, engine.device) for phase in ("train", "test")}
        self.hooks: list[BaseHook] = []
        self.cur_epoch = 0
        self.cur_step = 0
        self.max_epochs: int | None = None
        self.max_steps: int | None = None
        self.steps_per_epoch: int | None = None
        self.batch_samples = 0
        self.loss_weight: torch.Tensor | float = 0
        self.optimizer_stepped = False
        self.train_dataloader: Iterable[Any] | None = None
        self.test_dataloader: Iterable[Any] | None = None
        self.stop_reason: str | None = None
        self._logger = get_dist_logger() if logger is None else logger
        self._loss_watch = LossWatch(nan_loss, engine, self._logger)

    @names_arguments
    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        *,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
        resume: str | Path | None = None,
    ) -> None:
        """Train until `epochs` epochs or `max_steps` iterations are complete in all, earlier calls included.

        Each epoch puts the model in training mode. Batch norms that are in evaluation mode below a module in
        training mode were frozen by the user: they stay in it.

        Args:
            train_dataloader: Batches of an epoch; read anew for every epoch.
            epochs: Number of epochs.
            max_steps: Number of iterations, if that is less. It ends an epoch early; gradients accumulated
                since the last update are then lost.
            test_dataloader: Batches to test on.
            test_interval: Number of epochs from one test to the next.
            hooks: The hooks, the same on every rank; those of an earlier call if not given.
            display_progress: Whether rank 0 shows how far it is.
            return_output_label: Whether hooks get outputs and labels; False frees their memory.
            resume: A folder of training states, as `SaveCheckpointHook(keep_last=...)` writes them, or one of
                them: go on from the newest complete one, bit for bit, the position in the data and the hooks'
                own figures included. Without one there the training begins. The metrics of an epoch that was
                interrupted are those of its rest.

        Raises:
            ValueError: A number is not positive, a hook is no `BaseHook`, the loader is empty, or the
                training states are damaged or those of another run.
            NanLossError: A loss is NaN or infinite, and `nan_loss` is "stop".
        """
        _check_positive(epochs=epochs, test_interval=test_interval)
        if max_steps is not None:
            _check_positive(max_steps=max_steps)
        self.max_epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch = _length_of(train_dataloader)
        self.train_dataloader, self.test_dataloader = train_dataloader, test_dataloader
        self.stop_reason = None
        self._attach(hooks)
        if resume is not None:
            resume_state(self, resume, self._logger)
        if self._is_complete():
            self._logger.warning(
                f"nothing to train: {self.cur_epoch} epochs and {self.cur_step} steps are complete already",
                ranks=[0],
            )
        with self._telling_hooks_of_exceptions():
            self._call_hooks("before_train")
            # A rank whose own hook requests the end must not leave the others alone: all decide together.
            while not self._is_complete() and not self._agree_to_stop():
                self._train_epoch(train_dataloader, display_progress, return_output_label)
                if test_dataloader is not None and self.cur_epoch % test_interval == 0:
                    self._test(test_dataloader, display_progress, return_output_label)
            self._call_hooks("after_train")

    @names_arguments
    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        *,
        hooks: Sequence[BaseHook] | None = None,
        display_progress: bool = False,
        return_output_label: bool = True,
    ) -> dict[str, float]:
        """Run the model over the test data in evaluation mode, without gradients.

        Each module gets the mode back that it was in before.

        Args:
            test_dataloader: Batches to test on.
            hooks: The hooks, the same on every rank; those of an earlier call if not given.
            display_progress: Whether rank 0 shows how far it is.
            return_output_label: Whether hooks get outputs and labels.

        Returns:
            The metrics that hooks gathered, e.g. `{"Loss": 0.1}` with a `LossHook`.

        Raises:
            ValueError: A hook is no `BaseHook`, or the loader is empty.
        """
        self._attach(hooks)
        with self._telling_hooks_of_exceptions():
            self._test(test_dataloader, display_progress, return_output_label)
        return self.metrics["test"].epoch_values

    def request_stop(self, reason: str) -> None:
        """End `fit` after the present epoch and its test, on all ranks; a request of one rank is enough.

        Args:
            reason: The reason, for the log and for `stop_reason`.
        """
        self.stop_reason = reason

    def predict(self, data: Any) -> Any:
        """Run the model on one input in evaluation mode, without gradients; modules keep their modes.

        Args:
            data: The input: a tensor, a list or tuple for several arguments, a dict for keyword arguments.
                If the schedule has its own `data_process_func`, a batch as that function takes it.

        Returns:
            The output of the model.
        """
        batch = data if self.engine.schedule.data_process_func is not None else (data, None)
        with evaluation_mode(self.engine.model), torch.no_grad():
            output, _, _ = self.engine.execute_schedule(iter((batch,)), forward_only=True, return_loss=False)
        return output

    def _train_epoch(
        self, dataloader: Iterable[Any], display_progress: bool, return_output_label: bool
    ) -> None:
        first_step = self.cur_step
        frozen = _frozen_norms(self.engine.model)
        self.engine.train()
        for module in frozen:
            module.eval()
        self.timer.reset("Train-step")
        self.metrics["train"].start_epoch()
        self._call_hooks("before_train_epoch")
        self.timer.start("Train-epoch")
        title = f"Epoch {self.cur_epoch + 1}/{self.max_epochs} train"
        with self._progress(title, self.steps_per_epoch, display_progress) as advance:
            for batch in dataloader:
                self._train_iter(batch, return_output_label)
                advance(self.states.get("step_metrics", ""))
                if self.cur_step == self.max_steps:
                    break
        self.timer.stop("Train-epoch", keep_in_history=True)
        self._loss_watch.look()
        if self.cur_step == first_step:
            raise ValueError(_empty("train_dataloader"))
        self.cur_epoch += 1
        self.metrics["train"].end_epoch()
        self._call_hooks("after_train_epoch")

    def _train_iter(self, batch: Any, return_output_label: bool) -> None:
        self.batch_samples = num_samples(batch)
        self.metrics["train"].start_step()
        self._call_hooks("before_train_iter")
        self.timer.start("Train-step")
        self.engine.zero_grad()
        results = self.engine.execute_schedule(iter((batch,)), return_output_label=return_output_label)
        self._take_weight()
        self.optimizer_stepped = self.engine.step()
        self.timer.stop("Train-step", keep_in_history=True)
        self.cur_step += 1
        self._loss_watch.see(results[2], self.cur_step)
        self._call_hooks("after_train_iter", *results)

    def _test(self, dataloader: Iterable[Any], display_progress: bool, return_output_label: bool) -> None:
        with evaluation_mode(self.engine.model):
            self._test_epoch(dataloader, display_progress, return_output_label)

    def _test_epoch(
        self, dataloader: Iterable[Any], display_progress: bool, return_output_label: bool
    ) -> None:
        is_empty = True
        self.timer.reset("Test-step")
        self.metrics["test"].start_epoch()
        self._call_hooks("before_test")
        self._call_hooks("before_test_epoch")
        self.timer.start("Test-epoch")
        title = f"Epoch {self.cur_epoch} test"
        with (
            torch.no_grad(),
            self._progress(title, _length_of(dataloader), display_progress) as advance,
        ):
            for batch in dataloader:
                is_empty = False
                self._test_iter(batch, return_output_label)
                advance(self.states.get("step_metrics", ""))
        self.timer.stop("Test-epoch", keep_in_history=True)
        if is_empty:
            raise ValueError(_empty("test_dataloader"))
        self.metrics["test"].end_epoch()
        self._call_hooks("after_test_epoch")
        self._call_hooks("after_test")

    def _test_iter(self, batch: Any, return_output_label: bool) -> None:
        self.batch_samples = num_samples(batch)
        self.metrics["test"].start_step()
        self._call_hooks("before_test_iter")
        self.timer.start("Test-step")
        results = self.engine.execute_schedule(
            iter((batch,)), forward_only=True, return_output_label=return_output_label
        )
        self._take_weight()
        self.timer.stop("Test-step", keep_in_history=True)
        self._call_hooks("after_test_iter", *results)

    def _take_weight(self) -> None:
        if self.engine.num_samples is not None:  # a pipeline may cut along another dimension than 0
            self.batch_samples = self.engine.num_samples
        weight = self.engine.loss_weight
        self.loss_weight = self.batch_samples if weight is None else weight

    def _attach(self, hooks: Sequence[BaseHook] | None) -> None:
        """Take over the hooks of a call, in the order of their priorities."""
        if hooks is None:
            return
        _check_hooks(hooks)
        self.hooks = sorted(hooks, key=lambda hook: hook.priority)
        self._call_hooks("after_hook_is_attached")

    def _call_hooks(self, moment: str, *results: Any) -> None:
        for hook in self.hooks:
            getattr(hook, moment)(self, *results)

    @contextmanager
    def _telling_hooks_of_exceptions(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for hook in self.hooks:
                try:
                    hook.on_exception(self, error)
                except Exception as second:
                    error.add_note(
                        f"and {type(hook).__name__}.on_exception: {type(second).__name__}: {second}"
                    )
            raise

    def _agree_to_stop(self) -> bool:
        """Return whether a rank requests the end, before every epoch; one all-reduce of one number."""
        mesh = self.engine.mesh
        asks = self.stop_reason is not None
        if mesh.world_size > 1:
            # All ranks of the job join with 0 or 1; the maximum is 1 if any rank requests the end.
            asking = torch.tensor(int(asks), device=self.engine.device)
            asks = bool(all_reduce_in_place(asking, mesh.axis(tuple(mesh.axes)), dist.ReduceOp.MAX))
        if asks and self.stop_reason is None:
            self.stop_reason = "another rank has asked for it"
        if asks:
            self._logger.info(f"Training ends after epoch {self.cur_epoch}: {self.stop_reason}", ranks=[0])
        return asks

    def _is_complete(self) -> bool:
        assert self.max_epochs is not None, "fit has set it"
        return self.cur_epoch >= self.max_epochs or (
            self.max_steps is not None and self.cur_step >= self.max_steps
        )

    def _progress(
        self, title: str, total: int | None, display_progress: bool
    ) -> AbstractContextManager[Advance]:
        shown = display_progress and self.engine.mesh.rank == 0
        return show_progress(title, total, logger=self._logger, shown=shown)


def _check_engine(engine: Any) -> None:
    if isinstance(engine, nn.Module | Optimizer | tuple | type):
        raise ValueError(
            f"engine is a {type(engine).__name__}; it must be the first result of "
            "colossalai.initialize: engine, train_dataloader, test_dataloader, lr_scheduler = "
            "colossalai.initialize(...)"
        )


def _check_hooks(hooks: Any) -> None:
    if isinstance(hooks, BaseHook) or not isinstance(hooks, Sequence):
        raise ValueError(f"hooks is {hooks!r:.80}; it must be a list of hooks, such as [hooks.LossHook()]")
    for hook in hooks:
        if isinstance(hook, type) and issubclass(hook, BaseHook):
            raise ValueError(
                f"the class {hook.__name__} is not a hook; give an object of it: {hook.__name__}()"
            )
        if not isinstance(hook, BaseHook):
            raise ValueError(
                f"{hook!r} is not a hook; give instances of subclasses of trainer.hooks.BaseHook"
            )


def _frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the layers with running statistics that are in evaluation mode, unlike the module around them.

    A whole model in evaluation mode, as `from_pretrained` returns it, has none.
    """
    return [
        child
        for module in model.modules()
        if module.training
        for child in module.children()
        if isinstance(child, _NormBase) and not child.training
    ]


def _length_of(dataloader: Iterable[Any]) -> int | None:
    try:
        return len(dataloader)  # type: ignore[arg-type]
    except TypeError:  # an iterable dataset has no length
        return None


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value <= 0:
            raise ValueError(f"{name}={value!r} is out of range; give a positive integer")


def _empty(name: str) -> str:
    return f"{name} gave no batch; give a loader with data that can be read once per epoch, not an iterator"
