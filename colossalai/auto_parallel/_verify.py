"""Verification of a plan: the counted live bytes of a step on the real ranks.

[Note: the step of a verification]
A copy of the model is trained for two steps of the plan; the second one has optimizer states and is counted.
Tensors without values (on the meta device, lazy) get random ones. Arguments are those that the plan was made
for, if they have values; otherwise random numbers, and 0 for integers, which is an index of any table. The
loss is the model's own, if it returns a scalar, or the cross entropy of all floating outputs, which takes as
much memory as losses usually do. The ranks need as much memory as the plan takes, in addition to the user's
model.

[Note: live bytes on a rank]
On a CPU, these are the storages that are alive after each operation. Memory that a kernel allocates and frees
within one operation is not counted there. An accelerator's allocator includes it, and counted 15 % more on an
H200 (workspaces of products and of attention). So on accelerators the larger of both counts is used; torch's
statistics of the peak are reset.

[Note: errors of one rank]
The copy communicates through its own groups. A rank that fails destroys them, so that the collectives of the
other ranks fail instead of blocking. Then all ranks meet in the job's group, and raise the earliest error.
"""

import copy
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from colossalai.auto_parallel._plan import AutoPlan
from colossalai.auto_parallel.trace._trace import ModelTrace
from colossalai.cluster import gather_values
from colossalai.context import Mesh, get_current_device, make_group, random_state, set_random_state
from colossalai.lazy import is_lazy
from colossalai.runtime import Plan, TrainingStep, assemble

_MOST_REPEATS = 3
_STD = 0.02  # of random parameters


class LiveByteCounter(TorchDispatchMode):
    """Tracks the live storages of the inputs and outputs of all operations in the block.

    A storage counts with its current size (FSDP resizes those of gathered parameters to zero), and a DTensor
    with its local part. Memory that a kernel allocates and frees within one operation is not counted.

    Args:
        outside: Tensors whose memory is not counted, even as inputs of operations.

    Attributes:
        peak: The most bytes that were alive after an operation.
    """

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak: int = 0
        self._refs: set[StorageWeakRef] = set()
        self._outside = {StorageWeakRef(each.untyped_storage()) for each in _with_memory(list(outside))}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and update the peak."""
        result = func(*args, **(kwargs or {}))
        # Inputs count, too: no operation creates the buckets in shared memory.
        for tensor in _with_memory((args, kwargs, result)):
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref not in self._outside:
                self._refs.add(ref)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Return the bytes that are alive now."""
        self._refs = {ref for ref in self._refs if not ref.expired()}
        storages = map(torch.UntypedStorage._new_with_weak_ptr, (ref.cdata for ref in self._refs))
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _with_memory(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value that have memory; for a DTensor and other wrappers, their components."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _with_memory([getattr(leaf, name) for name in names])
        elif isinstance(leaf, Tensor) and leaf.device.type != "meta":
            yield leaf


def verified_plan(
    make: Callable[[float], AutoPlan],
    model: nn.Module,
    meta_args: Mapping[str, Any],
    *,
    memory_budget: float | None,
) -> AutoPlan:
    """Return a plan whose counted peak is within the budget; collective over the job.

    Args:
        make: Returns the plan for a factor of predicted sizes, the same on all ranks.
        model: The model.
        meta_args: The arguments of its forward.
        memory_budget: Bytes of a rank. None: no limit.

    Raises:
        ValueError: `make` finds no plan, `model` cannot be run by itself, or no plan was found whose counted
            peak is within `memory_budget`.
    """
    scale = 1.0
    counted: list[float] = []
    for _ in range(1 + _MOST_REPEATS):
        try:
            plan = make(scale)
        except ValueError:
            if not counted:
                raise
            break  # no plan is predicted to fit any more
        peak = counted_peak(plan, model, meta_args)
        if memory_budget is None or peak <= memory_budget:
            return replace(plan, counted_bytes=peak)
        counted.append(peak)
        # The bytes of the plan are already scaled.
        scale *= peak / plan.peak_bytes
    assert memory_budget is not None, "without one the first plan is returned"
    least = math.ceil(min(counted))
    raise ValueError(
        f"no plan was found that keeps {memory_budget:,.0f} bytes a rank: {len(counted)} were run for a "
        f"step, and the smallest budget that works is {least:,}, the counted peak of the least of them"
    )


def refuse_unrunnable(trace: ModelTrace) -> None:
    """Refuse a model without an output that a loss can be computed from.

    Raises:
        ValueError: `trace` has no floating output.
    """
    if not any(trace.tensors[name].dtype.is_floating_point for name in trace.outputs):
        raise ValueError(
            "the model returns no floating tensor, so that it cannot be trained for a step by itself: pass "
            "verify=False to make_plan"
        )


def counted_peak(plan: AutoPlan, model: nn.Module, meta_args: Mapping[str, Any]) -> float:
    """Return the counted peak of the rank that needs most in a step of a plan; collective over the job.

    The model and all random states stay unchanged. See [Note: the step of a verification].

    Raises:
        ValueError: The copy of `model` cannot be run on some rank; raised on all ranks.
    """
    lowered = plan.runtime_plan()
    assert lowered.layout is not None, "a produced plan says its layout"
    everybody = range(dist.get_world_size())
    before = random_state()
    device = get_current_device()
    groups = _groups()
    mesh = Mesh(
        lowered.layout.over(len(everybody)).axes(),
        rank=dist.get_rank(),
        device_type=device.type,
        views={"dp": ("edp", "ep")},
    )
    # See [Note: errors of one rank]: by default the mesh would use the job's own group for all ranks.
    mesh.adopt_group(tuple(everybody), make_group(tuple(everybody), purpose="verification"))
    peak, failed_at, reason = 0.0, math.inf, ""
    try:
        peak = float(_count(plan, lowered, model, meta_args, mesh=mesh, device=device))
    except Exception as error:
        failed_at, reason = time.time(), f"{type(error).__name__}: {error}"
    finally:
        mesh.forget_groups()
        gc.collect()  # the traceback refers to buffers and parameters: free them, too
        for group in set(_groups()) - set(groups):
            dist.destroy_process_group(group)
        set_random_state(before)
    found = gather_values([peak, failed_at, reason])
    _, failed_at, reason = min(found, key=lambda each: each[1])
    if failed_at < math.inf:
        raise ValueError(
            f"a step of {plan.model} cannot be run to verify the plan ({reason}): pass verify=False to "
            "make_plan, or arguments with values"
        )
    return max(float(each[0]) for each in found)


def _groups() -> list[dist.ProcessGroup]:
    """Return the existing process groups."""
    return list(dist.distributed_c10d._world.pg_map)


def _count(
    plan: AutoPlan,
    lowered: Plan,
    model: nn.Module,
    meta_args: Mapping[str, Any],
    *,
    mesh: Mesh,
    device: torch.device,
) -> int:
    """Return the counted peak of this rank; see [Note: live bytes on a rank]."""
    has_allocator = device.type != "cpu"
    if device.type == "cuda":  # earlier products leave workspaces that the plan needs, too: 67 MB on an H200
        torch._C._cuda_clearCublasWorkspaces()
    held_before = torch.accelerator.memory_allocated(device) if has_allocator else 0
    # Copying reads the user's model, whose memory is not part of the plan.
    with LiveByteCounter(outside=(*model.parameters(), *model.buffers())) as memory:
        twin = _copy_with_values(model)
        optimizer = _make_optimizer(plan.optimizer, twin, is_sharded=plan.setting.zero == 3)
        wrapped, updated = assemble(lowered, twin, optimizer, mesh=mesh, device=device)
        assert updated is not None, "one was given"
        del twin, optimizer
        step = TrainingStep(wrapped, updated)
        part = slice(mesh.axis_rank("dp"), None, mesh.axis_size("dp"))
        given = {name: _argument(value, part, device) for name, value in meta_args.items()}
        for is_last in (False, True):
            step.zero_grad()
            gc.collect()
            if is_last:
                memory.peak = 0
                if has_allocator:
                    torch.accelerator.reset_peak_memory_stats(device)
            if lowered.pipeline is not None:
                step.run_pipeline(given, None, _loss_of)
            else:
                step.backward(_loss_of(step.forward(**given)))
            step.step()
        allocated = torch.accelerator.max_memory_allocated(device) - held_before if has_allocator else 0
        return max(int(memory.peak), allocated)


def _copy_with_values(model: nn.Module) -> nn.Module:
    """Return a copy of a model with random values for tensors without values; tied ones stay tied."""
    known: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta or is_lazy(tensor):
            made: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
            if tensor.is_floating_point():
                made.normal_(std=_STD)
            is_param = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_param else made
    return copy.deepcopy(model, known)


def _make_optimizer(name: str, model: nn.Module, *, is_sharded: bool) -> torch.optim.Optimizer:
    """Return the optimizer of the given name in a plan."""
    params = [param for param in model.parameters() if param.requires_grad]
    if name in ("adam", "adamw"):
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return kind(params, lr=1e-6, fused=True)
    # torch does not support fused SGD for DTensors.
    return torch.optim.SGD(
        params, lr=1e-6, momentum=0.9 if name == "momentum" else 0.0, fused=not is_sharded or None
    )


def _argument(value: Any, part: slice, device: torch.device) -> Any:
    """Return a rank's part of an argument, with values."""
    if not isinstance(value, Tensor):
        return value
    own = value[part] if value.dim() else value
    if not own.is_meta:
        return own.detach().to(device)
    made = torch.zeros(own.shape, dtype=own.dtype, device=device)
    if own.is_floating_point():
        return made.normal_()
    return made.fill_(True) if own.dtype == torch.bool else made


def _loss_of(output: Any) -> Tensor:
    """Return the model's own loss, or the cross entropy of its floating outputs with class 0."""
    found = [
        each
        for each in tree_leaves(output)
        if isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad
    ]
    if not found:
        raise ValueError("no floating output depends on a trainable parameter, so there is no loss")
    own = [each for each in found if each.numel() == 1]
    if own:
        return own[0].sum()
    losses = []
    for each in found:
        scores = each.flatten(0, -2) if each.dim() > 1 else each[None]  # (positions, classes)
        labels = torch.zeros(len(scores), dtype=torch.long, device=each.device)
        losses.append(nn.functional.cross_entropy(scores, labels))
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]
