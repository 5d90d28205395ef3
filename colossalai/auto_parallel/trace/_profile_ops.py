"""The profile of a model's operations: the costs of forward and backward, and the saved tensors.

The costs of a backward come from autograd itself, not from a table of rules. Each operation that differs from
all earlier ones (in target, arguments, shapes, dtypes or required gradients) is run once by itself on fake
tensors, forward and backward; its saved tensors, results and floating point operations are counted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from colossalai.auto_parallel.trace._trace import InputSlot, ModelTrace, Operation, TensorMeta
from colossalai.logging import get_dist_logger


@dataclass(frozen=True)
class MadeGradient:
    """The gradient of one input of an operation, as its backward makes it.

    Attributes:
        tensor: The input.
        num_bytes: Bytes of its storage; 0 if it shares the storage of another gradient.
        same_as: The tensor of the operation whose gradient has the same storage; "" if it has its own.
    """

    tensor: str
    num_bytes: int
    same_as: str = ""


@dataclass(frozen=True, kw_only=True)
class OpProfile:
    """Costs of one operation.

    Attributes:
        forward_flops: Floating point operations of its products, convolutions and attention; others count 0.
        backward_flops: The same for its backward.
        forward_bytes: Bytes that its kernels read and write.
        backward_bytes: The same for its backward.
        saved: Tensors of the trace whose storage autograd saves for the backward, by the name of the tensor
            that the storage was made for. This includes parameters and buffers, which take no extra memory.
        extra_saved_bytes: Saved bytes outside of the tensors of the trace: masks of dropout, log-sum-exp of
            attention, mean and deviation of a norm.
        forward_peak: Peak of live bytes while it runs, beyond its inputs and its results.
        backward_peak: Peak of live bytes while its backward runs, beyond its inputs and the gradients that
            it makes.
        gradients: The gradients that its backward makes; empty if it has no backward.
        differentiable: The outputs that require a gradient.
        is_assumed: Whether the operation could not be run by itself, so that its saved tensors are assumed;
            see `profile_operations`.
    """

    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    saved: tuple[str, ...]
    extra_saved_bytes: int
    forward_peak: int
    backward_peak: int
    gradients: tuple[MadeGradient, ...] = ()
    differentiable: tuple[str, ...] = ()
    is_assumed: bool = False


def profile_operations(trace: ModelTrace) -> Mapping[str, OpProfile]:
    """Profile the operations of a trace, by their names.

    An operation that cannot be run by itself is assumed to read its inputs and write its outputs once, to
    move twice as many bytes in its backward, and to save both; it is logged.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports sympy

    mode = FakeTensorMode()
    known: dict[str, _Measured] = {}
    needing = set(trace.trainable)
    profiles = {}
    for operation in trace.operations:
        metas = [trace.tensors[name] for name in operation.inputs]
        needs = [name in needing for name in operation.inputs]
        key = repr(
            (
                operation.target,
                operation.arguments,
                operation.is_grad_enabled,
                operation.autocast,
                metas,
                needs,
            )
        )
        if key not in known:
            try:
                known[key] = _measure(operation, metas, needs, mode=mode, device=trace.device)
            except Exception as error:
                known[key] = _assume(operation, trace, needs)
                get_dist_logger().log_once(
                    f"{operation.target} cannot be profiled by itself ({type(error).__name__}: {error}): it "
                    "is assumed to save its inputs and outputs"
                )
        profile = profiles[operation.name] = _named(known[key], operation, trace)
        needing.update(profile.differentiable)
        # A tensor written in place requires a gradient from here on, and so do all views of it.
        if profile.differentiable:
            needing.update(_changed(operation, trace))
    return profiles


def saved_bytes(trace: ModelTrace, profiles: Mapping[str, OpProfile], operations: Iterable[Operation]) -> int:
    """Return the bytes that a set of operations saves for its backward, each storage once.

    Storages from before the forward (parameters, buffers, arguments of the model) do not count.

    Args:
        trace: The trace.
        profiles: Profiles of its operations.
        operations: Some of its operations.
    """
    chosen = [profiles[each.name] for each in operations]
    storages = {name for profile in chosen for name in profile.saved} - trace.outside
    return sum(trace.tensors[name].num_bytes for name in storages) + sum(
        profile.extra_saved_bytes for profile in chosen
    )


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """An `OpProfile` whose tensors are numbers: inputs first, then outputs.

    Attributes:
        counts: The fields that are numbers, by name.
        saved: Numbers of tensors.
        gradients: For each input number, bytes and the number of the tensor of the same storage, or None.
        differentiable: Numbers of tensors.
        is_assumed: See `OpProfile`.
    """

    counts: Mapping[str, int]
    saved: tuple[int, ...]
    gradients: tuple[tuple[int, int, int | None], ...] = ()
    differentiable: tuple[int, ...] = ()
    is_assumed: bool = False


def _named(measured: _Measured, operation: Operation, trace: ModelTrace) -> OpProfile:
    names = (*operation.inputs, *operation.outputs)
    return OpProfile(
        **measured.counts,
        saved=tuple(dict.fromkeys(trace.storage_of(names[number]) for number in measured.saved)),
        gradients=tuple(
            MadeGradient(names[number], num_bytes, "" if same is None else names[same])
            for number, num_bytes, same in measured.gradients
        ),
        differentiable=tuple(names[number] for number in measured.differentiable),
        is_assumed=measured.is_assumed,
    )


def _changed(operation: Operation, trace: ModelTrace) -> list[str]:
    """Return all tensors on storages that an operation writes into in place."""
    schema = getattr(_function_of(operation.target), "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = {
        trace.storage_of(operation.inputs[slot.index])
        for each in schema.arguments
        if each.alias_info is not None
        and each.alias_info.is_write
        and isinstance(slot := operation.argument(each.name), InputSlot)
    }
    return [name for name in trace.tensors if trace.storage_of(name) in written]


def _function_of(target: str) -> Any:
    """Return the overload of a target. None if the target is not an overload."""
    names = target.split(".")
    if len(names) != 3:
        return None
    packet = getattr(getattr(torch.ops, names[0]), names[1], None)
    return getattr(packet, names[2], None)


def _assume(operation: Operation, trace: ModelTrace, needs: Sequence[bool]) -> _Measured:
    inputs = [trace.tensors[name] for name in operation.inputs]
    outputs = [trace.tensors[name] for name in operation.outputs]
    moved = sum(meta.num_bytes for meta in (*inputs, *outputs))
    has_backward = any(needs) and operation.is_grad_enabled
    floats = [number for number, meta in enumerate((*inputs, *outputs)) if meta.dtype.is_floating_point]
    return _Measured(
        counts={
            "forward_flops": 0,
            "backward_flops": 0,
            "forward_bytes": moved,
            "backward_bytes": 2 * moved if has_backward else 0,
            "extra_saved_bytes": 0,
            "forward_peak": 0,
            "backward_peak": 0,
        },
        saved=tuple(floats) if has_backward else (),
        gradients=tuple(
            (number, inputs[number].num_bytes, None)
            for number, need in enumerate(needs)
            if need and has_backward
        ),
        differentiable=tuple(each for each in floats if each >= len(inputs)) if has_backward else (),
        is_assumed=True,
    )


def _measure(
    operation: Operation, metas: Sequence[TensorMeta], needs: Sequence[bool], *, mode: Any, device: str
) -> _Measured:
    """Run an operation by itself on fake tensors, forward and backward."""
    function = _function_of(operation.target)
    if function is None:
        raise NotImplementedError("it is not an operation of torch.ops with a schema")
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.set_grad_enabled(operation.is_grad_enabled))
        leaves = [_fake(meta, need, device) for meta, need in zip(metas, needs, strict=True)]
        # Autograd does not allow in-place writes to a leaf.
        inputs = [leaf.clone() if need and function._schema.is_mutable else leaf
                  for leaf, need in zip(leaves, needs, strict=True)]  # fmt: skip
        args, kwargs = _call_of(operation, function, inputs)
        counter = _KernelCounter(outside=inputs)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast(device, operation.autocast, enabled=operation.autocast is not None,
                           cache_enabled=False),
            counter,
        ):  # fmt: skip
            result = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        del result
        tensors = [*inputs, *outputs]
        numbers = _storage_numbers(tensors)
        saved_numbers = dict.fromkeys(numbers[key] for each in saved if (key := _storage(each)) in numbers)
        extra = {key: each for each in saved if (key := _storage(each)) not in numbers}
        extra_bytes = sum(each.untyped_storage().nbytes() for each in extra.values())
        # Drop all other references to saved tensors, or they would count as live in the backward.
        saved.clear()
        extra.clear()
        forward = counter.reset()
        differentiable = tuple(
            number for number, each in enumerate(outputs, len(inputs)) if each.requires_grad
        )
        backward, gradients = _run_backward(counter, leaves, tensors, differentiable)
    return _Measured(
        counts={
            "forward_flops": forward.flops,
            "backward_flops": backward.flops,
            "forward_bytes": forward.num_bytes,
            "backward_bytes": backward.num_bytes,
            "extra_saved_bytes": extra_bytes,
            "forward_peak": max(0, forward.peak - forward.left),
            "backward_peak": max(0, backward.peak - sum(num_bytes for _, num_bytes, _ in gradients)),
        },
        saved=tuple(saved_numbers),
        gradients=tuple(gradients),
        differentiable=differentiable,
    )


def _run_backward(
    counter: "_KernelCounter",
    leaves: Sequence[Tensor],
    tensors: Sequence[Tensor],
    differentiable: Sequence[int],
) -> tuple["_Counts", list[tuple[int, int, int | None]]]:
    """Run a backward from some of the tensors to the leaves that require a gradient."""
    wanted = [number for number, leaf in enumerate(leaves) if leaf.requires_grad]
    if not differentiable or not wanted:
        return _Counts(), []
    given = [torch.empty_like(tensors[number]) for number in differentiable]
    counter.leave_out(given)
    with counter:
        made = torch.autograd.grad(
            [tensors[number] for number in differentiable],
            [leaves[number] for number in wanted],
            given,
            allow_unused=True,
        )
    # A backward can pass a gradient on unchanged, or return one storage for two inputs (an addition does
    # both).
    owners = {_storage(grad): number for number, grad in zip(differentiable, given, strict=True)}
    gradients = []
    for number, grad in zip(wanted, made, strict=True):
        if grad is not None:
            owner = owners.setdefault(_storage(grad), number)
            is_own = owner == number
            size = grad.untyped_storage().nbytes() if is_own else 0
            gradients.append((number, size, None if is_own else owner))
    return counter.reset(), gradients


def _fake(meta: TensorMeta, needs_grad: bool, device: str) -> Tensor:
    """Return a tensor of a given shape, on a new storage; call it under a fake mode."""
    if meta.stride is None:
        made = torch.empty(meta.shape, dtype=meta.dtype, device=device)
    else:
        made = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    return made.requires_grad_(needs_grad)


def _call_of(
    operation: Operation, function: Any, inputs: Sequence[Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with tensors in their places."""

    def filled(value: Any) -> Any:
        if isinstance(value, InputSlot):
            return inputs[value.index]
        return [filled(each) for each in value] if isinstance(value, tuple) else value

    given = dict(operation.arguments)
    args = []
    for each in function._schema.arguments:
        if each.kwarg_only or each.name not in given:
            break  # arguments behind an omitted one were passed by name
        args.append(filled(given.pop(each.name)))
    return args, {name: filled(value) for name, value in given.items()}


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_numbers(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return for the identity of each storage the number of the first tensor on it."""
    return {_storage(tensor): number for number, tensor in reversed(list(enumerate(tensors)))}


@dataclass(frozen=True)
class _Counts:
    """Counters of some kernels.

    Attributes:
        flops: Floating point operations of products, convolutions and attention.
        num_bytes: Bytes read and written.
        peak: Peak of live bytes, relative to the start.
        left: Live bytes at the end, relative to the start.
    """

    flops: int = 0
    num_bytes: int = 0
    peak: int = 0
    left: int = 0


_aten = torch.ops.aten
_FROM_A_TABLE = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather)
# Products of rows with the matrices of their experts: torch's own, which its backward calls as well, and the
# one of transformers, whose backward is two products.
_GROUPED_PRODUCTS = {
    "aten::_grouped_mm": 1,
    "transformers::grouped_mm_fallback": 1,
    "transformers::grouped_mm_fallback_backward": 2,
}
_UNWRITTEN = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


class _KernelCounter(TorchDispatchMode):
    """Counts the costs of the kernels that are called within its context.

    Args:
        outside: Tensors that do not count as live.
    """

    def __init__(self, *, outside: Iterable[Tensor]) -> None:
        super().__init__()
        self._outside: set[StorageWeakRef] = set()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._flops = self._num_bytes = self._peak = self._before = 0
        self.leave_out(outside)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors from the live bytes."""
        self._outside.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def reset(self) -> _Counts:
        """Return the counts since the last reset and start again."""
        live = self._live()
        counts = _Counts(self._flops, self._num_bytes, max(0, self._peak - self._before), live - self._before)
        self._flops = self._num_bytes = 0
        self._peak = self._before = live
        return counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not made:  # queries of the device of fake tensors, which are frequent
            return result
        self._flops += _flops_of(func, args, kwargs, result)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._num_bytes += _moved_bytes(func, taken, made)
        for tensor in made:
            storage = tensor.untyped_storage()
            if (ref := StorageWeakRef(storage)) not in self._outside:
                self._sizes[ref] = storage.nbytes()
        self._peak = max(self._peak, self._live())
        return result

    def _live(self) -> int:
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(self._sizes.values())


def _flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    packet = func._overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    # Torch counts the attention of accelerators only: two products in the forward; in the backward one of
    # them again, and four more.
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        query, key, value = args[:3]
        return 2 * _num_pairs(query, key) * (int(query.shape[-1]) + int(value.shape[-1]))
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        _, query, key, value = args[:4]
        return 2 * _num_pairs(query, key) * (3 * int(query.shape[-1]) + 2 * int(value.shape[-1]))
    if (times := _GROUPED_PRODUCTS.get(func._schema.name)) is not None:
        # (rows, features) with (experts, features, outputs), or for their gradient (features, rows) with
        # (rows, outputs): each row is multiplied by one expert.
        first, second = args[:2]
        return times * 2 * int(math.prod(first.shape[-2:])) * int(second.shape[-1])
    return 0


def _num_pairs(query: Tensor, key: Tensor) -> int:
    """Return the number of pairs of a query and a key, over batch and heads."""
    return math.prod(query.shape[:-1]) * key.shape[-2]


def _moved_bytes(func: Any, taken: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that a kernel reads and writes; a view moves none, and a lookup reads its result."""
    packet = func._overloadpacket
    storages = {_storage(tensor) for tensor in taken}
    is_view = bool(made) and all(_storage(tensor) in storages for tensor in made)
    if packet in _UNWRITTEN or (is_view and not func._schema.is_mutable):
        return 0
    written = sum(map(_num_bytes, made))
    if packet in _FROM_A_TABLE:
        return 2 * written + sum(map(_num_bytes, taken[1:]))
    return written + sum(map(_num_bytes, taken))


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for an expanded one, those of its memory."""
    return min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes())
