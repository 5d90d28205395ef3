"""Replicated data parallelism: torch's `DistributedDataParallel`, or only equal initial weights.

[Note: the order of the first sum]
The position of a gradient in its bucket decides in which order an all-reduce over three or more ranks adds it
up, and so its last bits. `DistributedDataParallel` rebuilds its buckets after its first backward, in the
order of that one's gradients. The first step of a job, and the first one after a checkpoint was loaded, would
then
add up in another order. So the reducer gets its first backward here: one from a zero that depends on every
parameter, the last one first, which is the order that torch, too, expects of a model. The model's own forward
is not run, nor are hooks that users have registered on parameters.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossalai.context import Axis
from colossalai.nn.parallel._arriving import ArrivingParams
from colossalai.nn.parallel._buckets import EarlierMeans, hooks_of_grad
from colossalai.nn.parallel._data_method import (
    AppliedDataMethod,
    DataMethod,
    NoSync,
    broadcast_from_first,
)
from colossalai.nn.parallel._unsynced import UnsyncedGrads
from colossalai.tensor import DDP_IGNORED, GradientSync, gradient_sync


@dataclass(frozen=True, kw_only=True)
class Replicated(DataMethod):
    """Every rank holds the whole model; gradients are averaged in buckets while the backward runs.

    The fields are those of `torch.nn.parallel.DistributedDataParallel`. With one replica the module stays
    bare. If parameters are cut over a part of the replicas (experts), there are nested wrappers, one for each
    set of ranks that share gradients. Gradients are added up in the same order in every step, so that a run
    resumed from a checkpoint has the same bits; not with `static_graph=True`, whose first two steps torch
    reduces in another order.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: int | None = None
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    in_pipeline: ClassVar[bool | None] = False

    @property
    def label(self) -> str:
        """See the base class."""
        return "DDP"

    def allows_float32_grads(self, replicas: Axis) -> bool:
        """See the base class: `DistributedDataParallel` reduces in the dtype of the parameters only."""
        return replicas.size == 1

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class."""
        syncs: dict[GradientSync, set[str]] = {}  # with the names of the tensors of each
        for name, tensor in _named_tensors(module):
            syncs.setdefault(gradient_sync(tensor, replicas), set()).add(name)
        trainable = {gradient_sync(each, replicas) for each in module.parameters() if each.requires_grad}
        if replicas.size == 1:
            return NoSync(module)
        # Only changed options are passed: torch warns of some of these names even at their default value.
        chosen = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if arriving.device.type != "cpu":
            chosen["device_ids"] = [arriving.device]
        wrappers: list[DistributedDataParallel] = []
        means = EarlierMeans(module.parameters(), replicas)
        for sync in sorted(trainable, key=lambda sync: sync.axis.size):  # that of most parameters outermost
            others = {name for other, names in syncs.items() if other != sync for name in names}
            inner = wrappers[-1] if wrappers else module
            wrapper = _wrap(inner, sync, {"module." * len(wrappers) + name for name in others}, chosen)
            if sync.axis.size != sync.divisor:
                wrapper.register_comm_hook(_DividedSum(sync, weakref.ref(means)), _average)
            # With find_unused_parameters torch never rebuilds the buckets. A static graph is recorded in the
            # first backward, which must be one of the model.
            if not self.find_unused_parameters and not self.static_graph:
                _settle_buckets(wrapper)
            wrappers.append(wrapper)
        return _Averaging(wrappers[-1] if wrappers else module, wrappers, replicas, means)


@final
class _Averaging(AppliedDataMethod):
    """A module whose backwards average its gradients if the forward before enabled it.

    Args:
        module: The module: the outermost of `wrappers`, if there are any.
        wrappers: Nested wrappers, the outermost last; each averages other parameters.
        replicas: The ranks that see different parts of the batch.
        means: Of all parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        wrappers: Sequence[DistributedDataParallel],
        replicas: Axis,
        means: EarlierMeans,
    ) -> None:
        super().__init__(module)
        self._wrappers = wrappers
        self._means = means
        taken = _params_of_reducers(wrappers)
        self._unsynced = UnsyncedGrads(
            taken,
            (param for param in module.parameters() if not param.requires_grad),
            replicas,
            means,
            are_all_used=not any(wrapper.find_unused_parameters for wrapper in wrappers),
        )
        for number, wrapper in enumerate(wrappers):
            wrapper.register_forward_pre_hook(partial(_expect, self._unsynced, number))

    def set_sync(self, enabled: bool, *, part: int | None = None) -> None:
        """See the base class."""
        self._unsynced.syncs = enabled
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = enabled


def _expect(grads: UnsyncedGrads, reducer: int, wrapper: nn.Module, *_: object) -> None:
    """Leave gradients to the reducer of a wrapper, under the condition on which its forward prepares it."""
    assert isinstance(wrapper, DistributedDataParallel)
    if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
        grads.expect(reducer)


def _params_of_reducers(wrappers: Sequence[DistributedDataParallel]) -> list[list[nn.Parameter]]:
    """Return the parameters that each wrapper averages.

    None of a static graph: there a parameter may have several gradients in a backward.
    """
    taken: dict[nn.Parameter, None] = {}
    found = []
    for wrapper in wrappers:
        ignored = wrapper.parameters_to_ignore
        own = [
            param
            for name, param in wrapper.module.named_parameters()
            if param.requires_grad and name not in ignored and param not in taken
        ]
        taken.update(dict.fromkeys(own))
        found.append([] if wrapper.static_graph else own)
    return found


@dataclass(frozen=True, kw_only=True)
class Unsynchronized(DataMethod):
    """Every rank holds the whole model; a gradient handler makes the gradients equal."""

    @property
    def label(self) -> str:
        """See the base class."""
        return "gradients left to handlers"

    def apply(
        self, module: nn.Module, *, blocks: list[nn.Module], replicas: Axis, arriving: ArrivingParams
    ) -> AppliedDataMethod:
        """See the base class."""
        broadcast_from_first(module, replicas)
        return NoSync(module)


class _Zero(nn.Module):
    """Zero as a function of the trainable parameters of a module; its backward reaches the last one first.

    Args:
        module: The module, which is not called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        lookups = [part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
        self._sparse = {part.weight for part in lookups if part.sparse}

    def forward(self, device: torch.device) -> torch.Tensor:
        """Return the zero, on a device."""
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        total = torch.zeros((), device=device)
        for param in self.module.parameters():
            if param.requires_grad:
                is_sparse = param in self._sparse
                none = nn.functional.embedding(nothing, param, sparse=True) if is_sparse else param[None][:0]
                total = total + none.sum().abs()  # a real number for a parameter of any dtype
        return total


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every name of every parameter and buffer."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _wrap(
    module: nn.Module, sync: GradientSync, ignored: Collection[str], options: Mapping[str, Any]
) -> DistributedDataParallel:
    """Return a module whose backward averages its gradients, but for parameters that are ignored by name."""
    if not ignored:
        return DistributedDataParallel(module, process_group=sync.axis.group, **options)
    own = getattr(module, DDP_IGNORED, None)  # the names that the user has set
    # Torch looks up a parameter of the module itself with a dot before its name.
    setattr(module, DDP_IGNORED, [*(own or ()), *ignored, *(f".{name}" for name in ignored)])
    try:
        wrapper = DistributedDataParallel(module, process_group=sync.axis.group, **options)
    finally:
        delattr(module, DDP_IGNORED)
        if own is not None:
            setattr(module, DDP_IGNORED, own)
    return wrapper


@dataclass(frozen=True)
class _DividedSum:
    """State of a communication hook of torch: how a bucket is summed, and which gradients are means."""

    sync: GradientSync
    means: "weakref.ref[EarlierMeans]"


def _average(state: _DividedSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket over ranks that are fewer than the parts of the batch, and divide by these."""
    means = state.means()
    assert means is not None, "the applied method holds them as long as its module runs"
    for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        means.scale(param, grad)
        means.note(param)
    flat = bucket.buffer().div_(state.sync.divisor)
    # Sum over the holders of the bucket; DDP waits for the future at the end of the backward.
    work = dist.all_reduce(flat, group=state.sync.axis.group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def _settle_buckets(applied: DistributedDataParallel) -> None:
    """Let the reducer see a backward before the first step; see [Note: the order of the first sum].

    Collective over the replicas: one all-reduce of the size of the gradients.
    """
    params = list(applied.parameters())
    grads = {param: param.grad for param in params}
    held = [hooks for param in params for hooks in hooks_of_grad(param)]
    users = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()  # those of the reducer are in the graph
    module, applied.module = applied.module, _Zero(applied.module)
    try:
        with torch.enable_grad():
            # The next forward, that of the first step, rebuilds the buckets in this order.
            applied(next(module.parameters()).device).backward()
    finally:
        applied.module = module
        for hooks, each in zip(held, users, strict=True):
            hooks.update(each)
    for param, grad in grads.items():
        param.grad = grad
