"""Cutting of a model that was not written for pipelines, along its stack of blocks.

Embeddings and other parts before the blocks are placed on the first stage, norm and head on the last one.
Modules without parameters (dropout, rotary tables) are on every stage. The forward of a stage is described in
[Note: forward of a stage].
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.pipeline.stages._chunks import as_model
from colossalai.pipeline.stages._partition import Part, balanced_parts, even_parts, parameter_weights
from colossalai.pipeline.stages._placeholders import (
    BehindElsewhere,
    BlockElsewhere,
    FrontElsewhere,
    on_meta,
)
from colossalai.pipeline.stages._stage import ModelStage, NoteBlocks, PartOfStack, StageFlow, Tie, end_stage
from colossalai.pipeline.stages._trace import (
    Anatomy,
    Trial,
    can_try,
    dissect,
    guess_sample,
    run_trial,
    shares_activations,
)

Balance = Literal["uniform", "parameters"] | Sequence[float]
Wishes = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class StageCut:
    """Placement of the parts of a model on stages; the same on every rank.

    Attributes:
        anatomy: Layout of the model.
        blocks: For each stage its blocks (start, end).
        holders: For each part outside of the stack, the stages that hold it.
        feeding: The part whose output is the input of the first block; empty if it is not known.
    """

    anatomy: Anatomy
    blocks: tuple[Part, ...]
    holders: Mapping[str, frozenset[int]]
    feeding: str

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.blocks)

    def stages_of(self, name: str) -> frozenset[int]:
        """Return the stages that hold the parameter or module `name`."""
        if name.startswith(f"{self.anatomy.stack}."):
            block = name.removeprefix(f"{self.anatomy.stack}.").partition(".")[0]
            number = self.anatomy.block_names.index(block)
            return frozenset(s for s, (start, end) in enumerate(self.blocks) if start <= number < end)
        return next(
            held for part, held in self.holders.items() if name == part or name.startswith(f"{part}.")
        )


def plan_cut(
    model: nn.Module, num_stages: int, *, balance: Balance, stack: str | None, wishes: Wishes, sample: Any
) -> StageCut:
    """Return the placement of the parts on stages; the arguments are those of `cut_model`.

    Args:
        model: The model.
        num_stages: The number of stages.
        balance: Distribution of the blocks.
        stack: The name of the stack; None: it is searched for.
        wishes: Names of parts under "first", "last" and "everywhere".
        sample: Data for the trial run; None: it is guessed.
    """
    anatomy = dissect(model, stack)
    trial = _try_model(model, anatomy, sample)
    holders = _holders(model, anatomy, num_stages, trial)
    holders |= _requested_stages(wishes, [n for n in anatomy.parts if not is_parameter(model, n)], num_stages)
    blocks = _split_blocks(model, anatomy, num_stages, balance)
    # A block that takes slices takes no output of a part as it is.
    untried = "" if shares_activations(model) else _only_front(model, holders)
    return StageCut(anatomy, tuple(blocks), holders, trial.feeding if trial else untried)


def ties_of(model: nn.Module, cut: StageCut) -> list[Tie]:
    """Return the parameters that several stages hold, in the order of their names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    ties = []
    for known_as in names.values():
        stages = frozenset[int]().union(*(cut.stages_of(name) for name in known_as))
        if len(stages) > 1:
            ties.append(Tie(tuple(known_as), tuple(sorted(stages))))
    return sorted(ties, key=lambda tie: tie.names)


def _try_model(model: nn.Module, anatomy: Anatomy, sample: Any, *, is_final: bool = True) -> Trial | None:
    """Make a trial run with the given sample, or a guessed one; return None if it is not possible."""
    if shares_activations(model):  # blocks communicate, and a sample changes nothing
        return None
    parts = [name for name in anatomy.parts if not is_parameter(model, name)]
    if sample is not None:
        return _checked(run_trial(model, sample, stack=anatomy.stack, parts=parts), anatomy)
    if not can_try(model):
        return None
    argument = _first_argument(model)
    guessed = guess_sample(model, argument)
    reason = f"what data it takes ({argument!r}) is not known"
    if guessed is not None:
        try:
            trial = run_trial(model, guessed, stack=anatomy.stack, parts=parts)
        except Exception as error:  # foreign code on made-up data can raise anything
            reason = f"{type(error).__name__}: {error}"
        else:
            return _checked(trial, anatomy)
    if not is_final:
        return None
    get_dist_logger().log_once(
        f"no trial run of {type(model).__name__} before it is cut into stages ({reason}): the order of "
        "registration decides which modules run before and after the blocks. If that is wrong, pass stages "
        "that colossalai.pipeline.cut_model makes (sample=..., or first=[...] and last=[...])",
        level="INFO",
        ranks=[0],
    )
    return None


def _first_argument(model: nn.Module) -> str:
    return next(iter(inspect.signature(model.forward).parameters), "")


def _checked(trial: Trial, anatomy: Anatomy) -> Trial:
    for number in trial.repeated[:1]:
        raise ValueError(
            f"block {number} of {anatomy.stack!r} runs more than once in a forward: such a model cannot be "
            "cut along its blocks"
        )
    for source, target in trial.skipped_over[:1]:
        raise ValueError(
            f"block {target} of {anatomy.stack!r} takes a result of block {source}, past those "
            "between: such a model cannot be cut along its blocks"
        )
    for name in trial.used_at:
        if name.startswith(f"{anatomy.stack}."):
            raise ValueError(f"{name!r} is used outside of its block: such a model cannot be cut")
    return trial


def _holders(
    model: nn.Module, anatomy: Anatomy, num_stages: int, trial: Trial | None
) -> dict[str, frozenset[int]]:
    """Return the stages that need each part outside of the stack."""
    everyone = frozenset(range(num_stages))
    front, behind = frozenset({0}), frozenset({num_stages - 1})
    holders = {}
    for part in anatomy.parts:
        if is_parameter(model, part) or not _has_params(model.get_submodule(part)):
            holders[part] = everyone
            continue
        times = _times(trial, part)
        if not times:
            holders[part] = front if part in anatomy.before else behind
        elif times <= {0, anatomy.num_blocks}:
            holders[part] = (front if 0 in times else frozenset()) | (behind if max(times) else frozenset())
        else:  # between blocks, too
            holders[part] = everyone
    return holders


def _times(trial: Trial | None, part: str) -> set[int]:
    used = trial.used_at.items() if trial else ()
    return {time for name, times in used if name.startswith(f"{part}.") for time in times}


def _requested_stages(wishes: Wishes, parts: Sequence[str], num_stages: int) -> dict[str, frozenset[int]]:
    """Return the stages on which the caller places parts."""
    everyone = frozenset(range(num_stages))
    meant = {"first": frozenset({0}), "last": frozenset({num_stages - 1}), "everywhere": everyone}
    wished: dict[str, frozenset[int]] = {}
    for argument, names in wishes.items():
        for name in names:
            if name not in parts:
                raise ValueError(
                    f"{argument} names {name!r}, which is not a module outside of the blocks: {parts}"
                )
            wished[name] = wished.get(name, frozenset()) | meant[argument]
    return wished


def _split_blocks(model: nn.Module, anatomy: Anatomy, num_stages: int, balance: Balance) -> list[Part]:
    if anatomy.num_blocks < num_stages:
        raise ValueError(
            f"{anatomy.stack!r} has {anatomy.num_blocks} blocks, fewer than {num_stages} stages: use fewer "
            "stages (pipeline size x chunks)"
        )
    if balance == "uniform":
        return even_parts(anatomy.num_blocks, num_stages)
    if balance == "parameters":
        weights = parameter_weights(model.get_submodule(anatomy.stack).children())
        parts = {name: _count(model, name) for name in anatomy.parts}
        weights[0] += sum(parts[name] for name in anatomy.before)
        weights[-1] += sum(parts[name] for name in anatomy.behind)
        return balanced_parts(weights, num_stages)
    if isinstance(balance, str) or len(balance) != anatomy.num_blocks:
        raise ValueError(
            f"balance={balance!r}; it must be 'uniform', 'parameters' or a weight for each of "
            f"{anatomy.num_blocks} blocks"
        )
    return balanced_parts(balance, num_stages)


def _only_front(model: nn.Module, holders: Mapping[str, frozenset[int]]) -> str:
    """Return the part before the blocks if there is only one; its output is assumed to feed the blocks."""
    front = [name for name, held in holders.items() if 0 in held and _has_parameters_of_its_own(model, name)]
    return front[0] if len(front) == 1 else ""


def can_cut_unseen(model: nn.Module, num_stages: int, sample: Any) -> bool:
    """Return whether `cut_model` without a sample makes the stages that it would make with this one.

    Args:
        model: The model, which is not changed.
        num_stages: The number of stages.
        sample: Data as its forward takes it; its values do not matter.
    """
    try:
        anatomy = dissect(model)
        _split_blocks(model, anatomy, num_stages, "uniform")
        guessed = _try_model(model, anatomy, None, is_final=False)
        # If the sample has only the guessed argument, a second trial run would give the same result.
        is_alone = isinstance(sample, Mapping) and list(sample) == [_first_argument(model)]
        trial = guessed if guessed and is_alone else _try_model(model, anatomy, sample)
        unseen = _holders(model, anatomy, num_stages, guessed)
        feeding = guessed.feeding if guessed else _only_front(model, unseen)
    except Exception:  # from foreign code on fake tensors, or a model that cannot be cut
        return False
    if trial is None:
        return False
    # The placeholder of a part that feeds the blocks returns a tensor of the shape of their input.
    feeds = not feeding or feeding in trial.fitting
    return feeds and unseen == _holders(model, anatomy, num_stages, trial)


def is_parameter(model: nn.Module, name: str) -> bool:
    """Return whether a name is a parameter's rather than a module's."""
    parent, _, key = name.rpartition(".")
    return key in model.get_submodule(parent)._parameters


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_parameters_of_its_own(model: nn.Module, name: str) -> bool:
    return not is_parameter(model, name) and _has_params(model.get_submodule(name))


def _count(model: nn.Module, name: str) -> int:
    if is_parameter(model, name):
        return model.get_parameter(name).numel()
    return sum(param.numel() for param in model.get_submodule(name).parameters())


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
    `stages`. A trial run on fake tensors shows which parts run before and which after the blocks. If it is
    not possible (the data is of an unknown kind, or layers are tensor-parallel), the order of registration is
    used instead, and a stage for which it is wrong raises an error when it runs.

    Parameters keep their names. A parameter that belongs to a container of the blocks (a class token) is on
    every stage. See `tied_parameters` for parameters on several stages.

    Args:
        model: A module with a stack of blocks; it is changed and cannot be used afterwards.
        num_stages: The number of stages, over all ranks and chunks.
        stages: The stages of this rank, ascending.
        balance: "uniform" by the number of blocks; "parameters" by those of the blocks and, in the first and
            last stage, of the parts before and after them; or a weight for each block.
        stack: The name of the `nn.ModuleList` or `nn.Sequential` of blocks; by default the longest one.
        first: Names of parts to place on the first stage, regardless of the trial run.
        last: The same for the last stage.
        everywhere: The same for all stages.
        sample: Data for the trial run, as the loader gives it; its values do not matter.

    Returns:
        A `ModelStage`, or several as a `ChunkList`.

    Raises:
        ValueError: `model` has no stack of blocks, fewer blocks than stages, a part that runs between the
            blocks, or blocks that take more than the output of the one before; or an argument is wrong.
    """
    _check(model, num_stages, stages)
    wishes = {"first": first, "last": last, "everywhere": everywhere}
    cut = plan_cut(model, num_stages, balance=balance, stack=stack, wishes=wishes, sample=sample)
    ties = ties_of(model, cut)
    made: list[nn.Module] = [_stage(model, cut, index, ties) for index in stages]
    _free_other_parts(model, cut, set(stages))
    return as_model(made)


def _check(model: nn.Module, num_stages: int, stages: Sequence[int]) -> None:
    if not stages or list(stages) != sorted(set(stages)) or not 0 <= stages[0] <= stages[-1] < num_stages:
        raise ValueError(f"stages={list(stages)}: name stages from 0 to {num_stages - 1}, ascending")
    config = getattr(model, "config", None)
    for flag in ("output_hidden_states", "output_attentions"):
        if getattr(config, flag, False):
            raise ValueError(f"config.{flag} is set, but a stage sees only its own blocks: switch it off")


def _stage(model: nn.Module, cut: StageCut, index: int, ties: Sequence[Tie]) -> ModelStage:
    """Make a stage: copies of the containers, with the stage's parts, and placeholders for the others."""
    flow = StageFlow()
    anatomy = cut.anatomy
    own = anatomy.block_names[slice(*cut.blocks[index])]
    containers = {name: _shallow_copy(model.get_submodule(name)) for name in anatomy.containers}
    for name in anatomy.parts:
        if index not in cut.holders[name]:
            parent, _, key = name.rpartition(".")
            containers[parent]._modules[key] = _placeholder(model, cut, name, flow)
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


def _placeholder(model: nn.Module, cut: StageCut, name: str, flow: StageFlow) -> nn.Module:
    part = model.get_submodule(name)
    if 0 in cut.holders[name]:
        return FrontElsewhere(name, part, flow, feeds_blocks=name == cut.feeding)
    return BehindElsewhere(name, part, flow)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same sub-modules, which can be replaced in the copy."""
    copied = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        own = value.copy() if isinstance(value, dict | set) else value
        object.__setattr__(copied, name, own)
    return copied


def _free_other_parts(model: nn.Module, cut: StageCut, stages: set[int]) -> None:
    """Free the memory of all parts that none of these stages holds."""
    stack = cut.anatomy.stack
    parts = [f"{stack}.{key}" for key in cut.anatomy.block_names]
    parts += [name for name in cut.anatomy.parts if not is_parameter(model, name)]
    kept = [name for name in parts if not stages.isdisjoint(cut.stages_of(name))]
    held = {id(module) for name in kept for module in model.get_submodule(name).modules()}
    for name in set(parts) - set(kept):
        for module in model.get_submodule(name).modules():
            if id(module) not in held:  # a module can belong to two parts
                _free_memory(module)


def _free_memory(module: nn.Module) -> None:
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                held[name] = on_meta(tensor)  # type: ignore[assignment]
