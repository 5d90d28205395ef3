"""Prediction: the seconds of a step and the peak of bytes of a rank, for a choice under a setting.

[Note: the peak of a step]
A rank holds its parameters and states. The rest is the maximum over several moments:

- the start of the loss's backward: all saved tensors, and three times the outputs of the model (the
  log-softmax of a cross entropy, its gradient, and that of the outputs, in float32), unless the loss is one
  of the outputs;
- the backward behind the blocks, operation by operation (see `_backward_walk`);
- the blocks as a chain (`checkpoint/_chain.py`), with the tensors saved before them;
- the backward before the blocks, when no block keeps anything;
- the update, with gradients only.

At each of them, the memory of gradients follows from [Note: arrival of gradients]. A stage of a pipeline
keeps as many microbatches as the schedule has in flight there. All but the first microbatch start with
existing gradients; the new gradient of an operation is alive in addition until it is accumulated.

This omits some bytes: outputs held by the caller, simultaneous gradients of several branches. Their amount is
known for a model that is neither cut nor recomputed, from a complete walk (`trace/_live_bytes.py`). The
difference, for a rank's part of the batch, is added to the working memory under every setting.

[Note: rows of experts]
In a trace, experts are grouped products of rows of tokens with the matrices of their experts. A loop over
experts also saves the rows that it adds to its result (the backward of `index_add_` needs their shape). It
selects the matrices of one expert from those of all, and the gradient of that selection is as large as all
matrices, with zeros for the others: such a gradient, its accumulated sum and the new sum are alive at once,
in addition to the sums of the other matrices. If ranks share experts, rows exist in the order of the sender,
of the receiver, and of the experts at the same time. All three effects were found by counting.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import torch

from colossalai.auto_parallel._costs import Seconds
from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._parts import ModelParts
from colossalai.auto_parallel.checkpoint._chain import Chain, ChainBlock, ChainCost, simulate
from colossalai.auto_parallel.machine._machine import time_of
from colossalai.auto_parallel.prediction._parameters import RankParameters
from colossalai.auto_parallel.prediction._peak import GradientMemory, PeakMoment, gradient_memory
from colossalai.auto_parallel.trace._trace import Operation
from colossalai.pipeline import Costs, Replay, make_schedule, partition_balanced
from colossalai.runtime import RecomputeSegment

SCHEDULE = "1f1b"
_LOSS_TENSORS = 3  # each as large as the outputs
_ROWS_OF_EXPERTS = 3  # see [Note: rows of experts]
_Found = TypeVar("_Found")
_STATISTIC_BYTES = 4  # bytes of a number of a channel: batch norms compute in float32
_STATISTIC_CALLS = (20, 14)  # channel operations of a batch norm over all replicas, in `shardformer`
_DATA_AXIS, _PIPELINE_AXIS = "0", "1"  # of a mesh of (data, pipeline, tensor)


@dataclass(frozen=True, kw_only=True)
class OutsideBytes:
    """Bytes of operations outside of the blocks, for a rank's part of the batch.

    Attributes:
        saved: Bytes saved for their backward.
        forward_peak: Largest temporary bytes of one of them in the forward.
        backward_peak: The same in the backward, including gradients.
    """

    saved: float
    forward_peak: float
    backward_peak: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted costs of a step.

    Attributes:
        seconds: Seconds by purpose; their sum is the step.
        bytes: Bytes by purpose, of the rank that needs most; their sum is its peak.
        segments: The recomputed segments, by the numbers of blocks.
    """

    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    segments: tuple[RecomputeSegment, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        return sum(self.seconds.values())

    @property
    def peak_bytes(self) -> float:
        """The peak of the rank that needs most."""
        return sum(self.bytes.values())


class Predictor:
    """Predicts the costs of a choice.

    Args:
        inner: The problem of a setting.
        choice: The cut of each layer.
        parts: The parts of the model.
        left_out: Bytes that the prediction omits, for the whole batch; see [Note: the peak of a step].
        has_loss: Whether a loss of the outputs is computed outside of the model.
    """

    def __init__(
        self,
        inner: InnerProblem,
        choice: CutChoice,
        parts: ModelParts,
        *,
        left_out: float = 0.0,
        has_loss: bool = True,
    ) -> None:
        self._has_loss = has_loss
        self._inner, self._choice, self._parts = inner, choice, parts
        self._left_out = left_out * inner.setting.share
        self._costs, self._trace, self._setting = inner.costs, inner.trace, inner.setting
        transfers: dict[str, Seconds] = {}
        for site, strategy in zip(inner.strategies.sites, choice.strategies, strict=True):
            if strategy.is_cut:
                found = Seconds(
                    inner.transfer_seconds(strategy.forward), inner.transfer_seconds(strategy.backward)
                )
                transfers[site.operations[0]] = transfers.get(site.operations[0], Seconds()) + found
        for each in parts.experts if self._setting.expert > 1 else ():
            # Rows are sent to their experts and back, and so are their gradients.
            both = 2 * self._inner.params.speed.cost(
                "all_to_all", self._costs.activation_bytes(each.rows) * self._setting.share, _DATA_AXIS
            )
            transfers[each.products[0]] = transfers.get(each.products[0], Seconds()) + Seconds(both, both)
        for operation in self._costs.batch_norms if self._setting.data > 1 else ():
            found = self._statistics_of_all(operation)
            transfers[operation.name] = transfers.get(operation.name, Seconds()) + found
        self._transfers = transfers
        # See [Note: rows of experts].
        is_shared = self._setting.expert > 1
        self._rows_of = {name: each.rows for each in parts.experts for name in each.products if is_shared}
        self._looped = {each.products[-1]: each for each in parts.experts if each.is_loop and not is_shared}
        self._params = RankParameters(inner, choice, parts)
        self._with_params: dict[float, tuple[ChainBlock, ...]] = {}
        self._alike = self._equal_blocks()
        self._compute_of = (
            self._compute(parts.before),
            *self._of_blocks(lambda number: self._compute(parts.within[number])),
            self._compute(parts.after),
        )
        self._transfer_of = (
            self._communicate(parts.before),
            *self._of_blocks(lambda number: self._communicate(parts.within[number])),
            self._communicate(parts.after),
        )

    def _statistics_of_all(self, operation: Operation) -> Seconds:
        """Return the additional seconds of a batch norm with statistics over all replicas.

        They exchange two numbers per channel in the forward, and two sums in the backward. The operations on
        these numbers cost little more than their calls.
        """
        num_channels = self._trace.tensors[operation.outputs[0]].shape[1] * self._divided(operation.name)
        num_bytes = 2.0 * _STATISTIC_BYTES * num_channels
        speed = self._inner.params.speed
        call = time_of(
            self._costs.machine, flops=0.0, bytes=2 * num_bytes, kind="elementwise", dtype=torch.float32
        )
        forward, backward = _STATISTIC_CALLS
        return Seconds(
            speed.cost("all_gather", num_bytes * self._setting.data, _DATA_AXIS) + forward * call,
            speed.cost("all_reduce", num_bytes, _DATA_AXIS) + backward * call,
        )

    @cached_property
    def chain(self) -> Chain | None:
        """The blocks as a chain. None if they do not form one."""
        parts = self._parts
        if not parts.is_chain:
            return None

        def block_of(number: int) -> ChainBlock:
            taken, made = parts.inputs[number], parts.outputs[number]
            compute, moved = self._compute_of[number + 1], self._transfer_of[number + 1]
            return ChainBlock(
                name="",
                forward_s=compute.forward + moved.forward,
                backward_s=compute.backward + moved.backward,
                saved_bytes=round(self._saved(parts.within[number], without={taken, made})),
                input_bytes=self._size(taken),
                output_bytes=self._size(made),
                forward_peak=round(self._transient(parts.within[number], is_backward=False)),
                backward_peak=round(self._transient(parts.within[number], is_backward=True)),
            )

        found = zip(parts.blocks, self._of_blocks(block_of), strict=True)
        return Chain(tuple(replace(each, name=name) for name, each in found))

    def _equal_blocks(self) -> tuple[int, ...]:
        """Return for each block the first block that is equal to it and has the same cuts."""
        inner, strategies = self._inner, self._inner.strategies
        firsts: dict[object, int] = {}
        found = []
        for number, names in enumerate(self._parts.within):
            kind = inner.kind_of_block(names)
            options: list[object] = []
            if kind is not None and strategies.sites:
                for name in names:
                    if (site := strategies.site_of.get(name)) is not None:
                        chosen = self._choice.strategies[site]
                        options.append((chosen.cut, chosen.field))
                    operation = self._trace.operations[self._trace.places[name]]
                    options += [
                        self._choice.are_cut[strategies.followers_by_tensor[tensor]]
                        for tensor in (*operation.inputs, *operation.outputs)
                        if tensor in strategies.followers_by_tensor
                    ]
            key: object = number if kind is None else (kind, tuple(options))
            found.append(firsts.setdefault(key, number))
        return tuple(found)

    def _of_blocks(self, ask: Callable[[int], _Found]) -> tuple[_Found, ...]:
        """Return the value of a function for each block by its number, computed once for equal blocks."""
        known = {number: ask(number) for number in dict.fromkeys(self._alike)}
        return tuple(known[number] for number in self._alike)

    @property
    def least_seconds(self) -> float:
        """Lower bound of the seconds of a step: its computation, for any split into stages.

        With m microbatches, stage i begins after one microbatch has passed the earlier stages, and computes
        all m: a step takes at least sum(t_j, j < i) + m * t_i, for every i. For p stages whose t_i have a
        given sum, the largest of these is least if all are equal: sum / (1 - (1 - 1 / m) ** p).
        """
        setting = self._setting
        total = sum(each.total for each in (*self._compute_of, *self._transfer_of))
        return total / (1 - (1 - 1 / setting.microbatches) ** setting.pipeline)

    @property
    def least_bytes(self) -> tuple[float, float]:
        """Lower bounds of the bytes when the backward begins, for any recomputation, and at the update."""
        memory, saved_before = self._memory, self._saved(self._parts.before)
        begin = self._beside_chain(memory)
        # The part of all gradients as if all parameters were in blocks: a lower bound.
        gradients = memory.begun + memory.part * self._params.trained_bytes_at(range(len(self._compute_of)))
        return begin + self._saved(self._parts.after), begin - saved_before + gradients

    @property
    def _memory(self) -> GradientMemory:
        """Memory of gradients in the worst microbatch: all but the first start with gradients."""
        total = self._params.trained_bytes_at(range(len(self._compute_of)))
        return self._gradient_memory(total, is_first=self._setting.microbatches == 1)

    def _gradient_memory(self, total: float, *, is_first: bool) -> GradientMemory:
        ratio = self._inner.params.master_ratio
        return gradient_memory(self._setting, total, is_first=is_first, master_ratio=ratio)

    def _beside_chain(self, memory: GradientMemory) -> float:
        """Return the bytes that are alive while the blocks and the operations behind them run."""
        stage = range(len(self._compute_of))
        states = self._params.states_at(stage)
        root, _ = self._gathered(stage, self._parts.before, self._parts.after)
        states_bytes = sum(states.values()) - states["gradients"]
        return states_bytes + memory.held + root + self._saved(self._parts.before) + self._left_out

    def chain_with_head(self) -> tuple[Chain, float] | None:
        """Return the chain of the blocks and the head, and the bytes in addition to it: the input of rotor.

        Rotor keeps all of the last block of a chain, and the head cannot be recomputed anyway. So a bound of
        the chain bounds the moments of [Note: the peak of a step] that depend on recomputation. None if the
        blocks do not form a chain.
        """
        chain, parts = self.chain, self._parts
        if chain is None:
            return None
        memory = self._memory
        stage = range(len(self._compute_of))
        _, largest = self._gathered(stage, parts.before, parts.after)
        entry = chain.blocks[-1].output_bytes
        head = ChainBlock(
            name="",  # not a block
            forward_s=0.0,
            backward_s=0.0,
            saved_bytes=round(max(self._saved(parts.after) - entry, 0.0)),  # its input counts as the output
            input_bytes=entry,
            output_bytes=0,
            forward_peak=round(max(self._loss_bytes() - memory.begun, 0.0)),
            backward_peak=round(self._backward_walk(parts.after, memory.root_part) + largest),
            gradient_bytes=round(
                memory.root_part * self._params.trained_bytes_at([stage[-1]])
                # The gradient of a tied parameter waits for the one before the blocks.
                + max(1 - memory.root_part, 0.0) * self._params.tied_bytes()
            ),
        )
        blocks = (*self._blocks_with_params(memory.part), head)
        return Chain(blocks), self._beside_chain(memory) + memory.begun

    def outside_of_blocks(self) -> tuple[OutsideBytes, OutsideBytes]:
        """Return the bytes of the operations before the blocks, and behind them."""
        before, after = (
            OutsideBytes(
                saved=self._saved(operations),
                forward_peak=self._transient(operations, is_backward=False),
                backward_peak=self._transient(operations, is_backward=True),
            )
            for operations in (self._parts.before, self._parts.after)
        )
        return before, after

    def predict(self, segments: Sequence[RecomputeSegment] = ()) -> Prediction:
        """Return the costs of a step with some recomputed segments of the blocks."""
        repeats = self._repeats(segments)
        if self._setting.pipeline > 1:
            return self._predict_pipeline(segments, repeats)
        microbatches = self._setting.microbatches
        blocks = self._compute_of[1:-1]
        seconds = {
            "forward": microbatches * sum(each.forward for each in self._compute_of),
            "backward": microbatches * sum(each.backward for each in self._compute_of),
            "recomputation": microbatches
            * sum(
                times * (own.forward + moved.forward)
                for times, own, moved in zip(repeats, blocks, self._transfer_of[1:-1], strict=True)
            ),
            "tensor communication": microbatches * sum(each.total for each in self._transfer_of),
            **self._params.seconds_at(range(len(self._compute_of))),
        }
        found = self._peak(range(len(self._compute_of)), segments, live=1)
        return Prediction(seconds=seconds, bytes=found, segments=tuple(segments))

    def _predict_pipeline(self, segments: Sequence[RecomputeSegment], repeats: Sequence[int]) -> Prediction:
        setting, num_blocks = self._setting, len(self._parts.blocks)
        ranges = self.stages()
        forward, backward, busy = [], [], dict.fromkeys(("forward", "backward", "recomputation"), 0.0)
        moved_seconds = 0.0
        for stage in ranges:
            own = [self._compute_of[place] for place in stage]
            moved = [self._transfer_of[place] for place in stage]
            again = sum(
                repeats[place - 1] * (self._compute_of[place].forward + self._transfer_of[place].forward)
                for place in stage
                if 1 <= place <= num_blocks
            )
            forward.append(sum(each.forward for each in (*own, *moved)))
            backward.append(sum(each.backward for each in (*own, *moved)) + again)
            busy["forward"] += sum(each.forward for each in own)
            busy["backward"] += sum(each.backward for each in own)
            busy["recomputation"] += again
            moved_seconds += sum(each.total for each in moved)
        handed = self._trace.tensors[self._parts.outputs[0]].num_bytes * setting.share
        message = self._inner.params.speed.cost("point_to_point", handed, _PIPELINE_AXIS)
        replay = _replay_of(setting.pipeline, setting.microbatches)
        step = replay.step_time(Costs(forward, backward, p2p=message))
        scale = setting.microbatches / setting.pipeline
        seconds = {name: scale * value for name, value in busy.items()}
        seconds["tensor communication"] = scale * moved_seconds
        seconds["pipeline bubble and messages"] = step - sum(seconds.values())
        slowest: dict[str, float] = {}
        most: dict[str, float] = {}
        for number, stage in enumerate(ranges):
            for name, value in self._params.seconds_at(stage).items():
                slowest[name] = max(slowest.get(name, 0.0), value)
            live = min(setting.microbatches, setting.pipeline - number)
            blocks = [place - 1 for place in stage if 1 <= place <= num_blocks]
            again_here = tuple(each for each in segments if blocks[0] <= each.first <= blocks[-1])
            found = self._peak(stage, again_here, live=live)
            if sum(found.values()) > sum(most.values()):
                most = found
        return Prediction(seconds={**seconds, **slowest}, bytes=most, segments=tuple(segments))

    def stages(self) -> list[list[int]]:
        """Return the places of each stage: 0 is before the blocks, the last one behind them."""
        weights = [self._params.bytes_at([place + 1]) for place in range(len(self._parts.within))]
        split = _balanced(tuple(weights), self._setting.pipeline)
        found = [[place + 1 for part in parts for place in range(*part)] for parts in split]
        found[0].insert(0, 0)
        found[-1].append(len(weights) + 1)
        return found

    # See [Note: the peak of a step].
    def _peak(
        self, stage: Sequence[int], segments: Sequence[RecomputeSegment], *, live: int
    ) -> dict[str, float]:
        """Return the bytes at the peak of a rank, by purpose.

        Args:
            stage: The places of its stage, see `stages`.
            segments: The recomputed segments of its blocks.
            live: Number of microbatches in flight.
        """
        found = self._params.states_at(stage)
        total = self._params.trained_bytes_at(stage)
        del found["gradients"]
        several = self._setting.microbatches > 1
        moments: list[PeakMoment] = []
        for is_first in (True, False) if several else (True,):
            memory = self._gradient_memory(total, is_first=is_first)
            # If all microbatches fit in flight, one fewer is alive when the second one runs backward.
            num_live = live if is_first or self._setting.microbatches > live else live - 1
            moments += self._moments(stage, segments, memory, num_live)
        most = max(moments, key=lambda each: each.total)
        kept = max(min(most.kept, most.kept + most.working), 0.0)
        found |= {"gradients": most.gradients} | ({"gathered": most.gathered} if most.gathered else {})
        working = most.total - most.gradients - most.gathered - kept
        return {**found, "activations": kept, "working memory": working + self._left_out}

    def _moments(
        self, stage: Sequence[int], segments: Sequence[RecomputeSegment], memory: GradientMemory, live: int
    ) -> Iterator[PeakMoment]:
        """Yield the memory of a rank at the moments of a backward, for `_peak`."""
        parts, num_blocks = self._parts, len(self._parts.blocks)
        numbers = [place - 1 for place in stage if 1 <= place <= num_blocks]
        first, last = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
        before = parts.before if 0 in stage else ()
        after = parts.after if num_blocks + 1 in stage else ()
        saved_before, saved_after = self._saved(before), self._saved(after)
        kept, cost = self._kept_and_peak(first, last, segments, memory)
        others = (live - 1) * (saved_before + kept + saved_after)
        if self._setting.pipeline > 1:  # outputs kept for their gradients, and messages in flight
            others += (live + 1) * self._size(parts.outputs[0])
        behind = self._params.trained_bytes_at([num_blocks + 1]) if after else 0.0
        tied = self._params.tied_bytes() if before and after else 0.0
        root, largest = self._gathered(stage, before, after)
        base = memory.held + memory.begun
        yield PeakMoment(
            gradients=memory.held,
            kept=others + saved_before + kept + saved_after,
            working=self._loss_bytes() * bool(after),
            gathered=root,
        )
        yield PeakMoment(
            gradients=base,
            kept=others + saved_before + kept + saved_after,
            working=self._backward_walk(after, memory.root_part),
            gathered=root + largest,
        )
        # The gradient of a tied weight, until its last part arrives.
        waiting = tied * max(1 - memory.root_part, 0.0)
        yield PeakMoment(
            gradients=base + memory.root_part * behind + cost.gradients_at_peak,
            kept=others + saved_before + kept,
            working=waiting + cost.peak_bytes - cost.gradients_at_peak - kept,
            gathered=root,
        )
        of_blocks = self._params.trained_bytes_at([place for place in stage if 1 <= place <= num_blocks])
        complete = base + memory.root_part * behind + memory.part * of_blocks
        yield PeakMoment(
            gradients=complete,
            kept=others + saved_before,
            working=waiting + tied * memory.width + self._backward_walk(before, memory.root_part),
            gathered=root + largest,
        )
        outside = self._params.trained_bytes_at([place for place in stage if not 1 <= place <= num_blocks])
        most = max(complete, base + memory.part * of_blocks + memory.root_part * outside)
        yield PeakMoment(  # the update
            gradients=most + memory.last,
            gathered=2 * root,  # the gradients to reduce, and the reduced ones
        )

    def _kept_and_peak(
        self, first: int, last: int, segments: Sequence[RecomputeSegment], memory: GradientMemory
    ) -> tuple[float, ChainCost]:
        """Return the bytes that blocks keep at the end of the forward, and the peak of their chain."""
        chain = self.chain
        if first == last:
            return 0.0, ChainCost(0.0, 0, ())
        gathered = self._setting.zero == 3
        if chain is None:
            inside = [name for names in self._parts.within[first:last] for name in names]
            kept = self._saved(inside)
            walk = self._backward_walk(inside, memory.part)
            extra = 3 * self._largest_block() if gathered else 0.0
            return kept, ChainCost(0.0, round(kept + walk + extra), ())
        moved = tuple(_moved(each, -first) for each in segments)
        covered = {place for each in moved for place in range(each.first, each.last)}
        kept = sum(
            block.input_bytes * (place not in covered or any(each.first == place for each in moved))
            + block.saved_bytes * (place not in covered)
            for place, block in enumerate(chain.blocks[first:last])
        )
        blocks = self._blocks_with_params(memory.part)[first:last]
        return float(kept), simulate(Chain(blocks), moved)

    def _blocks_with_params(self, part: float) -> tuple[ChainBlock, ...]:
        """Return the blocks with the gradients of their parameters, and with gathered parameters.

        Args:
            part: Bytes for each byte of complete gradients.
        """
        if (known := self._with_params.get(part)) is not None:
            return known
        chain = self.chain
        assert chain is not None
        is_gathered = self._setting.zero == 3

        def block_of(number: int) -> ChainBlock:
            block, own = chain.blocks[number], self._params.bytes_at([number + 1])
            names = self._parts.within[number]
            without = {self._parts.inputs[number], self._parts.outputs[number]}
            # See [Note: arrival of gradients].
            walk = self._backward_walk(names, 1.0 if is_gathered else part, without=without)
            gathered = own * is_gathered
            return replace(
                block,
                name="",
                forward_peak=block.forward_peak + round(2 * gathered),
                backward_peak=round(walk + (own + 2 * self._largest_block()) * is_gathered),
                gradient_bytes=round(part * self._params.trained_bytes_at([number + 1])),
            )

        found = zip(chain.names, self._of_blocks(block_of), strict=True)
        self._with_params[part] = tuple(replace(each, name=name) for name, each in found)
        return self._with_params[part]

    def _backward_walk(
        self, operations: Sequence[str], part: float, *, without: Collection[str] = ()
    ) -> float:
        """Return the peak of the backward of some operations, relative to their saved bytes.

        Their backwards run one by one, the last one first: each has its temporaries and the gradients of its
        parameters, plus the gradients so far, minus the saved bytes that are already freed.

        Args:
            operations: Operations in the order of the forward.
            part: Bytes for each byte of complete gradients.
            without: Tensors that do not count as saved.
        """
        tensors, extra = self._costs.saved_by
        seen: set[str] = set(without)
        lets_go: dict[str, float] = {}
        made = {
            each for name in operations for each in self._trace.operations[self._trace.places[name]].outputs
        }
        for name in operations:  # shared saved tensors are freed with the backward of their first user
            saved = [each for each in self._costs.profiles[name].saved if each in made - seen]
            seen.update(saved)
            of_batch = extra.get(name, 0.0) * self._divided(name)
            of_batch += sum(tensors.get(each, 0.0) * self._part_of(each) for each in saved)
            lets_go[name] = of_batch * self._setting.share + self._casts_of(name)
        most = complete = gone = 0.0
        width = self._gradient_memory(0.0, is_first=True).width
        copied = width if width > 1 else 0.0  # a cast to float32 is alive together with its source
        for name in reversed(operations):
            own = self._params.gradient_bytes(name)
            moment = self._transient((name,), is_backward=True)
            most = max(most, moment + own * (1 + copied) + part * complete - gone)
            complete += own
            gone += lets_go[name]
        return most

    def _loss_bytes(self) -> float:
        """Return the bytes of a loss at the start of its backward; see [Note: the peak of a step]."""
        tensors = self._trace.tensors
        outputs = [name for name in self._trace.outputs if tensors[name].dtype.is_floating_point]
        if not self._has_loss or any(tensors[name].numel == 1 for name in outputs):
            return 0.0
        parts = (tensors[name].num_bytes * self._part_of(name) for name in dict.fromkeys(outputs))
        return _LOSS_TENSORS * self._setting.share * sum(parts)

    def _gathered(
        self, stage: Sequence[int], before: Sequence[str], after: Sequence[str]
    ) -> tuple[float, float]:
        """Return the bytes of ZeRO 3's parameters outside of the blocks, and of the largest block."""
        if self._setting.zero < 3:
            return 0.0, 0.0
        num_blocks = len(self._parts.blocks)
        ends = [place for place in stage if not 1 <= place <= num_blocks]
        return self._params.bytes_at(ends), self._largest_block()

    def _largest_block(self) -> float:
        return max(
            (self._params.bytes_at([place + 1]) for place in range(len(self._parts.blocks))), default=0.0
        )

    def _repeats(self, segments: Sequence[RecomputeSegment]) -> list[int]:
        """Return the number of additional forwards of each block."""
        chain = self.chain
        if chain is None:
            return [0] * len(self._parts.blocks)
        return [count - 1 for count in simulate(chain, segments).num_forwards]

    def _compute(self, operations: Iterable[str]) -> Seconds:
        found = Seconds()
        for name in operations:
            found = found + self._inner.operation_seconds(name, self._choice)
        return found

    def _communicate(self, operations: Iterable[str]) -> Seconds:
        found = Seconds()
        for name in operations:
            if name in self._transfers:
                found = found + self._transfers[name]
        return found

    def _size(self, name: str) -> int:
        return round(self._costs.activation_bytes(name) * self._setting.share * self._part_of(name))

    def _saved(self, operations: Iterable[str], *, without: Iterable[str] = ()) -> float:
        """Return the saved bytes of the outputs of some operations, for a rank's part of the batch."""
        tensors, extra = self._costs.saved_by
        left_out, operations = set(without), tuple(operations)
        found = 0.0
        for name in operations:
            for made in self._trace.operations[self._trace.places[name]].outputs:
                if made in tensors and made not in left_out:
                    found += tensors[made] * self._part_of(made)
            found += extra.get(name, 0.0) * self._divided(name)
            if name in self._looped:
                found += self._costs.activation_bytes(self._looped[name].rows)
        return found * self._setting.share + sum(map(self._casts_of, operations))

    def _casts_of(self, operation: str) -> float:
        """Return the bytes of the parameter casts that an operation keeps on a rank."""
        return self._costs.casts_of_weights.get(operation, 0.0) * self._divided(operation)

    def _divided(self, operation: str) -> float:
        """Return the fraction of the work of an operation on a rank."""
        number = self._inner.strategies.site_of.get(operation)
        if number is not None:
            return 1 / self._setting.tensor if self._choice.strategies[number].is_cut else 1.0
        group = self._inner.strategies.followers_of.get(operation)
        return 1 / self._setting.tensor if group is not None and self._choice.are_cut[group] else 1.0

    def _transient(self, operations: Iterable[str], *, is_backward: bool) -> float:
        """Return the largest temporary bytes of one of some operations, including its gradients."""
        most = 0.0
        for name in operations:
            profile, undivided = self._costs.profiles[name], 0.0
            if is_backward:
                size = float(profile.backward_peak)
                made = (each for each in profile.gradients if each.tensor not in self._trace.params)
                size += sum(each.num_bytes for each in made)
                size += sum(self._costs.activation_bytes(each) for each in profile.differentiable)
            else:
                size = float(profile.forward_peak)
            if (rows := self._rows_of.get(name)) is not None:
                size += _ROWS_OF_EXPERTS * self._costs.activation_bytes(rows)
            if is_backward and name in self._looped:
                sizes = [self._costs.activation_bytes(each) for each in self._looped[name].trained]
                undivided = sum(sizes) + 2 * max(sizes, default=0.0)
            most = max(most, size * self._divided(name) * self._setting.share + undivided)
        return most

    def _part_of(self, tensor: str) -> float:
        return self._inner.part_of_tensor(tensor, self._choice)


@lru_cache(maxsize=256)
def _replay_of(num_stages: int, num_microbatches: int) -> Replay:
    return Replay(make_schedule(SCHEDULE, num_stages, num_microbatches))


@lru_cache(maxsize=256)
def _balanced(weights: tuple[float, ...], num_stages: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(map(tuple, partition_balanced(weights, num_stages, 1)))


def _moved(segment: RecomputeSegment, by: int) -> RecomputeSegment:
    """Return a segment with its block numbers shifted."""
    inner = tuple(_moved(each, by) for each in segment.inner)
    return replace(segment, first=segment.first + by, last=segment.last + by, inner=inner)
