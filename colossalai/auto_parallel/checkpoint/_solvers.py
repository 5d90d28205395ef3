"""Checkpoint solvers with their documented names: from a graph with costs to a graph with recomputed blocks.

They select among the blocks of the user's own model. The returned graph only describes the selection, which
takes effect when the graph is assigned to the `graph` of the traced model.
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
    """Selects the fastest recomputation within some bytes: rotor's dynamic program (1911.13214).

    Args:
        graph: `gm.graph` after `metainfo_trace`.
        free_memory: Bytes for activations, both saved and temporary, and for the parameter copies counted by
            `optim_multiplier`. -1: the free memory of the model's device; on the CPU, the available host
            memory. Batch and parameters do not count; nor does a loss computed outside of the model.
        cnode: Names of tensors that several blocks take in addition to the hidden state: arguments of the
            forward (masks), or tensors of `graph.trace`. Tensors without a gradient are shared automatically,
            so no names are needed; given names are checked.
        memory_slots: Number of slots that memory is divided into. More slots find better answers in more
            time.
        optim_multiplier: Multiple of the bytes of the parameters that is subtracted from `free_memory` first:
            1 for gradients, 3 with the states of Adam; 0 if `free_memory` is for activations alone.

    Raises:
        ValueError: `graph` has no costs or no chain of blocks, a number is out of its range, or `cnode` has a
            name that is not a tensor, or a tensor with a gradient.
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
                f"free_memory={free_memory!r}: give bytes above 0, or -1 for the free memory of the device"
            )
        self.graph = graph
        self.free_memory = _free_bytes(graph.trace.device) if free_memory == _WHAT_IS_FREE else free_memory
        self.memory_slots = memory_slots
        self.optim_multiplier = optim_multiplier

    def solve(self) -> TracedGraph:
        """Return the graph with its recomputed segments.

        Raises:
            BudgetError: A `ValueError`: `free_memory` is less than any recomputation needs; the message has
                the least that works.
        """
        costs = self.graph.chained()
        taken = math.ceil(self.optim_multiplier * self.graph.param_bytes)
        room = math.floor(self.free_memory) - taken - costs.outside_bytes
        least = max(least_budget(costs.chain), costs.before_bytes)
        if room < least:
            needed = taken + costs.outside_bytes + least
            raise BudgetError(
                f"free_memory={self.free_memory:,.0f} is less than {self.graph.model} needs with any "
                f"recomputation: give at least {needed:,} bytes, of which {taken:,} are for "
                f"optim_multiplier={self.optim_multiplier:g}, or a smaller batch",
                needed,
            )
        return replace(self.graph, segments=solve_rotor(costs.chain, room, self.memory_slots))


class CheckpointSolverChen:
    """Recomputes segments that would keep about equal bytes, all but the last (Chen et al., 1604.06174).

    Args:
        graph: `gm.graph` after `metainfo_trace`.
        cnode: See `CheckpointSolverRotor`.
        num_segments: Number of segments, including the last one, which keeps all: with 1 nothing is
            recomputed. None: about the square root of the number of blocks.

    Raises:
        ValueError: `graph` has no costs or no chain of blocks, `num_segments` is below 1 or above the number
            of blocks, or `cnode` has a name that is not a tensor, or a tensor with a gradient.
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
        """Return the graph with its recomputed segments."""
        chain = self.graph.chained().chain
        blocks = replace(chain, blocks=chain.blocks[:-1])  # without the head
        return replace(self.graph, segments=solve_chen(blocks, num_segments=self.num_segments))


def _check_graph(graph: TracedGraph) -> None:
    """Check that a value is a traced graph.

    Raises:
        ValueError: `graph` has another type.
    """
    if not isinstance(graph, TracedGraph):
        raise ValueError(
            f"graph is a {type(graph).__name__}: give gm.graph of gm = metainfo_trace(symbolic_trace(model, "
            "meta_args=...), ...)"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_shared(graph: TracedGraph, names: Sequence[str] | None) -> None:
    """Check that the blocks can share some tensors.

    Raises:
        ValueError: `names` has a name that is not a tensor of the trace, or a tensor with a gradient.
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
                f"cnode names {name!r}, which is not a tensor of the trace of {graph.model}: use "
                f"{' or '.join(map(repr, near))}"
            )
        if name in graph.trace.trainable or carries_gradient(graph.trace, name):
            raise ValueError(
                f"cnode names {name!r}, which has a gradient: the bytes of a gradient that grows over all "
                "blocks are not counted, so only tensors without one (masks, positions) can be shared in "
                "addition to the hidden state"
            )


def _free_bytes(device: str) -> int:
    """Return the free bytes of a device; for host memory, the bytes available without swapping."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.accelerator.get_memory_info()
    return int(free)
