"""Booster: give it model, optimizer, criterion, dataloader and scheduler, and train with what it returns."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colossalai.booster._saving import Saving, boosted_optimizer
from colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.context import ConfigException, global_context, names_arguments
from colossalai.logging import get_dist_logger
from colossalai.runtime import (
    ModelWrapper,
    assemble,
    replicas_of,
    tensor_axis_of,
    to_device,
)

Boosted = tuple[Any, Any, Any, Any, Any]


class Booster(Saving):
    """Builds the methods of a plugin into training components; several models and optimizers in one job work.

    Args:
        device: Where the models are put; default: the device of this rank.
        mixed_precision: "fp16", "bf16", "fp32" or an object with options; default: as the model is.
        plugin: The parallel methods; default: data parallelism over all ranks.

    Raises:
        RuntimeError: Nothing has been launched.
        ValueError: An argument is not what it must be.
    """

    @names_arguments
    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ValueError(f"plugin is {plugin!r}; it must be an object such as TorchDDPPlugin()")
        if not isinstance(mixed_precision, MixedPrecision | str | None):
            raise ValueError(
                f"mixed_precision is {mixed_precision!r}; it must be a name or a MixedPrecision object"
            )
        chosen = (
            mixed_precision_factory("fp32" if mixed_precision is None else mixed_precision)
            if not isinstance(mixed_precision, MixedPrecision)
            else mixed_precision
        )
        self.mesh = global_context.mesh
        self.device = global_context.device if device is None else _device(device)
        self.plugin = plugin or TorchDDPPlugin()
        self.plan = self.plugin.plan(chosen.precision())
        if global_context.pipeline_parallel_size > 1 and self.plan.pipeline is None:
            raise ConfigException(
                f"the job was launched with a pipeline, which {type(self.plugin).__name__} does not run: use "
                "HybridParallelPlugin(pp_size=...)"
            )

    @names_arguments
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., torch.Tensor] | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Build the methods in; call it once for each model, before the first step of its optimizer.

        Args:
            model: The model; it is moved to the device and changed in place. With a pipeline: the whole
                model, of which this rank's part comes back, or this rank's part.
            optimizer: Its optimizer.
            criterion: The loss function; moved to the device if it is a module.
            dataloader: Batches, from `plugin.prepare_dataloader`; returned as it is.
            lr_scheduler: A scheduler of the optimizer; returned as it is.

        Returns:
            Model, optimizer, criterion, dataloader, scheduler; None for what was not given.

        Raises:
            ValueError: The components do not fit together.
        """
        boosted, wrapped = assemble(
            self.plan,
            model,
            optimizer,
            mesh=self.mesh,
            device=self.device,
            replicas=replicas_of(global_context),
            tensor_axis=tensor_axis_of(global_context),
        )
        if isinstance(criterion, nn.Module):
            criterion.to(self.device)
        if self.mesh.axis_size("dp") > 1 and type(dataloader) is DataLoader:
            get_dist_logger().log_once(
                "this dataloader gives every data-parallel rank the same samples, unless its sampler divides "
                "them: plugin.prepare_dataloader(dataset, batch_size) makes one that does",
                ranks=[0],
            )
        return boosted, wrapped, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Run the backward of a loss; the loss scale, if any, is that of `optimizer`.

        Raises:
            ValueError: The optimizer has not been boosted.
        """
        boosted_optimizer(optimizer).backward(loss)

    @names_arguments
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., torch.Tensor] | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """Take the next batch and run it through the pipeline: forward, and with an optimizer backward.

        A batch that is a pair is taken as (data, label), and the criterion gets (output, label). Any other is
        the data, and the criterion gets (output, data of the microbatch). Data that is a dict becomes keyword
        arguments.

        Args:
            data_iter: Iterator of batches, the same ones on all pipeline ranks.
            model: A model that was boosted with a pipeline.
            criterion: The loss function.
            optimizer: Its boosted optimizer; None to run forward only.
            return_loss: Return the mean loss of the batch, on every rank.
            return_outputs: Return the outputs, on the rank of the last stage.

        Returns:
            "loss" and "outputs", each None if it was not asked for or is not known here.

        Raises:
            ValueError: Model or optimizer have not been boosted with a pipeline, or a loss is needed and
                there is no criterion.
            StopIteration: There are no more batches.
        """
        boosted = _boosted_model(model)
        if boosted.pipeline is None:
            raise ValueError(
                "this model has no pipeline: boost it with HybridParallelPlugin(pp_size=...), or call it and "
                "booster.backward yourself"
            )
        batch = to_device(next(data_iter), self.device)
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        data, label = batch if is_pair else (batch, batch)
        factor = 1.0 if optimizer is None else boosted_optimizer(optimizer).start_backward()
        result = boosted.pipeline.run(
            data,
            label,
            criterion,
            forward_only=optimizer is None,
            return_loss=return_loss,
            return_output=return_outputs,
            loss_factor=factor,
            sync=boosted.syncs,
        )
        return {"loss": result.loss, "outputs": result.output}

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Return a context in which forward and backward of `model` only add to this rank's gradients.

        To accumulate N microbatches, run all but the last one in it, divide each loss by N, then step once.

        Args:
            model: A boosted model.
            optimizer: Accepted for plugins whose optimizer synchronizes; checked to be boosted.

        Raises:
            ValueError: The model or the optimizer has not been boosted.
        """
        if optimizer is not None:
            boosted_optimizer(optimizer)
        return _boosted_model(model).no_sync()


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, which is no device of torch: {error}") from error
    here = ["cpu", *(each.type for each in [torch.accelerator.current_accelerator()] if each is not None)]
    if chosen.type not in here:
        raise ValueError(f"device is {device!r}; this machine has {' and '.join(here)} only")
    return chosen


def _boosted_model(model: nn.Module) -> ModelWrapper:
    if not isinstance(model, ModelWrapper):
        raise ValueError("this model has not been boosted: use the one that booster.boost returned")
    return model
