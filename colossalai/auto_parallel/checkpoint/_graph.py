"""Traced graph: the operations of a model as a value, with costs of its blocks and the recomputed segments.

A graph describes a model and does not run. A solver takes a graph and returns another one.

[Note: the peak of a traced model]
Tensors kept outside of the blocks are live from the first operation to the last. In addition there are the
blocks as a chain (see [Note: live bytes of a chain]). The operations behind the blocks, the head and a loss,
are the last block of that chain, which is never in a segment: its backward begins when all activations have
been saved. The backward before the blocks, for example of an embedding, runs when no block keeps anything.

The error of this model is known without recomputation: it is the difference to the walk over all operations
(`trace/_live_bytes.py`). It is added under any recomputation.
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
    """Costs of a forward and a backward of a model on one device; see [Note: the peak of a traced model].

    Attributes:
        chain: The blocks in order, and behind them the head.
        outside_s: Seconds outside of the chain.
        outside_bytes: Bytes that are live during the whole step, in addition to the chain.
        before_bytes: Bytes that are live in the backward before the blocks, in addition to `outside_bytes`.
    """

    chain: Chain
    outside_s: float
    outside_bytes: int
    before_bytes: int

    def peak_bytes(self, segments: Sequence[RecomputeSegment] = ()) -> int:
        """Return the peak of live bytes of activations, both saved and temporary."""
        return self.outside_bytes + max(simulate(self.chain, segments).peak_bytes, self.before_bytes)

    def seconds(self, segments: Sequence[RecomputeSegment] = ()) -> float:
        """Return the seconds of forward and backward, including recomputation."""
        return self.outside_s + simulate(self.chain, segments).seconds


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """The operations of a model and the blocks to recompute; `assign` it to `gm.graph`.

    Attributes:
        model: The name of the model's class.
        trace: The operations of its forward.
        blocks: Full names of its blocks in the order in which they run, which the indices of segments refer
            to. Empty for a model without blocks, or before the trace is profiled.
        costs: Costs of forward and backward. None if the blocks do not form a chain, or before the trace is
            profiled.
        is_profiled: Whether `metainfo_trace` has profiled the trace.
        segments: The segments of blocks to recompute.
    """

    model: str
    trace: ModelTrace
    blocks: tuple[str, ...] = ()
    costs: GraphCosts | None = None
    is_profiled: bool = False
    segments: tuple[RecomputeSegment, ...] = ()

    @property
    def digest(self) -> str:
        """The sha256 of the trace, the same in every process and for all graphs of one trace."""
        return self.trace.digest

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Full names of the recomputed blocks, in order."""
        return tuple(name for each in self.segments for name in self.blocks[each.first : each.last])

    @property
    def named_segments(self) -> Segments:
        """The recomputed segments with the names of the blocks, for `apply_recompute` or a `Plan`."""
        return Segments(self.segments, self.blocks)

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of all parameters, tied ones counted once."""
        trace = self.trace
        return sum(trace.tensors[name].num_bytes for name in trace.params if trace.storage_of(name) == name)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of live bytes of activations.

        Raises:
            ValueError: The graph has no costs.
        """
        return self.chained().peak_bytes(self.segments)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of forward and backward.

        Raises:
            ValueError: The graph has no costs.
        """
        return self.chained().seconds(self.segments)

    def chained(self) -> GraphCosts:
        """Return the costs.

        Raises:
            ValueError: The graph has no costs: it is not profiled, or the model has no chain of blocks.
        """
        if not self.is_profiled:
            raise ValueError(
                f"the graph of {self.model} has no costs: call gm = metainfo_trace(gm, *args) before, and "
                "take gm.graph"
            )
        if not self.blocks:
            raise ValueError(
                f"{self.model} has no blocks to choose from: only members of one class of an nn.ModuleList "
                "or an nn.Sequential are recomputed; put its repeated parts into one"
            )
        if self.costs is None:
            raise ValueError(
                f"the {len(self.blocks)} blocks of {self.model} ({self.blocks[0]!r} to {self.blocks[-1]!r}) "
                "do not form a chain, in which the only tensor with a gradient that a block takes is the "
                "output of the previous one: colossalai.auto_parallel.make_plan, or a Plan with "
                "recompute=True, recomputes blocks of other models"
            )
        return self.costs


def graph_of(model: nn.Module, arguments: Mapping[str, Any]) -> TracedGraph:
    """Trace a model in its current mode, without changing it.

    Args:
        model: The model.
        arguments: Arguments of its forward by name. Tensors can be on the meta device.

    Raises:
        ValueError: `arguments` does not fit the forward, or the forward cannot be traced with it.
    """
    return TracedGraph(model=type(model).__name__, trace=trace_model(model, arguments))


def profiled(
    graph: TracedGraph, model: nn.Module, profile: MachineProfile | str | Path | None = None
) -> TracedGraph:
    """Return a graph with costs and without recomputation.

    Args:
        graph: Graph of the model.
        model: The model.
        profile: Profile of the machine, as for `make_plan`. None: the shipped one of two CPU cores.

    Raises:
        ValueError: `profile` is not a profile.
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
    costs = OperationCosts(trace, profiles, machine, precision="fp32")  # in the model's own dtypes
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
