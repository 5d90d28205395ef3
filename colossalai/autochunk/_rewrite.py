"""The graph with its regions replaced by loops over chunks."""

import operator
from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor, fx

from colossalai.autochunk._calls import input_nodes, is_cheap
from colossalai.autochunk._flow import Walk, follow
from colossalai.autochunk._loop import ChunkLoop, ChunkOutput
from colossalai.autochunk._profile import GraphProfile
from colossalai.autochunk._rules import ChunkCut, input_cuts, needs_length, sized_call
from colossalai.autochunk._search import RegionChoice


def loop_name(number: int) -> str:
    """Return the name of the module of a region."""
    return f"chunk_{number}"


class GraphRewriter:
    """Rewrites a graph with different regions.

    Args:
        graph: The traced graph.
        profile: Its profile.
        inplace: Whether outputs of regions take the memory of inputs.
    """

    def __init__(self, graph: fx.Graph, profile: GraphProfile, *, inplace: bool) -> None:
        self._traced = graph
        self._profile = profile
        self._inplace = inplace
        self._bodies: dict[Any, fx.GraphModule] = {}  # of repeated blocks, by identity
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}

    def rewrite(self, regions: Sequence[RegionChoice]) -> tuple[fx.Graph, dict[str, ChunkLoop]]:
        """Return a graph that runs the regions in loops, and the loops by the names of their modules.

        Args:
            regions: Disjoint regions, in order.
        """
        self._graph = fx.Graph()
        self._graph.set_codegen(copy(self._traced._codegen))
        self._new = {}
        loops: dict[str, ChunkLoop] = {}
        first = {each.first: each for each in regions}
        within = {position for each in regions for position in range(each.first, each.last + 1)}
        for node in self._traced.nodes:  # attributes first: a loop takes those of all its operations
            if node.op in ("placeholder", "get_attr"):
                self._copy(node)
        for position, node in enumerate(self._profile.nodes):
            if (region := first.get(position)) is not None:
                loops[loop_name(len(loops))] = self._add_loop(region, loop_name(len(loops)))
            elif position not in within:
                self._copy(node)
        self._copy(self._traced.output_node())
        return self._graph, loops

    def _copy(self, node: fx.Node) -> None:
        self._new[node] = self._graph.node_copy(node, self._new.__getitem__)

    def _add_loop(self, region: RegionChoice, name: str) -> ChunkLoop:
        """Add the operations of a region to the graph, and return the loop."""
        walk = follow(self._profile, region.first, region.last, region.choices)
        for position in sorted(walk.hoisted):  # their inputs are hoisted, too, or of before the region
            self._copy(self._profile.nodes[position])
        body = _Body(self._profile, walk)
        inputs = list(body.inputs)
        identity = None if region.key is None else (region.key, body.pattern)
        module = self._bodies.get(identity) if identity is not None else None
        if module is None:
            module = fx.GraphModule({}, body.graph())
            self._bodies[identity or name] = module
        positions = sorted(walk.outputs)
        outputs = [_output(self._profile.nodes[each].meta["val"], walk.outputs[each]) for each in positions]
        replaced = {}
        for output, position in walk.replaceable().items() if self._inplace else ():
            source = self._profile.nodes[position]
            replaced[positions.index(output)] = inputs.index((source, walk.outputs[output]))
        result = self._graph.call_module(name, tuple(self._new[source] for source, _ in inputs))
        for number, position in enumerate(positions):
            node = self._profile.nodes[position]
            self._new[node] = self._graph.create_node(
                "call_function", operator.getitem, (result, number), name=node.name
            )
            self._new[node].meta = {"nn_module_stack": node.meta.get("nn_module_stack")}
        return ChunkLoop(
            module,
            inputs=[cut for _, cut in inputs],
            outputs=outputs,
            extent=walk.extent,
            size=region.size,
            takes_length=body.takes_length,
            replaced=replaced,
            identity=identity and (identity, region.size, tuple(replaced.items())),
        )


class _Body:
    """The operations of one chunk.

    Args:
        profile: The profile of the graph.
        walk: The walk of the region.

    Attributes:
        inputs: The inputs and their cuts.
        takes_length: Whether the operations need the length of the chunk.
        pattern: Number of the input of each argument of an operation; None: the result of another one.
    """

    def __init__(self, profile: GraphProfile, walk: Walk) -> None:
        self._chunked = {profile.nodes[position]: cut for position, cut in sorted(walk.cuts.items())}
        self._outputs = [profile.nodes[position] for position in sorted(walk.outputs)]
        self._cheap = {node for node in self._chunked if is_cheap(node) and _is_final(profile, node)}
        self._parts: dict[fx.Node, Sequence[ChunkCut | None]] = {}
        numbers: dict[tuple[fx.Node, ChunkCut | None], int] = {}
        pattern: list[int | None] = []
        for node, cut in self._chunked.items():
            cuts = input_cuts(node, cut)
            assert cuts is not None
            self._parts[node] = cuts
            for key in zip(input_nodes(node), cuts, strict=True):
                is_input = key[0] not in self._chunked
                # A tensor can be an input twice: whole and cut, or with two cuts.
                pattern.append(numbers.setdefault(key, len(numbers)) if is_input else None)
        self.inputs = tuple(numbers)
        self.takes_length = any(map(needs_length, self._chunked))
        self.pattern = tuple(pattern)

    def graph(self) -> fx.Graph:
        """Return the graph of one chunk."""
        body = fx.Graph()
        taken: dict[tuple[fx.Node, ChunkCut | None], fx.Node] = {
            key: body.placeholder(f"in{number}_{key[0].name}") for number, key in enumerate(self.inputs)
        }
        length = body.placeholder("length") if self.takes_length else None
        new: dict[fx.Node, fx.Node] = {}
        merged: dict[str, fx.Node] = {}
        for node, cut in self._chunked.items():
            cuts = self._parts[node]
            order = iter(cuts)

            def mapped(source: fx.Node, order: Any = order) -> fx.Node:
                part = next(order)
                return new[source] if source in self._chunked else taken[source, part]

            args, kwargs = fx.node.map_arg((node.args, node.kwargs), mapped)
            target, args = sized_call(node, tuple(args), cut, cuts, length)
            key = f"{target} {args} {kwargs}" if node in self._cheap else node.name
            if key not in merged:  # see [Note: results that are computed again]
                merged[key] = body.create_node("call_function", target, args, kwargs, name=node.name)
            new[node] = merged[key]
        body.output(tuple(new[each] for each in self._outputs))
        return body


def _is_final(profile: GraphProfile, node: fx.Node) -> bool:
    """Return whether nothing writes into the result of an operation."""
    return not any(number in profile.writes for number in profile.of_node[profile.positions[node]])


def _output(whole: Tensor, cut: ChunkCut) -> ChunkOutput:
    """Return the description of an output; the loop's tensor has the strides' order of the traced one."""
    shape = tuple(map(int, whole.shape))
    dims = list(range(len(shape)))
    strides = whole.stride()
    if all(stride > 0 or extent == 1 for stride, extent in zip(strides, shape, strict=True)):
        dims.sort(key=lambda dim: -strides[dim])
    return ChunkOutput(cut, shape, tuple(dims))
