"""Cut a model that was never written for a pipeline, along its stack of blocks.

Embeddings and whatever else runs before the blocks go to the first stage, norm and head to the last one. What
has no parameters (dropout, rotary tables) is on every stage. How a stage then runs: see
[Note: a stage runs the forward of the whole model].
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from colossalai.pipeline._chunks import as_model
from colossalai.pipeline._cut_plan import Balance, Cut, is_parameter, plan_cut, ties_of
from colossalai.pipeline._elsewhere import (
    BehindElsewhere,
    BlockElsewhere,
    Flow,
    FrontElsewhere,
    on_meta,
)
from colossalai.pipeline._model_stage import ModelStage, NoteBlocks, PartOfStack, Tie, end_stage


def cut_model(
    model: nn.Module,
    num_stages: int,
    stages: Sequence[int],
    *,
    balance: Balance = "uniform",
    stack: str | None = None,
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    everywhere: Sequence[str] = (),
    sample: Any = None,
) -> nn.Module:
    """Return the stages of a model that this rank holds; the rest of the model loses its memory.

    Every rank calls it with the same model, on the device "meta" or with memory, and the same arguments but
    `stages`. Which parts run before and which after the blocks is seen in a trial run on fake tensors. Where
    there can be none (the data is of an unknown kind, or layers are tensor-parallel), it is taken from the
    order in which they are registered, and a stage that is wrong about it says so when it runs.

    Parameters keep their names. One that a container of the blocks holds itself (a class token) is on every
    stage. See `tied_parameters` for those on several stages.

    Args:
        model: A module with a stack of blocks; it is changed and of no use afterwards.
        num_stages: The number of stages, over all ranks and chunks.
        stages: The stages of this rank, ascending.
        balance: "uniform" by the number of blocks; "parameters" by those of the blocks and, in the first and
            last stage, of the parts before and behind; or a weight for each block.
        stack: The name of the `nn.ModuleList` or `nn.Sequential` of blocks; by default the longest one.
        first: Names of parts that the first stage shall hold, whatever the trial says.
        last: The same for the last stage.
        everywhere: The same for all stages.
        sample: Data for the trial run, as the loader gives it; its values do not matter.

    Returns:
        A `ModelStage`, or several as a `ChunkList`.

    Raises:
        ValueError: The model has no stack of blocks, fewer blocks than stages, a part that runs between the
            blocks, or blocks that take more than what the one before returns; or an argument is wrong.
    """
    _check(model, num_stages, stages)
    wishes = {"first": first, "last": last, "everywhere": everywhere}
    cut = plan_cut(model, num_stages, balance=balance, stack=stack, wishes=wishes, sample=sample)
    ties = ties_of(model, cut)
    made: list[nn.Module] = [_stage(model, cut, index, ties) for index in stages]
    _forget_others(model, cut, set(stages))
    return as_model(made)


def _check(model: nn.Module, num_stages: int, stages: Sequence[int]) -> None:
    if not stages or list(stages) != sorted(set(stages)) or not 0 <= stages[0] <= stages[-1] < num_stages:
        raise ValueError(f"stages={list(stages)}: name stages from 0 to {num_stages - 1}, ascending")
    config = getattr(model, "config", None)
    for flag in ("output_hidden_states", "output_attentions"):
        if getattr(config, flag, False):
            raise ValueError(f"config.{flag} is set, but a stage sees only its own blocks: switch it off")


def _stage(model: nn.Module, cut: Cut, index: int, ties: Sequence[Tie]) -> ModelStage:
    """Make a stage: copies of the containers around the parts themselves, or stand-ins for them."""
    flow = Flow()
    anatomy = cut.anatomy
    own = anatomy.block_names[slice(*cut.blocks[index])]
    containers = {name: _shallow_copy(model.get_submodule(name)) for name in anatomy.containers}
    for name in anatomy.parts:
        if index not in cut.holders[name]:
            parent, _, key = name.rpartition(".")
            containers[parent]._modules[key] = _stand_in(model, cut, name, flow)
    blocks = {
        key: block if key in own else BlockElsewhere(f"{anatomy.stack}.{key}", block, flow)
        for key, block in model.get_submodule(anatomy.stack)._modules.items()
        if block is not None
    }
    blocks[own[0]].register_forward_pre_hook(NoteBlocks(flow))
    if index < cut.num_stages - 1:
        blocks[own[-1]].register_forward_hook(end_stage)
    for name, copied in [*containers.items(), (anatomy.stack, PartOfStack(blocks, own))]:
        if name:
            parent, _, key = name.rpartition(".")
            containers[parent]._modules[key] = copied
    return ModelStage(
        containers[""],
        flow,
        index=index,
        num_stages=cut.num_stages,
        last_block=f"{anatomy.stack}.{own[-1]}",
        ties=tuple(tie for tie in ties if index in tie.stages),
    )


def _stand_in(model: nn.Module, cut: Cut, name: str, flow: Flow) -> nn.Module:
    part = model.get_submodule(name)
    if 0 in cut.holders[name]:
        return FrontElsewhere(name, part, flow, feeds_blocks=name == cut.feeding)
    return BehindElsewhere(name, part, flow)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same sub-modules, which can be exchanged in the copy."""
    copied = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        own = value.copy() if isinstance(value, dict | set) else value
        object.__setattr__(copied, name, own)
    return copied


def _forget_others(model: nn.Module, cut: Cut, stages: set[int]) -> None:
    """Take the memory of all parts that none of these stages holds."""
    stack = cut.anatomy.stack
    parts = [f"{stack}.{key}" for key in cut.anatomy.block_names]
    parts += [name for name in cut.anatomy.parts if not is_parameter(model, name)]
    kept = [name for name in parts if not stages.isdisjoint(cut.stages_of(name))]
    held = {id(module) for name in kept for module in model.get_submodule(name).modules()}
    for name in set(parts) - set(kept):
        for module in model.get_submodule(name).modules():
            if id(module) not in held:  # a module may be a part of two
                _forget(module)


def _forget(module: nn.Module) -> None:
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                held[name] = on_meta(tensor)  # type: ignore[assignment]
