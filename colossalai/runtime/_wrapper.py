"""What a door returns for a model: it computes through the methods and looks like the model given."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from colossalai import checkpoint_io
from colossalai.amp import OptimizerWrapper as OptimizerWrapper  # documented beside ModelWrapper
from colossalai.context import MOE_CONTEXT, Mesh, get_current_device
from colossalai.nn.parallel import AppliedDataMethod, params_called
from colossalai.runtime._pipeline import Pipeline
from colossalai.tensor import TransparentModule, nested_tensors


class ModelWrapper(TransparentModule):
    """A model with the methods of a plan applied.

    Forward goes through the methods. Names are those of the model that was given: `state_dict`,
    `named_parameters`, `named_modules` and attributes (`model.config`, `model.fc1`) have no prefix.
    Attributes, buffers and modules without parameters are set on the model, too (see `TransparentModule`),
    except `module`, `data`, `pipeline`, `takes_labels`, `trained_by`, `parts`, `syncs`, `is_in_no_sync` and
    `optimizers`, which are those of the wrapper.

    Args:
        raw: The model that was given.
        data: The data-parallel method at work on the same with the other methods around it.
        pipeline: What runs it, if it is only a part of a model.
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
        super().__init__()
        self.module = data.module
        self.data = data
        self.pipeline = pipeline
        self._has_experts = MOE_CONTEXT.has_layers(raw)
        self.takes_labels = fused_loss
        self.syncs = True
        self.is_in_no_sync = False
        self.trained_by = tuple(trained_by)
        self.parts = parts
        self.optimizers: tuple[Any, ...] = ()  # those whose steps wait for the end of a window
        self._stand_for(raw)

    def unwrap(self) -> nn.Module:
        """Return the model that was given."""
        raw: nn.Module = self._raw
        return raw

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; its outputs lead to the auxiliary losses of its layers with experts.

        Raises:
            ValueError: The module is a stage of a pipeline, and no whole model.
        """
        if self.pipeline is not None:
            raise ValueError(
                "this is a stage of a pipeline, which cannot be called: use engine.execute_schedule(...) or "
                "booster.execute_pipeline(...), which run a batch through all stages"
            )
        if not MOE_CONTEXT.expects_losses or (torch.compiler.is_compiling() and not self._has_experts):
            return self.module(*args, **kwargs)  # which torch.compile can trace
        with MOE_CONTEXT.forward_of(self, nested_tensors((args, kwargs))) as losses:
            output = self.module(*args, **kwargs)
        MOE_CONTEXT.assign(losses, nested_tensors(output))
        return output

    def register_forward_method(self, name: str) -> None:
        """Let a method of the model run as its forward does, when it is called on this wrapper.

        Its inputs and outputs are converted and its operations cast by the precision, hooks of the model run
        around it, FSDP gathers parameters for it, and its gradients are averaged during the backward. Where
        it calls `self(...)` FSDP gives the parameters of the model itself back after that: use them before,
        or call `self.forward(...)`.

        Args:
            name: Name of the method, such as "compute_loss".

        Raises:
            ValueError: The model has no such method, it is forward, or the model is a stage of a pipeline.
        """
        raw = self.unwrap()
        if self.pipeline is not None:
            raise ValueError(f"{name} is a method of a whole model, and this is a stage of a pipeline")
        if name == "forward":
            raise ValueError("forward is what the other methods run as: call the model itself")
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
            restore()  # what the method calls is the forward of the model again
            return method(*args, **kwargs)

        raw.forward = run
        try:
            return self(*args, **kwargs)
        finally:
            restore()

    def set_sync(self, enabled: bool) -> None:
        """Say whether the next forward and its backward synchronize gradients."""
        self.syncs = enabled
        if self.pipeline is None:
            self.data.set_sync(enabled)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, forward and backward add to the gradients of this rank without communication."""
        self.set_sync(False)
        self.is_in_no_sync = True
        try:
            yield
        finally:
            self.is_in_no_sync = False
            self.set_sync(True)

    def gathered(self, *parts: str | nn.Module | nn.Parameter) -> AbstractContextManager[None]:
        """Return a block within which parameters can be read and written, where a rank holds parts of them.

        All ranks enter and leave it. What one has written, all have then; where several have written into
        one chunk, what the first of them has. Where every rank has whole parameters it does nothing.

        Args:
            parts: Modules or parameters of the model, or their names; default: all.

        Raises:
            ValueError: `parts` holds what the model has not, or its parameters are DTensors (FSDP).
        """
        return self.data.gathered(params_called(self.unwrap(), parts) if parts else None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model that was given, under its own names.

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
        return self.data.state_dict(self.unwrap(), *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the model that was given; all ranks load the same whole values.

        Raises:
            ValueError: `assign` is set, and this rank holds parts of the model; or names or shapes in
                `state_dict` are not the model's, where ranks hold slices or stages.
        """
        if self.parts is not None:
            if assign:
                raise ValueError(
                    "assign=True replaces parameters, and those of this model are parts: leave it out"
                )
            report = checkpoint_io.load_whole_state_dict(self.unwrap(), state_dict, strict=strict)
            return _IncompatibleKeys([*report.missing], [*report.unexpected])
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
