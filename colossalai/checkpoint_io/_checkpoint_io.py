"""`CheckpointIO`: saving and loading as an object, and its implementation `GeneralCheckpointIO`."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io._model import load_model, save_model
from colossalai.checkpoint_io._optimizer import load_optimizer, save_optimizer
from colossalai.checkpoint_io._optimizer_state import ParamNames
from colossalai.checkpoint_io._state import parameter_names
from colossalai.checkpoint_io.formats import Stateful, load_lr_scheduler, save_lr_scheduler


class CheckpointIO(ABC):
    """Interface for saving and loading model, optimizer and scheduler, for implementations of your own.

    Every rank calls the methods.
    """

    @abstractmethod
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """Save the weights of a model; the arguments are those of `Booster.save_model`."""

    @abstractmethod
    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> nn.Module:
        """Load weights into a model and return it."""

    @abstractmethod
    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
    ) -> None:
        """Save the state of an optimizer; the arguments are those of `Booster.save_optimizer`."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """Load the state of an optimizer."""

    @abstractmethod
    def save_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """Save the state of a scheduler."""

    @abstractmethod
    def load_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """Load the state of a scheduler."""


class GeneralCheckpointIO(CheckpointIO):
    """Saves full tensors by name and loads slices of them, as Booster does; models may be boosted or not.

    Args:
        model: The model of optimizers that were not boosted or initialized: their states are saved under its
            names. Without it such states are saved by position, and load into an optimizer that was built
            alike.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
    ) -> None:
        """See the base class.

        Raises:
            OSError: The checkpoint cannot be written; nothing that was there before is lost.
        """
        save_model(
            _unwrapped(model),
            checkpoint,
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            use_safetensors=use_safetensors,
            gather_dtensor=gather_dtensor,
        )

    def load_model(self, model: nn.Module, checkpoint: str | Path, strict: bool = True) -> nn.Module:
        """See the base class; the format is detected.

        Raises:
            ValueError: A name or a shape in `checkpoint` is not the model's; nothing has been overwritten.
        """
        load_model(_unwrapped(model), checkpoint, strict=strict)
        return model

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | Path,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
    ) -> None:
        """See the base class.

        Raises:
            ValueError: The optimizer holds a parameter that the model has not.
            OSError: The checkpoint cannot be written; nothing that was there before is lost.
        """
        save_optimizer(
            optimizer,
            checkpoint,
            param_names=self._names(optimizer),
            shard=shard,
            prefix=prefix or None,
            size_per_shard=size_per_shard,
            gather_dtensor=gather_dtensor,
        )

    def load_optimizer(self, optimizer: Optimizer, checkpoint: str | Path) -> None:
        """See the base class.

        Raises:
            ValueError: A name or a shape in `checkpoint` is not the optimizer's; nothing has been
                overwritten.
        """
        load_optimizer(optimizer, checkpoint, param_names=self._names(optimizer))

    def save_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """See the base class."""
        save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Stateful, checkpoint: str | Path) -> None:
        """See the base class."""
        load_lr_scheduler(lr_scheduler, checkpoint)

    def _names(self, optimizer: Optimizer) -> ParamNames:
        if isinstance(optimizer, OptimizerWrapper):
            return optimizer.param_names
        if self._model is not None:
            return parameter_names(_unwrapped(self._model))
        params = (param for group in optimizer.param_groups for param in group["params"])
        return {param: f"param_{place}" for place, param in enumerate(params)}


@runtime_checkable
class _Wrapper(Protocol):
    """The wrapped model of `initialize` or `boost`."""

    def unwrap(self) -> nn.Module:
        """Return the model that was given."""


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, _Wrapper) else model
