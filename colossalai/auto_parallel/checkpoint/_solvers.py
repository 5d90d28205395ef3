"""Checkpoint solvers by their documented names: a graph with costs in, one that recomputes blocks out.

They choose among the blocks of the user's own model. What they return says so and does nothing: it is carried
out where it is assigned to the `graph` of the traced model.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import replace

import psutil
import torch

from colossalai.auto_parallel._parts import carries_gradient
from colossalai.auto_parallel.checkpoint._chen import solve_chen
from colossalai.auto_parallel.checkpoint._graph import TracedGraph
from colossalai.auto_parallel.checkpoint._rotor import least_budget, solve_rotor
from colossalai.auto_parallel.solver._choice import BudgetError

_WHAT_IS_FREE = -1


class CheckpointSolverRotor:
    """Recomputes what takes the least time within some bytes: rotor's dynamic program (1911.13214).

    Args:
        graph: `gm.graph` behind `metainfo_trace`.
        free_memory: Bytes for activations, those that are kept and those that are there for a moment, and
            for what `optim_multiplier` says. -1: what the device of the model has free; on the CPU, what the
            host has. Batch and parameters do not count; nor does what is computed outside of the model, such
            as a loss that is not among its outputs.
        cnode: Names of tensors that several blocks take beside the hidden state: arguments of the forward
            (masks), or tensors of `graph.trace`. All that needs no gradient is shared by itself, so nothing
            has to be named here; what is named is checked.
        memory_slots: Into how many slots memory is divided; more of them find better answers in more time.
        optim_multiplier: How many times the bytes of the parameters are taken off `free_memory` before: 1 for
            gradients, 3 with the states of Adam; 0 where `free_memory` is for activations alone.

    Raises:
        ValueError: `graph` has no costs or no chain of blocks, a number is out of its range, or `cnode` names
            what is no tensor, or one with a gradient.
    """

    def __init__(
        self,
        graph: TracedGraph,
        free_memory: float = _WHAT_IS_FREE,
        cnode: Sequence[str] | None = None,
        memory_slots: int = 500,
        optim_multiplier: float = 1.0,
    ) -> None:
        _check_graph(graph)
        graph.chained()
        _check_shared(graph, cnode)
        if type(memory_slots) is not int or memory_slots < 1:
            raise ValueError(f"memory_slots={memory_slots!r}: give an integer of 1 or more (500 is usual)")
        if not (_is_number(optim_multiplier) and 0 <= optim_multiplier < math.inf):
            raise ValueError(f"optim_multiplier={optim_multiplier!r}: give a number of 0 or more")
        if not (_is_number(free_memory) and (free_memory == _WHAT_IS_FREE or 0 < free_memory < math.inf)):
            raise ValueError(
                f"free_memory={free_memory!r}: give bytes above 0, or -1 for what the device has free"
            )
        self.graph = graph
        self.free_memory = _free_bytes(graph.trace.device) if free_memory == _WHAT_IS_FREE else free_memory
        self.memory_slots = memory_slots
        self.optim_multiplier = optim_multiplier

    def solve(self) -> TracedGraph:
        """Return the graph with what is recomputed.

        Raises:
            BudgetError: A `ValueError`: `free_memory` is less than anything needs; it names the least that
                works.
        """
        costs = self.graph.chained()
        taken = math.ceil(self.optim_multiplier * self.graph.param_bytes)
        room = math.floor(self.free_memory) - taken - costs.outside_bytes
        least = max(least_budget(costs.chain), costs.before_bytes)
        if room < least:
            needed = taken + costs.outside_bytes + least
            raise BudgetError(
                f"free_memory={self.free_memory:,.0f} is below what {self.graph.model} needs whatever is "
                f"recomputed: give at least {needed:,} bytes, of which {taken:,} are for "
                f"optim_multiplier={self.optim_multiplier:g}, or a smaller batch",
                needed,
            )
        return replace(self.graph, segments=solve_rotor(costs.chain, room, self.memory_slots))


class CheckpointSolverChen:
    """Recomputes segments that keep about equally much, all but the last one (Chen et al., 1604.06174).

    Args:
        graph: `gm.graph` behind `metainfo_trace`.
        cnode: As of `CheckpointSolverRotor`.
        num_segments: How many segments, the last one included, which keeps all: with 1 nothing is recomputed.
            None: about the square root of the number of blocks.

    Raises:
        ValueError: `graph` has no costs or no chain of blocks, `num_segments` is below 1 or above the number
            of blocks, or `cnode` names what is no tensor, or one with a gradient.
    """

    def __init__(
        self, graph: TracedGraph, cnode: Sequence[str] | None = None, num_segments: int | None = None
    ) -> None:
        _check_graph(graph)
        graph.chained()
        _check_shared(graph, cnode)
        num_blocks = len(graph.blocks)
        if num_segments is not None and not (type(num_segments) is int and 1 <= num_segments <= num_blocks):
            raise ValueError(
                f"num_segments={num_segments!r}: {graph.model} has {num_blocks} blocks; give 1 to "
                f"{num_blocks}"
            )
        self.graph = graph
        self.num_segments = num_segments

    def solve(self) -> TracedGraph:
        """Return the graph with what is recomputed."""
        chain = self.graph.chained().chain
        blocks = replace(chain, blocks=chain.blocks[:-1])  # without the head
        return replace(self.graph, segments=solve_chen(blocks, num_segments=self.num_segments))


def _check_graph(graph: TracedGraph) -> None:
    """Refuse what is not a graph.

    Raises:
        ValueError: `graph` is something else.
    """
    if not isinstance(graph, TracedGraph):
        raise ValueError(
            f"graph is a {type(graph).__name__}: give gm.graph of gm = metainfo_trace(symbolic_trace(model, "
            "meta_args=...), ...)"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_shared(graph: TracedGraph, names: Sequence[str] | None) -> None:
    """Refuse what the blocks cannot share.

    Raises:
        ValueError: `names` has no tensor of the trace, or one with a gradient.
    """
    if isinstance(names, str):
        raise ValueError(f"cnode={names!r}: give a list of names, [{names!r}]")
    if names is not None and not (
        isinstance(names, Sequence) and all(isinstance(each, str) for each in names)
    ):
        raise ValueError(f"cnode={names!r}: give a list of names")
    tensors = graph.trace.tensors
    for name in names or ():
        if name not in tensors:
            near = difflib.get_close_matches(name, tensors, n=3) or list(graph.trace.inputs)
            raise ValueError(
                f"cnode names {name!r}, which is no tensor of the trace of {graph.model}: use "
                f"{' or '.join(map(repr, near))}"
            )
        if name in graph.trace.trainable or carries_gradient(graph.trace, name):
            raise ValueError(
                f"cnode names {name!r}, which has a gradient: the bytes of a gradient that grows over all "
                "blocks are not counted, so only what has none (masks, positions) can be shared beside the "
                "hidden state"
            )


def _free_bytes(device: str) -> int:
    """Return what a device has free; in host memory, what processes could still take without swapping."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.accelerator.get_memory_info()
    return int(free)
