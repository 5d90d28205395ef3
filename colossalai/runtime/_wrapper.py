"""Model wrapper of `boost` and `initialize`: runs the methods, with the interface of the given model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from colossalai import checkpoint_io
from colossalai.amp import OptimizerWrapper as OptimizerWrapper  # documented with ModelWrapper
from colossalai.context import Mesh, get_current_device
from colossalai.nn.parallel import AppliedDataMethod, AppliedModel
from colossalai.runtime._pipeline import Pipeline


class ModelWrapper(AppliedModel):
    """A model with the methods of a plan applied.

    Forward runs through the methods; names and attributes are those of the model (see `AppliedModel`), except
    `module`, `data`, `pipeline`, `takes_labels`, `trained_by`, `parts`, `syncs`, `is_in_no_sync` and
    `optimizers`, which are those of the wrapper.

    Args:
        raw: The given model.
        data: The data-parallel method applied to the model with its other methods.
        pipeline: The pipeline that runs it, if it is only a part of a model.
        fused_loss: Whether it takes labels, and returns its loss in training without logits.
        trained_by: The optimizers of its parameters.
        parts: The ranks that hold the model together, if this one holds slices or stages of it.
    """

    _mutable = frozenset({"syncs", "is_in_no_sync", "optimizers"})

    def __init__(
        self,
        raw: nn.Module,
        data: AppliedDataMethod,
        *,
        pipeline: Pipeline | None = None,
        fused_loss: bool = False,
        trained_by: Sequence[OptimizerWrapper] = (),
        parts: Mesh | None = None,
    ) -> None:
        super().__init__(data)
        self.pipeline = pipeline
        self.takes_labels = fused_loss
        self.syncs = True
        self.is_in_no_sync = False
        self.trained_by = tuple(trained_by)
        self.parts = parts
        self.optimizers: tuple[Any, ...] = ()  # optimizers whose steps are delayed to the end of a window
        if pipeline is not None:
            self.forward = _refuse_to_run_a_stage  # type: ignore[method-assign]
        self._stand_for(raw)

    def register_forward_method(self, name: str) -> None:
        """Make a method of the model run as its forward does, when it is called on this wrapper.

        The precision converts its inputs and outputs and casts its operations, hooks of the model run
        around it, FSDP gathers parameters for it, and its gradients are averaged during the backward. If
        it calls `self(...)` FSDP reshards the parameters of the model itself after that: use them before,
        or call `self.forward(...)`.

        Args:
            name: Name of the method, such as "compute_loss".

        Raises:
            ValueError: `name` is not a method of the model, it is forward, or the model is a pipeline stage.
        """
        raw = self.unwrap()
        if self.pipeline is not None:
            raise ValueError(f"{name} is a method of a whole model, and this is a stage of a pipeline")
        if name == "forward":
            raise ValueError("forward is not a method to call through the wrapper: call the model itself")
        if not callable(getattr(raw, name, None)) or isinstance(getattr(raw, name), nn.Module):
            classes = [each for each in type(raw).__mro__[:-1] if issubclass(each, nn.Module)]
            known = [
                each
                for kind in classes[: classes.index(nn.Module)]
                for each, value in vars(kind).items()
                if isinstance(value, FunctionType) and not each.startswith("_")
            ]
            raise ValueError(
                f"{type(raw).__name__} has no method {name!r}; its own are {', '.join(known) or 'none'}"
            )
        self.__dict__[name] = partial(self._call_as_forward, name)

    def _call_as_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raw = self.unwrap()
        method, own = getattr(raw, name), vars(raw).get("forward")

        def restore() -> None:
            vars(raw).pop("forward", None)
            if own is not None:
                raw.forward = own

        def run(*args: Any, **kwargs: Any) -> Any:
            restore()  # so that calls of the model in the method run its own forward
            return method(*args, **kwargs)

        raw.forward = run
        try:
            return self(*args, **kwargs)
        finally:
            restore()

    def set_sync(self, enabled: bool) -> None:
        """Set whether the next forward and its backward synchronize gradients."""
        self.syncs = enabled
        if self.pipeline is None:
            super().set_sync(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which forward and backward add to this rank's gradients without communication."""
        self.is_in_no_sync = True
        try:
            with super().no_sync():
                yield
        finally:
            self.is_in_no_sync = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the given model, under its own names.

        Under tensor, expert and pipeline parallelism and Gemini the values are whole, in host memory, on
        every rank; all ranks call it. FSDP has DTensors. With `keep_vars` they are parameters of this rank.
        """
        options = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)) | kwargs
        if self.parts is not None and not options.get("keep_vars"):
            raw = self.unwrap()
            device, prefix = get_current_device(), options.get("prefix", "")
            whole = checkpoint_io.whole_state_dict(raw, self.parts, device=device, prefix=prefix)
            if options.get("destination") is None:
                return whole
            options["destination"].update(whole)
            return options["destination"]
        return super().state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the given model; all ranks load the same whole values.

        Raises:
            ValueError: `assign` is set, and this rank holds parts of the model; or names or shapes in
                `state_dict` are not the model's, if ranks hold slices or stages.
        """
        if self.parts is not None:
            if assign:
                raise ValueError(
                    "assign=True replaces parameters, and those of this model are parts: leave it out"
                )
            report = checkpoint_io.load_whole_state_dict(self.unwrap(), state_dict, strict=strict)
            return _IncompatibleKeys([*report.missing], [*report.unexpected])
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _refuse_to_run_a_stage(*_: Any, **__: Any) -> NoReturn:
    """Take the place of the forward of a wrapper with a pipeline.

    Raises:
        ValueError: A stage is called like a whole model.
    """
    raise ValueError(
        "this is a stage of a pipeline, which cannot be called: use engine.execute_schedule(...) or "
        "booster.execute_pipeline(...), which run a batch through all stages"
    )
