"""Schedules of all kinds and sizes for property tests."""

from hypothesis import strategies as st

from colossalai.pipeline.schedules._action import Action, Op, Schedule
from colossalai.pipeline.schedules._generators import SCHEDULES, make_schedule

sizes = st.tuples(st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))


@st.composite
def schedules(draw, names=tuple(SCHEDULES), min_ranks=1):
    """Return any schedule of some names."""
    num_ranks = draw(st.integers(min_ranks, 8))
    num_microbatches = draw(st.integers(1, 16))
    name = draw(st.sampled_from(names))
    num_chunks = draw(st.integers(1, 4)) if name == "interleaved" else None
    return make_schedule(name, num_ranks, num_microbatches, num_chunks)


def parsed(*rows: str, rank_of_stage: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Return a schedule from rows like "0F0 0B0"."""
    actions = tuple(tuple(parse(cell) for cell in row.split()) for row in rows)
    return Schedule("by hand", num_microbatches, rank_of_stage, actions)


def parse(cell: str) -> Action:
    """Return the action of a cell of one-digit numbers."""
    stage, op, microbatch = cell
    return Action(Op(op), int(stage), int(microbatch))


def with_row(schedule: Schedule, rank: int, row) -> Schedule:
    """Return a schedule in which one rank has other actions."""
    actions = list(schedule.actions)
    actions[rank] = tuple(row)
    return Schedule(schedule.name, schedule.num_microbatches, schedule.rank_of_stage, tuple(actions))
