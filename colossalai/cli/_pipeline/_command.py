"""`colossalai pipeline`: check the options, simulate the schedules, and print the outcomes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from colossalai.cli._picture import check_picture
from colossalai.cli._pipeline._chart import show_charts
from colossalai.cli._pipeline._outcome import Outcome, show, show_steps
from colossalai.cli._pipeline._plot import plot
from colossalai.pipeline import SCHEDULES, Costs, Schedule, make_schedule, read_schedule, simulate


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Settings of a simulation.

    Attributes:
        num_ranks: Number of pipeline ranks; None: from the file.
        num_microbatches: Number of microbatches; None: from the file.
        names: Names of schedules; None: all, or none if there is a file.
        num_chunks: Number of stages on a rank of the interleaved schedule.
        file: Path of a CSV file of actions.
        forward: Time of the forward of a microbatch through a rank's share of the model.
        backward: Time of the whole backward.
        weight_grad: Time of the part of the backward that computes weight gradients; None: a half.
        p2p: Time of a message.
        message_bytes: Size of a message; None: unknown.
    """

    num_ranks: int | None = None
    num_microbatches: int | None = None
    names: tuple[str, ...] | None = None
    num_chunks: int = 2
    file: str | None = None
    forward: float = 1.0
    backward: float = 2.0
    weight_grad: float | None = None
    p2p: float = 0.0
    message_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineOutput:
    """Outputs of a simulation.

    Attributes:
        plot_file: Path of a picture.
        has_text: Whether to draw text charts as well.
        has_steps: Whether to list the steps of each rank as well, messages included.
        as_json: Whether to print JSON in place of the table.
    """

    plot_file: str | None = None
    has_text: bool = False
    has_steps: bool = False
    as_json: bool = False


def compare(settings: PipelineSettings, output: PipelineOutput) -> None:
    """Simulate schedules and print a comparison of step time, bubble, memory and messages.

    Raises:
        ValueError: An option is missing or contradicts the schedule of the file, an output cannot be written,
            or a schedule cannot be run.
    """
    _check_output(output)
    outcomes = [_simulate(schedule, settings) for schedule in _choose(settings)]
    if output.plot_file is not None:
        plot(outcomes, output.plot_file)
    if output.as_json:
        sys.stdout.write(json.dumps([outcome.as_dict() for outcome in outcomes], indent=2) + "\n")
        return
    show(outcomes)
    if output.has_text:
        show_charts(outcomes)
    if output.has_steps:
        show_steps(outcomes)


def stage_costs(schedule: Schedule, settings: PipelineSettings) -> Costs:
    """Return the costs of stages: a rank's share of the model, divided evenly over its stages."""
    parts = [len(schedule.stages_of(rank)) for rank in schedule.rank_of_stage]
    weight_grad = settings.weight_grad
    return Costs(
        [settings.forward / part for part in parts],
        [settings.backward / part for part in parts],
        settings.p2p,
        None if weight_grad is None else [weight_grad / part for part in parts],
    )


def _simulate(schedule: Schedule, settings: PipelineSettings) -> Outcome:
    timeline = simulate(schedule, stage_costs(schedule, settings))
    return Outcome(timeline=timeline, message_bytes=settings.message_bytes)


def _choose(settings: PipelineSettings) -> list[Schedule]:
    """Return the schedules given by name, and the schedule of the file."""
    if settings.weight_grad is not None and settings.weight_grad > settings.backward:
        raise ValueError(
            f"--weight_grad {settings.weight_grad:g} is a part of --backward {settings.backward:g}, and "
            "cannot be more"
        )
    own = [] if settings.file is None else [read_schedule(settings.file)]
    num_ranks = _agree("--stages", settings.num_ranks, [schedule.num_ranks for schedule in own])
    num_microbatches = _agree(
        "--microbatches", settings.num_microbatches, [schedule.num_microbatches for schedule in own]
    )
    names = settings.names if settings.names is not None else (() if own else tuple(SCHEDULES))
    named = [
        make_schedule(
            name, num_ranks, num_microbatches, settings.num_chunks if name == "interleaved" else None
        )
        for name in names
    ]
    return named + own


def _agree(option: str, given: int | None, in_file: Sequence[int]) -> int:
    """Return a number from the option or from the file; both have to agree."""
    if given is None and not in_file:
        raise ValueError(f"{option} is needed, or a schedule with --file")
    if given is not None and in_file and given != in_file[0]:
        raise ValueError(
            f"{option} {given}, but the schedule of --file is for {in_file[0]}: leave {option} out"
        )
    return in_file[0] if given is None else given


def _check_output(output: PipelineOutput) -> None:
    for option, is_given in (("--text", output.has_text), ("--steps", output.has_steps)):
        if output.as_json and is_given:
            raise ValueError(f"--json prints nothing but JSON: leave {option} out")
    if output.plot_file is not None:
        check_picture("--plot", output.plot_file)
