"""Gradient handlers: they make gradients equal over ranks after the backward, as a config names them."""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.communication import all_reduce
from colossalai.context import Axis, ParallelMode, global_context
from colossalai.engine import BaseGradientHandler
from colossalai.nn.parallel import EarlierMeans
from colossalai.pipeline.stages import sync_shared_grads
from colossalai.registry import GRADIENT_HANDLER
from colossalai.tensor import GradientSync, gradient_sync, row_cache_of
from colossalai.zero import Shards

BUCKET_BYTES = 25 * 2**20


@final
class GradientAverage:
    """Replaces the gradients of trainable parameters by those of the mean loss over all replicas, in place.

    Args:
        replicas: The ranks that see different parts of the batch; nothing happens if there is one only.
    """

    def __init__(self, replicas: Axis) -> None:
        self._replicas = replicas
        self._means = EarlierMeans((), replicas)

    def __call__(self, params: Iterable[nn.Parameter]) -> None:
        """Average the gradients.

        One all-reduce for each bucket, with the bytes of the trainable parameters in total. A parameter that
        has no gradient on this rank (it was not used here) counts as zero, so that all ranks send the same.

        Args:
            params: The parameters, the same on all ranks.
        """
        if self._replicas.size == 1:
            return
        trainable = [param for param in params if param.requires_grad and row_cache_of(param) is None]
        self._means.track(trainable)
        for param in trainable:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            self._means.scale(param, param.grad)
        for sync, grads in _buckets(trainable, self._replicas):
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            means = all_reduce(flat, sync.axis).div_(sync.divisor).split([grad.numel() for grad in grads])
            for grad, mean in zip(grads, means, strict=True):
                grad.copy_(mean.view_as(grad))
        for param in trainable:
            self._means.note(param)


def _buckets(
    params: Iterable[nn.Parameter], replicas: Axis
) -> Iterator[tuple[GradientSync, list[torch.Tensor]]]:
    """Yield gradients of one kind, in the order of the parameters, as many as fit in a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device, GradientSync], list[torch.Tensor]] = {}
    for param in params:
        assert param.grad is not None
        sync = gradient_sync(param, replicas)
        kind = (param.grad.dtype, param.grad.device, sync)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(grad.nbytes for grad in bucket) + param.grad.nbytes > BUCKET_BYTES:
            yield sync, bucket
            bucket = open_buckets[kind] = []
        bucket.append(param.grad)
    yield from ((sync, bucket) for (_, _, sync), bucket in open_buckets.items())


def _data_ranks() -> Axis:
    """Return the ranks of DATA; and in tensor mode "dap" those that share activations, too."""
    if global_context.layout.dap > 1:
        return global_context.mesh.axis(global_context.mesh.batch_axes)
    return global_context.axis(ParallelMode.DATA)


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over DATA, and over ranks that share activations; see `GradientAverage`."""

    _average: GradientAverage | None = None  # from the first call on

    def handle_gradient(self) -> None:
        """Average the gradients in place; nothing with one rank along `dp`."""
        self._average = self._average or GradientAverage(_data_ranks())
        self._average(self._model.parameters())


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over SEQUENCE_DP: every parameter is replicated there; see `GradientAverage`.

    So are slices of parameters cut by tensor parallelism.

    A rank's loss is the mean over the tokens that it holds, and its backward gives the gradient of the sum of
    all ranks' losses, with respect to its own copy. So if all ranks hold equally many counted tokens, the
    mean over the ranks is the gradient of the mean over all tokens. Otherwise (padding, a masked language
    model), give the loss its weight: `engine.backward(loss, weight=number_of_own_tokens)`.
    """

    _average: GradientAverage | None = None  # from the first call on

    def handle_gradient(self) -> None:
        """Average the gradients in place.

        Raises:
            ValueError: No ranks of the launched job share sequences.
        """
        self._average = self._average or GradientAverage(global_context.axis(ParallelMode.SEQUENCE_DP))
        self._average(self._model.parameters())


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(BaseGradientHandler):
    """Averages all gradients: those of experts over the ranks that hold them, others over DATA.

    See [Note: ranks of a gradient]. Named in the config, `gradient_handler=[dict(type=
    "MoeGradientHandler")]`, it does so, and the data-parallel method leaves it to this. If the config
    names no handler, `initialize` adds one to the engine of a model with experts; gradients are averaged by
    the data-parallel method then, during the backward, which is faster, and this one does nothing: the
    gradients of experts would be divided twice.

    Args:
        model: The model.
        optimizer: Its optimizer.
        averaged: Whether gradients are averaged before this is called.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, averaged: bool = False) -> None:
        super().__init__(model, optimizer)
        self.averaged = averaged
        self._average: GradientAverage | None = None

    def handle_gradient(self) -> None:
        """Average the gradients in place, unless they are."""
        if not self.averaged:
            self._average = self._average or GradientAverage(_data_ranks())
            self._average(self._model.parameters())


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(BaseGradientHandler):
    """Sums the gradients of shared parameters; see `PipelineSharedModuleWrapper`.

    A pipeline does so in every step by itself. Gradients that are summed already are left unchanged.
    """

    def handle_gradient(self) -> None:
        """Sum the gradients in place."""
        sync_shared_grads(self._model.parameters())


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Waits until each rank has its slices of the mean gradients, and averages the remaining ones.

    A step under ZeRO does so by itself, and skips it after this handler.

    Args:
        model: The model.
        optimizer: Its wrapped optimizer, under ZeRO stage 1 or 2.

    Raises:
        ValueError: The optimizer is not under ZeRO.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        shards = optimizer.masters if isinstance(optimizer, OptimizerWrapper) else None
        if not isinstance(shards, Shards):
            raise ValueError(
                "ZeROGradientHandler needs an optimizer under ZeRO: put zero=dict(stage=1) into the config, "
                "or take DataParallelGradientHandler"
            )
        self._shards = shards

    def handle_gradient(self) -> None:
        """Finish the means; collective over the replicas."""
        self._shards.finish_means()
