"""Activation checkpointing of parts of a model: its blocks, or named modules."""

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from colossalai.cluster import gather_values
from colossalai.context import Axis
from colossalai.pipeline import ChunkList, PartOfStack
from colossalai.runtime.recomputation._segments import RecomputeHandle, Segments, run_in_segments
from colossalai.shardformer import follow_batches_once


def apply_recompute(
    module: nn.Module, select: bool | str | Sequence[str] | Segments, *, stages: Axis | None = None
) -> nn.Module:
    """Checkpoint parts of a module permanently, in place; names of parameters do not change.

    Args:
        module: The module.
        select: True for its blocks (see `find_blocks`), or names of sub-modules, or one name; or segments of
            neighbouring blocks that are recomputed together (see `_segments.py`).
        stages: The ranks of the pipeline, if the module is a stage; all call this: a name can be another
            stage's part, and blocks are the parts that any stage has several of.

    Raises:
        ValueError: `select` has a name that is not a sub-module, or of a sub-module that is never called, or
            the module has no blocks; or a segment has a block twice, or blocks of several stages.
    """
    if select:
        _recompute(module, select, stages)
    return module


def removable_recompute(module: nn.Module, segments: Segments) -> RecomputeHandle:
    """Checkpoint blocks of a module in segments, as `apply_recompute` does, until `remove()`.

    Batch norms count a batch once, as in a model from `assemble`.

    Args:
        module: The whole module.
        segments: The blocks.

    Raises:
        ValueError: `segments` has a name that is not a sub-module, or of a sub-module that is never called.
    """
    handle = _recompute(module, segments, None)
    for undo in follow_batches_once(module):
        handle.behind(undo)
    return handle


def _recompute(
    module: nn.Module, select: bool | str | Sequence[str] | Segments, stages: Axis | None
) -> RecomputeHandle:
    handle = RecomputeHandle()
    if isinstance(select, Segments):
        _apply_segments(module, select, stages, handle)
    else:
        names = [select] if isinstance(select, str) else select
        chosen = (
            _blocks(module, stages)
            if isinstance(names, bool)
            else _named_parts(module, list(names), stages).values()
        )
        for part in chosen:
            handle.checkpoint_forward(part)
    for model in _caching_models(module):
        handle.behind(model.register_forward_pre_hook(_without_cache, with_kwargs=True).remove)
    return handle


def _apply_segments(
    module: nn.Module, chosen: Segments, stages: Axis | None, handle: RecomputeHandle
) -> None:
    here = _named_parts(module, [name for names in chosen.names_by_segment for name in names], stages)
    split = {
        f"the segment from {names[0]!r} to {names[-1]!r}"
        for names in chosen.names_by_segment
        if 0 < sum(name in here for name in names) < len(names)
    }
    for found in _gather_findings(split, stages):
        if found:
            raise ValueError(
                f"{min(found)} has blocks of several stages of the pipeline, which do not run as one: let it "
                "end where a stage ends"
            )
    run_in_segments(chosen, here, module, handle)


def _caching_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models whose forward can cache keys and values, such as those of transformers.

    A block that is recomputed would find those of its first run, and append its own.
    """
    if "use_cache" in inspect.signature(module.forward).parameters:
        return [module]
    return [found for child in module.children() for found in _caching_models(child)]


def _without_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Disable the cache in training, unless the caller enables it; a hook before the forward."""
    return args, {"use_cache": False, **kwargs} if module.training else kwargs


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the repeated parts of a model: members of its outermost stacks that are of one class.

    In a stack with other members (an embedding, a head), members without sub-modules, such as linear layers,
    are not blocks.
    """
    members = list(dict.fromkeys(module.children()))
    if isinstance(module, PartOfStack):
        return members
    repeated = _repeated_members(members) if _is_stack(module) else set()
    return [
        block for member in members for block in ([member] if member in repeated else find_blocks(member))
    ]


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(module, ChunkList)


def _repeated_members(members: Sequence[nn.Module]) -> set[nn.Module]:
    counts = Counter(type(member) for member in members if _has_params(member))
    are_alike = len({type(member) for member in members}) == 1
    return {
        member
        for member in members
        if counts[type(member)] > 1 and (are_alike or next(member.children(), None) is not None)
    }


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _blocks(module: nn.Module, stages: Axis | None) -> list[nn.Module]:
    chosen = find_blocks(module)
    # A stage can hold only one block, without a repeated class.
    kinds = {kind for found in _gather_findings({_kind(block) for block in chosen}, stages) for kind in found}
    if not kinds:
        raise ValueError(
            "recompute=True finds no stack of blocks (nn.ModuleList or nn.Sequential): name sub-modules"
        )
    return chosen or _outermost(module, kinds)


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _outermost(module: nn.Module, kinds: set[str]) -> list[nn.Module]:
    """Return the outermost modules of some classes."""
    if _kind(module) in kinds:
        return [module]
    return [found for child in module.children() for found in _outermost(child, kinds)]


def _named_parts(module: nn.Module, names: list[str], stages: Axis | None) -> dict[str, nn.Module]:
    known = dict(module.named_modules(remove_duplicate=False))
    absent = _gather_findings({name for name in names if not name or name not in known}, stages)
    for name in names:
        if all(name in others for others in absent):
            of_what = " of any stage" if stages is not None else ""
            raise ValueError(
                f"recompute names {name!r}, which is not a sub-module{of_what}; there are "
                f"{[each for each in known if each][:20]}"
            )
    present = [name for name in names if name not in absent[0 if stages is None else stages.rank]]
    for name in present:
        _refuse_uncalled(name, known[name])
    return {name: known[name] for name in present}


def _refuse_uncalled(name: str, part: nn.Module) -> None:
    if type(part).forward is nn.Module.forward:
        raise ValueError(
            f"recompute names {name!r}, a {type(part).__name__}, which is never called itself: name modules "
            f"in it, such as {[f'{name}.{each}' for each, _ in part.named_children()][:3]}, or pass True for "
            "all blocks of the model"
        )


def _gather_findings(found: set[str], stages: Axis | None) -> list[set[str]]:
    """Return the findings of every stage."""
    if stages is None:
        return [found]
    return gather_values(found, stages.group)
