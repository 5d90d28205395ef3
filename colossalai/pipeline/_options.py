"""Pipeline options: the schedule, the microbatches, the chunks and the known message shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from colossalai.pipeline._loss_reduction import REDUCTIONS
from colossalai.pipeline.execution import BatchDim, check_batch_dim
from colossalai.pipeline.schedules import SCHEDULES, Schedule, make_schedule, read_schedule

PARTITIONS = ("balanced", "uniform")
_FEWEST_CHUNKS = {"interleaved": 2, "zb-v": 2}


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of pipeline parallelism.

    Attributes:
        num_microbatches: Number of microbatches that a batch is cut into.
        schedule: A name ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"), the path of a CSV file of actions,
            or a `Schedule`; None: "1f1b", with several chunks "interleaved".
        num_chunks: Number of stages on a rank; None: as many as the schedule needs.
        partition: Partition of a whole model: "balanced" (by parameters) or "uniform" (by blocks); None: the
            given model is already the part of this rank.
        tensor_shape: Shape of the output of every stage but the last, if it is always the same tensor; None:
            shapes are exchanged.
        scatter_gather_tensors: Send only the rank's part of an activation that is the same on all
            tensor-parallel ranks; the receivers gather it.
        batch_dim: The dimension of the samples in all tensors of a batch and in the output; or a mapping from
            names of inputs to it, with None for an input about the whole batch, which every microbatch gets
            whole. A name is a key of a dict, a field, or a path: "data", "label", "data[0]", "data['x']";
            "output" is the model's output. Inputs without a name are cut along dim 0. None: all are.
        loss_reduction: Reduction of the criterion: the "mean" over the samples of a batch, or their "sum";
            None: the criterion's attribute `reduction`, else the mean.
    """

    num_microbatches: int
    schedule: str | Path | Schedule | None = None
    num_chunks: int | None = None
    partition: str | None = None
    tensor_shape: tuple[int, ...] | None = None
    scatter_gather_tensors: bool = False
    batch_dim: BatchDim | None = field(default=None, hash=False)  # a mapping has no hash
    loss_reduction: str | None = None

    def __post_init__(self) -> None:
        check_batch_dim(self.batch_dim)
        if isinstance(self.batch_dim, Mapping):
            object.__setattr__(self, "batch_dim", dict(self.batch_dim))  # a private copy
        if self.loss_reduction not in (None, *REDUCTIONS):
            raise ValueError(
                f"loss_reduction is {self.loss_reduction!r}; it must be one of {', '.join(REDUCTIONS)}, or "
                "left out"
            )
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches is {self.num_microbatches}; it must be at least 1")
        if self.partition is not None and self.partition not in PARTITIONS:
            raise ValueError(f"partition is {self.partition!r}; it must be one of {', '.join(PARTITIONS)}")
        if isinstance(self.schedule, str) and not self._is_file and self.schedule not in SCHEDULES:
            raise ValueError(
                f"there is no schedule {self.schedule!r}: choose one of {', '.join(SCHEDULES)}, "
                "or give the path of a .csv file of actions"
            )
        fewest = _FEWEST_CHUNKS.get(self.name, 1)
        if self.num_chunks is not None and (
            self.num_chunks < fewest or (self.name == "zb-v" and self.num_chunks != 2)
        ):
            raise ValueError(
                f"schedule {self.name!r} with {self.num_chunks} stage{'s' * (self.num_chunks != 1)} on a "
                f"rank: it needs {'exactly' if self.name == 'zb-v' else 'at least'} {fewest} "
                "(num_model_chunks of HybridParallelPlugin, NUM_CHUNKS in a config)"
            )
        if self.num_chunks is not None and self.num_chunks > 1 and self.name in ("gpipe", "1f1b", "zb-h1"):
            raise ValueError(
                f"schedule {self.name!r} has one chunk on a rank, not {self.num_chunks}: choose "
                "'interleaved' or 'zb-v'"
            )

    @property
    def name(self) -> str:
        """The schedule's name."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.name
        if self.schedule is None:
            return "interleaved" if (self.num_chunks or 1) > 1 else "1f1b"
        return str(self.schedule)

    def make_schedule(self, num_ranks: int, num_microbatches: int | None = None) -> Schedule:
        """Return the schedule for a number of microbatches; default: `num_microbatches`.

        Raises:
            ValueError: The schedule, from a file or given as a value, has another number of ranks or
                microbatches.
            OSError: The file cannot be read.
        """
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        if isinstance(self.schedule, Schedule):
            return _fitting(self.schedule, num_ranks, count)
        if self._is_file:
            return _fitting(read_schedule(Path(self.name)), num_ranks, count)
        num_chunks = self.num_chunks or _FEWEST_CHUNKS.get(self.name, 1)
        return make_schedule(self.name, num_ranks, count, num_chunks)

    @property
    def _is_file(self) -> bool:
        return isinstance(self.schedule, Path) or str(self.schedule).endswith(".csv")


def _fitting(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Schedule:
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise ValueError(
            f"the schedule {schedule.name!r} is for {schedule.num_ranks} pipeline ranks and "
            f"{schedule.num_microbatches} microbatches, the job has {num_ranks} and {num_microbatches}"
        )
    return schedule
