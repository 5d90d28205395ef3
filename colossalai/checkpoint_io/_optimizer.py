"""The state of an optimizer: saved by parameter name with full tensors, loaded into slices.

torch numbers parameters by their place in the groups. Names depend neither on the place nor on how the
parameters were cut, so a state loads under another plan, another order of groups, another number of ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io._collective import on_every_rank
from colossalai.checkpoint_io._global_plan import names_elsewhere
from colossalai.checkpoint_io._load_report import common_prefix, listed
from colossalai.checkpoint_io._optimizer_state import (
    OPTIMIZER,
    ParamNames,
    hyper_parameters,
    named_parameters,
    opened,
    optimizer_store,
    stored_content,
)
from colossalai.checkpoint_io._state import Layout, Store
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.formats import load_store, save_slices, save_store
from colossalai.checkpoint_io.resharding import (
    Stored,
    is_cut_by_spec,
    new_replicated,
    new_state,
    pack,
    unpack,
    whole_shape,
    with_own_memory,
)
from colossalai.logging import get_dist_logger
from colossalai.tensor import range_of_states


@dataclass(frozen=True)
class OptimizerLoading:
    """A checkpoint that was compared with an optimizer, ready to be copied.

    Attributes:
        optimizer: The optimizer.
        states: The new state of each parameter that has one, in whole tensors.
        groups: The new hyper-parameters of each of its groups.
        other_state: The new state that belongs to no parameter.
        saved_class: The name of the class that was saved.
    """

    optimizer: Optimizer
    states: dict[nn.Parameter, dict[str, Any]]
    groups: list[dict[str, Any]]
    other_state: dict[Any, Any]
    saved_class: str

    def apply(self) -> None:
        """Overwrite the optimizer; no communication."""
        if self.saved_class != type(self.optimizer).__name__:
            get_dist_logger().warning(
                f"a state of {self.saved_class} is loaded into {type(self.optimizer).__name__}", ranks=[0]
            )
        self.optimizer.state.clear()
        self.optimizer.state.update(with_own_memory(self.other_state))
        for group, hyper in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(with_own_memory(hyper))
            for parameter in group["params"]:
                placed = _placed(self.states.get(parameter, {}), parameter, group)
                if placed:
                    self.optimizer.state[parameter] = placed


def optimizer_names_elsewhere(optimizer: Optimizer, param_names: ParamNames) -> frozenset[str]:
    """Return the names of parameters whose state other ranks hold and this one does not; collective.

    Raises:
        ValueError: A parameter has no name, or two have the same.
    """
    return names_elsewhere(on_every_rank(lambda: list(named_parameters(optimizer, param_names))))


def plan_optimizer_loading(
    optimizer: Optimizer,
    store: Store,
    param_names: ParamNames,
    *,
    source: str,
    elsewhere: Collection[str] = (),
) -> OptimizerLoading:
    """Compare a checkpoint with an optimizer and overwrite nothing.

    Args:
        optimizer: The optimizer.
        store: The checkpoint.
        param_names: The name of each of its parameters.
        source: What to call the checkpoint.
        elsewhere: Names of parameters whose state other ranks hold.

    Raises:
        ValueError: Something does not fit; all of it is named.
    """
    content = stored_content(store)
    if not content:
        raise ValueError(f"{source}: there is no optimizer in it that save_optimizer wrote")
    named = named_parameters(optimizer, param_names)
    prefix = common_prefix(content["shapes"], named.keys() | set(elsewhere))
    shapes = _here(
        {name.removeprefix(prefix): tuple(shape) for name, shape in content["shapes"].items()}, elsewhere
    )
    saved_groups = [
        (
            frozenset(name.removeprefix(prefix) for name in group["params"]) - set(elsewhere),
            hyper_parameters(group),
        )
        for group in content["param_groups"]
    ]
    names = {parameter: name for name, parameter in named.items()}
    groups = [
        frozenset(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups
    ]
    states = _here({name.removeprefix(prefix): state for name, state in content["state"].items()}, elsewhere)
    misfits = [
        *_name_misfits(shapes, named),
        *_group_misfits([members for members, _ in saved_groups], groups),
        *_state_misfits(states, named),
    ]
    if misfits:
        raise ValueError("\n".join([f"{source} does not fit the optimizer; nothing was loaded.", *misfits]))
    hyper_of = dict(saved_groups)
    return OptimizerLoading(
        optimizer=optimizer,
        states={named[name]: state for name, state in states.items()},
        groups=[
            hyper_of[members] if members else _hyper_of_empty(saved_groups, number)
            for number, members in enumerate(groups)
        ],
        other_state=content["other_state"],
        saved_class=content["optimizer"],
    )


def _here(values: dict[str, Any], elsewhere: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in elsewhere}


def _hyper_of_empty(saved: list[tuple[frozenset[str], dict[str, Any]]], number: int) -> dict[str, Any]:
    """Return the hyper-parameters of a group whose parameters are all on other ranks."""
    return saved[number][1] if number < len(saved) else {}


def _name_misfits(saved: Mapping[str, tuple[int, ...]], named: Mapping[str, nn.Parameter]) -> Iterator[str]:
    missing = [name for name in named if name not in saved]
    if missing:
        yield f"{len(missing)} missing in the checkpoint: {listed(missing, shown=50)}"
    unexpected = [name for name in saved if name not in named]
    if unexpected:
        yield f"{len(unexpected)} unexpected in the checkpoint: {listed(unexpected, shown=50)}"
    wrong = [
        f"{name}: {saved[name]} in the checkpoint, {whole_shape(parameter)} in the optimizer"
        for name, parameter in named.items()
        if name in saved and saved[name] != whole_shape(parameter)
    ]
    if wrong:
        yield f"{len(wrong)} of another shape: {listed(wrong, shown=50)}"


def _group_misfits(saved: list[frozenset[str]], present: list[frozenset[str]]) -> Iterator[str]:
    """Yield the groups whose hyper-parameters would have no home."""
    for members in filter(None, saved):
        if members not in present:
            yield f"a group in the checkpoint is none of the optimizer's: {listed(sorted(members))}"
    for members in filter(None, present):
        if members not in saved:
            yield f"a group of the optimizer is none of the checkpoint's: {listed(sorted(members))}"


def _state_misfits(
    states: Mapping[str, Mapping[str, Any]], named: Mapping[str, nn.Parameter]
) -> Iterator[str]:
    """Yield the states of which it is not known how to cut them."""
    for name, state in states.items():
        if name in named and is_cut_by_spec(named[name]):
            strange = [
                f"{key} {stored.shape}"
                for key, stored in pack(state)[1].items()
                if stored.shape and stored.shape != whole_shape(named[name])
            ]
            if strange:
                yield f"{name} is a tensor-parallel slice, and it is not known how to cut {listed(strange)}"


def _placed(state: Mapping[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank has of a parameter's state, placed where the optimizer expects it."""
    part = range_of_states(parameter)
    if part is not None and part.numel == 0:
        return {}
    tree, tensors = pack(dict(state))
    found: dict[str, Any] = unpack(
        tree, {key: _place(key, stored, parameter, group) for key, stored in tensors.items()}
    )
    return found


def _place(key: str, stored: Stored, parameter: nn.Parameter, group: Mapping[str, Any]) -> torch.Tensor:
    if key == "step":
        # torch's optimizers count on the host unless the whole update runs on the device.
        on_device = group.get("capturable") or group.get("fused")
        return stored.whole().to(parameter.device if on_device else "cpu")
    if stored.shape == whole_shape(parameter):
        return new_state(stored, parameter)
    return new_replicated(stored, parameter)


def save_optimizer(
    optimizer: Optimizer,
    checkpoint: str | Path,
    *,
    param_names: ParamNames,
    shard: bool = False,
    prefix: str | None = None,
    size_per_shard: float = 1024,
    use_safetensors: bool = False,
    buffer_size: float = DEFAULT_BUFFER_MB,
    gather_dtensor: bool = True,
) -> None:
    """Save an optimizer; collective: every rank calls it, global rank 0 writes.

    Args:
        optimizer: Its state may be DTensors, or slices of the shape of their parameter's. Several groups, a
            part of the model's parameters, and parameters that have no state yet are all right.
        checkpoint: A file; with `shard` a folder, which may be the one that holds the model.
        param_names: The name of each of its parameters; `parameter_names(model)` gives them.
        shard: Write a folder of shards with an index.
        prefix: Text to put in front of every parameter name.
        size_per_shard: The most a shard holds, in MB (1024 * 1024 bytes).
        use_safetensors: Write that format rather than torch's.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank beside its own.
        gather_dtensor: False: every rank writes what it holds into a folder that all of them see, which may
            be the one that holds the model; of the other options only `prefix` counts then.

    Raises:
        ValueError: A parameter has no name, or the state holds something that is not plain, or of another
            shape than the slice that its parameter is.
        OSError: The checkpoint cannot be written; on all ranks. What was there before is still there.
    """
    layout = Layout(
        shard=shard,
        size_per_shard=size_per_shard,
        use_safetensors=use_safetensors,
        buffer_size=buffer_size,
    )
    with opened(optimizer, loads=False) as raw:
        assert raw is not None
        store = optimizer_store(raw, param_names, prefix=prefix or "")
        if gather_dtensor:
            save_store(checkpoint, store, OPTIMIZER, layout)
        else:
            save_slices(checkpoint, store, OPTIMIZER)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path, *, param_names: ParamNames) -> None:
    """Load an optimizer's state and hyper-parameters; collective: every rank copies its own slices.

    Names decide what belongs where; the order of groups and of parameters does not matter. If all names in
    the checkpoint carry one and the same prefix, it is left out. What the optimizer held before is dropped.

    Args:
        optimizer: The optimizer to overwrite; its parameters may be cut in another way than those saved.
        checkpoint: A file or folder that `save_optimizer` wrote; the format is seen from the content.
        param_names: The name of each of its parameters.

    Raises:
        ValueError: The checkpoint is damaged, or does not fit: all misfits are named, and nothing was
            overwritten.
        OSError: It cannot be read.
    """
    store = load_store(checkpoint, OPTIMIZER)
    with opened(optimizer, loads=True) as raw:
        assert raw is not None
        elsewhere = optimizer_names_elsewhere(raw, param_names)
        loading = on_every_rank(
            lambda: plan_optimizer_loading(
                raw, store, param_names, source=str(checkpoint), elsewhere=elsewhere
            )
        )
        on_every_rank(loading.apply)
