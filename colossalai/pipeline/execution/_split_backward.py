"""The backward of a stage in two parts: the gradient of its input, then the gradients of its parameters.

Only the first part is on the critical path of the stage before (zero-bubble schedules, 2401.10241). Together
the two parts do the work of a plain backward, once.

[Note: two parts of a backward]
A node of the autograd graph is *inner* if the stage's input can be reached from it. The first part runs the
inner nodes, and the engine skips gradients that only parameters need: a linear layer computes the gradient of
its input and skips its weight's. The edges from an inner node to nodes that are not inner are its
*branches*; they end in parameters. The gradient that arrived at the node is kept, and the second part runs
the node again with it, for its branches only. There are four special cases:

- A branch that two nodes share (a tied bias) would be reached twice, the second time through the inner nodes
  below. Its gradient is captured in the first part, where the engine sums it.
- A branch can start in the middle of another one (a tied weight, once plain and once behind its transpose).
  A gradient captured there would contain the gradient from the other branch. Then all the parameters at the
  ends of such branches get their gradients in the first part.
- A node further down a branch can be shared (a weight behind two transposes). Then the gradients of the
  branches are collected, and one backward from all of them ends the second part: the engine sums.
- A Python function computes all its gradients whenever it runs, and may communicate; a node whose saved
  tensors are recomputed (activation checkpointing) would recompute them again. Both run in the first part
  only, and their branches are captured there.

Only the second part writes to `.grad` of parameters. If a captured parameter has a gradient hook of the
user, which would run at the capture and again at the end, the second part is a whole backward instead.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


@dataclass
class _DeferredNode:
    """An inner node whose branches are left to the second part."""

    node: Node
    branches: list[GradientEdge]
    leaves: list[torch.Tensor] | None  # the parameters at the ends, if no other path leads to them
    arrived: Gradients = ()

    def keep(self, arrived: Gradients) -> None:
        """Keep the gradients that arrive at the node; its hook in the first part."""
        self.arrived = arrived

    def arriving(self) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return the edges at which gradients arrived at the node, and the gradients."""
        found = [
            (GradientEdge(self.node, i), grad) for i, grad in enumerate(self.arrived) if grad is not None
        ]
        return [edge for edge, _ in found], [grad for _, grad in found]


@dataclass
class PendingBackward:
    """The remaining part of a backward; made by `input_grads`.

    Attributes:
        edges: The edges from which the gradients of parameters continue.
        grads: The gradients there; None if none arrived.
        late: Nodes to run for their branches.
        leaves: The parameters that get gradients; None: all that can be reached.
        owners: Edges that keep the graph alive: a node of a Python function lives only as long as its graph.
    """

    edges: list[GradientEdge] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)
    late: list[_DeferredNode] = field(default_factory=list)
    leaves: list[torch.Tensor] | None = None
    owners: list[GradientEdge] = field(default_factory=list)

    def weight_grads(self) -> None:
        """Add the gradients of the parameters to their `.grad`, and free the graph; call it once."""
        edges, grads = list(self.edges), list(self.grads)
        while self.late:
            late = self.late.pop()
            outputs, arrived = late.arriving()
            if not outputs:
                continue
            if late.leaves is not None:
                torch.autograd.backward(outputs, arrived, inputs=late.leaves)
            else:
                edges += late.branches
                grads += torch.autograd.grad(outputs, late.branches, arrived, allow_unused=True)
        alive = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if grad is not None]
        self.edges, self.grads, self.owners = [], [], []
        if alive:
            torch.autograd.backward(
                [edge for edge, _ in alive], [grad for _, grad in alive], inputs=self.leaves
            )


def input_grads(
    outputs: Sequence[torch.Tensor | GradientEdge],
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[Gradients, PendingBackward]:
    """Compute the gradients of the inputs; leave those of the parameters for later.

    Args:
        outputs: The outputs of the stage; a gradient edge replaces a tensor that need not be kept.
        grads: Their gradients.
        inputs: The leaves whose gradients are computed now; without leaves, everything is left for later.

    Returns:
        The gradients of the inputs (None where an input was not used), and the rest of the backward.
    """
    edges = [output if isinstance(output, GradientEdge) else get_gradient_edge(output) for output in outputs]
    if not inputs:
        return (), PendingBackward(edges, [*grads])
    graph = _Graph([edge.node for edge in edges], [get_gradient_edge(leaf).node for leaf in inputs])
    early, late = graph.cut()
    if any(_has_hooks(edge.node) for edge in early):  # the hook would see a captured gradient twice
        found = torch.autograd.grad(edges, inputs, grads, retain_graph=True, allow_unused=True)
        return found, PendingBackward(edges, [*grads], leaves=graph.parameters())
    inner = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge.node in graph.inner]
    outer = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge.node not in graph.inner]
    if not inner:
        return (None,) * len(inputs), PendingBackward(edges, [*grads])
    handles = [part.node.register_prehook(part.keep) for part in late]
    found = torch.autograd.grad(
        [edge for edge, _ in inner],
        [*map(get_gradient_edge, inputs), *early],
        [grad for _, grad in inner],
        retain_graph=bool(late),
        allow_unused=True,
    )
    for handle in handles:
        handle.remove()
    pending = PendingBackward(
        [*early, *(edge for edge, _ in outer)],
        [*found[len(inputs) :], *(grad for _, grad in outer)],
        late,
        owners=edges,
    )
    return found[: len(inputs)], pending


class _Graph:
    """The autograd graph of a stage."""

    def __init__(self, roots: Sequence[Node], targets: Sequence[Node]) -> None:
        self.roots = set(roots)
        self.order: list[Node] = []  # children before parents
        self.parents: defaultdict[Node, set[Node]] = defaultdict(set)
        self._visit(roots)
        self.inner = set(targets)
        for node in self.order:
            if any(child in self.inner for child, _ in node.next_functions):
                self.inner.add(node)

    def cut(self) -> tuple[list[GradientEdge], list[_DeferredNode]]:
        """Return the branches to capture in the first part, and the nodes left to the second.

        See [Note: two parts of a backward].
        """
        early: dict[GradientEdge, None] = dict.fromkeys(self._shared_leaves())
        tangled = {edge.node for edge in early}
        late = []
        for node in self.order:
            if node not in self.inner:
                continue
            branches = self._branches(node)
            if tangled:
                branches = [edge for edge in branches if not tangled & self._leaves_below(edge.node)]
            if _runs_once(node):
                early |= dict.fromkeys(branches)
                continue
            early |= {edge: None for edge in branches if len(self.parents[edge.node]) > 1}
            if own := [edge for edge in branches if edge not in early]:
                late.append(_DeferredNode(node, own, self._private_leaves(own)))
        return list(early), late

    def parameters(self) -> list[torch.Tensor]:
        """Return the leaves that are not inputs."""
        leaves = (_leaf_of(node) for node in self.order if node not in self.inner)
        return [leaf for leaf in leaves if leaf is not None]

    def _branches(self, node: Node) -> list[GradientEdge]:
        edges = (GradientEdge(child, index) for child, index in node.next_functions if child is not None)
        return list(dict.fromkeys(edge for edge in edges if edge.node not in self.inner))

    def _shared_leaves(self) -> list[GradientEdge]:
        """Return the leaves of branches that start inside other branches, and of all that share a leaf."""
        starts = {edge.node for node in self.inner for edge in self._branches(node)}
        found: set[Node] = set()
        for start in starts:
            if not self.parents[start] <= self.inner:
                found |= self._leaves_below(start)
        below = [self._leaves_below(start) for start in starts] if found else []
        while more := [leaves for leaves in below if leaves & found and not leaves <= found]:
            found |= set().union(*more)
        return [GradientEdge(node, 0) for node in self.order if node in found]

    def _leaves_below(self, node: Node) -> set[Node]:
        seen, stack = {node}, [node]
        while stack:
            children = {child for child, _ in stack.pop().next_functions if child is not None} - seen
            seen |= children
            stack += children
        return {node for node in seen if _leaf_of(node) is not None}

    def _private_leaves(self, branches: Sequence[GradientEdge]) -> list[torch.Tensor] | None:
        """Return the parameters at the ends of branches; None if another path leads to a part of them."""
        leaves, stack = [], [edge.node for edge in branches]
        while stack:
            node = stack.pop()
            if len(self.parents[node]) > 1 or node in self.roots:
                return None
            if (leaf := _leaf_of(node)) is not None:
                leaves.append(leaf)
            stack += [child for child, _ in node.next_functions if child is not None]
        return leaves

    def _visit(self, roots: Sequence[Node]) -> None:
        seen: set[Node] = set()
        stack = [(root, False) for root in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self.order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                for child, _ in node.next_functions:
                    if child is not None:
                        self.parents[child].add(node)
                        stack.append((child, False))


def _runs_once(node: Node) -> bool:
    """Return whether a node must not run again: it is a Python function, or would recompute."""
    if isinstance(node, BackwardCFunction):
        return True
    for name in _saved_names(type(node)):
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, tuple) else (saved,):
            hook = getattr(tensor, "unpack_hook", None)
            if hook is not None and hook.__module__ == torch.utils.checkpoint.__name__:
                return True
    return False


@cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _leaf_of(node: Node) -> torch.Tensor | None:
    """Return the tensor that a node accumulates into; None for other nodes."""
    return getattr(node, "variable", None)


def _has_hooks(node: Node) -> bool:
    """Return whether the user has registered a hook on the gradient of a leaf."""
    leaf = _leaf_of(node)
    return leaf is not None and bool(leaf._backward_hooks)
