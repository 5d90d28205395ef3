"""The hook that profiles training steps, with torch's profiler."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colossalai.context import names_arguments
from colossalai.logging import get_dist_logger
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook, check_interval

if TYPE_CHECKING:
    from torch.profiler import profile

    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class ProfilerHook(BaseHook):
    """Writes a trace of some training steps for each rank, to be opened in Perfetto or chrome://tracing.

    The file is `rank_<global rank>_step_<number of the last step>.pt.trace.json`. The first steps, which
    allocate memory and select kernels, are left out; the trace begins after `skip + warmup` steps.

    Args:
        folder: Folder of the traces; made if it does not exist.
        skip: Number of training steps before the profiler is started.
        warmup: Number of profiled steps whose figures, which are slow at first, are discarded.
        steps: Number of steps in the trace.
        ranks: The global ranks that record; all of them if not given.
        record_shapes: Record the shapes of the tensors.
        profile_memory: Record allocations and frees.
        with_stack: Record the Python lines; that makes the steps slower.
        priority: Hooks with a lower value run earlier.

    Raises:
        ValueError: `skip` or `warmup` is negative, or `steps` is below 1.
    """

    @names_arguments
    def __init__(
        self,
        folder: str | Path,
        *,
        skip: int = 2,
        warmup: int = 1,
        steps: int = 3,
        ranks: Sequence[int] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        for name, value in (("skip", skip), ("warmup", warmup)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}={value!r} is out of range; give an integer that is 0 or greater")
        self.folder = Path(folder)
        self.skip = skip
        self.warmup = warmup
        self.steps = check_interval(steps, name="steps")
        self.ranks = None if ranks is None else tuple(ranks)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._profiler: profile | None = None
        self._is_done = False
        self._num_steps = 0

    def before_train(self, trainer: "Trainer") -> None:
        """Make the profiler, which is idle until the first profiled step."""
        rank = trainer.engine.mesh.rank
        if self._is_done or (self.ranks is not None and rank not in self.ranks):
            return
        from torch.profiler import profile, schedule

        def write(profiler: "profile") -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank_{rank}_step_{trainer.cur_step}.pt.trace.json"
            profiler.export_chrome_trace(str(path))
            self._is_done = True

        when = schedule(wait=0, skip_first=self.skip, warmup=self.warmup, active=self.steps, repeat=1)
        self._num_steps = 0
        self._profiler = profile(schedule=when, on_trace_ready=write, **self._options)
        self._profiler.start()

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Advance the profiler by a step."""
        if self._profiler is None:
            return
        self._num_steps += 1
        self._profiler.step()  # writes the trace after the last step
        if self._is_done:
            self._stop()
            get_dist_logger().info(
                f"profiled {self.steps} steps; the trace of each rank is in {self.folder}",
                ranks=[trainer.engine.mesh.rank if self.ranks is None else self.ranks[0]],
            )

    def after_train(self, trainer: "Trainer") -> None:
        """End a trace that is shorter than planned; log it if there is none."""
        if self._profiler is None:
            return
        self._stop()
        if not self._is_done:
            get_dist_logger().warning(
                f"ProfilerHook has written no trace: the training had {self._num_steps} steps, and the first "
                f"{self.skip + self.warmup} are left out (skip={self.skip}, warmup={self.warmup})",
                ranks=[trainer.engine.mesh.rank],
            )

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        """End the profiler, so that another one can be made."""
        self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
