"""Elementwise optimizers, which can update a slice of a parameter.

An optimizer declares it by a class attribute, `elementwise`; classes of other libraries are declared here. An
undeclared class gets whole tensors, which is right for every optimizer that updates a parameter
from that parameter's own gradient and state.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.tensor import spec_of

_ATTRIBUTE = "elementwise"
_MEASURES_WHOLES = "measures_wholes"

_declared: dict[type[Optimizer], bool] = {
    **dict.fromkeys((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam), True),
    **dict.fromkeys((torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad), True),
    **dict.fromkeys((torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD), True),
}


def declare_elementwise(optimizer_class: type[Optimizer], elementwise: bool = True) -> None:
    """Declare whether an optimizer class of another library is elementwise.

    Classes of your own use an attribute: `elementwise = True`.

    Args:
        optimizer_class: The class.
        elementwise: Whether the update of an element needs no other element of its parameter.
    """
    _declared[optimizer_class] = elementwise


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether slices of parameters are enough for an optimizer.

    A declaration also applies to derived classes without a `step` of their own.

    Raises:
        ValueError: `optimizer` treats all parameters as one vector.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS treats all parameters as one vector, which ZeRO cuts: train without ZeRO, or with an "
            "optimizer that updates each parameter by itself"
        )
    base = _declaring_class(optimizer)
    return base is not None and _says_elementwise(base)


def refuse_cut_parameters(optimizer: Optimizer, names: Mapping[nn.Parameter, str] | None = None) -> None:
    """Refuse an optimizer that needs whole parameters where ranks hold slices of them, each its own.

    `elementwise` optimizers take slices. Others of this package have the class attribute `measures_wholes`:
    the norms that they take are those of the whole, by the spec of the parameter.

    Args:
        optimizer: The optimizer.
        names: The parameters that tensor or expert parallelism cuts, with their names; default: those that
            carry a spec which cuts them.

    Raises:
        ValueError: `optimizer` holds one of them, and is not known to update slices as it would the whole.
    """
    base = _declaring_class(optimizer)
    takes_slices = base is not None and (_says_elementwise(base) or vars(base).get(_MEASURES_WHOLES, False))
    if takes_slices or isinstance(optimizer, torch.optim.SparseAdam):
        return
    held = (param for group in optimizer.param_groups for param in group["params"])
    is_cut = _is_cut if names is None else names.__contains__
    param = next(filter(is_cut, held), None)
    if param is None:
        return
    what = f"a parameter of shape {tuple(param.shape)}" if names is None else names[param]
    kind = type(optimizer).__name__
    raise ValueError(
        f"{kind} holds {what}, of which tensor or expert parallelism gives each rank a slice, and it is not "
        "known to update slices as it does whole parameters: take an elementwise optimizer (SGD, Adam, "
        "AdamW, HybridAdam, ...) or Lamb, FusedLAMB or Lars of colossalai.nn for parameters that are cut, "
        f"or train {kind} without tensor and expert parallelism. If its update of an element needs no other "
        f"element, declare it before: colossalai.zero.declare_elementwise({kind})"
    )


def _is_cut(param: torch.Tensor) -> bool:
    spec = spec_of(param)
    return spec is not None and any(spec.mesh.axis_size(axis) > 1 for axis in spec.axes)


def _says_elementwise(base: type[Optimizer]) -> bool:
    return bool(vars(base).get(_ATTRIBUTE, _declared.get(base)))


def _declaring_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class whose declaration holds for an optimizer; None if none does."""
    classes = type(optimizer).__mro__
    for base, rest in ((base, classes[number + 1 :]) for number, base in enumerate(classes)):
        if _ATTRIBUTE in vars(base) or base in _declared:
            declaring: type[Optimizer] = base
            return declaring
        own = _step_of(base)
        if own is not None and own is not next(filter(None, map(_step_of, rest)), None):
            return None
    return None


def _step_of(cls: type) -> Callable[..., Any] | None:
    """Return the `step` of a class, without torch's wrapper around it."""
    step: Callable[..., Any] | None = vars(cls).get("step")
    while step is not None and getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step
