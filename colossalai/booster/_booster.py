"""Booster: builds a plugin's parallel methods into model, optimizer, criterion, dataloader and scheduler."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypedDict, overload

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import TypeVar

from colossalai.amp import GivenLoss, OptimizerWrapper, Weight
from colossalai.booster._saving import Saving, boosted_optimizer
from colossalai.booster.mixed_precision import MixedPrecision, mixed_precision_factory
from colossalai.booster.plugin import Plugin, TorchDDPPlugin
from colossalai.context import Axis, ConfigException, global_context, names_arguments, relayout
from colossalai.runtime import (
    Criterion,
    DataParallelLoader,
    ModelWrapper,
    Plan,
    WatchedLoader,
    assemble_with_optimizers,
    check_built_for,
    check_division,
    criterion_of,
    describe_model,
    divided_among,
    gather_samples,
    log_start,
    to_device,
    watched,
)
from colossalai.tensor import process_group_of

T = TypeVar("T")
GivenOptimizerT = TypeVar("GivenOptimizerT", bound=Optimizer)
OptimizerT = TypeVar("OptimizerT")
CriterionT = TypeVar("CriterionT", bound=Criterion | None, default=None)
LoaderT = TypeVar("LoaderT", bound=Iterable[Any] | None, default=None)
SchedulerT = TypeVar("SchedulerT", default=None)

Boosted = tuple[ModelWrapper, OptimizerT, CriterionT, LoaderT, SchedulerT]
"""Model, optimizer, criterion, dataloader, scheduler; None for a component that was not given."""


class BatchOutput(TypedDict):
    """Loss and outputs of a batch through the pipeline; None if not requested, or not on this rank."""

    loss: torch.Tensor | None
    outputs: Any


class Booster(Saving):
    """Builds the methods of a plugin into training components; a job can have several models and optimizers.

    It lays out the mesh of the job for the plan of the plugin: make it before layers of `colossalai.nn` that
    are to be cut are built, or call `plugin.configure()` before.

    Args:
        device: Device of the models. Default: the device of this rank.
        mixed_precision: "fp16", "bf16", "fp32" or an object with options. Default: the model's dtype. "auto":
            "bf16" on devices that are fast at it, else "fp32"; decided by rank 0 at `boost`.
        plugin: The parallel methods. Default: data parallelism over all ranks.
        gradient_accumulation: Number of microbatches in one optimizer step; see `accumulate`.
        compile: Compile the model's blocks: True, or a dict of options of `torch.compile`.
        fused_loss: Whether a language model that is given labels computes its loss in training in chunks,
            without logits.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `device` or `mixed_precision` is unknown, `plugin` is not a `Plugin`,
            `gradient_accumulation` is below 1, or `mixed_precision` is given here and to the plugin.
    """

    @names_arguments
    def __init__(
        self,
        device: str | torch.device | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
        *,
        gradient_accumulation: int = 1,
        compile: bool | Mapping[str, Any] = False,
        fused_loss: bool = False,
    ) -> None:
        if plugin is not None and not isinstance(plugin, Plugin):
            raise ValueError(f"plugin is {plugin!r}; it must be an object such as TorchDDPPlugin()")
        if not isinstance(mixed_precision, MixedPrecision | str | None):
            raise ValueError(
                f"mixed_precision is {mixed_precision!r}; it must be a name or a MixedPrecision object"
            )
        if not isinstance(fused_loss, bool):
            raise ValueError(f"fused_loss is {fused_loss!r}; it must be True or False")
        if type(gradient_accumulation) is not int or gradient_accumulation < 1:
            raise ValueError(
                f"gradient_accumulation is {gradient_accumulation!r}; it must be an integer of at least 1"
            )
        self.gradient_accumulation = gradient_accumulation
        chosen = (
            mixed_precision_factory("fp32" if mixed_precision is None else mixed_precision)
            if not isinstance(mixed_precision, MixedPrecision)
            else mixed_precision
        )
        self.plugin = plugin or TorchDDPPlugin()
        plan = self.plugin.plan(chosen.precision())
        if compile is not False:
            plan = replace(plan, compile=compile)
        if fused_loss:
            plan = replace(plan, fused_loss=True)
        self.device = global_context.device if device is None else _device(device)
        self.plugin.configure()  # the last call that can fail: from here on the job has the plan's mesh
        self.mesh = global_context.mesh
        if global_context.layout.pipeline > 1 and plan.pipeline is None:
            raise ConfigException(
                f"the job was launched with a pipeline, which {type(self.plugin).__name__} does not run: use "
                "HybridParallelPlugin(pp_size=...)"
            )
        self.plan = replace(plan, layout=global_context.layout)
        self._precision = plan.precision  # as it was chosen; "auto" is resolved for each model

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: None = None,
        criterion: CriterionT = ...,
        dataloader: LoaderT = ...,
        lr_scheduler: SchedulerT = ...,
    ) -> Boosted[None, CriterionT, LoaderT, SchedulerT]: ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        criterion: CriterionT = ...,
        dataloader: LoaderT = ...,
        lr_scheduler: SchedulerT = ...,
    ) -> Boosted[OptimizerWrapper, CriterionT, LoaderT, SchedulerT]: ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: tuple[Optimizer, ...],
        criterion: CriterionT = ...,
        dataloader: LoaderT = ...,
        lr_scheduler: SchedulerT = ...,
    ) -> Boosted[tuple[OptimizerWrapper, ...], CriterionT, LoaderT, SchedulerT]: ...

    @overload
    def boost(
        self,
        model: nn.Module,
        optimizer: list[GivenOptimizerT],
        criterion: CriterionT = ...,
        dataloader: LoaderT = ...,
        lr_scheduler: SchedulerT = ...,
    ) -> Boosted[list[OptimizerWrapper], CriterionT, LoaderT, SchedulerT]: ...

    @names_arguments
    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | list[GivenOptimizerT] | tuple[Optimizer, ...] | None = None,
        criterion: Criterion | None = None,
        dataloader: Iterable[Any] | None = None,
        lr_scheduler: object = None,
    ) -> Boosted[object, Criterion | None, Iterable[Any] | None, object]:
        """Build the methods in; call it once for each model, before the first step of its optimizer.

        Args:
            model: The model; it is moved to the device and changed in place. With a pipeline: the whole
                model, of which this rank's part is returned, or this rank's part.
            optimizer: Its optimizer, or a list or tuple of several with separate parameters (the players of a
                GAN in one module, Muon and AdamW), which is returned with the same type. They share one loss
                scale, and each clips by the norm of its own parameters.
            criterion: The loss function; moved to the device if it is a module.
            dataloader: Batches, from `plugin.prepare_dataloader`, whose tensors are then moved to the device;
                returned as it is. With `gradient_accumulation` iterate over the returned one, which marks the
                end of an epoch.
            lr_scheduler: A scheduler of the optimizer, or several; returned as it is.

        Returns:
            Model, optimizer, criterion, dataloader, scheduler; None for a component that was not given.

        Raises:
            ValueError: `optimizer` is empty or holds parameters that `model` lacks, a component has been
                boosted before, `model` cannot be built for the plan of the plugin, or `dataloader` divides
                samples among another number of ranks than the model has data-parallel ones.
        """
        criterion_of(criterion, fused_loss=self.plan.fused_loss)
        if isinstance(optimizer, list | tuple):
            given: list[Optimizer] = [*optimizer]
            if not given:
                raise ValueError("optimizer is empty: give at least one, or leave it out")
        else:
            given = [] if optimizer is None else [optimizer]
        plan = self._lay_out_as_cut(model, dataloader)
        check_division(
            dataloader, self.mesh.axis_size("dp"), remedy="plugin.prepare_dataloader(dataset, batch_size)"
        )
        plan = replace(plan, precision=self._precision)
        if isinstance(model, nn.Module):  # `assemble` refuses anything else
            plan = plan.resolve(model, self.mesh, self.device)
        self.plan = replace(self.plan, precision=plan.precision)  # which checkpoints store
        described = describe_model(model, plan)
        boosted, wrapped = assemble_with_optimizers(
            plan,
            model,
            given,
            mesh=self.mesh,
            device=self.device,
            accumulation_steps=self.gradient_accumulation,
        )
        log_start(boosted, wrapped, plan=plan, mesh=self.mesh, described=described)
        if isinstance(criterion, nn.Module):
            check_built_for(self.plan, criterion, self.mesh)
            criterion.to(self.device)
        if isinstance(dataloader, DataParallelLoader):
            dataloader.device = self.device
        if dataloader is not None and self.gradient_accumulation > 1:
            dataloader = watched(dataloader)
            for each in boosted.optimizers:
                each.window.watch = dataloader
        returned: OptimizerWrapper | list[OptimizerWrapper] | tuple[OptimizerWrapper, ...] | None
        if isinstance(optimizer, list):
            returned = wrapped
        else:
            returned = tuple(wrapped) if isinstance(optimizer, tuple) else next(iter(wrapped), None)
        return boosted, returned, criterion, dataloader, lr_scheduler

    def _lay_out_as_cut(self, model: nn.Module, dataloader: Iterable[Any] | None) -> Plan:
        """Lay the job out for a model that a user has cut; return its plan, or the plugin's for other models.

        Raises:
            ValueError: `dataloader` divides samples among other ranks.
        """
        group = process_group_of(model)
        layout = self.plan.layout
        if group is None or (
            layout is not None and layout.over(self.mesh.world_size).axes() == group.mesh.axes
        ):
            return self.plan
        divided = divided_among(dataloader)
        if divided not in (None, 1, group.dp_world_size()):
            raise ValueError(
                f"the dataloader divides samples among {divided} ranks, and the model is cut "
                f"over {group}, of which {group.dp_world_size()} see different samples: launch with "
                f"parallel=dict(tensor=dict(size={group.tp_world_size()}, mode='1d')) in the config, then "
                "prepare_dataloader"
            )
        relayout(group.layout)
        self.mesh = global_context.mesh
        return replace(self.plan, layout=group.layout)  # for this model: rules must not cut other models

    def backward(self, loss: GivenLoss, optimizer: Optimizer, weight: Weight | None = None) -> None:
        """Run the backward of a loss, multiplied by the loss scale of `optimizer`, if any.

        Args:
            loss: The mean over the batch, or a pair (sum, count).
            optimizer: The boosted optimizer.
            weight: Number of labels (or samples) of the mean. With it, or with pairs, the step is that of the
                mean over all labels of all ranks and of all backwards since `optimizer.zero_grad()`, and
                losses are not divided for accumulation. After it `optimizer.mean_loss` is that mean.

        Raises:
            ValueError: `optimizer` has not been boosted, `loss` is not a valid loss, `weight` is negative or
                not one number, or only some of the losses of a step have a weight.
        """
        boosted_optimizer(optimizer).backward(loss, weight)

    @names_arguments
    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Criterion | None = None,
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> BatchOutput:
        """Take the next batch and run it through the pipeline: forward, and with an optimizer backward.

        A batch that is a pair is taken as (data, label), and the criterion gets (output, label). Any other
        batch is the data, and the criterion gets (output, data of the microbatch). The entries of a dict are
        keyword arguments.

        Args:
            data_iter: Iterator of batches, the same ones on all pipeline ranks.
            model: A model that was boosted with a pipeline.
            criterion: The loss function; it returns the mean over the microbatch, or a pair (sum, count).
            optimizer: Its boosted optimizer; None to run forward only.
            return_loss: Whether to return the mean loss of the batch, on every rank.
            return_outputs: Whether to return the outputs, on the rank of the last stage.

        Returns:
            "loss" and "outputs", each None if it was not requested or is not on this rank.

        Raises:
            ValueError: `model` or `optimizer` has not been boosted with a pipeline, or a loss is needed and
                there is no criterion.
            StopIteration: `data_iter` has no more batches.
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
        result = boosted.pipeline.run(
            data,
            label,
            criterion,
            optimizer=None if optimizer is None else boosted_optimizer(optimizer),
            num_parts=self.gradient_accumulation,
            return_loss=return_loss,
            return_output=return_outputs,
            sync=boosted.syncs,
        )
        return {"loss": result.loss, "outputs": result.output}

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        """Context for a microbatch with forward, backward, step and zero_grad, as for a whole batch.

        With `Booster(gradient_accumulation=N)` N microbatches make one step of the optimizers of `model`.
        Losses without a weight are divided here, gradients are synchronized in the last microbatch only, and
        step, clipping and zero_grad take effect then; `optimizer.stepped` is True after a step, and a
        scheduler steps after it. The window also ends at the end of an epoch, if `boost` was given the
        dataloader.

            for batch in dataloader:
                with booster.accumulate(model):
                    booster.backward(criterion(model(batch)), optimizer)
                    optimizer.step()
                    optimizer.zero_grad()

        Args:
            model: A boosted model.

        Raises:
            ValueError: The model has not been boosted, or a microbatch has a backward and no step.
        """
        boosted = _boosted_model(model)
        optimizers = boosted.optimizers
        closes = not optimizers or any(each.window.closes_window for each in optimizers)
        with nullcontext() if closes else boosted.no_sync():
            yield
        if any(each.has_unstepped for each in optimizers):
            raise ValueError(
                "a backward without a step: call optimizer.step() and zero_grad() in every microbatch; they "
                "take effect in the last one of each window"
            )

    @names_arguments
    def gather_for_metrics(self, data: T, dataloader: Iterable[Any] | None = None) -> T:
        """Return predictions, labels and the like with the rows of all data-parallel ranks, each sample once.

        If the samples are not a multiple of the ranks, the last batch repeats some: their rows are left out.
        The rows are in the order of the dataset (of the sampler, if it shuffles). Collective over the
        data-parallel ranks, for the current batch, or after a pass for all of it.

        Args:
            data: Tensors, in dicts, lists and tuples at any depth; dim 0 has a row, or equally many, for each
                sample. A tensor without dims gives a row for each rank. None stays None, as on the ranks of a
                pipeline that have no output.
            dataloader: The loader of the samples. Default: the loader of `plugin.prepare_dataloader` that
                returned a batch last. With a loader of another kind all rows are returned, rank after rank.

        Raises:
            ValueError: `data` holds an object that is not a tensor, its shapes differ between ranks beyond
                dim 0, its rows do not belong to samples, or the loader divides them among another number of
                ranks; on all ranks.
        """
        loader = self.plugin.last_dataloader() if dataloader is None else dataloader
        loader = loader.loader if isinstance(loader, WatchedLoader) else loader
        replicas = self.mesh.axis("dp")
        last_batch = None
        if isinstance(loader, DataParallelLoader):
            last_batch = loader.last_batch
            if loader.reads_all:  # every rank has read all samples
                replicas = Axis("dp", (self.mesh.rank,), self.mesh)
            elif loader.num_replicas not in (None, replicas.size):
                raise ValueError(
                    f"the dataloader divides samples among {loader.num_replicas} ranks, and this booster "
                    f"gathers from {replicas.size}: gather with the booster whose plugin prepared the loader"
                )
        return gather_samples(data, replicas, last_batch=last_batch, device=self.device)

    def gathered_grads(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the whole gradients that the next steps apply, by the names of the parameters.

        See `OptimizerWrapper.gathered_grads`. Collective: all ranks call it, between backward and step.

        Args:
            model: A boosted model.

        Raises:
            ValueError: `model` has not been boosted, or no optimizer was boosted with it; or the
                microbatch is not the last one of its window.
        """
        optimizers = _boosted_model(model).trained_by
        if not optimizers:
            raise ValueError(
                "this model was boosted without an optimizer, for which gradients are gathered: pass one to "
                "booster.boost(model, optimizer)"
            )
        return {name: grad for each in optimizers for name, grad in each.gathered_grads().items()}

    def register_forward_method(self, model: nn.Module, name: str) -> None:
        """Make a method of a boosted model run as its forward does; see `ModelWrapper`.

        Args:
            model: A boosted model, on which the method is called afterwards.
            name: Name of the method, such as "compute_loss".

        Raises:
            ValueError: `model` has not been boosted, has no such method, or is a stage of a pipeline.
        """
        _boosted_model(model).register_forward_method(name)

    def no_sync(self, model: nn.Module, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Return a context in which forward and backward of `model` only add to this rank's gradients.

        To accumulate N microbatches, run all but the last one in it, divide each loss without a weight by N,
        then step once.

        Args:
            model: A boosted model.
            optimizer: Accepted for plugins whose optimizer synchronizes; checked to be boosted.

        Raises:
            ValueError: `model` or `optimizer` has not been boosted.
        """
        if optimizer is not None:
            boosted_optimizer(optimizer)
        return _boosted_model(model).no_sync()


def _device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}, which is not a device of torch: {error}") from error
    here = ["cpu", *(each.type for each in [torch.accelerator.current_accelerator()] if each is not None)]
    if chosen.type not in here:
        raise ValueError(f"device is {device!r}; this machine has {' and '.join(here)} only")
    return chosen


def _boosted_model(model: nn.Module) -> ModelWrapper:
    if not isinstance(model, ModelWrapper):
        raise ValueError("this model has not been boosted: use the model that booster.boost returned")
    return model
