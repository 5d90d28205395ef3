"""Optimizer checkpoints: saved by parameter name with full tensors, loaded into slices.

torch numbers parameters by their place in the groups. Names depend neither on the place nor on how the
parameters were cut, so a state loads under another plan, another order of groups, another number of ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io._collective import called_by_all_ranks, on_every_rank
from colossalai.checkpoint_io._optimizer_state import (
    OPTIMIZER,
    ParamNames,
    hyper_parameters,
    local_optimizer_state,
    named_parameters,
    opened,
    stored_content,
)
from colossalai.checkpoint_io._save_plan import gather_states
from colossalai.checkpoint_io._state import FileLayout, common_prefix, names_elsewhere
from colossalai.checkpoint_io.formats import load_state, save_sharded, save_whole
from colossalai.checkpoint_io.resharding import (
    StateCut,
    StoredTensor,
    new_states,
    pack,
    state_cuts,
    unpack,
    wholes,
    with_own_memory,
)
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, listed
from colossalai.logging import get_dist_logger
from colossalai.tensor import as_memory


@dataclass(frozen=True)
class OptimizerLoadPlan:
    """A checkpoint that was compared with an optimizer, ready to be copied.

    Attributes:
        optimizer: The optimizer.
        states: The new state of each parameter that has one, in whole tensors.
        cuts: The cut of the states of each parameter.
        groups: The new hyper-parameters of each of its groups.
        other_state: The new state that belongs to no parameter.
        saved_class: The name of the class that was saved.
    """

    optimizer: Optimizer
    states: dict[nn.Parameter, dict[str, object]]
    cuts: dict[nn.Parameter, StateCut]
    groups: list[dict[str, object]]
    other_state: Mapping[object, object]
    saved_class: str

    def apply(self) -> None:
        """Overwrite the optimizer; no communication: every rank reads its own slices."""
        if self.saved_class != type(self.optimizer).__name__:
            get_dist_logger().warning(
                f"a state of {self.saved_class} is loaded into {type(self.optimizer).__name__}", ranks=[0]
            )
        self.optimizer.state.clear()
        others: Any = with_own_memory(self.other_state)  # keys of the optimizer's own, not tensors
        self.optimizer.state.update(others)
        group_of: dict[nn.Parameter, dict[str, Any]] = {}
        for group, hyper in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(with_own_memory(hyper))
            group_of |= dict.fromkeys(group["params"], group)
        parts = {param: self.cuts[param].part for param in group_of}
        packed = {
            param: pack(dict(self.states[param]))
            for param, part in parts.items()
            if self.states.get(param) and (part is None or part.end > part.begin)
        }
        placed = self._placed(
            {param: cast("dict[str, StoredTensor]", tensors) for param, (_, tensors) in packed.items()},
            group_of,
        )
        for param, (tree, _) in packed.items():
            self.optimizer.state[param] = unpack(tree, placed[param])

    def _placed(
        self,
        stored: dict[nn.Parameter, dict[str, StoredTensor]],
        group_of: Mapping[nn.Parameter, Mapping[str, Any]],
    ) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Return this rank's parts of the states, on the devices that the optimizer expects."""
        placed: dict[nn.Parameter, dict[str, torch.Tensor]] = {param: {} for param in stored}
        counted = [param for param, tensors in stored.items() if "step" in tensors]
        for param, step in zip(counted, wholes([stored[param]["step"] for param in counted]), strict=True):
            # torch's optimizers count on the host unless the whole update runs on the device.
            on_device = group_of[param].get("capturable") or group_of[param].get("fused")
            placed[param]["step"] = step.to(param.device if on_device else "cpu")
        places = [(key, param) for param, tensors in stored.items() for key in tensors if key != "step"]
        states = new_states([(stored[param][key], param) for key, param in places], self.cuts)
        for (key, param), state in zip(places, states, strict=True):
            placed[param][key] = state
        return placed


def plan_optimizer_loading(
    optimizer: Optimizer,
    content: Mapping[str, Any],
    param_names: ParamNames,
    *,
    source: str,
    elsewhere: Collection[str] = (),
) -> OptimizerLoadPlan:
    """Compare a checkpoint with an optimizer and overwrite nothing.

    Args:
        optimizer: The optimizer.
        content: The checkpoint, as `stored_content` returns it.
        param_names: The name of each of its parameters.
        source: Name of the checkpoint in messages.
        elsewhere: Names of parameters whose state other ranks hold.

    Raises:
        ValueError: `content` holds no optimizer, or its names, shapes or groups are not those of `optimizer`;
            all misfits are named.
    """
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
    cuts = state_cuts(named)
    whole = {name: cut.whole_shape for name, cut in cuts.items()}
    states = _here({name.removeprefix(prefix): state for name, state in content["state"].items()}, elsewhere)
    misfits = [
        *_name_misfits(shapes, whole),
        *_group_misfits([members for members, _ in saved_groups], groups),
        *_state_misfits(states, cuts),
    ]
    if misfits:
        raise ValueError("\n".join([f"{source} does not fit the optimizer; nothing was loaded.", *misfits]))
    hyper_of = dict(saved_groups)
    return OptimizerLoadPlan(
        optimizer=optimizer,
        states={named[name]: state for name, state in states.items()},
        cuts={param: cuts[name] for name, param in named.items()},
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


def _name_misfits(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Yield which names, with their shapes, are on one side only, or of other shapes."""
    missing = [name for name in wanted if name not in saved]
    if missing:
        yield f"{len(missing)} missing in the checkpoint: {listed(missing, shown=50)}"
    unexpected = [name for name in saved if name not in wanted]
    if unexpected:
        yield f"{len(unexpected)} unexpected in the checkpoint: {listed(unexpected, shown=50)}"
    wrong = [
        f"{name}: {saved[name]} in the checkpoint, {shape} in the optimizer"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
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


def _state_misfits(states: Mapping[str, Mapping[str, Any]], cuts: Mapping[str, StateCut]) -> Iterator[str]:
    """Yield the states of which it is not known how to cut them."""
    sliced = {name for name, cut in cuts.items() if cut.is_slice}
    for name in filter(sliced.__contains__, states):
        strange = [
            f"{key} {stored.shape}"
            for key, stored in pack(states[name])[1].items()
            if stored.shape and stored.shape != cuts[name].whole_shape
        ]
        if strange:
            yield f"{name} is a tensor-parallel slice, and it is not known how to cut {listed(strange)}"


@called_by_all_ranks("save", "an optimizer")
@as_memory()
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
        checkpoint: A file; with `shard` a folder, which can contain the model.
        param_names: The name of each of its parameters; `parameter_names(model)` gives them.
        shard: Write a folder of shards with an index.
        prefix: Text to put in front of every parameter name.
        size_per_shard: The most a shard holds, in MB (1024 * 1024 bytes).
        use_safetensors: Write that format rather than torch's.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank in addition to
            its states.
        gather_dtensor: False: every rank writes its shards to a folder that all of them see, which can
            contain the model; of the other options only `prefix` counts then.

    Raises:
        ValueError: A parameter has no name, or the state holds a value that is not plain, or a tensor of
            another shape than the slice that its parameter is.
        OSError: The checkpoint cannot be written; on all ranks. An earlier checkpoint is kept.
    """
    layout = FileLayout(
        shard=shard,
        size_per_shard=size_per_shard,
        use_safetensors=use_safetensors,
        buffer_size=buffer_size,
    )
    with opened(optimizer, loads=False) as raw:
        assert raw is not None
        (state,), _ = gather_states(local_optimizer_state(raw, param_names, prefix=prefix or ""))
        if gather_dtensor:
            save_whole(checkpoint, state, OPTIMIZER, layout)
        else:
            save_sharded(checkpoint, state, OPTIMIZER)


@called_by_all_ranks("load", "an optimizer")
@as_memory()
def load_optimizer(optimizer: Optimizer, checkpoint: str | Path, *, param_names: ParamNames) -> None:
    """Load an optimizer's state and hyper-parameters; collective: every rank copies its own slices.

    States are matched by name; the order of groups and of parameters does not matter. If all names in the
    checkpoint have the same prefix, it is left out. Earlier states of the optimizer are dropped.

    Args:
        optimizer: The optimizer to overwrite; its parameters may be cut in another way than those saved.
        checkpoint: A file or folder that `save_optimizer` wrote; the format is seen from the content.
        param_names: The name of each of its parameters.

    Raises:
        ValueError: The checkpoint is damaged, or its names, shapes or groups are not the optimizer's: all
            misfits are named, and nothing was overwritten.
        OSError: The checkpoint cannot be read.
    """
    state = load_state(checkpoint, OPTIMIZER)
    with opened(optimizer, loads=True) as raw:
        assert raw is not None
        (elsewhere,) = names_elsewhere(lambda: [named_parameters(raw, param_names)])
        plan = on_every_rank(
            lambda: plan_optimizer_loading(
                raw, stored_content(state), param_names, source=str(checkpoint), elsewhere=elsewhere
            )
        )
        on_every_rank(plan.apply)
