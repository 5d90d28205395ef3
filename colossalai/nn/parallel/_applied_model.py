"""Base of the wrappers: a model with a data-parallel method applied, under the names of the model itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from colossalai.context import Axis
from colossalai.nn.layer.moe import LossCollector, bias_updates, collect_losses
from colossalai.nn.parallel._data_method import AppliedDataMethod, params_called
from colossalai.tensor import TransparentModule


class AppliedModel(TransparentModule):
    """A model whose forward goes through a data-parallel method.

    Names are those of the model that was given: `state_dict`, `named_parameters`, `named_modules` and
    attributes (`model.config`, `model.fc1`) have no prefix. Attributes, buffers and modules without
    parameters are set on the model, too (see `TransparentModule`), except those of the wrapper.

    A subclass calls `_stand_for(raw)` at the end of its constructor.

    Args:
        data: The data-parallel method, applied to the model.

    Attributes:
        module: The model, as the method runs it.
        data: As given.
    """

    def __init__(self, data: AppliedDataMethod) -> None:
        super().__init__()
        self.module = data.module
        self.data = data
        self._collector: LossCollector | None = None

    def _stand_for(self, raw: nn.Module) -> None:
        super()._stand_for(raw)
        collect_losses(self, raw, _set_collector)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled wrapper, which gets a collector as a new one does."""
        super().__setstate__(state)
        if self._collector is None:
            collect_losses(self, self.unwrap(), _set_collector)

    def unwrap(self) -> nn.Module:
        """Return the model that was given."""
        raw: nn.Module = self.__dict__["_raw"]
        return raw

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its outputs lead to the auxiliary losses of its layers with experts."""
        module = self._modules["module"]  # `self.module` would go through `__getattr__` in each forward
        assert module is not None
        if self._collector is None:
            return module(*args, **kwargs)
        return self._collector.run_forward(module, args, kwargs)

    def set_sync(self, enabled: bool) -> None:
        """Set whether the next forward and its backward synchronize gradients."""
        self.data.set_sync(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, forward and backward add to the gradients of this rank.

        They send nothing; under ZeRO that holds for stage 1.
        """
        self.set_sync(False)
        try:
            yield
        finally:
            self.set_sync(True)

    def gathered(self, *parts: str | nn.Module | nn.Parameter) -> AbstractContextManager[None]:
        """Return a block within which parameters can be read and written, where a rank holds parts of them.

        All ranks enter and leave it. Afterwards every rank has the values that one rank has written; if
        several have written into one chunk, those of the first of them. If every rank has whole parameters
        (DDP, ZeRO stages 1 and 2) it does nothing.

        Args:
            parts: Modules or parameters of the model, or their names; default: all.

        Raises:
            ValueError: `parts` are not all of the model, or its parameters are DTensors (FSDP).
        """
        return self.data.gathered(params_called(self.unwrap(), parts) if parts else None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model that was given, under its own names.

        Under Gemini (ZeRO stage 3) the values are whole, in host memory, on every rank: all ranks call it,
        and the chunks are gathered one after the other. `colossalai.checkpoint_io` saves without that.
        """
        return self.data.state_dict(self.unwrap(), *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the model that was given; all ranks load the same whole values.

        Raises:
            ValueError: `assign` is set, and this rank holds parts of the model.
        """
        return self.data.load_state_dict(self.unwrap(), state_dict, strict=strict, assign=assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters under the names of the model that was given."""
        return self.unwrap().named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return the modules under the names of the model that was given."""
        modules: Iterator[tuple[str, nn.Module]] = self.unwrap().named_modules(memo, prefix, remove_duplicate)
        return modules

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers under the names of the model that was given."""
        return self.unwrap().named_buffers(prefix, recurse, remove_duplicate)


def updates_after_step(model: AppliedModel, replicas: Axis) -> tuple[Callable[[], None], ...]:
    """Return the updates of a model that follow each optimizer step, none for a dense model.

    Args:
        model: The model.
        replicas: The ranks with different parts of the batch.
    """
    return bias_updates(model.unwrap(), replicas)


def _set_collector(wrapper: AppliedModel, collector: LossCollector) -> None:
    wrapper._collector = collector
