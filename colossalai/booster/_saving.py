"""Saving and loading of a Booster: a whole run, or model, optimizer and scheduler separately."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai import checkpoint_io
from colossalai._lazy import find_name
from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io import Stateful
from colossalai.context import Mesh, global_context, names_arguments
from colossalai.logging import get_dist_logger
from colossalai.runtime import (
    AccumulatingOptimizer,
    ModelWrapper,
    Plan,
    Resumed,
    Run,
    resume_run,
    save_run,
    settings_of,
)


class Saving:
    """The part of Booster that saves and loads; abstract.

    Attributes:
        mesh: The ranks of the job.
        plan: The built-in methods.
    """

    mesh: Mesh
    plan: Plan

    @names_arguments
    def save(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        *,
        step: int,
        epoch: int | None = None,
        extra: Mapping[str, object] | None = None,
        save_async: bool = False,
        keep_last: int = 2,
        every: int = 1,
        buffer_size: float = 512,
    ) -> Path | None:
        """Save everything needed to resume a run, as `folder/step-<step>`; every rank calls it.

        The loss scale and the random states are saved, too. Every rank writes its own part, so all of them
        must see the folder. Call it between two steps: gradients are not saved.

        Args:
            folder: The folder of the run's training states.
            model: The model.
            optimizer: Its optimizer.
            lr_scheduler: A scheduler of the optimizer.
            dataloader: The loader of the training data, from `plugin.prepare_dataloader`.
            step: The number of steps done.
            epoch: Epoch of the next batch, from 0. Default: the loader's.
            extra: Plain values of your own.
            save_async: Return when everything is copied to host memory, and write in the background. An error
                there is raised by the next step, or save, or `gpc.destroy()`, on every rank.
            keep_last: Number of training states to keep in the folder.
            every: Save only if `step` is a multiple.
            buffer_size: Largest buffer for writing on a rank, in MB, in addition to the saved tensors and to
                their copy in host memory with `save_async`.

        Returns:
            The path of the training state; None if it was not time.

        Raises:
            ValueError: `step`, `every`, `keep_last` or another option is out of range, a value cannot be
                saved, or an accumulation window is open, as in `no_sync`.
            OSError: The training state cannot be written; on all ranks. The last `keep_last` ones remain.
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

    @names_arguments
    def load(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        lr_scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        *,
        buffer_size: float = 512,
    ) -> Resumed | None:
        """Resume from the newest complete training state of a folder, or from a given one.

        It can have been saved under any other plan and number of ranks, and by an Engine. Every rank calls it
        after `boost`.

        Args:
            folder: The folder, or a path that `save` returned.
            model: The model to overwrite; likewise the other components, which are skipped if None.
            optimizer: Its optimizer.
            lr_scheduler: A scheduler of the optimizer.
            dataloader: The loader of the training data: its next pass continues at the saved position.
            buffer_size: Largest buffer for loading on a rank, in MB, in addition to the loaded tensors.

        Returns:
            Step, epoch and extra values of the training state; None if there is none.

        Raises:
            ValueError: All training states in `folder` are damaged, or the newest complete one lacks a part
                or has other names or shapes; nothing was overwritten.
            OSError: The training state cannot be read.
        """
        run = self._run(model, optimizer, lr_scheduler, dataloader)
        resumed = resume_run(folder, run, buffer_size=buffer_size)
        if resumed is not None and isinstance(optimizer, AccumulatingOptimizer):
            optimizer.restart_window()
        return resumed

    def _run(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Stateful | None,
        dataloader: Stateful | None,
    ) -> Run:
        if isinstance(optimizer, list | tuple):
            raise ValueError(
                "a training state holds one optimizer, and several are given: pass none, and save each with "
                "save_optimizer (and load_optimizer)"
            )
        if isinstance(lr_scheduler, list | tuple):
            raise ValueError(
                "a training state holds one scheduler, and several are given: pass none, and save each with "
                "save_lr_scheduler (and load_lr_scheduler)"
            )
        return Run(
            is_in_window=isinstance(optimizer, AccumulatingOptimizer) and optimizer.window.is_in_window,
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dataloader=dataloader,
            settings=settings_of(self.plan, self.mesh, global_context.config),
        )

    @names_arguments
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
                which all ranks must see; `shard`, `size_per_shard` and `use_safetensors` have no effect then.
            prefix: Prefix of the names.
            size_per_shard: Largest size of a shard in MB.
            use_safetensors: Write safetensors instead of torch's format.
            variant: A word in the file names of a folder, as in model.fp16.safetensors of transformers.
            buffer_size: Largest buffer for saving on a rank, in MB, in addition to the model.

        Raises:
            OSError: The checkpoint cannot be written; an earlier one is not lost.
        """
        raw = _raw_model(model)
        if shard and getattr(raw, "peft_config", None):
            get_dist_logger().log_once(
                "save_model of a model with adapters: the names are those of peft, which from_pretrained of "
                "transformers does not open, so no config is written. booster.save_lora(model, folder) "
                "writes the adapters, and with merges=True the whole model",
                ranks=[0],
            )
        checkpoint_io.save_model(
            raw,
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            gather_dtensor=gather_dtensor,
            variant=variant,
            buffer_size=buffer_size,
        )

    @names_arguments
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
        """Load weights into a model, boosted or not, from any format of `save_model`.

        Args:
            model: The model.
            checkpoint: A file or a folder; the format is detected.
            strict: Whether missing and unexpected names are errors; otherwise they are logged.
            prefix: Prefix of the names in the checkpoint, to be removed. Default: it is detected.
            variant: Variant of the weights in a folder with several: "fp16" for model.fp16.safetensors.
            allow_pickle: Run the code that a torch file may hold, if it cannot be restored without: only for
                files from a trusted source.

        Raises:
            ValueError: `checkpoint` has a name or a shape that is not the model's, or the file needs
                `allow_pickle`; nothing has been overwritten.
        """
        checkpoint_io.load_model(
            _raw_model(model),
            checkpoint,
            strict=strict,
            prefix=prefix,
            variant=variant,
            allow_pickle=allow_pickle,
        )

    @names_arguments
    def save_lora(
        self, model: nn.Module, folder: str | Path, *, merges: bool = False, size_per_shard: float = 1024
    ) -> None:
        """Save the adapters of a model in peft's format; every rank calls it, rank 0 writes.

        `PeftModel.from_pretrained` opens the folder, and so does `load_lora` under any plan.

        Args:
            model: A model of peft's `get_peft_model`, boosted or not.
            folder: Target folder; it is created. Adapters with a name other than "default" go to subfolders.
            merges: Save the whole model instead, with the adapters merged into its weights, which
                `from_pretrained` of transformers opens. Ranks need memory for the weights with adapters.
            size_per_shard: Largest size of a file of the merged weights, in MB.

        Raises:
            ValueError: `model` has no adapters, or with `merges` adapters that cannot be merged.
            OSError: `folder` cannot be written.
        """
        if merges:
            _lora("save_merged")(model, folder, size_per_shard=size_per_shard)
        else:
            _lora("save_adapters")(model, folder)

    def load_lora(self, model: nn.Module, folder: str | Path) -> None:
        """Load adapters into a model's adapters; every rank calls it.

        Args:
            model: A model of peft's `get_peft_model` with adapters of the same shape, boosted or not.
            folder: A folder of `save_lora`, or of peft's `save_pretrained`.

        Raises:
            ValueError: `model` has no adapters, `folder` has none, or they differ in shape or scaling;
                nothing was overwritten.
            OSError: `folder` cannot be read.
        """
        _lora("load_adapters")(model, folder)

    @names_arguments
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
            prefix: Prefix of the names.
            size_per_shard: Largest size of a shard in MB.

        Raises:
            ValueError: `optimizer` has not been boosted.
        """
        wrapped = boosted_optimizer(optimizer)
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
            ValueError: `optimizer` has not been boosted, or `checkpoint` has a name or a shape that is not
                the optimizer's.
        """
        wrapped = boosted_optimizer(optimizer)
        checkpoint_io.load_optimizer(wrapped, checkpoint, param_names=wrapped.param_names)

    def save_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """Save the state of a scheduler to a file; every rank calls it, rank 0 writes."""
        checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """Load the state of a scheduler."""
        checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)


def _lora(name: str) -> Any:
    """Return a function of `_lora`, which a job without adapters does not import."""
    return find_name(__package__ or "", {name: f"{__package__}._lora"}, name)


def _raw_model(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def boosted_optimizer(optimizer: Optimizer) -> OptimizerWrapper:
    """Return an optimizer with the type that `boost` returns.

    Raises:
        ValueError: `optimizer` has not been boosted.
    """
    if not isinstance(optimizer, OptimizerWrapper):
        raise ValueError("this optimizer has not been boosted: use the optimizer that booster.boost returned")
    return optimizer
