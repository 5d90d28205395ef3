"""State dict of an optimizer: by parameter name, as a flat state dict, and back.

The content, also of a single torch file:

    state         {parameter name: {key: tensor or scalar}}
    param_groups  [{"params": [parameter names], "lr": ..., ...}]
    shapes        {parameter name: [extents of the full parameter]}
    other_state   state that belongs to no parameter, by the optimizer's own keys
    optimizer     the name of the class
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io._hugging_face_index import Stems
from colossalai.checkpoint_io._save_plan import LocalState
from colossalai.checkpoint_io._state import Kind, merge_by_name
from colossalai.checkpoint_io.resharding import (
    FlatStateDict,
    TensorMetadata,
    pack,
    shards_of_states,
    state_cuts,
    unpack,
)
from colossalai.checkpoint_io.storage import (
    OPTIMIZER_FOLDER,
    Count,
    Form,
    listed,
    refuse_other_form,
)
from colossalai.tensor import CACHED_TABLE, ROW_CACHE, tables_for_caches

ParamNames = Mapping[nn.Parameter, str]

_FORM: dict[str | type, Form] = {
    "state": {str: dict},
    "param_groups": [{"params": [str]}],
    "shapes": {str: [Count()]},
    "other_state": dict,
    "optimizer": str,
}
# Not hyper-parameters: these name the parameters; the second is torch's own.
_NAMES_IN_GROUP = ("params", "param_names")


@contextmanager
def opened(optimizer: Optimizer | None, *, loads: bool) -> Iterator[Optimizer | None]:
    """Context that gives the optimizer that holds the parameters of the model, as they are named.

    A wrapped optimizer can hold other tensors in their place: float32 masters, slices. Any can hold caches of
    tables, which are in their places here.

    Args:
        optimizer: A wrapped optimizer, or any other.
        loads: Whether the block replaces states.
    """
    held: AbstractContextManager[Optimizer | None] = nullcontext(optimizer)
    if isinstance(optimizer, OptimizerWrapper):
        held = optimizer.for_checkpoint(loads=loads)
    with held as raw:
        groups = [] if raw is None else raw.param_groups
        if raw is None or not any(hasattr(param, ROW_CACHE) for group in groups for param in group["params"]):
            yield raw
            return
        with tables_for_caches(raw, loads=loads):
            yield raw


def named_parameters(optimizer: Optimizer, param_names: ParamNames) -> dict[str, nn.Parameter]:
    """Return the parameters of an optimizer by name.

    Raises:
        ValueError: A parameter has no name, or two have the same.
    """
    named: dict[str, nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            is_table = hasattr(parameter, CACHED_TABLE)
            name = _name_of_table(parameter, param_names) if is_table else param_names.get(parameter)
            if name is None:
                raise ValueError(
                    f"parameter {place} of group {number} (of shape {tuple(parameter.shape)}) has no name in "
                    f"param_names: give those of every model whose parameters the optimizer holds"
                )
            if name in named:
                raise ValueError(f"two parameters of the optimizer are called {name!r} in param_names")
            named[name] = parameter
    return named


def _name_of_table(table: nn.Parameter, param_names: ParamNames) -> str | None:
    cache, key = getattr(table, CACHED_TABLE)  # the parameter of a module, whose state dict has the key
    name = param_names.get(cache)
    if name is None:
        return None
    prefix, dot, _ = name.rpartition(".")
    return f"{prefix}{dot}{key}"


def hyper_parameters(group: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a parameter group other than its parameters."""
    return {key: value for key, value in group.items() if key not in _NAMES_IN_GROUP}


def local_optimizer_state(optimizer: Optimizer, param_names: ParamNames, *, prefix: str = "") -> LocalState:
    """Return the state of an optimizer on this rank.

    To gather it raises a ValueError where a parameter has no name, or the state holds a value that is not
    plain, or a tensor whose cut is not known.
    """
    return LocalState(
        lambda: _own_content(optimizer, param_names, prefix), _merge, _flatten, join=stored_content
    )


def _own_content(optimizer: Optimizer, param_names: ParamNames, prefix: str) -> dict[str, Any]:
    surplus = optimizer.state_dict().keys() - {"state", "param_groups"}
    if surplus:
        raise ValueError(
            f"{type(optimizer).__name__}.state_dict() holds {listed(map(repr, surplus))} besides 'state' and "
            f"'param_groups': entries without a parameter or group cannot be saved by parameter name"
        )
    named = {prefix + name: param for name, param in named_parameters(optimizer, param_names).items()}
    names = {param: name for name, param in named.items()}
    state = optimizer.state
    # Three passes: the states are taken apart, the cuts of their tensors are read, and they are joined again.
    packed = {name: pack(dict(state[param])) for name, param in named.items() if param in state}
    cuts = state_cuts(named)
    shards = shards_of_states(
        {name: cast("dict[str, torch.Tensor]", tensors) for name, (_, tensors) in packed.items()}, cuts
    )
    return {
        "state": {name: unpack(tree, shards[name]) for name, (tree, _) in packed.items()},
        "param_groups": [
            {"params": [names[parameter] for parameter in group["params"]], **hyper_parameters(group)}
            for group in optimizer.param_groups
        ],
        "shapes": {name: list(cuts[name].whole_shape) for name in named},
        "other_state": {key: item for key, item in state.items() if not isinstance(key, torch.Tensor)},
        "optimizer": type(optimizer).__name__,
    }


def stored_content(state: FlatStateDict[TensorMetadata]) -> dict[str, object]:
    """Return the content that a flat state dict was made of; an empty one if there is no optimizer in it.

    Raises:
        ValueError: `state` has the parts of an optimizer, and one of them has another form.
    """
    content = unpack(state.tree, state.tensors)
    if not isinstance(content, dict) or not _is_ours(content):
        return {}
    refuse_other_form(content, _FORM, "optimizer")
    for names in (content["state"], content["shapes"]):
        refuse_other_form(list(names), [str], "name")
    return content


def _merge(contents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together the contents of ranks that hold different parameters; groups belong together by number."""
    first = next(content for content in contents if content)
    groups = [content["param_groups"] for content in contents if content]
    return {
        "state": merge_by_name(content.get("state", {}) for content in contents),
        "param_groups": [
            {
                **members[0],
                "params": list(dict.fromkeys(name for group in members for name in group["params"])),
            }
            for members in zip(*groups, strict=True)
        ],
        "shapes": merge_by_name(content.get("shapes", {}) for content in contents),
        "other_state": first["other_state"],
        "optimizer": first["optimizer"],
    }


def _is_ours(content: object) -> bool:
    return isinstance(content, dict) and content.keys() >= _FORM.keys()


def _flatten(content: Mapping[str, Any]) -> FlatStateDict[Any]:
    tree, tensors = pack(content)
    return FlatStateDict(tensors, tree)


def _split(content: object) -> FlatStateDict[torch.Tensor]:
    if isinstance(content, dict) and _is_ours(content):
        return _flatten(content)
    if isinstance(content, dict) and content.keys() >= {"state", "param_groups"}:
        raise ValueError(
            "it is torch's own optimizer.state_dict(), which numbers the parameters: load that one with "
            "optimizer.load_state_dict, and save with save_optimizer"
        )
    raise ValueError("there is no optimizer in it")


OPTIMIZER = Kind(
    OPTIMIZER_FOLDER,
    Stems(torch="pytorch_optim", safetensors="optim"),
    join=stored_content,
    split=_split,
    needs_tree=True,
)
