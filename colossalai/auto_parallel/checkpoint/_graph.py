"""Traced graph: the operations of a model as a value, what its blocks take, and which of them are recomputed.

A graph describes a model and does not run. It is given to a solver, which returns another one.

[Note: the peak of a traced model]
From the first operation to the last there is what is kept outside of the blocks. On top of that come the
blocks as a chain (see [Note: live bytes of a chain]). What is behind them, the head and a loss, is the last
block of that chain, one that is in no segment: its backward begins when everything has been kept that will
be. A backward before the blocks, an embedding's say, comes when nothing of them is left.

What this leaves out is known for a model of which nothing is recomputed: the difference to the walk over all
its operations (`trace/_live_bytes.py`). It is added whatever is recomputed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from colossalai.auto_parallel._costs import OperationCosts
from colossalai.auto_parallel._inner import CutGraph, InnerProblem
from colossalai.auto_parallel._make import machine_of
from colossalai.auto_parallel._parts import parts_of_model
from colossalai.auto_parallel._setting import ParameterCosts, Setting
from colossalai.auto_parallel.checkpoint._chain import Chain, ChainBlock, simulate
from colossalai.auto_parallel.cuts._find import find_strategies
from colossalai.auto_parallel.machine._machine import MachineProfile
from colossalai.auto_parallel.prediction._prediction import Predictor
from colossalai.auto_parallel.trace._live_bytes import live_bytes
from colossalai.auto_parallel.trace._profile_ops import profile_operations
from colossalai.auto_parallel.trace._trace import ModelTrace, trace_model
from colossalai.runtime import RecomputeSegment, Segments

_HEAD = "what is behind the blocks"


@dataclass(frozen=True, kw_only=True)
class GraphCosts:
    """What a forward and a backward of a model take on one device; see [Note: the peak of a traced model].

    Attributes:
        chain: The blocks in order, and behind them the head.
        outside_s: Seconds outside of the chain.
        outside_bytes: Live all the time besides the chain.
        before_bytes: Live besides `outside_bytes` in the backward of what is before the blocks.
    """

    chain: Chain
    outside_s: float
    outside_bytes: int
    before_bytes: int

    def peak_bytes(self, segments: Sequence[RecomputeSegment] = ()) -> int:
        """Return the most bytes of activations that are live at once, kept and for a moment."""
        return self.outside_bytes + max(simulate(self.chain, segments).peak_bytes, self.before_bytes)

    def seconds(self, segments: Sequence[RecomputeSegment] = ()) -> float:
        """Return the seconds of forward and backward, those that are repeated included."""
        return self.outside_s + simulate(self.chain, segments).seconds


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """The operations of a model, and which of its blocks are recomputed; `assign` it to `gm.graph`.

    Attributes:
        model: The name of the model's class.
        trace: The operations of its forward.
        blocks: Full names of its blocks in the order in which they run; segments count in it. Empty where
            there are none, or where the trace has not been profiled.
        costs: What they take; None where they are no chain, or where the trace has not been profiled.
        is_profiled: Whether `metainfo_trace` has been there.
        segments: What is recomputed.
    """

    model: str
    trace: ModelTrace
    blocks: tuple[str, ...] = ()
    costs: GraphCosts | None = None
    is_profiled: bool = False
    segments: tuple[RecomputeSegment, ...] = ()

    @property
    def digest(self) -> str:
        """A sha256 of the trace, the same in every process; graphs of one trace have the same."""
        return self.trace.digest

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Full names of the blocks that are recomputed, in order."""
        return tuple(name for each in self.segments for name in self.blocks[each.first : each.last])

    @property
    def named_segments(self) -> Segments:
        """What is recomputed, with the names of the blocks: for `apply_recompute`, or a `Plan`."""
        return Segments(self.segments, self.blocks)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of all parameters, of each once."""
        trace = self.trace
        return sum(trace.tensors[name].num_bytes for name in trace.params if trace.storage_of(name) == name)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of activations that are predicted to be live at once.

        Raises:
            ValueError: The graph has no costs.
        """
        return self.chained().peak_bytes(self.segments)

    @property
    def step_seconds(self) -> float:
        """Seconds that forward and backward are predicted to take.

        Raises:
            ValueError: The graph has no costs.
        """
        return self.chained().seconds(self.segments)

    def chained(self) -> GraphCosts:
        """Return the costs.

        Raises:
            ValueError: The graph has none: it has not been profiled, or the model has no chain of blocks.
        """
        if not self.is_profiled:
            raise ValueError(
                f"the graph of {self.model} has no costs: call gm = metainfo_trace(gm, *args) before, and "
                "take gm.graph"
            )
        if not self.blocks:
            raise ValueError(
                f"{self.model} has no blocks to choose from: what is recomputed are members of one "
                "class of an nn.ModuleList or an nn.Sequential; put its repeated parts into one"
            )
        if self.costs is None:
            raise ValueError(
                f"the {len(self.blocks)} blocks of {self.model} ({self.blocks[0]!r} to {self.blocks[-1]!r}) "
                "are no chain, in which each takes one tensor with a gradient, what the one before returns, "
                "and nothing else of them is used: colossalai.auto_parallel.make_plan, or a Plan with "
                "recompute=True, recomputes blocks of other models"
            )
        return self.costs


def graph_of(model: nn.Module, arguments: Mapping[str, Any]) -> TracedGraph:
    """Trace a model, in the mode that it is in; it stays as it is.

    Args:
        model: The model.
        arguments: Of its forward by name; tensors may be on the meta device.

    Raises:
        ValueError: `arguments` does not fit the forward, or the forward cannot be traced with it.
    """
    return TracedGraph(model=type(model).__name__, trace=trace_model(model, arguments))


def profiled(
    graph: TracedGraph, model: nn.Module, profile: MachineProfile | str | Path | None = None
) -> TracedGraph:
    """Return a graph with costs, and nothing recomputed.

    Args:
        graph: Of the model.
        model: The model.
        profile: What operations take, as of `make_plan`; None: the shipped one of two CPU cores.

    Raises:
        ValueError: `profile` is no profile.
    """
    trace, setting, machine = graph.trace, Setting(), machine_of(profile)
    profiles = profile_operations(trace)
    params = ParameterCosts(
        setting=setting,
        machine=machine,
        speed=machine.mesh_speed(setting.shape),
        precision="fp32",
        optimizer="sgd",
    )
    costs = OperationCosts(trace, profiles, machine, precision="fp32")  # in the model's own types
    inner = InnerProblem(
        costs, params, CutGraph(trace=trace, strategies=find_strategies(trace, model, 1), alike={})
    )
    parts = parts_of_model(trace, model)
    predictor = Predictor(inner, inner.whole(), parts)
    graph = replace(graph, blocks=parts.blocks, costs=None, is_profiled=True, segments=())
    if predictor.chain is None:
        return graph
    before, after = predictor.outside_of_blocks()
    last = predictor.chain.blocks[-1]
    # See [Note: the peak of a traced model].
    head = ChainBlock(
        name=_HEAD,
        forward_s=0.0,
        backward_s=0.0,
        saved_bytes=0,
        input_bytes=last.output_bytes,
        output_bytes=0,
        forward_peak=math.ceil(after.forward_peak),
        backward_peak=math.ceil(after.backward_peak),
    )
    chain = Chain((*predictor.chain.blocks, head))
    seconds = predictor.predict().seconds
    found = GraphCosts(
        chain=chain,
        outside_s=seconds["forward"] + seconds["backward"] - simulate(chain, ()).seconds,
        outside_bytes=math.ceil(before.saved + after.saved),
        before_bytes=math.ceil(before.backward_peak),
    )
    left_out = max(live_bytes(trace, profiles) - found.peak_bytes(), 0)
    return replace(graph, costs=replace(found, outside_bytes=found.outside_bytes + left_out))
