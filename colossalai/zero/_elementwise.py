"""Which optimizers treat each element alone, so that a slice of a parameter is enough for them.

An optimizer says so by a class attribute, `elementwise`; for classes of other libraries it is declared here.
One that nobody has declared gets whole tensors, which is right for every optimizer that updates a parameter
from that parameter's own gradient and state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_ATTRIBUTE = "elementwise"

_declared: dict[type[Optimizer], bool] = {
    **dict.fromkeys((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam), True),
    **dict.fromkeys((torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad), True),
    **dict.fromkeys((torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD), True),
}


def declare_elementwise(optimizer_class: type[Optimizer], elementwise: bool = True) -> None:
    """Say of an optimizer class of another library whether it treats each element alone.

    An own class says it by an attribute: `elementwise = True`.

    Args:
        optimizer_class: The class.
        elementwise: Whether the update of an element needs no other element of its parameter.
    """
    _declared[optimizer_class] = elementwise


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether slices of parameters are enough for an optimizer.

    What is declared of a class holds for those derived from it that do not bring a `step` of their own.

    Raises:
        ValueError: `optimizer` treats all parameters as one vector.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS treats all parameters as one vector, which ZeRO cuts: train without ZeRO, or with an "
            "optimizer that updates each parameter by itself"
        )
    classes = type(optimizer).__mro__
    for base, rest in ((base, classes[number + 1 :]) for number, base in enumerate(classes)):
        if _ATTRIBUTE in vars(base):
            return bool(vars(base)[_ATTRIBUTE])
        if base in _declared:
            return _declared[base]
        own = _step_of(base)
        if own is not None and own is not next(filter(None, map(_step_of, rest)), None):
            return False
    return False


def _step_of(cls: type) -> Callable[..., Any] | None:
    """Return the `step` that a class brings, without what torch puts around it in every class it builds."""
    step: Callable[..., Any] | None = vars(cls).get("step")
    while step is not None and getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step
