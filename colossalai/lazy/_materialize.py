"""Materialization of a lazily built module: memory and values for its tensors, in place."""

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
    """Return the values of a lazy tensor as a new tensor; the lazy one does not change.

    Args:
        tensor: The tensor. A tensor that is not lazy is returned itself, or as a copy on `device`.
        device: Device of the result. Default: the device of an eager build.

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
    """Materialize the lazy tensors of a module and its submodules.

    The values are those of an eager build from the same random state. Parameters keep their identity, so that
    ties to other modules, optimizers, and attributes such as a sharding spec stay valid. Tensors in plain
    attributes are treated alike.

    Args:
        module: The module or a part of one. Tensors that are not lazy do not change.
        device: Device of the tensors. Default: for each tensor the device of an eager build.

    Returns:
        The module.

    Raises:
        ValueError: A tensor is on the meta device without being lazy, or has hooks, or is referenced by an
            unknown graph or view.
    """
    Materialization(module, device=device).all()
    return module if device is None else module.to(device)


class Materialization:
    """Materialization of a module, all at once or in groups of parameters.

    Call `others` first, then `params` any number of times, then `end`.

    Args:
        module: The module or a part of one.
        device: Device of the tensors. Default: for each tensor the device of an eager build.

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
        """Materialize all tensors.

        Raises:
            ValueError: A tensor is referenced by an unknown graph or view.
        """
        self.others()
        self._give(list(self._lazy))
        self.end()

    def others(self) -> None:
        """Materialize the tensors that are not parameters.

        They come first, since tensors computed from parameters, and views of them, refer to the lazy ones.

        Raises:
            ValueError: A tensor is referenced by an unknown graph or view.
        """
        for part in self._recurrent:
            part._flat_weight_refs = []  # tensors with weak references cannot be swapped
        self._give(
            tape for tape, named in self._lazy.items() if not all(_is_param(t) for _, t in named.values())
        )

    def params(self, params: Iterable[nn.Parameter]) -> None:
        """Materialize some parameters, and the tensors that share memory with them.

        Raises:
            ValueError: A tensor is referenced by an unknown graph or view.
        """
        self._give(tape for param in params if (tape := tape_of(param)) in self._lazy)

    def end(self) -> None:
        """Finish after all parameters have been materialized."""
        for part in self._recurrent:
            part._init_flat_weights()

    def _give(self, tapes: "Iterable[Tape | None]") -> None:
        for tape in dict.fromkeys(tapes):
            assert tape is not None, "what has a tape is lazy"
            storage = replay(tape, device=self._device)
            for name, tensor in sorted(self._lazy.pop(tape).values(), key=lambda named: _is_param(named[1])):
                _swap(name, tensor, view(storage, place_of(tensor, tape)))


def _swap(name: str, tensor: Tensor, value: Tensor) -> None:
    """Swap a tensor with `value`, keeping the attributes of the tensor."""
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
    """Yield the tensors of a module and its submodules: parameters, buffers, and plain attributes."""
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
