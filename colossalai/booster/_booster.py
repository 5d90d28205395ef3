"""Booster: give it model, optimizer, criterion, dataloader and scheduler, and train with what it returns."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from colossalai import checkpoint_io
from colossalai.amp import OptimizerWrapper
from colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.context import ConfigException, global_context
from colossalai.logging import get_dist_logger
from colossalai.runtime import (
    ModelWrapper,
    Resumed,
    Run,
    assemble,
    replicas_of,
    resume_run,
    save_run,
    settings_of,
    tensor_axis_of,
    to_device,
)

Boosted = tuple[Any, Any, Any, Any, Any]


class Booster:
    """Builds the methods of a plugin into training components; several models and optimizers in one job work.

    Args:
        device: Where the models are put; default: the device of this rank.
        mixed_precision: "fp16", "bf16", "fp32" or an object with options; default: as the model is.
        plugin: The parallel methods; default: data parallelism over all ranks.

    Raises:
        RuntimeError: Nothing has been launched.
        ValueError: An argument is not what it must be.
    """

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
            mixed_precision_factory(mixed_precision or "fp32")
            if not isinstance(mixed_precision, MixedPrecision)
            else mixed_precision
        )
        self.mesh = global_context.mesh
        self.device = global_context.device if device is None else torch.device(device)
        self.plugin = plugin or TorchDDPPlugin()
        self.plan = self.plugin.plan(chosen.precision())
        if global_context.pipeline_parallel_size > 1 and self.plan.pipeline is None:
            raise ConfigException(
                f"the job was launched with a pipeline, which {type(self.plugin).__name__} does not run: use "
                "HybridParallelPlugin(pp_size=...)"
            )

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
        _boosted_optimizer(optimizer).backward(loss)

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
        factor = 1.0 if optimizer is None else _boosted_optimizer(optimizer).start_backward()
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
            _boosted_optimizer(optimizer)
        return _boosted_model(model).no_sync()

    def save(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        step: int,
        epoch: int | None = None,
        extra: Mapping[str, Any] | None = None,
        save_async: bool = False,
        keep_last: int = 2,
        every: int = 1,
        buffer_size: float = 512,
    ) -> Path | None:
        """Save everything that a run needs to go on, as `folder/step-<step>`; every rank calls it.

        With what is given go the loss scale and the random states. Every rank writes its own part, so all of
        them must see the folder. Call it between two steps: gradients are not saved.

        Args:
            folder: The folder of the run's training states.
            model: The model.
            optimizer: Its optimizer.
            lr_scheduler: A scheduler of the optimizer.
            dataloader: The loader of the training data, from `plugin.prepare_dataloader`.
            step: The number of steps done.
            epoch: The epoch that the next batch belongs to, from 0; default: that of the loader.
            extra: Plain values of your own.
            save_async: Return when everything is copied to host memory, and write in the background. An error
                there is raised by the next step, or save, or `gpc.destroy()`, on every rank.
            keep_last: How many training states stay in the folder.
            every: Save only where `step` is a multiple.
            buffer_size: The most memory, in MB, that writing takes on a rank beside what is saved, and beside
                the copy in host memory that `save_async` makes.

        Returns:
            The path of the training state; None if it was not time.

        Raises:
            ValueError: Something cannot be saved.
            OSError: It cannot be written; on all ranks. The earlier ones stay.
        """
        return save_run(
            folder,
            self._run(model, optimizer, lr_scheduler, dataloader),
            step=step,
            epoch=epoch,
            extra=extra,
            save_async=save_async,
            keep_last=keep_last,
            every=every,
            buffer_size=buffer_size,
        )

    def load(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        dataloader: Any = None,
        *,
        buffer_size: float = 512,
    ) -> Resumed | None:
        """Go on from the newest complete training state of a folder, or from the one that a path is.

        It may have been saved under any other plan and number of ranks, and by an Engine. Every rank calls it
        after `boost`.

        Args:
            folder: The folder, or a path that `save` returned.
            model: The model to overwrite; likewise the others, which are left out if None.
            optimizer: Its optimizer.
            lr_scheduler: A scheduler of the optimizer.
            dataloader: The loader of the training data: its next pass goes on where the saved one was.
            buffer_size: The most memory, in MB, that loading takes on a rank beside what is loaded.

        Returns:
            Step, epoch and extra values as they were saved; None if there is no training state.

        Raises:
            ValueError: All training states are damaged, or the newest complete one lacks something or does
                not fit; nothing was overwritten.
            OSError: It cannot be read.
        """
        run = self._run(model, optimizer, lr_scheduler, dataloader)
        return resume_run(folder, run, buffer_size=buffer_size)

    def _run(self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any, dataloader: Any) -> Run:
        return Run(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            settings=settings_of(self.plan, self.mesh, global_context.config),
        )

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        *,
        variant: str | None = None,
        buffer_size: float = 512,
    ) -> None:
        """Save the weights of a model; every rank calls it, rank 0 writes.

        Args:
            model: A model, boosted or not.
            checkpoint: A file, or with `shard` a folder in the format of Hugging Face (index and shards).
            shard: Whether to write a folder of shards.
            gather_dtensor: Write whole tensors. False: a folder to which every rank writes its own slices,
                which all ranks must see; `shard`, `size_per_shard` and `use_safetensors` do not count then.
            prefix: Put before the names.
            size_per_shard: Largest size of a shard in MB.
            use_safetensors: Write safetensors instead of torch's format.
            variant: A word in the file names of a folder, as in model.fp16.safetensors of transformers.
            buffer_size: The most memory, in MB, that saving takes on a rank beside the model.

        Raises:
            OSError: The checkpoint cannot be written; nothing that was there before is lost.
        """
        checkpoint_io.save_model(
            _raw_model(model),
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            gather_dtensor=gather_dtensor,
            variant=variant,
            buffer_size=buffer_size,
        )

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        strict: bool = True,
        *,
        prefix: str | None = None,
        variant: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """Load weights into a model, boosted or not, from whatever `save_model` can write.

        Args:
            model: The model.
            checkpoint: A file or a folder; the format is detected.
            strict: Whether missing and unexpected names are errors; otherwise they are logged.
            prefix: What the names in the checkpoint begin with, to be left out; found out if it is not given.
            variant: Which weights of a folder, if it holds several: "fp16" for model.fp16.safetensors.
            allow_pickle: Run the code that a torch file may hold, if it cannot be restored without: only for
                a file from somebody whom you trust.

        Raises:
            ValueError: Names or shapes do not fit, or the file needs `allow_pickle`; nothing has been
                overwritten.
        """
        checkpoint_io.load_model(
            _raw_model(model),
            checkpoint,
            strict=strict,
            prefix=prefix,
            variant=variant,
            allow_pickle=allow_pickle,
        )

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
    ) -> None:
        """Save the state of a boosted optimizer by parameter name; every rank calls it, rank 0 writes.

        Args:
            optimizer: The optimizer.
            checkpoint: A file, or with `shard` a folder of shards.
            shard: Whether to write a folder of shards.
            gather_dtensor: Write whole tensors; see `save_model`.
            prefix: Put before the names.
            size_per_shard: Largest size of a shard in MB.

        Raises:
            ValueError: The optimizer has not been boosted.
        """
        wrapped = _boosted_optimizer(optimizer)
        checkpoint_io.save_optimizer(
            wrapped,
            checkpoint,
            param_names=wrapped.param_names,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            gather_dtensor=gather_dtensor,
        )

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """Load the state of a boosted optimizer, saved under any plugin and number of ranks.

        Raises:
            ValueError: The optimizer has not been boosted, or names or shapes do not fit.
        """
        wrapped = _boosted_optimizer(optimizer)
        checkpoint_io.load_optimizer(wrapped, checkpoint, param_names=wrapped.param_names)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Save the state of a scheduler to a file; every rank calls it, rank 0 writes."""
        checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | Path) -> None:
        """Load the state of a scheduler."""
        checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)


def _raw_model(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def _boosted_model(model: nn.Module) -> ModelWrapper:
    if not isinstance(model, ModelWrapper):
        raise ValueError("this model has not been boosted: use the one that booster.boost returned")
    return model


def _boosted_optimizer(optimizer: Optimizer) -> OptimizerWrapper:
    if not isinstance(optimizer, OptimizerWrapper):
        raise ValueError("this optimizer has not been boosted: use the one that booster.boost returned")
    return optimizer
