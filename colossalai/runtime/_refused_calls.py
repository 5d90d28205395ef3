"""Methods of transformers and peft that are refused on a model under a plan, with replacements.

There are two kinds. Some give a model other parameters, while the optimizer, the buckets and slices of a data
method and the ranks that hold the same parameter rely on the present ones. Some export the tensors of this
process, which under many plans are a part of the model.

[Note: refusals on the model itself]
A refusal replaces the method on the given model and on its submodules, since scripts keep references to both.
It ends with the plan: with the wrapper that `boost` returned, or with the job. A copy of the model has no
plan.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from colossalai.context import is_in_job

_LIBRARIES = ("transformers", "peft")
_CHANGING = (
    *("resize_token_embeddings", "resize_position_embeddings"),
    *("set_input_embeddings", "set_output_embeddings"),
    *("add_adapter", "add_weighted_adapter", "delete_adapter"),
)
_EXPORTING = ("save_pretrained", "merge_and_unload", "unload")  # the last two of peft models
_INSTEAD = (
    "booster.save_model(model, folder, shard=True, use_safetensors=True), or with an Engine save_model of "
    "colossalai.checkpoint_io, which writes the weights of all ranks and the config (or give the whole "
    "state_dict=)"
)
_INSTEAD_OF_PEFT = (
    "colossalai.chat.save_pretrained(model, folder, booster=booster), which writes the adapters, or with "
    "merges=True the model that they are added into"
)


class RefusedCall:
    """Refusal of a method, set in its place on a module.

    Args:
        owner: The module.
        name: Name of the method.
        reason: Reason of the refusal, and a replacement.
        wrapper: Wrapper of the model under the plan; None for a copy, which has no plan.
        unless: Name of an argument with which the method is right under a plan, too.
    """

    def __init__(
        self, owner: nn.Module, name: str, reason: str, wrapper: nn.Module | None, *, unless: str = ""
    ) -> None:
        self._owner = weakref.ref(owner)  # no cycle: the memory of a model is freed with its last reference
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)
        self._name = name
        self._reason = reason
        self._unless = unless

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error; after the end of the plan, call the method.

        Raises:
            ValueError: The plan has not ended, and the argument `unless` is not given.
        """
        owner = self._owner()
        is_right = kwargs.get(self._unless) is not None
        if not is_right and is_in_job() and self._wrapper is not None and self._wrapper() is not None:
            raise ValueError(f"{type(owner).__name__}.{self._name}: {self._reason}")
        return getattr(type(owner), self._name)(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RefusedCall":
        """Return a callable for the same method on the copy of the owner, which is being made."""
        return RefusedCall(copy.deepcopy(self._owner(), memo), self._name, self._reason, None)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the method itself of the owner's copy; see [Note: refusals on the model itself]."""
        return getattr, (self._owner(), self._name)


def refuse_calls(models: Iterable[nn.Module], wrapper: nn.Module, *, is_alone: bool, is_whole: bool) -> None:
    """Replace methods by refusals that would be wrong without a message, or fail within torch.

    Args:
        models: The given model, and the modules that its pipeline stages were made of.
        wrapper: The result of `boost`; the refusals end with it.
        is_alone: Whether no other rank, no slice and no master depends on the set of the model's parameters.
        is_whole: Whether this rank holds all of it in plain parameters.
    """
    for module in (module for model in models for module in model.modules()):
        if not is_alone:
            for name in _methods(module, _CHANGING):
                vars(module)[name] = RefusedCall(
                    module,
                    name,
                    "the parameters of this model are in use by its plan and its optimizer: call it before "
                    "boost (or colossalai.initialize), and before the optimizer is built",
                    wrapper,
                )
        if not is_whole:
            for name in _methods(module, _EXPORTING):
                is_of_peft = _is_of_peft(module)
                instead = _INSTEAD_OF_PEFT if is_of_peft else _INSTEAD
                vars(module)[name] = RefusedCall(
                    module,
                    name,
                    f"this rank holds a part of the model: let every rank call {instead}",
                    wrapper,
                    unless="" if is_of_peft else "state_dict",  # a whole state, which the user has gathered
                )


def _methods(module: nn.Module, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those names that are methods from a library on the class of a module."""
    theirs = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] in _LIBRARIES]
    return (name for name in names if any(name in vars(base) for base in theirs))


def _is_of_peft(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)
