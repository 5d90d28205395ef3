"""A model cut into stages: a batch goes through it in microbatches, as a schedule says.

The executor knows stages and microbatches; here it meets what belongs to training: precision, the loss, data
parallelism, weights that stages share.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.amp import Precision
from colossalai.context import Axis
from colossalai.nn.parallel import DataMethod
from colossalai.pipeline import (
    PipelineExecutor,
    PipelineOptions,
    Schedule,
    merge_outputs,
    microbatch_weights,
    num_samples_in,
    split_batch,
    sync_shared_grads,
)

Criterion = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What running a batch gave.

    Attributes:
        output: The output of the model for the whole batch, on the rank of the last stage; else None.
        loss: The mean loss of the batch, on every rank; None if it was not asked for.
    """

    output: Any
    loss: Tensor | None


class Pipeline:
    """This rank's stages, and what runs a batch through all of them.

    Args:
        model: This rank's stage, or a list of them; on `device`.
        options: How it is run unless a call says otherwise.
        axis: The pipeline ranks.
        tensor_axis: The ranks that share a stage, None where their activations differ.
        device: The device of this rank.
        precision: The precision of forward and backward.
        data: The data-parallel method, applied to `model` already.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        options: PipelineOptions,
        axis: Axis,
        tensor_axis: Axis | None,
        device: torch.device,
        precision: Precision,
        data: DataMethod,
    ) -> None:
        self.model = model
        self.options = options
        self.axis = axis
        self._tensor_axis = tensor_axis
        self._device = device
        self._precision = precision
        self._data = data
        self._chunks = list(model) if isinstance(model, nn.ModuleList) else [model]
        self._is_closing = False  # whether the gradients are complete after the present batch
        self._executors: dict[PipelineOptions, PipelineExecutor] = {}
        self._last_ranks: dict[PipelineOptions, int] = {}

    @property
    def holds_last_stage(self) -> bool:
        """Whether the output of the model is seen on this rank."""
        return self._last_rank(self.options) == self.axis.rank

    def run(
        self,
        data: Any,
        label: Any,
        criterion: Criterion | None,
        *,
        options: PipelineOptions | None = None,
        forward_only: bool = False,
        return_loss: bool = True,
        return_output: bool = False,
        loss_factor: float = 1.0,
        sync: bool = True,
    ) -> BatchResult:
        """Run a batch forward and, unless `forward_only`, backward; collective over the pipeline.

        Args:
            data: What the first stage takes, the same on every stage.
            label: What the criterion takes beside the output; None: it takes the output alone.
            criterion: The loss function; needed for a loss.
            options: How to run it.
            forward_only: Leave out the backward.
            return_loss: Return the loss, the same on all ranks: one broadcast of a scalar.
            return_output: Keep the output.
            loss_factor: Factor of the gradients.
            sync: Whether the gradients of this batch, and those before it, are made equal over the replicas.

        Raises:
            ValueError: A loss is needed and there is no criterion.
        """
        options = options or self.options
        if criterion is None and (return_loss or not forward_only):
            raise ValueError("a loss is needed and there is no criterion: pass one to the door")
        batch = (data, label)
        microbatches = split_batch(batch, min(options.num_microbatches, num_samples_in(batch)))
        shares = microbatch_weights(microbatches)
        executor = self._executor(options)
        self._is_closing = sync = sync and not forward_only
        if not forward_only:
            self._data.set_sync(self.model, enabled=False)
        wants_loss = criterion is not None and (return_loss or not forward_only)

        def compute_loss(output: Any, number: int) -> Tensor:
            part = microbatches[number][1]
            output = self._precision.convert_output(output)
            assert criterion is not None
            return _checked(criterion(output) if part is None else criterion(output, part))

        result = executor.run(
            [self._precision.convert_input(part) for part, _ in microbatches],
            compute_loss=compute_loss if wants_loss else None,
            forward_only=forward_only,
            loss_factors=[share * loss_factor for share in shares],
            keep_outputs=return_output,
        )
        if sync:
            self._make_equal()
        return BatchResult(
            output=None if result.outputs is None else self._joined(result.outputs, shares),
            loss=self._mean_loss(result.losses, shares, options) if return_loss else None,
        )

    def _joined(self, outputs: list[Any], shares: list[float]) -> Any:
        return merge_outputs([self._precision.convert_output(output) for output in outputs], shares)

    def _make_equal(self) -> None:
        """Make the gradients equal over the replicas, and those of shared weights over their stages."""
        if self._data.shards_gradients:  # afterwards no rank has all of them
            sync_shared_grads(self.model.parameters())
        self._data.finish(self.model)
        if not self._data.shards_gradients:
            sync_shared_grads(self.model.parameters())

    def _before_last_backward(self, chunk: int) -> None:
        if self._is_closing:
            self._data.set_sync(self._chunks[chunk], enabled=True)

    def _mean_loss(
        self, losses: list[Tensor] | None, shares: list[float], options: PipelineOptions
    ) -> Tensor:
        # MPS has no float64.
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        mean = torch.zeros((), dtype=dtype, device=self._device)
        for share, loss in zip(shares, losses, strict=True) if losses is not None else ():
            mean += share * loss.to(dtype)
        last = self.axis.ranks[self._last_rank(options)]
        dist.broadcast(mean, src=last, group=self.axis.group)
        return mean

    def _last_rank(self, options: PipelineOptions) -> int:
        if options not in self._last_ranks:
            self._last_ranks[options] = options.make_schedule(self.axis.size).rank_of_stage[-1]
        return self._last_ranks[options]

    def _executor(self, options: PipelineOptions) -> PipelineExecutor:
        if options not in self._executors:

            def make_schedule(num_microbatches: int) -> Schedule:
                return options.make_schedule(self.axis.size, num_microbatches)

            self._executors[options] = PipelineExecutor(
                self._chunks,
                self.axis,
                make_schedule=make_schedule,
                device=self._device,
                tensor_shape=options.tensor_shape,
                scatter_axis=self._tensor_axis if options.scatter_gather_tensors else None,
                dtype=next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None),
                stage_context=self._stage_context,
                on_last_backward=self._before_last_backward,
            )
        return self._executors[options]

    def _stage_context(self) -> AbstractContextManager[Any]:
        return self._precision.forward_context(self._device.type)


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = type(loss).__name__
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {kind}"
        raise ValueError(
            f"the criterion returned a loss of {found}; it must be a tensor with one value, the mean over "
            "the samples that it was given"
        )
    return loss.reshape(())
