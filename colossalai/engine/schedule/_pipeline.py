"""Pipeline schedules: options of a run through the engine's pipeline."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from colossalai.context import global_context, names_arguments
from colossalai.engine.schedule._base import BaseSchedule, DataProcess
from colossalai.pipeline import BatchDim, PipelineOptions, Schedule

if TYPE_CHECKING:
    from colossalai.engine._engine import Engine


class PipelineSchedule(BaseSchedule):
    """Runs a batch in microbatches through the stages; 1F1B (one forward, one backward) by default.

    Every stage reads the same batches. The first one takes the data as a model without a pipeline does; each
    later one takes the output of the stage before and, if the data is a dict, the entries that its `forward`
    has arguments for.

    Args:
        num_microbatches: Number of microbatches of a batch; the last one can be smaller, and a batch of fewer
            samples has as many microbatches as samples.
        data_process_func: Function from a batch to (data, label); see `BaseSchedule`.
        tensor_shape: Shape of the output of every stage but the last for a microbatch; None: it is exchanged.
        scatter_gather_tensors: Send only the rank's part of an activation that is the same on all
            tensor-parallel ranks (1d); the receivers gather it.
        schedule: "1f1b", "gpipe", "zb-h1", or "zb-v" for two chunks on a rank; the path of a CSV file of
            actions; or a `colossalai.pipeline.Schedule`.
        batch_dim: The dimension of the samples in all tensors of a batch and in the output; or a mapping from
            names of inputs to it, such as `{"class_weights": None}` for an input that every microbatch gets
            whole. See `colossalai.pipeline.PipelineOptions`.
        loss_reduction: Reduction of the criterion: the "mean" or the "sum" over the samples; None: its
            attribute `reduction`, else the mean.

    Raises:
        ValueError: `num_microbatches` is below 1, or another option is unknown or out of range.
    """

    @names_arguments
    def __init__(
        self,
        num_microbatches: int,
        data_process_func: DataProcess | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
        *,
        schedule: str | Path | Schedule | None = None,
        batch_dim: BatchDim | None = None,
        loss_reduction: str | None = None,
    ) -> None:
        super().__init__(data_process_func)
        self.options = PipelineOptions(
            num_microbatches=num_microbatches,
            schedule=schedule,
            tensor_shape=None if tensor_shape is None else tuple(tensor_shape),
            scatter_gather_tensors=scatter_gather_tensors,
            batch_dim=batch_dim,
            loss_reduction=loss_reduction,
        )

    @classmethod
    def from_options(cls, options: PipelineOptions) -> "PipelineSchedule":
        """Return the schedule object of options from a config."""
        made = cls(options.num_microbatches)
        made.options = options
        return made

    def forward_back_step(
        self,
        engine: "Engine",
        data_iter: Iterator[Any],
        forward_only: bool = False,
        return_loss: bool = True,
        return_output_label: bool = True,
    ) -> tuple[Any, Any, torch.Tensor | None]:
        """See the base class; output and label are on the rank of the last stage, None on the others.

        The loss is the mean over the batch, on every rank.

        Raises:
            ValueError: `engine` has no pipeline, or a loss is needed and there is no criterion.
            StopIteration: `data_iter` has no more batches.
        """
        data, label = self.load_batch(data_iter, engine.device)
        result = engine.training_step.run_pipeline(
            data,
            label,
            engine.criterion if return_loss or not forward_only else None,
            options=self.options,
            forward_only=forward_only or not torch.is_grad_enabled(),
            return_loss=return_loss,
            return_output=return_output_label,
        )
        kept = (result.output, label) if return_output_label and engine.sees_output else (None, None)
        return (*kept, result.loss)


class InterleavedPipelineSchedule(PipelineSchedule):
    """Interleaved 1F1B: each rank holds several stages (chunks), for a smaller bubble (2104.04473).

    Args:
        num_microbatches: Number of microbatches of a batch.
        num_model_chunks: Number of chunks on a rank, at least 2.
        data_process_func: Function from a batch to (data, label); see `BaseSchedule`.
        tensor_shape: Shape of the output of every stage but the last for a microbatch; None: it is exchanged.
        scatter_gather_tensors: See `PipelineSchedule`.
        batch_dim: See `PipelineSchedule`.
        loss_reduction: See `PipelineSchedule`.

    Raises:
        ValueError: `num_microbatches` is below 1, `num_model_chunks` below 2, or another option is out of
            range.
    """

    @names_arguments
    def __init__(
        self,
        num_microbatches: int,
        num_model_chunks: int,
        data_process_func: DataProcess | None = None,
        tensor_shape: Sequence[int] | None = None,
        scatter_gather_tensors: bool = False,
        *,
        batch_dim: BatchDim | None = None,
        loss_reduction: str | None = None,
    ) -> None:
        super().__init__(num_microbatches, data_process_func, tensor_shape, scatter_gather_tensors)
        self.options = PipelineOptions(
            num_microbatches=num_microbatches,
            schedule="interleaved",
            num_chunks=num_model_chunks,
            tensor_shape=self.options.tensor_shape,
            scatter_gather_tensors=scatter_gather_tensors,
            batch_dim=batch_dim,
            loss_reduction=loss_reduction,
        )


def get_tensor_shape() -> tuple[int, ...] | None:
    """Return the `TENSOR_SHAPE` of the launched config, None if it has none."""
    shape = global_context.config.get("TENSOR_SHAPE")
    return None if shape is None else tuple(shape)
