"""Step time, memory and bubble of pipelines: colossalai.pipeline against torch.distributed.pipelining.

    colossalai run --nproc_per_node 2 benchmarks/pipeline.py --json results.json

Both run the same transformer blocks, cut into the same stages, with the same weights, data and microbatches;
losses and all gradients are compared before the timing. A step is forward and backward of a batch, without an
optimizer; it ends when its slowest rank ends. Torch has its cheapest options: outputs are not collected,
gradients are not scaled afterwards.

Variants differ in the library of their matrix products (`harness/products.py`). Peers use torch's, and "...
medium" the "medium" precision; ours use the choice of the job (`colossalai run --set matmul=onednn`), and
"... torch" uses torch's.

- `peak_mib` is the largest rank's peak of live tensors, from the copying of its parameters to the end of the
  second step: parameters, gradients, activations and message buffers; see `harness/memory.py`.
- `idle` is the fraction of a step in which a rank waits for messages or has already ended: the mean over
  ranks, the median over separate rounds; see `harness/waits.py`. `idle_simulated` is that of our schedule in
  `colossalai.pipeline.simulate`, with measured costs: for each stage the median time of its actions without
  waiting, for a message the time from a ping-pong of the same size.
"""

import argparse
import copy
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness.memory import PeakBytes
from harness.peers import peer_group
from harness.products import bits_at_medium, with_products
from harness.rounds import compare, report, time_rounds
from harness.waits import timed_waits
from torch import nn
from torch.distributed import pipelining

import colossalai
from colossalai.core import global_context as gpc
from colossalai.pipeline import (
    Action,
    Costs,
    Op,
    PipelineExecutor,
    Schedule,
    ScheduleStep,
    StepKind,
    make_schedule,
    simulate,
    split_batch,
)
from colossalai.utils import get_current_device

THEIRS: Mapping[str, type] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
    "gpipe": pipelining.ScheduleGPipe,
}

Batch = tuple[torch.Tensor, torch.Tensor]
Stages = Mapping[int, nn.Module]


def make_stages(schedule: Schedule, args: argparse.Namespace) -> dict[int, nn.Module]:
    """Return the stages of this rank; all stages have the same number of blocks."""
    found = {}
    for stage in schedule.stages_of(gpc.mesh.axis("pp").rank):
        torch.manual_seed(stage)
        found[stage] = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    args.hidden,
                    args.hidden // 64,
                    4 * args.hidden,
                    dropout=0.0,
                    batch_first=True,
                    norm_first=True,
                )
                for _ in range(args.layers // schedule.num_stages)
            )
        ).to(get_current_device())
    return found


class Variant(ABC):
    """A pipeline of one of the two libraries.

    Args:
        stages: The stages of this rank.
        batch: Data and target of a step.
        num_microbatches: Number of parts of the batch.
    """

    def __init__(self, stages: Stages, batch: Batch, num_microbatches: int) -> None:
        self.stages = stages
        self.batch = batch
        self.num_microbatches = num_microbatches

    @abstractmethod
    def run(self) -> list[torch.Tensor]:
        """Run forwards and backwards; return the losses of the microbatches, of which the sum is the loss."""

    def step(self) -> list[torch.Tensor]:
        """Run forwards and backwards of a new step."""
        for stage in self.stages.values():
            stage.zero_grad()
        return self.run()

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank."""
        return [param.grad for stage in self.stages.values() for param in stage.parameters()]


class Ours(Variant):
    """The executor of colossalai.pipeline."""

    def __init__(self, name: str, stages: Stages, batch: Batch, num_microbatches: int) -> None:
        super().__init__(stages, batch, num_microbatches)
        axis = gpc.mesh.axis("pp")
        self.executor = PipelineExecutor(
            list(stages.values()),
            axis,
            make_schedule=lambda count: make_schedule(name, axis.size, count),
            device=get_current_device(),
        )

    def run(self) -> list[torch.Tensor]:
        """See `Variant`."""
        inputs, targets = (split_batch(tensor, self.num_microbatches) for tensor in self.batch)
        weight = 1 / self.num_microbatches
        result = self.executor.run(
            inputs,
            compute_loss=lambda output, number: nn.functional.mse_loss(output, targets[number]),
            loss_factors=[weight] * self.num_microbatches,
        )
        return [loss * weight for loss in result.losses or ()]


class Theirs(Variant):
    """A schedule of torch.distributed.pipelining."""

    def __init__(self, name: str, stages: Stages, batch: Batch, num_microbatches: int) -> None:
        super().__init__(stages, batch, num_microbatches)
        group = peer_group()
        num_stages = group.size() * len(stages)
        parts = [
            pipelining.PipelineStage(module, stage, num_stages, get_current_device(), group=group)
            for stage, module in stages.items()
        ]
        self.schedule = THEIRS[name](
            parts[0] if len(parts) == 1 else parts,
            num_microbatches,
            loss_fn=lambda output, target: nn.functional.mse_loss(output, target) / num_microbatches,
            scale_grads=False,
        )
        self.is_first, self.is_last = 0 in stages, num_stages - 1 in stages

    def run(self) -> list[torch.Tensor]:
        """See `Variant`."""
        inputs, target = self.batch
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *([inputs] if self.is_first else []),
            target=target if self.is_last else None,
            losses=losses if self.is_last else None,
            return_outputs=False,
        )
        return [loss.detach() for loss in losses]


KINDS: Mapping[str, type[Ours] | type[Theirs]] = {"theirs": Theirs, "ours": Ours}


def check_same(theirs: Variant, ours: Variant) -> None:
    """Require that both have the same losses and gradients."""
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(ours.step(), theirs.step())
    close(ours.gradients(), theirs.gradients())


def peak_bytes(build: Callable[[], Variant]) -> int:
    """Return the largest rank's peak of live bytes of a new pipeline in its first two steps."""
    with PeakBytes() as memory:
        variant = build()
        variant.step()
        variant.step()
    return max(_from_all_ranks(memory.peak))


def slowest(times: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return the times of the slowest rank of each step."""
    of_ranks = _from_all_ranks(times)
    return {
        name: [max(step) for step in zip(*(own[name] for own in of_ranks), strict=True)] for name in times
    }


def measure_idle(variants: Mapping[str, Variant], rounds: int) -> dict[str, float]:
    """Return the fraction of the time in which a rank does not compute, the median over rounds."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            dist.barrier()
            start = time.perf_counter()
            with timed_waits() as waiting:
                variant.step()
            total = time.perf_counter() - start
            of_ranks = _from_all_ranks((total, total - waiting.seconds))
            step_time = max(total for total, _ in of_ranks)
            found[name].append(1 - statistics.mean(busy for _, busy in of_ranks) / step_time)
    return {name: statistics.median(values) for name, values in found.items()}


def measure_costs(ours: Ours, schedule: Schedule, rounds: int, p2p: float) -> Costs:
    """Return the times of our pipeline's actions without their waiting."""
    seconds: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)

    of_actions: defaultdict[Action, float] = defaultdict(float)

    def timed(carry_out: Callable[[ScheduleStep], None], step: ScheduleStep) -> None:
        with timed_waits() as waiting:
            start = time.perf_counter()
            carry_out(step)
            of_actions[step.action] += time.perf_counter() - start - waiting.seconds

    handlers = ours.executor._handlers  # the public API does not expose single steps

    def timed_handlers(run: Any) -> dict[StepKind, Callable[[ScheduleStep], None]]:
        return {kind: partial(timed, handler) for kind, handler in handlers(run).items()}

    with mock.patch.object(ours.executor, "_handlers", timed_handlers):
        for _ in range(rounds):
            dist.barrier()
            of_actions.clear()
            ours.step()
            for action, total in of_actions.items():
                seconds[action.stage, action.op].append(total)
    own = {key: statistics.median(values) for key, values in seconds.items()}
    medians = {key: value for part in _from_all_ranks(own) for key, value in part.items()}
    stages = range(schedule.num_stages)
    halves = [[medians.get((stage, op), 0.0) for op in (Op.INPUT_GRAD, Op.WEIGHT_GRAD)] for stage in stages]
    return Costs(
        forward=[medians[stage, Op.FORWARD] for stage in stages],
        backward=[sum(halves[stage]) or medians[stage, Op.BACKWARD] for stage in stages],
        weight_grad=[halves[stage][1] for stage in stages],
        p2p=p2p,
    )


def measure_p2p(example: torch.Tensor, rounds: int = 20) -> float:
    """Return the time of a message of the size of a tensor from the first rank to the second."""
    axis = gpc.mesh.axis("pp")
    tensor = torch.empty_like(example)
    seconds = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        for number in range(2):
            if axis.rank == number:
                dist.send(tensor, group=axis.group, group_dst=1 - number)
            elif axis.rank == 1 - number:
                dist.recv(tensor, group=axis.group, group_src=number)
        seconds.append((time.perf_counter() - start) / 2)
    return _from_all_ranks(statistics.median(seconds))[0]


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a schedule."""
    schedule = make_schedule(name, gpc.mesh.axis("pp").size, args.microbatches)
    torch.manual_seed(1000)
    size = (args.microbatches * args.batch, args.seq, args.hidden)
    batch = torch.randn(size, device=get_current_device()), torch.randn(size, device=get_current_device())
    stages = make_stages(schedule, args)

    def build(kind: str) -> Variant:
        return KINDS[kind](name, copy.deepcopy(stages), batch, args.microbatches)

    memory = {kind: peak_bytes(partial(build, kind)) for kind in KINDS}
    variants = {kind: build(kind) for kind in KINDS}
    check_same(variants["theirs"], variants["ours"])
    steps, around = with_products({key: variant.step for key, variant in variants.items()}, theirs=["theirs"])
    times = slowest(time_rounds(steps, rounds=args.rounds, warmup=args.warmup, around=around))
    idle = measure_idle(variants, args.idle_rounds)
    p2p = measure_p2p(batch[0][: args.batch])
    costs = measure_costs(variants["ours"], schedule, args.idle_rounds, p2p)
    simulated = simulate(schedule, costs).idle_fraction
    return [
        {"schedule": name}
        | row
        | {
            "peak_mib": round(memory[row["variant"].split()[0]] / 2**20, 2),
            "memory_ratio": round(memory[row["variant"].split()[0]] / memory["theirs"], 4),
            "idle": round(idle[row["variant"]], 4) if row["variant"] in idle else None,
            "idle_simulated": round(simulated, 4) if row["variant"] == "ours" else None,
        }
        for row in compare(times, baseline="theirs")
    ]


def _from_all_ranks(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = partial(parser.add_argument, type=int)
    add("--rounds", default=30, help="rounds that count (default: %(default)s)")
    add("--warmup", default=3, help="rounds before them (default: %(default)s)")
    add("--idle_rounds", default=7, help="rounds that measure waiting and costs (default: %(default)s)")
    add("--microbatches", default=8, help="microbatches of a step (default: %(default)s)")
    add("--batch", default=2, help="sequences of a microbatch (default: %(default)s)")
    add("--seq", default=64, help="tokens in a sequence (default: %(default)s)")
    add("--hidden", default=256, help="features of a token (default: %(default)s)")
    add(
        "--layers", default=4, help="blocks of the model, in equal parts on all stages (default: %(default)s)"
    )
    parser.add_argument("--schedules", nargs="+", choices=THEIRS, default=list(THEIRS), help="default: all")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size < 2:
        parser.error("a pipeline needs two ranks or more: pass --nproc_per_node 2 to `colossalai run`")
    if args.layers % (2 * world_size):
        parser.error(
            f"--layers is {args.layers}; take a multiple of {2 * world_size}, two stages for each rank"
        )
    colossalai.launch_from_torch(config={"parallel": {"pipeline": world_size}}, verbose=False)
    rows = [row for name in args.schedules for row in measure(name, args)]
    report(
        f"Pipeline schedules, {world_size} ranks; theirs is torch.distributed.pipelining",
        rows,
        settings=vars(args) | {"medium_bits": bits_at_medium()},
        json_file=args.json,
    )


if __name__ == "__main__":
    main()
