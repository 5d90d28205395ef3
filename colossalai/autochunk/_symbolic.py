"""Graphs for lengths that change: a trace with symbolic lengths, and its graph for the lengths of one call.

[Note: lengths]
`torch.export` traces once with symbols for the lengths, and finds conditions under which its operations are
those of the model. Regions, chunk sizes and peaks depend on lengths, so nothing is planned with symbols: for
the lengths of a call, each symbol is replaced by its number, which gives the graph that a trace with these
lengths would have.

`torch.export` assumes that a symbol is 2 or more, and decides a comparison of it with 0 or 1 without a
condition, so these lengths are refused. It does not see a model that reads the type or the text of a length,
as `isinstance(length, int)`: the graph for the lengths of the example is compared with a static trace.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from colossalai.autochunk._calls import argument

MIN_LENGTH = 2  # see [Note: lengths]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_STATIC = (None, Dim.STATIC)
_LAST = 2**63 - 1  # end of a slice to the end

TensorDims = Mapping[int, Any]
"""`torch.export`'s description of each dimension of a tensor that changes."""


def dynamic_dims(arguments: Mapping[str, Any], dynamic_shapes: Any) -> list[TensorDims]:
    """Return the dimensions that change of each leaf of arguments, in the order of leaves.

    Args:
        arguments: Arguments by name.
        dynamic_shapes: The same structure as the arguments, as `torch.export` takes it, with a mapping from
            dimensions, or a sequence, for each tensor. Arguments can be left out of a mapping.

    Raises:
        ValueError: `dynamic_shapes` does not fit `arguments`, or has no length that changes.
    """
    if isinstance(dynamic_shapes, list | tuple):
        if len(dynamic_shapes) > len(arguments):
            raise ValueError(
                f"dynamic_shapes has {len(dynamic_shapes)} elements; the model takes {', '.join(arguments)}"
            )
        dynamic_shapes = dict(zip(arguments, dynamic_shapes, strict=False))
    found = list(_dims_of_leaves(dict(arguments), dynamic_shapes, "dynamic_shapes"))
    if not any(found):
        raise ValueError(
            f"dynamic_shapes={dynamic_shapes!r:.200} has no length that changes: give one as in "
            f'{{"{next(iter(arguments))}": {{1: torch.export.Dim("length", max=1024)}}}}'
        )
    return found


def _dims_of_leaves(value: Any, dims: Any, name: str) -> Iterator[TensorDims]:
    """Yield the dimensions that change of each leaf of a value.

    Raises:
        ValueError: `dims` does not fit `value`.
    """
    if isinstance(value, Tensor):
        yield _tensor_dims(value, dims, name)
    elif isinstance(value, dict):
        entries = {} if dims is None else dims
        if not isinstance(entries, Mapping) or not entries.keys() <= value.keys():
            raise ValueError(
                f"{name} is {dims!r:.80}; it must be a mapping from {', '.join(map(str, value))}"
            )
        for key, each in value.items():
            yield from _dims_of_leaves(each, entries.get(key), f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        entries = [None] * len(value) if dims is None else dims
        if not isinstance(entries, list | tuple) or len(entries) != len(value):
            raise ValueError(f"{name} is {dims!r:.80}; it must be a sequence of {len(value)} elements")
        for number, each in enumerate(value):
            yield from _dims_of_leaves(each, entries[number], f"{name}[{number}]")
    elif dims:
        raise ValueError(
            f"{name} is {dims!r:.80}, but that argument is of type {type(value).__name__}: lengths are those "
            "of tensors, also in lists, tuples and dicts"
        )
    else:
        yield from [{}] * len(tree_leaves(value))


def _tensor_dims(tensor: Tensor, dims: Any, name: str) -> TensorDims:
    """Return the dimensions of a tensor that change.

    Raises:
        ValueError: `dims` does not fit `tensor`.
    """
    if isinstance(dims, list | tuple):
        dims = dict(enumerate(dims))
    entries = {} if dims is None else dims
    if not isinstance(entries, Mapping) or not all(
        type(dim) is int and 0 <= dim < tensor.dim() for dim in entries
    ):
        raise ValueError(
            f"{name} is {dims!r:.80}; it must be a mapping from dimensions of a tensor of shape "
            f"{tuple(tensor.shape)} to torch.export.Dim"
        )
    for dim, each in entries.items():
        if type(each) is int and each != tensor.shape[dim]:
            raise ValueError(f"{name}[{dim}] is {each}, but the example has {tensor.shape[dim]} there")
    return {dim: each for dim, each in entries.items() if type(each) is not int and each not in _STATIC}


@dataclass(frozen=True)
class DynamicLength:
    """A length of an argument that changes.

    Attributes:
        leaf: Number of the argument among the leaves.
        path: Its path.
        dim: Dimension of the tensor.
        name: Name of the length.
        expression: The length, of symbols.
    """

    leaf: int
    path: str
    dim: int
    name: str
    expression: Any


@dataclass(frozen=True)
class SymbolicGraph:
    """A graph with symbolic lengths, see [Note: lengths].

    Attributes:
        graph: The graph.
        static: Graph of a trace without symbols, for the lengths of the example.
        lengths: Lengths of the arguments.
        ranges: Smallest and largest value of each symbol of the lengths.
        sizes: Value of each operation that reads the size of a tensor, of symbols.
        extents: Extent of the dimension that each slice is along, of symbols.
        scalars: Operations whose results are numbers, or nothing.
        guards: Function of the arguments that raises an AssertionError if their lengths do not fulfil the
            conditions. None: there are none.
    """

    graph: fx.Graph
    static: fx.Graph
    lengths: Sequence[DynamicLength]
    ranges: Mapping[Any, tuple[float, float]]
    sizes: Mapping[fx.Node, Any]
    extents: Mapping[fx.Node, Any]
    scalars: frozenset[fx.Node]
    guards: Callable[..., Any] | None

    @classmethod
    def of(
        cls,
        module: fx.GraphModule,
        static: fx.Graph,
        ranges: Mapping[Any, Any],
        dims: Mapping[str, TensorDims],
    ) -> "SymbolicGraph":
        """Return the symbolic graph of an exported module, which is used up.

        Args:
            module: The module, with guards.
            static: See the class.
            ranges: Range of each symbol.
            dims: Dimensions that change, by the path of the leaf of the arguments.
        """
        guards = _without_guards(module)
        lengths = _lengths(module.graph, dims)
        symbols = {symbol for each in lengths for symbol in each.expression.free_symbols}
        results = {node: node.meta.get("val") for node in module.graph.nodes if node.op == "call_function"}
        scalars = {
            node
            for node, value in results.items()
            if isinstance(value, _SYMBOLIC) or (not isinstance(value, Tensor) and _reads(node, _SYMBOLIC))
        }
        sizes = {
            node: results[node].node.expr
            for node in scalars
            if isinstance(results[node], torch.SymInt) and _reads(node, Tensor)
        }
        slices = [node for node in results if node.target is torch.ops.aten.slice.Tensor]
        extents = {node: _extent(node) for node in slices}
        for node in module.graph.nodes:
            node.meta.pop("val", None)
        return cls(
            graph=module.graph,
            static=static,
            lengths=lengths,
            ranges={symbol: _range(ranges[symbol]) for symbol in symbols if symbol in ranges},
            sizes=sizes,
            extents=extents,
            scalars=frozenset(scalars),
            guards=guards,
        )

    def __deepcopy__(self, memo: Any) -> "SymbolicGraph":
        return self  # nothing changes it, and copies of a model can share it

    @property
    def names(self) -> dict[str, dict[int, str]]:
        """Names of the lengths, by path and dimension."""
        found: dict[str, dict[int, str]] = {each.path: {} for each in self.lengths}
        for each in self.lengths:
            found[each.path][each.dim] = each.name
        return found

    def at(self, leaves: Sequence[Any]) -> fx.Graph:
        """Return the graph for the lengths of arguments.

        Raises:
            ValueError: The model has other operations at these lengths.
        """
        values = self._symbol_values(leaves)
        if self.guards is not None:
            try:
                self.guards(*leaves)
            except AssertionError as error:
                condition = str(error).removeprefix("Guard failed: ").replace(".size()", ".shape")
                raise ValueError(
                    f"this model was chunked for {condition}, and has other operations for "
                    f"{self._shown(leaves)}: call autochunk with arguments of such lengths"
                ) from error
        graph = fx.Graph()
        graph.set_codegen(copy(self.graph._codegen))
        new: dict[fx.Node, Any] = {}
        # Operations that read sizes have symbols, and the arithmetic of these. Both become numbers, and the
        # rest is copied. `new` maps a node of the trace to its copy, or to its number.
        for node in self.graph.nodes:
            expression = self.sizes.get(node)
            if expression is not None and expression.free_symbols <= values.keys():
                new[node] = int(expression.subs(values))
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
            if node in self.scalars and not any(
                isinstance(new[each], fx.Node) for each in node.all_input_nodes
            ):
                new[node] = node.target(*args, **kwargs)  # of numbers alone
            elif node in self.extents and _is_whole(args, self._extent_at(node, values)):
                new[node] = args[0]  # as in a static trace
            else:
                new[node] = graph.node_copy(node, new.__getitem__)
        return graph

    def _extent_at(self, node: fx.Node, values: Mapping[Any, int]) -> Any:
        extent = self.extents[node]
        return extent if isinstance(extent, int) else extent.subs(values)

    def _symbol_values(self, leaves: Sequence[Any]) -> dict[Any, int]:
        """Return the value of each symbol.

        Raises:
            ValueError: A length is out of its range, or does not fit the others.
        """
        values: dict[Any, int] = {}
        names: dict[Any, str] = {}
        # Symbols first, since with `Dim.AUTO` a length can be a product or sum of others.
        for length in sorted(self.lengths, key=lambda each: not each.expression.is_Symbol):
            value = int(leaves[length.leaf].shape[length.dim])
            unknown = length.expression.free_symbols - values.keys()
            # The first length with a symbol gives its value, by the inverse of a linear function of it, as
            # `torch.export` has them; further lengths are compared.
            for symbol in unknown:
                names[symbol] = length.name
                known = length.expression.subs(values)
                offset = known.subs(symbol, 0)
                factor = known.subs(symbol, 1) - offset
                values[symbol] = int((value - offset) // factor) if factor.is_Integer and factor else value
            expected = length.expression.subs(values)
            if unknown and expected != value:
                raise ValueError(
                    f"{length.name} is {value}, which is not possible in the trace; {expected} is"
                )
            if expected != value:
                related = ", ".join(sorted(names[each] for each in length.expression.free_symbols))
                raise ValueError(f"{length.name} is {value}, but must be {expected}, as {related} requires")
        for symbol, (least, most) in self.ranges.items():
            if not least <= values[symbol] <= most:
                most_text = "" if most == math.inf else f" and at most {most}"
                raise ValueError(
                    f"{names[symbol]} is {values[symbol]}; this model was chunked for at least "
                    f"{least}{most_text}"
                )
        return values

    def _shown(self, leaves: Sequence[Any]) -> str:
        found = {each.name: leaves[each.leaf].shape[each.dim] for each in self.lengths}
        return ", ".join(f"{name} = {value}" for name, value in found.items())


def first_difference(graph: fx.Graph, other: fx.Graph) -> str | None:
    """Return a description of the first operations in which two graphs differ; None: they are equal."""
    for one, two in zip_longest(_operations(graph), _operations(other), fillvalue="the end"):
        if one != two:
            return f"{one} and {two}"
    is_equal = _output_structure(graph) == _output_structure(other)
    return None if is_equal else "the structure of the result"


def _operations(graph: fx.Graph) -> Iterator[str]:
    """Yield a description of each operation, with the numbers of the operations that it reads."""
    names: dict[fx.Node, str] = {}
    numbers = count()
    for node in graph.nodes:
        is_slice = node.target is torch.ops.aten.slice.Tensor
        is_whole = is_slice and "val" in node.args[0].meta and _is_whole(node.args, _extent(node))
        if is_whole or node.target is torch.ops.aten.alias.default:
            names[node] = names[node.all_input_nodes[0]]
            continue
        names[node] = str(node.target) if node.op == "get_attr" else f"%{next(numbers)}"
        if node.op != "get_attr":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            if is_slice:
                args = (args[0], argument(node, 1, "dim", 0), *_slice_bounds(args))
            arguments = [*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())]
            yield f"{'' if node.op == 'placeholder' else node.target}({', '.join(arguments)})"


def _output_structure(graph: fx.Graph) -> str:
    return str(getattr(getattr(graph._codegen, "pytree_info", None), "out_spec", None))


def _without_guards(module: fx.GraphModule) -> Callable[..., Any] | None:
    """Remove the call that checks the conditions, and return its function."""
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target == "_guards_fn":
            guards = module.get_submodule("_guards_fn")
            module.graph.erase_node(node)
            return guards
    return None


def _lengths(graph: fx.Graph, dims: Mapping[str, TensorDims]) -> tuple[DynamicLength, ...]:
    """Return the lengths of the placeholders of a graph."""
    found = []
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for leaf, (node, (path, of_tensor)) in enumerate(zip(inputs, dims.items(), strict=True)):
        for dim, length in enumerate(node.meta["val"].shape if of_tensor else ()):
            if isinstance(length, torch.SymInt) and length.node.expr.free_symbols:
                name = getattr(of_tensor.get(dim), "__name__", f"{name_of(path)}.shape[{dim}]")
                found.append(DynamicLength(leaf, path, dim, name, length.node.expr))
    return tuple(found)


def name_of(path: str) -> str:
    """Return the name of a leaf with a path, for messages."""
    return path.replace("'", "").strip("[]").replace("][", ".")


def _range(bounds: Any) -> tuple[float, float]:
    most = int(bounds.upper) if bounds.upper.is_Integer else math.inf
    return max(MIN_LENGTH, int(bounds.lower)), most


def _reads(node: fx.Node, kind: Any) -> bool:
    """Return whether an operation has an argument of a type."""
    return any(isinstance(each.meta.get("val"), kind) for each in node.all_input_nodes)


def _extent(node: fx.Node) -> Any:
    """Return the extent of the dimension that a slice is along."""
    source: Any = node.args[0]
    size = source.meta["val"].shape[argument(node, 1, "dim", 0)]
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _is_whole(args: Sequence[Any], extent: Any) -> bool:
    """Return whether a slice has all elements."""
    start, end, step = _slice_bounds(args)
    return (start, step) == (0, 1) and isinstance(end, int) and end >= extent


def _slice_bounds(args: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return start, end and step of a slice with the defaults of a static trace."""
    given = dict(zip(("dim", "start", "end", "step"), args[1:], strict=False))
    start, end = given.get("start"), given.get("end")
    return 0 if start is None else start, _LAST if end is None else end, given.get("step", 1)
