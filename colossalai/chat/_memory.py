"""Memory of a run, estimated before its first step: the use of each model on a rank, and the free memory.

Parameters and master weights are allocated when models are boosted, like the copy of a rollout engine;
gradients and optimizer states in the first step, and on a CPU the cache of the engine with the first answers.
The pending part is compared with the free memory. The formulas are those of `colossalai memory --rlhf`, with
the actual element sizes and optimizer.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from colossalai.amp import OptimizerWrapper
from colossalai.booster import Booster
from colossalai.chat._course import Course
from colossalai.chat._heads import ValueModel
from colossalai.chat.rewards import ModelReward, Reward, parts_of
from colossalai.chat.rollout import RolloutEngine, config_of
from colossalai.communication import all_reduce_in_place
from colossalai.context import ParallelMode
from colossalai.logging import get_dist_logger
from colossalai.runtime import ModelWrapper
from colossalai.runtime.memory import (
    MemoryPlan,
    ParamNumbers,
    RlhfSetup,
    Storage,
    bytes_text,
    free_bytes,
    num_states,
    plans_of,
    rlhf_memory,
    rlhf_numbers,
    training_memory,
)

_STAGES: Mapping[str | None, Literal[0, 1, 2, 3]] = {"ZeRO 1": 1, "ZeRO 2": 2, "ZeRO 3": 3, "Gemini": 3}
_MOMENTS = 2  # for an unknown optimizer: those of Adam
_TO_COME = ("gradients", "gradients in float32", "optimizer states")
_LORA_RANK = 16  # of the proposed adapters


@dataclass(frozen=True, kw_only=True)
class MemoryNote:
    """Memory of a rank, in bytes.

    Attributes:
        models: By model and kind: parameters, gradients, master weights, optimizer states, keys and values.
        num_bytes: Total.
        to_come: Memory that is allocated in the first step.
        free: Memory that this rank can still allocate.
    """

    models: Mapping[str, Mapping[str, int]]
    num_bytes: int
    to_come: int
    free: int


def tell_memory(
    trained: Mapping[str, tuple[ModelWrapper, OptimizerWrapper]],
    *,
    booster: Booster,
    course: Course,
    reference: nn.Module | None = None,
    reward: Reward | None = None,
    engine: RolloutEngine | None = None,
) -> None:
    """Report the memory of a run's models on a rank, and warn if it is not enough; collective.

    With `course.log` rank 0 writes `memory.json`; with that or a progress bar it logs a line.

    Args:
        trained: Boosted models with their optimizers, by name.
        booster: Their parallel methods.
        course: The course, with the log folder.
        reference: A model that is not trained.
        reward: A model, or several, or functions, which are not counted.
        engine: The rollout engine.
    """
    fixed = dict(_fixed_models(reference, reward))
    note = note_memory(trained, fixed, booster=booster, engine=engine)
    worst = _worst_rank(note, booster)
    fits = worst.to_come <= worst.free
    # All ranks search for a plan, so that an error is raised on all of them. No collective follows.
    proposal = None if fits else _plan_that_fits(worst, trained, fixed, booster=booster, engine=engine)
    if booster.mesh.rank != 0:
        return
    if course.log is not None:
        Path(course.log).mkdir(parents=True, exist_ok=True)
        found = {
            "models": note.models,
            "bytes": worst.num_bytes,
            "bytes_to_come": worst.to_come,
            "bytes_free": worst.free,
            "fits": fits,
            "plan_that_fits": proposal,
        }
        Path(course.log, "memory.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    to_come, free = bytes_text(worst.to_come), bytes_text(worst.free)
    if course.log is not None or course.shows_progress:
        parts = ", ".join(f"{name} {bytes_text(sum(kinds.values()))}" for name, kinds in note.models.items())
        get_dist_logger().info(
            f"memory of a rank: {parts}; {to_come} of it to come, {free} are free",
            ranks=[0],
        )
    if not fits:
        help_text = (
            "by the same formulas none of the other plans does on so many ranks: take more ranks, a smaller "
            "batch of prompts, shorter answers or a smaller model"
            if proposal is None
            else f"{proposal} takes less, and fits"
        )
        get_dist_logger().warning(
            f"the first step will take {to_come} more on a rank, and {free} are free, activations aside: "
            f"{help_text}",
            ranks=[0],
        )


def note_memory(
    trained: Mapping[str, tuple[ModelWrapper, OptimizerWrapper]],
    fixed: Mapping[str, nn.Module],
    *,
    booster: Booster,
    engine: RolloutEngine | None,
) -> MemoryNote:
    """Return the memory of this rank, without communication.

    Args:
        trained: Boosted models with their optimizers.
        fixed: Models that are not trained.
        booster: The parallel methods.
        engine: The rollout engine.
    """
    models: dict[str, dict[str, int]] = {}
    to_come = 0
    for name, (model, optimizer) in trained.items():
        models[name] = kinds = _model_memory(model, optimizer, booster)
        is_there = min(_state_bytes(optimizer), kinds.get("optimizer states", 0))  # from an earlier fit
        to_come += sum(kinds.get(kind, 0) for kind in _TO_COME) - is_there
    plan = plan_here(booster)
    for name, other in fixed.items():
        cut = plan.dp if isinstance(other, ModelWrapper) and plan.zero == 3 else 1
        models[name] = {"frozen parameters": sum(param.nbytes for param in other.parameters()) // cut}
    if engine is not None:
        models["rollouts"] = {"keys and values": engine.cache_bytes, "frozen parameters": engine.copy_bytes}
        if booster.device.type == "cpu":  # pages are allocated at the first write
            to_come += engine.cache_bytes
    return MemoryNote(
        models=models,
        num_bytes=sum(sum(kinds.values()) for kinds in models.values()),
        to_come=to_come,
        free=free_bytes(booster.device),
    )


def plan_here(booster: Booster) -> MemoryPlan:
    """Return the plan of a booster in the form of the formulas."""
    plan, mesh = booster.plan, booster.mesh
    axes = mesh.batch_axes
    return MemoryPlan(
        name=plan.data.name_in_pairs or "DDP",
        plugin=type(booster.plugin).__name__,
        dp=mesh.axis_size(axes),
        zero=_STAGES.get(plan.data.name_in_pairs, 0),
    )


def _model_memory(model: ModelWrapper, optimizer: OptimizerWrapper, booster: Booster) -> dict[str, int]:
    """Return the memory of a model in training on a rank, by kind; its parameters may have several dtypes."""
    plan, found = plan_here(booster), dict[str, int]()
    if plan.zero == 0 and booster.plan.pipeline is not None:
        plan = replace(plan, dp=1)  # gradients are float32 from the start, as on one rank
    params = list(model.parameters())
    for dtype in {param.dtype for param in params}:
        own = [param for param in params if param.dtype == dtype]
        num_trained = sum(param.numel() for param in own if param.requires_grad)
        numbers = ParamNumbers(trained=num_trained, frozen=sum(param.numel() for param in own) - num_trained)
        storage = _storage(dtype, optimizer, has_masters=booster.plan.precision.has_masters)
        held = training_memory(numbers, storage, plan)
        for row in held.device:
            found[row.name] = found.get(row.name, 0) + row.num_bytes
    return found


def _storage(dtype: torch.dtype, optimizer: OptimizerWrapper, *, has_masters: bool) -> Storage:
    size = dtype.itemsize
    master = 4 if has_masters and size == 2 else 0
    return Storage(
        weight=size,
        grad=size,
        master=master,
        state=(master or size) * _num_moments(optimizer),
        element=size,
        residual=size,
    )


def _num_moments(optimizer: OptimizerWrapper) -> int:
    """Return the number of values that an optimizer keeps per parameter element."""
    inner = optimizer.optim
    states = num_states(inner)
    return _MOMENTS if states is None else max(states(group) for group in inner.param_groups)


def _state_bytes(optimizer: OptimizerWrapper) -> int:
    """Return the size of the existing optimizer states in bytes."""
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(
        (value.to_local() if hasattr(value, "to_local") else value).nbytes
        for value in tensors
        if isinstance(value, torch.Tensor) and value.dim()
    )


def _fixed_models(reference: nn.Module | None, reward: Reward | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the models that are not trained, each once."""
    if reference is not None:
        yield "reference", reference
    for name, part in {} if reward is None else parts_of(reward).items():
        model = part.model if isinstance(part, ModelReward) else part
        if isinstance(model, nn.Module):
            yield name, model


def _worst_rank(note: MemoryNote, booster: Booster) -> MemoryNote:
    """Return the numbers of the rank with the largest deficit, the same on all ranks; collective."""
    mesh = booster.mesh
    table = torch.zeros(mesh.world_size, 3, dtype=torch.float64)
    table[mesh.rank] = torch.tensor([note.num_bytes, note.to_come, note.free], dtype=torch.float64)
    known = table.to(booster.device)
    all_reduce_in_place(known, ParallelMode.GLOBAL)  # (rank, 3)
    num_bytes, to_come, free = min(known.tolist(), key=lambda row: row[2] - row[1])
    return replace(note, num_bytes=int(num_bytes), to_come=int(to_come), free=int(free))


def _plan_that_fits(
    worst: MemoryNote,
    trained: Mapping[str, tuple[ModelWrapper, OptimizerWrapper]],
    fixed: Mapping[str, nn.Module],
    *,
    booster: Booster,
    engine: RolloutEngine | None,
) -> str | None:
    """Return a plan for the same number of ranks that fits into memory; None if there is none."""
    limit = worst.num_bytes - worst.to_come + worst.free
    raw = {name: model.unwrap() for name, (model, _) in trained.items()}
    config = config_of(next(iter(raw.values())))
    kinds = ["critic" if isinstance(each, ValueModel) else "actor" for each in raw.values()]
    (model, optimizer), *_ = trained.values()
    dtype = next(model.parameters()).dtype
    setup = RlhfSetup(
        storage=_storage(dtype, optimizer, has_masters=booster.plan.precision.has_masters),
        models=tuple(kinds) if engine is None else (*kinds, "rollouts"),
    )
    beside = sum(sum(param.nbytes for param in each.parameters()) for each in fixed.values())
    if engine is not None:
        beside += engine.cache_bytes
    on_cpu = booster.device.type == "cpu"
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
    for lora_rank in (0, _LORA_RANK):
        for plan in plans_of(booster.mesh.world_size):
            if plan.offload and on_cpu:
                continue  # the device memory is the host memory
            try:
                numbers = rlhf_numbers(config, tp=plan.tp, lora_rank=lora_rank)
            except ValueError:  # the ranks cannot share the layers
                continue
            numbers = replace(numbers, cached_per_token=0)  # the actual cache is counted instead
            found = rlhf_memory(numbers, replace(setup, has_adapters=lora_rank > 0), plan)
            if found.num_bytes + beside <= limit:
                adapters = f" with adapters (LoRA) of rank {lora_rank}" if lora_rank else ""
                return plan.written(precision) + adapters
    return None
