"""Training of a model in pipeline stages: a batch runs in microbatches, in the order of a schedule.

The executor runs stages and microbatches; this module adds precision, the loss, data parallelism and the
weights that stages share.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.amp import GivenLoss, LossTerm, OptimizerWrapper, Precision, read_loss
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.nn.loss import logits_of
from colossalai.nn.parallel import AppliedDataMethod
from colossalai.pipeline import (
    LossCollection,
    Microbatches,
    ModelStage,
    PipelineExecutor,
    PipelineOptions,
    ReductionCheck,
    RepeatedTensors,
    Schedule,
    cut_batch,
    merge_outputs,
    output_dim_of,
    reduction_of,
    share_of,
    sync_shared_grads,
)
from colossalai.runtime._fused_loss import criterion_of, with_labels

Criterion = Callable[..., GivenLoss]
_NO_WEIGHT = -1.0
_PAIR_WITH_SUM = (
    "loss_reduction is 'sum', and the criterion returned a pair (sum, count), which is averaged over what it "
    "counts: leave loss_reduction out, or let the criterion return the sum alone"
)


@dataclass(frozen=True)
class TrainingBatch:
    """A batch, or a microbatch; `batch_dim` names its parts by these fields.

    Attributes:
        data: The input of the first stage.
        label: The second argument of the criterion; None if it takes the output alone.
    """

    data: Any
    label: Any


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """Result of a batch.

    Attributes:
        output: The output of the model for the whole batch, on the rank of the last stage; else None.
        loss: The mean loss of the batch, on every rank; None if it was not requested.
        weight: Number of labels of the mean, on every rank; None if the criterion does not return pairs.
        num_samples: The number of samples of the batch.
    """

    output: Any
    loss: Tensor | None
    weight: Tensor | None = None
    num_samples: int


class Pipeline:
    """This rank's stages, with the executors that run a batch through all stages.

    Args:
        model: This rank's stage, or a list of them; on `device`.
        options: Default options of a run.
        axis: The pipeline ranks.
        tensor_axis: The ranks that share a stage, None if their activations differ.
        device: The device of this rank.
        precision: The precision of forward and backward.
        data: The data-parallel method applied to `model`.
        collection: Collects the auxiliary losses of stages; None without such losses, on all stages.
        fused_loss: Whether the model takes the labels, and returns its loss.
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
        data: AppliedDataMethod,
        collection: LossCollection | None = None,
        fused_loss: bool = False,
    ) -> None:
        self.model = model
        self._fused_loss = fused_loss
        self.options = options
        self.axis = axis
        self._tensor_axis = tensor_axis
        self._device = device
        self._precision = precision
        self._convert_input = _hook(precision, "convert_input")
        self._data = data
        self._chunks = list(model) if isinstance(model, nn.ModuleList) else [model]
        self._shared = [param for param in model.parameters() if share_of(param) is not None]
        self._collection = collection
        self._is_closing = False  # whether the gradients are complete after the present batch
        self._executors: dict[PipelineOptions, PipelineExecutor] = {}
        self._last_ranks: dict[PipelineOptions, int] = {}
        self._repeated = RepeatedTensors()
        self._reductions = ReductionCheck(logs=axis.ranks[0] == 0)  # logs in one pipeline of all replicas

    @property
    def holds_last_stage(self) -> bool:
        """Whether this rank has the output of the model."""
        return self._last_rank(self.options) == self.axis.rank

    def run(
        self,
        data: Any,
        label: Any,
        criterion: Criterion | None,
        *,
        optimizer: OptimizerWrapper | None,
        num_parts: int = 1,
        options: PipelineOptions | None = None,
        return_loss: bool = True,
        return_output: bool = False,
        sync: bool = True,
    ) -> BatchResult:
        """Run a batch forward and, with an optimizer, backward; collective over the pipeline.

        With a backward, or for the loss, the last stage broadcasts three numbers.

        Args:
            data: The input of the first stage, the same on every stage.
            label: The second argument of the criterion; None: it takes the output alone.
            criterion: The loss function; needed for a loss. It returns the mean over a microbatch, or a pair
                (sum, count); the sum if the options or its `reduction` state so. If neither states the
                reduction it is called on parts of a microbatch, once; see [Note: means and sums].
            optimizer: The optimizer whose gradients are computed; None to run forward only.
            num_parts: Divisor of the gradients of losses without a weight.
            options: Options of this run.
            return_loss: Return the loss, the same on all ranks.
            return_output: Keep the output.
            sync: Whether to synchronize the gradients of this batch, and those before it, over the replicas.

        Raises:
            ValueError: A loss is needed and there is no criterion, `options` do not fit the batch, or the
                outputs of microbatches cannot be put together.
        """
        options = options or self.options
        if self._fused_loss:
            criterion = criterion_of(criterion, fused_loss=True)
        forward_only = optimizer is None
        wants_loss = return_loss or not forward_only
        if criterion is None and wants_loss:
            raise ValueError(
                "a loss is needed and there is no criterion: pass one to colossalai.initialize or "
                "booster.execute_pipeline"
            )
        output_dim = output_dim_of(options.batch_dim, is_needed=return_output)
        cut = cut_batch(TrainingBatch(data, label), options.num_microbatches, options.batch_dim)
        microbatches: list[TrainingBatch] = cut.parts
        if len(microbatches) > 1:
            self._warn_of_tables(cut)
        reduction = options.loss_reduction or reduction_of(criterion)
        is_unknown = reduction is None and len(microbatches) > 1
        tally = _Tally(cut.sizes, optimizer, num_parts, reduction=reduction or "mean")
        executor = self._executor(options)
        self._is_closing = sync = sync and not forward_only
        if not forward_only:
            self._data.set_sync(enabled=False)

        def compute_loss(output: Any, number: int) -> Tensor:
            output = self._precision.convert_output(output)
            part = microbatches[number]
            loss = _loss_of(criterion, output, part)
            if options.loss_reduction == "sum" and not isinstance(loss, Tensor):
                raise ValueError(_PAIR_WITH_SUM)
            value = tally.take(number, loss)
            if is_unknown and isinstance(loss, Tensor):
                self._reductions.compare_once(
                    criterion,
                    functools.partial(_loss_of, criterion),
                    output,
                    part,
                    value.detach(),
                    batch_dim=options.batch_dim,
                )
            return value

        inputs = self._inputs(microbatches)
        result = executor.run(
            inputs if self._convert_input is None else [*map(self._convert_input, inputs)],
            compute_loss=compute_loss if wants_loss else None,
            forward_only=forward_only,
            loss_factors=tally.factors,
            keep_outputs=return_output,
        )
        if sync:
            self._sync_gradients()
        loss, weight = self._share_loss(tally, options) if wants_loss else (None, None)
        output = None
        if result.outputs is not None:
            outputs = [self._precision.convert_output(each) for each in result.outputs]
            output = merge_outputs(
                [*map(logits_of, outputs)] if self._fused_loss else outputs, cut.sizes, output_dim
            )
        return BatchResult(
            output=output,
            loss=loss if return_loss else None,
            weight=weight,
            num_samples=sum(cut.sizes),
        )

    def _inputs(self, microbatches: Sequence[TrainingBatch]) -> list[Any]:
        stage: Any = self._chunks[0]
        if self._fused_loss and isinstance(stage, ModelStage):
            return [with_labels(part.data, part.label, stage.model) for part in microbatches]
        return [part.data for part in microbatches]

    def _warn_of_tables(self, cut: Microbatches) -> None:
        """Warn of tensors that are cut by a guess, and seem to be about the whole batch."""
        for each in self._repeated.see(cut.tensors):
            get_dist_logger().log_once(
                f"{each.place}, of shape {tuple(each.tensor.shape)}, has had the same values in different "
                f"batches, and is cut into microbatches like samples, since it has {sum(cut.sizes)} entries "
                f"as the batch has samples: if it is about the whole batch, pass batch_dim={{{each.name!r}: "
                f"None}} with the options of the pipeline, else {{{each.name!r}: 0}} ends this warning",
                ranks=[0],
            )

    def _sync_gradients(self) -> None:
        """Synchronize the gradients over the replicas, and those of shared weights over their stages."""
        if self._shared and self._data.shards_gradients:  # after `finish` no rank has all of them
            sync_shared_grads(self._shared)
        self._data.finish()
        if self._shared and not self._data.shards_gradients:
            sync_shared_grads(self._shared)

    def _before_last_backward(self, chunk: int) -> None:
        if self._is_closing:
            self._data.set_sync(enabled=True, part=chunk)

    def _share_loss(self, tally: "_Tally", options: PipelineOptions) -> tuple[Tensor, Tensor | None]:
        """Broadcast loss and weight of the batch from the last stage, and record them for the optimizer."""
        # MPS has no float64.
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        # (3,): a mean and _NO_WEIGHT; or a sum, its weight, and the unit of weights
        numbers = torch.zeros(3, dtype=dtype, device=self._device)
        if tally.losses:
            numbers.copy_(tally.numbers(dtype))
        last = self.axis.ranks[self._last_rank(options)]
        # All ranks of the pipeline join: the last stage sends three numbers.
        dist.broadcast(numbers, src=last, group=self.axis.group)
        value, weight, unit = numbers.unbind()
        is_weighted = weight.item() != _NO_WEIGHT
        term = LossTerm(value, weight if is_weighted else None, is_sum=is_weighted)
        if tally.optimizer is not None:
            if is_weighted:
                tally.optimizer.weights.adopt_unit(unit)
            tally.optimizer.note_loss(term)
        return term.mean, term.weight

    def _last_rank(self, options: PipelineOptions) -> int:
        if options not in self._last_ranks:
            self._last_ranks[options] = options.make_schedule(self.axis.size).rank_of_stage[-1]
        return self._last_ranks[options]

    def _executor(self, options: PipelineOptions) -> PipelineExecutor:
        if options not in self._executors:

            def make_schedule(num_microbatches: int) -> Schedule:
                return options.make_schedule(self.axis.size, num_microbatches)

            context = _hook(self._precision, "forward_context")
            self._executors[options] = PipelineExecutor(
                self._chunks,
                self.axis,
                make_schedule=make_schedule,
                device=self._device,
                tensor_shape=options.tensor_shape,
                scatter_axis=self._tensor_axis if options.scatter_gather_tensors else None,
                dtype=next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None),
                stage_context=context and functools.partial(context, self._device.type),
                convert_activation=_hook(self._precision, "convert_activation"),
                collection=self._collection,
                on_last_backward=self._before_last_backward,
            )
        return self._executors[options]


class _Tally:
    """The losses of the microbatches of a batch, in the order of the last stage.

    Args:
        sizes: The number of samples of each microbatch.
        optimizer: The optimizer whose gradients are computed, if any; its backward starts here.
        num_parts: Divisor of losses without a weight.
        reduction: Reduction of these losses: the "mean" over a microbatch, or the "sum".

    Attributes:
        losses: The losses so far.
        factors: Factor of each microbatch's loss in the backward; final once its loss is in `losses`.
    """

    def __init__(
        self, sizes: Sequence[int], optimizer: OptimizerWrapper | None, num_parts: int, *, reduction: str
    ) -> None:
        self.optimizer = optimizer
        self.losses: list[LossTerm] = []
        num_samples = sum(sizes)
        # The share of each microbatch in the loss of the batch.
        shares = self._shares = [1.0 if reduction == "sum" else size / num_samples for size in sizes]
        self._scale = 1.0 if optimizer is None else optimizer.start_backward()
        factor = self._scale / num_parts
        self.factors: list[Any] = [share * factor for share in shares]

    def take(self, number: int, loss: Any) -> Tensor:
        """Record the loss of a microbatch; return the tensor from which the backward starts.

        Raises:
            ValueError: `loss` is not a valid result of a criterion, or only some losses of the batch have a
                weight.
        """
        given = _checked(loss)
        if self.losses and (given.weight is None) != (self.losses[0].weight is None):
            raise ValueError(
                "the criterion returned a pair (sum, count) for some microbatches of a batch only: return "
                "one for all, or for none"
            )
        if given.weight is not None and self.optimizer is not None:
            factor = self.optimizer.factor_of_sum(given.weight) * self._scale
            self.factors[number] = factor.to(torch.promote_types(given.value.dtype, torch.float32))
        # The mean of mse_loss is a view into a storage of all the squares; a clone frees it.
        self.losses.append(LossTerm(given.value.detach().clone(), given.weight, is_sum=given.is_sum))
        return given.value

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return (mean, _NO_WEIGHT, 0), or (sum, weight, unit)."""
        total = torch.zeros((), dtype=dtype, device=self.losses[0].value.device)
        if self.losses[0].weight is None:
            for share, loss in zip(self._shares, self.losses, strict=True):
                total += share * loss.value.to(dtype)
            return torch.stack([total, torch.full_like(total, _NO_WEIGHT), torch.zeros_like(total)])
        weight, unit = torch.zeros_like(total), torch.ones_like(total)
        for loss in self.losses:
            assert loss.weight is not None
            total += loss.total
            weight += loss.weight
        if self.optimizer is not None:
            unit = self.optimizer.weights.unit(weight)
        return torch.stack([total, weight, unit])


def _hook(precision: Precision, name: str) -> Callable[..., Any] | None:
    """Return a hook of a precision; None if it is inherited from `Precision`, and so changes nothing."""
    is_inherited = getattr(type(precision), name) is getattr(Precision, name)
    return None if is_inherited else getattr(precision, name)


def _loss_of(criterion: Criterion | None, output: Any, part: TrainingBatch) -> Any:
    assert criterion is not None
    return criterion(output) if part.label is None else criterion(output, part.label)


def _checked(loss: Any) -> LossTerm:
    is_pair = isinstance(loss, tuple | list) and len(loss) == 2
    if not is_pair and (not isinstance(loss, Tensor) or loss.numel() != 1):
        kind = type(loss).__name__
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"type {kind}"
        raise ValueError(
            f"the criterion returned a loss of {found}; it must be a tensor with one value, the mean over "
            "the samples that it was given, or a pair (sum, count)"
        )
    given = read_loss(loss)
    return LossTerm(given.value.reshape(()), given.weight, is_sum=given.is_sum)
