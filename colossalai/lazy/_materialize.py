"""Giving a lazily built module its memory and values, in place."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.lazy._replay import Device, replay, view
from colossalai.lazy._tape import Tape, place_of, tape_of


def is_lazy(module_or_tensor: nn.Module | Tensor) -> bool:
    """Return whether a tensor, or a parameter or buffer of a module, has no values yet."""
    if isinstance(module_or_tensor, Tensor):
        return tape_of(module_or_tensor) is not None
    return any(tape_of(tensor) is not None for _, tensor in _named_tensors(module_or_tensor))


def materialize_tensor(tensor: Tensor, *, device: Device = None) -> Tensor:
    """Return the values of a lazy tensor as a new one; the lazy one stays what it is.

    Args:
        tensor: The tensor; one that is not lazy is returned itself, or as a copy on `device`.
        device: Where to; default: where it would be had it been built eagerly.

    Raises:
        ValueError: `tensor` is on the meta device without being lazy.
    """
    tape = tape_of(tensor)
    if tape is None:
        _require_values("the tensor", tensor)
        return tensor if device is None else tensor.to(device)
    value = view(replay(tape, device=device), place_of(tensor, tape))
    return value.requires_grad_(tensor.requires_grad)


def materialize(module: nn.Module, *, device: Device = None) -> nn.Module:
    """Give the lazy tensors of a module, its own and those of its submodules, memory and values.

    The values are those that it would have if it had been built eagerly from the same random state.
    Parameters stay the objects that they are: ties to other modules and optimizers hold, and so do attributes
    such as a sharding spec. Tensors that are kept as plain attributes are treated alike.

    Args:
        module: The module or a part of one. What is not lazy stays as it is.
        device: Where to; default: where each tensor would be had it been built eagerly.

    Returns:
        The module.

    Raises:
        ValueError: A tensor is on the meta device without being lazy, or has hooks, or is referred to by a
            graph or view that this does not know.
    """
    Materialization(module, device=device).all()
    return module if device is None else module.to(device)


class Materialization:
    """The way from a lazily built module to one with values, all at once or some parameters after others.

    First `others`, then `params` as often as one likes, then `end`.

    Args:
        module: The module or a part of one.
        device: Where to; default: where each tensor would be had it been built eagerly.

    Raises:
        ValueError: A tensor is on the meta device without being lazy, or has hooks.
    """

    def __init__(self, module: nn.Module, *, device: Device = None) -> None:
        self._device = device
        self._lazy: dict[Tape, dict[int, tuple[str, Tensor]]] = {}
        for name, tensor in _named_tensors(module):
            tape = tape_of(tensor)
            if tape is None:
                _require_values(name, tensor)
            else:
                _require_no_hooks(name, tensor)
                self._lazy.setdefault(tape, {})[id(tensor)] = (name, tensor)
        self._recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]

    def all(self) -> None:
        """Give all tensors their values.

        Raises:
            ValueError: A tensor is referred to by a graph or view that this does not know.
        """
        self.others()
        self._give(list(self._lazy))
        self.end()

    def others(self) -> None:
        """Give values to what is no parameter.

        What was computed from parameters, or is a view of one, refers to it, and so goes first.

        Raises:
            ValueError: A tensor is referred to by a graph or view that this does not know.
        """
        for part in self._recurrent:
            part._flat_weight_refs = []  # no tensor is swapped while there are weak references to it
        self._give(
            tape for tape, named in self._lazy.items() if not all(_is_param(t) for _, t in named.values())
        )

    def params(self, params: Iterable[nn.Parameter]) -> None:
        """Give values to some parameters, and to those that share memory with them.

        Raises:
            ValueError: A tensor is referred to by a graph or view that this does not know.
        """
        self._give(tape for param in params if (tape := tape_of(param)) in self._lazy)

    def end(self) -> None:
        """Hear that all parameters have their values."""
        for part in self._recurrent:
            part._init_flat_weights()

    def _give(self, tapes: "Iterable[Tape | None]") -> None:
        for tape in dict.fromkeys(tapes):
            assert tape is not None, "what has a tape is lazy"
            storage = replay(tape, device=self._device)
            for name, tensor in sorted(self._lazy.pop(tape).values(), key=lambda named: _is_param(named[1])):
                _swap(name, tensor, view(storage, place_of(tensor, tape)))


def _swap(name: str, tensor: Tensor, value: Tensor) -> None:
    """Let a tensor be what `value` is, with the attributes that it has."""
    attributes = {key: kept for key, kept in tensor.__dict__.items() if key != "_is_param"}
    if _is_param(tensor):
        value = nn.Parameter(value, tensor.requires_grad)
    elif tensor.is_leaf:
        value.requires_grad_(tensor.requires_grad)
    value.__dict__.update(attributes)
    try:
        torch.utils.swap_tensors(tensor, value)
    except RuntimeError as error:
        raise ValueError(
            f"{name} cannot be materialized in place, because something else refers to its lazy form (a "
            f"view, a graph, a weak reference): drop that, or make it after materialize. {error}"
        ) from error


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module and its submodules: parameters, buffers, those in plain attributes."""
    for prefix, part in module.named_modules():
        for name, value in part.__dict__.items():
            if name != "_modules":
                path = prefix if name in ("_parameters", "_buffers") else f"{prefix}.{name}"
                yield from _tensors_in(path, value)


def _tensors_in(path: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path.removeprefix("."), value
    elif type(value) is dict:
        for key, item in value.items():
            yield from _tensors_in(f"{path}.{key}", item)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(f"{path}.{index}", item)


def _is_param(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _require_values(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} is on the meta device, and nothing is known of its "
            "values: build the model under LazyInitContext() instead of torch.device('meta')"
        )


def _require_no_hooks(name: str, tensor: Tensor) -> None:
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"{name} has hooks, which materialize would lose: register them after it")
