"""Live bytes of a graph, operation by operation, from a run on fake tensors.

A storage lives from the operation that makes it to the last operation that reads a tensor on it, as in the
code that `torch.fx` generates; those of the model's outputs live to the end. Parameters, buffers and
arguments do not count. Temporaries of an operation of several kernels count during the operation.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

from colossalai.autochunk._calls import can_be_view, changed_arguments, input_nodes
from colossalai.autochunk._loop import ChunkLoop

FLOPS_PER_SECOND = (
    5e10  # floating-point operations per second, of two cores; with the others, the order of costs
)
BYTES_PER_SECOND = 1e10  # bytes read or written per second
SECONDS_PER_CALL = 1e-5  # seconds of a call of an operation


@dataclass(frozen=True)
class LiveStorage:
    """Lifetime of a storage.

    Attributes:
        size: Bytes.
        first: Position of the operation that makes it.
        last: Position of the last operation that reads it; the number of operations for a model's output.
        node: The node of the operation that makes it.
    """

    size: int
    first: int
    last: int
    node: fx.Node


@dataclass(frozen=True)
class GraphProfile:
    """Memory and time of the operations of a graph.

    Attributes:
        nodes: The operations in the order in which they run: no placeholders, attributes, or outputs.
        storages: All storages that operations make.
        of_node: Indices of the storages of the result of each operation; without those of parameters.
        temporary: Bytes of each operation that are freed when it ends.
        seconds: Estimated time of each operation.
        writes: Positions of the operations that write into each storage, by its index.
        writes_outside: Whether an operation writes into an argument, parameter or buffer.
    """

    nodes: Sequence[fx.Node]
    storages: Sequence[LiveStorage]
    of_node: Sequence[tuple[int, ...]]
    temporary: Sequence[int]
    seconds: Sequence[float]
    writes: Mapping[int, Sequence[int]]
    writes_outside: bool

    @cached_property
    def positions(self) -> Mapping[fx.Node, int]:
        """Position of each operation."""
        return {node: position for position, node in enumerate(self.nodes)}

    @cached_property
    def layouts(self) -> Sequence[Any]:
        """Shape, strides, dtype and device of the result of each operation; None for other results."""
        values = [node.meta["val"] for node in self.nodes]
        return [_described(each) if isinstance(each, Tensor) else None for each in values]

    @cached_property
    def live(self) -> np.ndarray:
        """Live bytes during each operation."""
        change = np.zeros(len(self.nodes) + 2, dtype=np.int64)
        for each in self.storages:
            change[each.first] += each.size
            change[each.last + 1] -= each.size
        return np.cumsum(change)[: len(self.nodes)] + np.array(self.temporary, dtype=np.int64)

    @cached_property
    def before(self) -> np.ndarray:
        """Bytes that each operation finds: of storages made before it and read by it or later."""
        change = np.zeros(len(self.nodes) + 2, dtype=np.int64)
        for each in self.storages:
            change[each.first + 1] += each.size
            change[each.last + 1] -= each.size
        return np.cumsum(change)[: len(self.nodes)]

    @cached_property
    def own_writes(self) -> Mapping[int, int]:
        """Operations that can write into a chunk instead: their positions, and the storages' indices.

        Such an operation writes into its first argument only, on a storage that an operation has made, and no
        later one reads the storage but through its result. The operation that has made it makes a new tensor
        for a chunk, too, and not a view of an input.
        """
        aliases: defaultdict[int, list[int]] = defaultdict(list)
        for position, numbers in enumerate(self.of_node):
            for number in numbers:
                aliases[number].append(position)
        found = {}
        for number, positions in self.writes.items():
            if can_be_view(self.storages[number].node):
                continue
            for at in positions:
                before = [self.nodes[each] for each in aliases[number] if each < at]
                users = {self.positions.get(user, len(self.nodes)) for each in before for user in each.users}
                args = self.nodes[at].args
                is_first = bool(args) and args[0] in before
                if is_first and self.of_node[at] == (number,) and max(users) <= at:
                    found[at] = number
        return found

    @cached_property
    def copied_and_written(self) -> frozenset[int]:
        """Storages of which a copy is written into that, with other strides than in the trace, is a view."""
        found: set[int] = set()
        for position, node in enumerate(self.nodes):
            numbers = self.of_node[position]
            is_copy = can_be_view(node) and all(self.storages[each].first == position for each in numbers)
            if is_copy and any(each in self.writes for each in numbers):
                sources = [self.positions[each] for each in node.all_input_nodes if each in self.positions]
                found.update(number for source in sources for number in self.of_node[source])
        return frozenset(found)

    @property
    def peak(self) -> int:
        """Largest number of live bytes."""
        return int(self.live.max(initial=0))

    def largest_at(self, position: int) -> LiveStorage:
        """Return the largest storage that lives during an operation."""
        living = [each for each in self.storages if each.first <= position <= each.last]
        return max(living, key=lambda each: each.size)


@dataclass(frozen=True)
class _Call:
    """Figures of a call, the same for all calls with arguments of the same shapes, strides and dtypes.

    Attributes:
        result: Its result, of fake tensors.
        sources: For each tensor of the result, the number of the tensor of the arguments with the same
            storage, or -1 - n for the new storage n.
        sizes: Bytes of each new storage.
        temporary: Bytes that are freed when the call ends.
        seconds: Estimated time.
    """

    result: Any
    sources: tuple[int, ...]
    sizes: tuple[int, ...]
    temporary: int
    seconds: float


class GraphProfiler:
    """Profiles of the graphs of one model by runs on fake tensors, in which equal calls run once.

    Args:
        root: Module with the attributes of the graphs.
        inputs: Flat arguments of the graphs; tensors are replaced by fake ones.
    """

    def __init__(self, root: nn.Module, inputs: Sequence[Any]) -> None:
        self._root = root
        self._inputs = inputs
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._costs = _KernelCosts()
        self._calls: dict[Any, _Call] = {}

    def profile(self, graph: fx.Graph, loops: Mapping[str, ChunkLoop] | None = None) -> GraphProfile:
        """Return the profile of a graph; results are stored as `meta["val"]` of its nodes.

        Args:
            graph: The graph.
            loops: Its loops, by the name of their module.
        """
        nodes: list[fx.Node] = []
        calls: list[_Call] = []
        inputs = iter(self._inputs)
        with self._mode, torch.no_grad(), self._costs:
            for node in graph.nodes:
                if node.op == "placeholder":
                    node.meta["val"] = self._fake(next(inputs))
                elif node.op == "get_attr":
                    node.meta["val"] = self._fake(operator.attrgetter(str(node.target))(self._root))
                elif node.op != "output":
                    calls.append(self._call(node, loops or {}))
                    nodes.append(node)
                    node.meta["val"] = calls[-1].result
        return _profile_of(nodes, calls)

    def _fake(self, value: Any) -> Any:
        return tree_map_only(Tensor, self._mode.from_tensor, value)

    def _call(self, node: fx.Node, loops: Mapping[str, ChunkLoop]) -> _Call:
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        if node.op == "call_module":
            loop = loops[str(node.target)]
            identity = loop.identity and ("loop", loop.identity)
            # All further chunks need as much as the second one; the last one can need less.
            return self._cached(identity, args, kwargs, lambda: loop.run(args, most=2))
        if changed_arguments(node):  # a change of the shape must not change other calls' results
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            return self._run(node.target, args, kwargs)
        is_known = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        try:
            run: Any = node.target
            return self._cached(str(run) if is_known else None, args, kwargs, lambda: run(*args, **kwargs))
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise ValueError(
                f"the shape of {node.name} ({node.target}) depends on values, so its memory is unknown: "
                "chunk a part of the model without it"
            ) from error
        except NotImplementedError as error:
            raise ValueError(
                f"the memory of {node.name} ({node.target}) is unknown: chunk a part of the model without it"
            ) from error

    def _cached(self, identity: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> _Call:
        """Return the figures of a call; with an identity, of an earlier one with such arguments."""
        if identity is None:
            return self._run(run, (), {}, taken=(args, kwargs))
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        storages = [each.untyped_storage()._cdata for each in tensors]
        shared = tuple(storages.index(each) for each in storages)
        key = (identity, str(structure), tuple(map(_described, leaves)), shared)
        if (known := self._calls.get(key)) is not None:
            result = _own_result(known, tensors)
            if result is not None:
                return replace(known, result=result)
        self._calls[key] = self._run(run, (), {}, taken=(args, kwargs))
        return self._calls[key]

    def _run(self, function: Any, args: Any, kwargs: Any, *, taken: Any = None) -> _Call:
        """Run a call and return its figures; `taken` are its arguments if `function` has them."""
        self._costs.start()
        result = function(*args, **kwargs)
        places: dict[int, int] = {}
        for number, each in enumerate(_tensors(taken if taken is not None else (args, kwargs))):
            places.setdefault(each.untyped_storage()._cdata, number)
        sources: list[int] = []
        sizes: list[int] = []
        for each in _tensors(result):
            storage = each.untyped_storage()
            if storage._cdata not in places:
                places[storage._cdata] = -1 - len(sizes)
                sizes.append(storage.nbytes())
            sources.append(places[storage._cdata])
        temporary = max(0, self._costs.peak - sum(sizes))
        return _Call(result, tuple(sources), tuple(sizes), temporary, self._costs.seconds)


def _own_result(call: _Call, tensors: Sequence[Tensor]) -> Any:
    """Return the result of an equal call with other arguments, on storages of its own; None if unknown.

    Args:
        call: The first call.
        tensors: Tensors among the arguments of the other call.
    """
    leaves, structure = tree_flatten(call.result)
    if len(set(call.sources)) < len(call.sources):
        return None
    sources = iter(call.sources)
    for number, each in enumerate(leaves):
        if not isinstance(each, Tensor):
            continue
        if (source := next(sources)) >= 0:
            if _described(each) != _described(tensors[source]):
                return None  # views are computed
            leaves[number] = tensors[source].detach()
        elif each.storage_offset() or each.untyped_storage().nbytes() != each.nbytes:
            return None
        else:
            leaves[number] = torch.empty_strided(
                each.shape, each.stride(), dtype=each.dtype, device=each.device
            )
    return tree_unflatten(leaves, structure)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def _described(leaf: Any) -> Any:
    """Return the properties of an argument that the figures of a call depend on."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), repr(leaf)


def _profile_of(nodes: Sequence[fx.Node], calls: Sequence[_Call]) -> GraphProfile:
    """Return the profile of operations with known figures."""
    positions = {node: position for position, node in enumerate(nodes)}
    tensors: dict[fx.Node, list[int | None]] = {}  # storage of each tensor of a result; None: from outside
    made: list[tuple[int, int]] = []  # size and first position
    of_node: list[tuple[int, ...]] = []
    last: list[int] = []
    for position, (node, call) in enumerate(zip(nodes, calls, strict=True)):
        taken: list[int | None] = []
        for source in input_nodes(node):
            taken += tensors.get(source, [None] * len(_tensors(source.meta["val"])))
        new = range(len(made), len(made) + len(call.sizes))
        made += [(size, position) for size in call.sizes]
        last += [position] * len(new)
        own = [taken[number] if number >= 0 else new[-1 - number] for number in call.sources]
        tensors[node] = own
        of_node.append(tuple(dict.fromkeys(number for number in own if number is not None)))
        end = max((positions.get(user, len(nodes)) for user in node.users), default=position)
        for number in of_node[-1]:
            last[number] = max(last[number], end)
    storages = [
        LiveStorage(size, first, end, nodes[first]) for (size, first), end in zip(made, last, strict=True)
    ]
    writes: defaultdict[int, list[int]] = defaultdict(list)
    writes_outside = False
    for position, node in enumerate(nodes):
        for source in changed_arguments(node):
            numbers = of_node[positions[source]] if source in positions else ()
            writes_outside |= not numbers
            for number in numbers:
                writes[number].append(position)
    temporary = [each.temporary for each in calls]
    seconds = [each.seconds for each in calls]
    return GraphProfile(nodes, storages, of_node, temporary, seconds, writes, writes_outside)


class _KernelCosts(TorchDispatchMode):
    """Peak of live bytes and estimated time of the kernels since the last `start`.

    Attributes:
        peak: Most bytes of the storages that kernels have made.
        seconds: Estimated time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start()

    def start(self) -> None:
        """Start an operation."""
        self.peak = 0
        self.seconds = SECONDS_PER_CALL
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = {StorageWeakRef(each.untyped_storage()) for each in taken}
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        moved = 0
        for each in made:
            storage = each.untyped_storage()
            if (ref := StorageWeakRef(storage)) not in known:
                self._sizes[ref] = storage.nbytes()
                moved += storage.nbytes()
        if moved:  # views move nothing
            moved += sum(each.nbytes for each in taken)
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        flops = (
            flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
            if (getattr(func, "_overloadpacket", None) in flop_registry)
            else 0
        )
        self.seconds += max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
        return result
