"""One step of an optimizer as several calls, each with a part of the parameters.

Buckets on disk are updated one by one, so the optimizer's own `step` is called several times.

[Note: numbers outside of states]
Some optimizers keep other numbers than the states of parameters: a counter in a group, a running estimate in
an attribute. Each call starts with the numbers from before the step, as if it was the only one; the changes
of all calls are the result of the step. So a counter counts steps and not calls, and a group that has no
parameters in a window keeps the result of another window.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

_PLAIN = (type(None), bool, int, float, complex, str, tuple)


def step_in_windows(
    optimizer: Optimizer,
    windows: Sequence[Sequence[nn.Parameter]],
    *,
    after_call: Callable[[Sequence[nn.Parameter]], None],
) -> None:
    """Step an optimizer window by window; its hooks and its own numbers see one step.

    Args:
        optimizer: The optimizer; its groups are the same afterwards.
        windows: Its parameters, each in one window.
        after_call: Called with each window after its update.
    """
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    numbers = _Numbers(optimizer)
    try:
        for index, window in enumerate(windows):
            own = set(window)
            for group, params in groups:
                group["params"] = [param for param in params if param in own]
            optimizer._optimizer_step_pre_hooks = before if index == 0 else OrderedDict()
            optimizer._optimizer_step_post_hooks = after if index == len(windows) - 1 else OrderedDict()
            optimizer.step()
            numbers.take_results()
            after_call(window)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
        for group, params in groups:
            group["params"] = params
        numbers.put_results()


@final
class _Numbers:
    """The numbers of an optimizer other than states of parameters; see [Note: numbers outside of states].

    Args:
        optimizer: The optimizer, before its step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = self._snapshots()
        self._results: list[dict[Any, Any]] = [{} for _ in self._first]

    def take_results(self) -> None:
        """Store the numbers that a call has changed, and restore those from before the step."""
        for own, first, results in zip(self._dicts(), self._first, self._results, strict=True):
            for key, value in _plain(own):
                if key not in first or _is_changed(value, first[key]):
                    results[key] = value.clone() if isinstance(value, torch.Tensor) else value
        # Groups can share a tensor, so it is put back after all have been read.
        for own, first in zip(self._dicts(), self._first, strict=True):
            for key in [key for key, _ in _plain(own) if key not in first]:
                del own[key]
            own.update({key: _restored(snapshot) for key, snapshot in first.items()})
        self._first = self._snapshots()

    def put_results(self) -> None:
        """Set the optimizer's numbers to the results of the calls."""
        for own, results in zip(self._dicts(), self._results, strict=True):
            for key, value in results.items():
                current = own.get(key)
                if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                    current.detach().copy_(value)  # a scheduler can hold it
                else:
                    own[key] = value

    def _snapshots(self) -> list[dict[Any, tuple[Any, int, Any]]]:
        """Return of each dict, by key, the value, and of a tensor its version and a copy."""
        return [{key: _snapshot(value) for key, value in _plain(each)} for each in self._dicts()]

    def _dicts(self) -> list[dict[Any, Any]]:
        """Return the attributes, the groups, and the states that do not belong to a parameter."""
        return [vars(self._optimizer), *self._optimizer.param_groups, self._optimizer.state]


def _plain(values: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            continue
        if isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.ndim == 0):
            yield key, value


def _snapshot(value: Any) -> tuple[Any, int, Any]:
    if isinstance(value, torch.Tensor):
        return value, value._version, value.detach().clone()
    return value, 0, None


def _is_changed(value: Any, first: tuple[Any, int, Any]) -> bool:
    was, version, _ = first
    if isinstance(value, torch.Tensor):
        return value is not was or value._version != version  # no read from the device
    return type(value) is not type(was) or value != was


def _restored(first: tuple[Any, int, Any]) -> Any:
    was, version, copy = first
    if isinstance(was, torch.Tensor) and was._version != version:
        was.detach().copy_(copy)
    return was
