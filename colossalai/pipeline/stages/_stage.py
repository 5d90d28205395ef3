"""What the executor calls: a stage, given what the stage before returned and the data of a microbatch."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class PipelineStage(nn.Module, ABC):
    """A part of a model that says itself how it runs as a stage.

    The names of its parameters are those that they have in the whole model.
    """

    @abstractmethod
    def forward(self, received: Any, data: Any) -> Any:
        """Run the stage.

        Args:
            received: What the stage before returned, a tensor or a tuple, list or dict of tensors; None on
                the first stage.
            data: The data of the microbatch as the loader gave it, the same on every stage.

        Returns:
            What the next stage receives; on the last stage, the output of the model.
        """


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def caller_of(chunk: nn.Module, *, is_first: bool) -> Callable[[Any, Any], Any]:
    """Return a function of (received, data) that runs a stage.

    A `PipelineStage` is called with both. Any other module is called with

    - on the first stage, the data: the entries of a dict as keyword arguments, those of a tuple or list as
      positional arguments, anything else as the only argument;
    - on later stages, what was received, in the same way; and where the data is a dict, with those of its
      entries that `forward` names and that have no value yet (with all, if it takes `**kwargs`).

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
    args, kwargs = _arguments(value)
    return module(*args, **kwargs, **more)


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple | list):
        return tuple(value), {}
    return (value,), {}


def _missing(signature: inspect.Signature, received: Any, data: Any) -> dict[str, Any]:
    """Return the entries of the data that a forward takes besides what was received."""
    if not isinstance(data, Mapping):
        return {}
    args, kwargs = _arguments(received)
    parameters = signature.parameters.values()
    positional = [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]
    taken = {*positional[: len(args)], *kwargs}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return {name: value for name, value in data.items() if name not in taken}
    return {name: data[name] for name in positional if name in data and name not in taken}


def _unwrapped(module: nn.Module) -> nn.Module:
    """Look through modules that pass all they are given to the one that they are around."""
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        kinds = {parameter.kind for parameter in inspect.signature(module.forward).parameters.values()}
        if not kinds <= set(_VARIADIC):
            break
        module = inner
    return module
