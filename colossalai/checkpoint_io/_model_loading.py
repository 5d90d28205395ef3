"""A checkpoint compared with a model: everything is accounted for before the first value is overwritten."""

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossalai.checkpoint_io._entries import Entry, Stored
from colossalai.checkpoint_io._held import copy_into, new_like, whole_shape
from colossalai.checkpoint_io._model_store import stored_values
from colossalai.checkpoint_io._names import LoadReport, common_prefix, listed
from colossalai.checkpoint_io._parts import prefix_of, tied_names
from colossalai.checkpoint_io._store import Store, names_by_tensor
from colossalai.checkpoint_io._tree import with_own_memory
from colossalai.logging import get_dist_logger


@dataclass(frozen=True)
class ModelLoading:
    """A checkpoint that was compared with a model, ready to be copied.

    Attributes:
        module: The model.
        copies: Its own tensors that will be overwritten, each with its new value.
        computed: Values that only the module itself can take in: extra state, and what its hooks made up.
        report: What did not fit.
    """

    module: nn.Module
    copies: list[tuple[torch.Tensor, Stored]]
    computed: dict[str, Any]
    report: LoadReport

    def apply(self) -> None:
        """Overwrite the model; no communication."""
        for target, stored in self.copies:
            copy_into(target, stored)
        if self.computed:
            self.module.load_state_dict(self.computed, strict=False)
        if not self.report.is_clean:
            get_dist_logger().warning(
                f"the checkpoint did not fit in full:\n{self.report.describe()}", ranks=[0]
            )


def module_names(module: nn.Module) -> list[str]:
    """Return the names of what a checkpoint holds of a module."""
    return [prefix_of(module) + name for name in module.state_dict(keep_vars=True)]


def plan_model_loading(
    module: nn.Module,
    store: Store,
    *,
    source: str,
    strict: bool,
    elsewhere: Collection[str] = (),
    saved_prefix: str | None = None,
) -> ModelLoading:
    """Compare a checkpoint with a model and overwrite nothing.

    Args:
        module: The model, or a part of one.
        store: The checkpoint.
        source: What to call it.
        strict: Whether a misfit is an error.
        elsewhere: Names of the parts of the model that other ranks hold.
        saved_prefix: What the names in the checkpoint begin with; found out if it is not given.

    Raises:
        ValueError: Something does not fit and `strict` is set; all of it is named.
    """
    prefix = prefix_of(module)
    state = {prefix + name: value for name, value in module.state_dict(keep_vars=True).items()}
    _refuse_meta(state)
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    targets = {name: value for name, value in state.items() if id(value) in own}
    groups = names_by_tensor(targets)
    stored = stored_values(store)
    if saved_prefix is None:
        stored = _without_common_prefix(stored, state.keys() | set(elsewhere), groups)
    else:
        stored = dict(_without_prefix(stored, saved_prefix))
    stored |= _under_other_names(state, stored)

    common = [name for name in state if name in stored]
    wrong_shape = {name for name in common if _shape(state[name]) != _shape(stored[name])}
    wrong_dtype = {name for name in common if _dtype(state[name]) != _dtype(stored[name])}
    covered = {name for names in groups.values() for name in names if not stored.keys().isdisjoint(names)}
    mismatched = [
        f"{name}: {_kind(stored[name])} in the checkpoint, {_kind(state[name])} in the model"
        for name in common
        if name in wrong_shape | wrong_dtype
    ]
    report = LoadReport(
        missing=tuple(name for name in state if name not in stored and name not in covered),
        unexpected=tuple(name for name in stored if name not in state and name not in elsewhere),
        mismatched=(*mismatched, *_torn(groups, stored)),
    )
    if strict and not report.is_clean:
        raise ValueError(f"{source} does not fit the model; nothing was loaded.\n{report.describe()}")

    fitting = [name for name in common if name not in wrong_shape]
    return ModelLoading(
        module=module,
        copies=[(targets[name], stored[name]) for name in fitting if name in targets],
        computed={
            name.removeprefix(prefix): _own(stored[name], state[name])
            for name in fitting
            if name not in targets
        },
        report=report,
    )


def _without_prefix(stored: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in stored.items():
        has_prefix = name.startswith(prefix)
        yield name.removeprefix(prefix) if has_prefix else f"{name} (without {prefix!r} before it)", value


def _without_common_prefix(
    stored: dict[str, Any], wanted: Set[str], groups: Mapping[str, list[str]]
) -> dict[str, Any]:
    """Return the stored values by the model's names, a prefix that all of them carry left out."""
    further_names = {name for names in groups.values() for name in names[1:]}
    prefix = common_prefix(stored, wanted) or common_prefix(stored, wanted - further_names)
    return {name.removeprefix(prefix): value for name, value in stored.items()}


def _under_other_names(state: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for what the checkpoint has under a name that the whole model ties to the wanted one."""
    found = {}
    for name, value in state.items():
        tied = next((other for other in tied_names(value) if other in stored), None)
        if name not in stored and tied is not None:
            found[name] = stored[tied]
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    return whole_shape(value) if isinstance(value, torch.Tensor | Entry) else None


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor | Entry) else None


def _kind(value: Any) -> str:
    return f"{whole_shape(value)} {value.dtype}" if isinstance(value, torch.Tensor | Entry) else "no tensor"


def _torn(groups: Mapping[str, list[str]], stored: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tensors that are one in the model and several, with different values, in the checkpoint."""
    for names in groups.values():
        first, *others = [name for name in names if name in stored] or [""]
        for name in others:
            if not _is_same(stored[first], stored[name]):
                yield f"{first} and {name}: two different tensors in the checkpoint, one in the model"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, Stored) and isinstance(second, Stored):
        return first.is_same_as(second)
    return first is second


def _own(stored: Any, here: Any) -> Any:
    if isinstance(stored, Stored) and isinstance(here, torch.Tensor):
        return new_like(stored, here)
    return with_own_memory(stored)


def _refuse_meta(state: Mapping[str, Any]) -> None:
    empty = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if empty:
        raise ValueError(
            f"{len(empty)} tensors of the model are on the device 'meta', without memory: {listed(empty)}. "
            f"Give it memory first, with module.to_empty(device=...)"
        )
