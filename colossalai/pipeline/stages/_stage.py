"""Pipeline stages: modules called with the output of the stage before and the data of a microbatch.

A stage is a module cut by hand, a module with its own stage interface (`PipelineStage`), or a whole model
with placeholders for the parts of other stages (`ModelStage`, made by `cut_model`).
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossalai.tensor import is_own_attribute


class PipelineStage(nn.Module, ABC):
    """A part of a model with its own stage interface.

    Its parameters have their names in the whole model.
    """

    @abstractmethod
    def forward(self, received: Any, data: Any) -> Any:
        """Run the stage.

        Args:
            received: The output of the stage before, a tensor or a tuple, list or dict of tensors; None on
                the first stage.
            data: The data of the microbatch as the loader gave it, the same on every stage.

        Returns:
            The input of the next stage; on the last stage, the output of the model.
        """


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def caller_of(chunk: nn.Module, *, is_first: bool) -> Callable[[Any, Any], Any]:
    """Return a function of (received, data) that calls a stage.

    A `PipelineStage` is called with both. Any other module is called with

    - on the first stage, the data: the entries of a dict as keyword arguments, those of a tuple or list as
      positional arguments, anything else as the only argument;
    - on later stages, the received value, in the same way; and if the data is a dict, those of its entries
      that `forward` names and that have no value yet (all, if it takes `**kwargs`).

    Args:
        chunk: The stage; it may have methods around it (data parallelism).
        is_first: Whether it is the first stage.
    """
    inner = _unwrapped(chunk)
    if isinstance(inner, PipelineStage):
        return chunk
    if is_first:
        return lambda received, data: _call(chunk, data, {})
    signature = inspect.signature(inner.forward)

    def run(received: Any, data: Any) -> Any:
        return _call(chunk, received, _missing(signature, received, data))

    return run


def _call(module: nn.Module, value: Any, more: Mapping[str, Any]) -> Any:
    args, kwargs = as_arguments(value)
    return module(*args, **kwargs, **more)


def as_arguments(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model's forward for the data of a loader.

    A dict is keyword arguments, a tuple or list positional ones, and anything else the first argument.
    """
    if isinstance(data, Mapping):
        return (), dict(data)
    return (tuple(data), {}) if isinstance(data, tuple | list) else ((data,), {})


def _missing(signature: inspect.Signature, received: Any, data: Any) -> dict[str, Any]:
    """Return the entries of the data that a forward takes in addition to the received value."""
    if not isinstance(data, Mapping):
        return {}
    args, kwargs = as_arguments(received)
    parameters = signature.parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    taken = {*positional[: len(args)], *kwargs}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return {name: value for name, value in data.items() if name not in taken}
    return {name: data[name] for name in positional if name in data and name not in taken}


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the innermost module of wrappers that pass all their arguments on."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        kinds = {parameter.kind for parameter in inspect.signature(module.forward).parameters.values()}
        if not kinds <= set(_VARIADIC):
            break
        module = inner
    return module


class StageEnd(BaseException):
    """Ends the forward of a model after the last block of a stage.

    It is not an `Exception`, so that code which handles those does not catch it.

    Args:
        output: Output of the block.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass
class StageFlow:
    """State of a stage's forward, read by its placeholders.

    Attributes:
        received: Output of the block before the first one of this stage; None outside of a forward.
        has_reached_blocks: Whether a block of this stage has been called.
    """

    received: Any = None
    has_reached_blocks: bool = False


@dataclass(frozen=True)
class Tie:
    """A parameter with a copy on several stages, whose gradients are summed over them.

    Attributes:
        names: All its names in the whole model; a stage can have only some of them.
        stages: The stages that hold it, in ascending order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


class PartOfStack(nn.ModuleList):
    """The blocks of a stage, numbered as in the whole model, in place of the model's stack.

    Its sub-modules are the stage's own blocks only. Iteration and indexing, as in the model's forward, give
    all blocks, with placeholders for the blocks of other stages.

    Args:
        blocks: All blocks, by name in the stack, in order.
        own: Names of the stage's own blocks.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], own: Sequence[str]) -> None:
        super().__init__()
        self._all_blocks = tuple(blocks.values())  # a tuple: not sub-modules
        for name in own:
            self.add_module(name, blocks[name])

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._all_blocks)

    def __len__(self) -> int:
        return len(self._all_blocks)

    def __getitem__(self, index: Any) -> Any:
        chosen = self._all_blocks[index]
        return list(chosen) if isinstance(index, slice) else chosen

    def forward(self, received: Any) -> Any:
        """Call all blocks in sequence; for a stack that is an `nn.Sequential`."""
        for block in self._all_blocks:
            received = block(received)
        return received


class ModelStage(PipelineStage):
    """One stage of a model that was not written for pipelines; see `cut_model`.

    Its sub-modules and parameters are the model's parts on this stage, under their names in the whole model;
    other attributes (`config`) are those of the model.

    Args:
        model: The model, with placeholders for the parts on other stages.
        flow: State of the forward, shared with the placeholders.
        index: The index of the stage.
        num_stages: The number of stages of the model.
        last_block: The name of the last block of this stage.
        ties: The parameters of this stage that are also on other stages.
    """

    def __init__(
        self,
        model: nn.Module,
        flow: StageFlow,
        *,
        index: int,
        num_stages: int,
        last_block: str,
        ties: tuple[Tie, ...],
    ) -> None:
        super().__init__()
        self.training = model.training
        self.index = index
        self.num_stages = num_stages
        self.ties = ties
        self._last_block = last_block
        self._flow = flow
        self._no_cache = _takes_cache(model)
        object.__setattr__(self, "_model", model)
        # The same dictionaries as the model's, so that names in this module have no prefix.
        for held in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, held, getattr(model, held))

    @property
    def model(self) -> nn.Module:
        """The model with placeholders for the parts on other stages; it shares its modules with this one."""
        model: nn.Module = self.__dict__["_model"]
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_model")
            if model is None:  # during a copy
                raise
            return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the model, whose forward runs, except those of the stage."""
        model = self.__dict__.get("_model")
        if model is None or is_own_attribute(self, name):
            super().__setattr__(name, value)
        if model is not None and (name == "training" or not is_own_attribute(self, name)):
            setattr(model, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute where it is read."""
        if "_model" not in self.__dict__ or is_own_attribute(self, name):
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    def train(self, mode: bool = True) -> "ModelStage":
        """Set training mode, also of the model itself, which is not a sub-module."""
        super().train(mode)
        self.__dict__["_model"].training = mode
        return self

    def forward(self, received: Any, data: Any) -> Any:
        """Run the model up to the last block of this stage; on the last stage, to its end.

        Args:
            received: The output of the stage before; None on the first stage.
            data: The data of the microbatch: a dict of keyword arguments of the model, a tuple of
                positional ones, or the first argument. The same on every stage.

        Returns:
            The output of the stage's last block, as packed by `pack`; on the last stage the model's output.

        Raises:
            RuntimeError: The forward of the model has not reached the last block of this stage.
            ValueError: A block returns an object that cannot be sent to the next stage.
        """
        args, kwargs = as_arguments(data)
        if self._no_cache:  # a cache of keys and values for generation would be of this stage only
            kwargs.setdefault("use_cache", False)
        self._flow.received = unpack(received)
        self._flow.has_reached_blocks = False  # a recomputation in a backward has called blocks, too
        try:
            output = self.__dict__["_model"](*args, **kwargs)
        except StageEnd as end:
            return pack(end.output, block=self._last_block)
        finally:
            self._flow.received = None
        if self.index < self.num_stages - 1:
            raise RuntimeError(
                f"the forward of the model ended without calling block {self._last_block!r}: a model that "
                "leaves out blocks (LayerDrop) cannot be cut"
            )
        return output


def _takes_cache(model: nn.Module) -> bool:
    """Return whether a forward has an argument that switches its cache of keys and values off."""
    base_of = getattr(model, "get_base_model", None)  # of adapters, whose forward passes the argument on
    return any(
        "use_cache" in inspect.signature(each.forward).parameters
        for each in (model, *(() if base_of is None else (base_of(),)))
    )


def tied_parameters(model: nn.Module) -> list[tuple[nn.Parameter, tuple[int, ...]]]:
    """Return the parameters of a cut model that are also on other stages, with all stages of each.

    All stages that share a parameter return it in the same order. Parameters are looked up by name at the
    call, since they may have been replaced after the cut.

    Args:
        model: The result of `cut_model`, or any other module, which has none.
    """
    found: dict[Tie, nn.Parameter] = {}
    for stage in model.modules():
        if isinstance(stage, ModelStage):
            named = dict(stage.named_parameters(remove_duplicate=False))
            for tie in stage.ties:
                found[tie] = next(named[name] for name in tie.names if name in named)
    return [(found[tie], tie.stages) for tie in sorted(found, key=lambda tie: tie.names)]


def end_stage(module: nn.Module, args: Any, output: Any) -> None:
    """End the forward of the model; the forward hook of a stage's last block."""
    raise StageEnd(output)


class NoteBlocks:
    """The forward pre-hook of a stage's first block: it marks the blocks as reached.

    Args:
        flow: State of the forward, shared with the placeholders.
    """

    def __init__(self, flow: StageFlow) -> None:
        self._flow = flow

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Set `has_reached_blocks`."""
        self._flow.has_reached_blocks = True


def pack(output: Any, *, block: str) -> Any:
    """Return the output of a block as a message to the next stage.

    Tensors are sent unchanged, and so are tuples and dicts of them; a tuple with None becomes a dict.

    Raises:
        ValueError: `output` is neither a tensor nor a tuple or dict of tensors.
    """
    if isinstance(output, torch.Tensor) or (type(output) is dict and _all_tensors(output.values())):
        return output
    if type(output) in (tuple, list):
        tensors = {f"{i}/{len(output)}": value for i, value in enumerate(output) if value is not None}
        if tensors and _all_tensors(tensors.values()):
            return tensors if len(tensors) < len(output) else tuple(output)
    raise ValueError(
        f"block {block!r} returns {_describe(output)}; between two stages it must be a tensor, or a tuple or "
        "dict of tensors (in a tuple also None): switch off caches, or cut the model by hand"
    )


def unpack(received: Any) -> Any:
    """Return the output of the block from the message of `pack`."""
    if isinstance(received, list):
        return tuple(received)
    if isinstance(received, dict) and "/" in next(iter(received)):
        length = int(next(iter(received)).rpartition("/")[2])
        return tuple(received.get(f"{i}/{length}") for i in range(length))
    return received


def _all_tensors(values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _describe(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {[type(value).__name__ for value in output]}"
    return f"a {type(output).__name__}"
