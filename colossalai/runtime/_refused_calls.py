"""Methods of transformers and peft that are refused on a model under a plan, with what to do instead.

Two kinds. Some give a model other parameters: the optimizer, the buckets and slices of a data method and the
ranks that hold the same parameter rely on those that were there before. Some export what is in this process,
which under many plans is a part of the model.

[Note: refused on the model itself]
A refusal takes the place of the method on the model that was given and on its submodules, since scripts keep
both. It ends with the plan: with the wrapper that `boost` returned, or with the job. A copy of the model
belongs to no plan.
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
_EXPORTING = ("save_pretrained", "merge_and_unload", "unload")  # the last two of a model of peft
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
    """The refusal of a method, in its place on a module.

    Args:
        owner: The module.
        name: Name of the method.
        reason: Why it is refused, and what to do instead.
        wrapper: Of the model under the plan; None: of a copy, which has no plan.
        unless: An argument by name with which the method is right under a plan, too.
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
        """Refuse; call the method where the plan has ended.

        Raises:
            ValueError: The plan has not ended, and the argument that makes it right is not given.
        """
        owner = self._owner()
        is_right = kwargs.get(self._unless) is not None
        if not is_right and is_in_job() and self._wrapper is not None and self._wrapper() is not None:
            raise ValueError(f"{type(owner).__name__}.{self._name}: {self._reason}")
        return getattr(type(owner), self._name)(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RefusedCall":
        """Return what calls the method of a copy of the owner, which is being made."""
        return RefusedCall(copy.deepcopy(self._owner(), memo), self._name, self._reason, None)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        """Be the method itself on a copy of the owner; see [Note: refused on the model itself]."""
        return getattr, (self._owner(), self._name)


def refuse_calls(models: Iterable[nn.Module], wrapper: nn.Module, *, is_alone: bool, is_whole: bool) -> None:
    """Put refusals in the place of methods that would be wrong without a message, or fail within torch.

    Args:
        models: The model as it was given, and what the stages of a pipeline have made of it.
        wrapper: What `boost` returns; the refusals end with it.
        is_alone: Whether no other rank, no slice and no master depends on which parameters the model has.
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
                    unless="" if is_of_peft else "state_dict",  # a whole one, which the user has gathered
                )


def _methods(module: nn.Module, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those names that are methods which a library has given to the class of a module."""
    theirs = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] in _LIBRARIES]
    return (name for name in names if any(name in vars(base) for base in theirs))


def _is_of_peft(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "peft" for base in type(module).__mro__)
