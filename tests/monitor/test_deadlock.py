"""Who waits in vain: found where it is so, and never said of a rank that may still come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.monitor._calls import CallRecord
from colossalai.monitor._diagnosis import DepartedRank, deadlock
from colossalai.monitor._rank_report import RankReport
from tests.tiers import further

pytestmark = pytest.mark.unit

PATIENCE_S = 10.0
ROUNDS = 40  # in which each rank makes a step: enough for all programs
COMPUTES = -1  # in a program: for as long as anybody looks


def wait(
    number=3,
    *,
    channel="gathers",
    partners=(0, 1),
    what="chunk 1",
    patience=PATIENCE_S,
    seconds=11.0,
    after_backwards=False,
):
    return CallRecord(
        op="gather" if patience else "all_reduce",
        channel=channel,
        number=number,
        partners=partners,
        where=f"of {what}",
        shapes=(),
        dtypes=(),
        seconds=seconds,
        module=None,
        patience=patience,
        advice="Do the same." if patience else "",
        after_backwards=after_backwards,
    )


def report(rank, *held, reached=None, does="it is at train.py:1", in_backward=()):
    own = {item.channel: item.number for item in held}
    return RankReport(
        rank=rank,
        host="host",
        pid=rank,
        activity=does,
        held=held,
        in_backward=in_backward,
        reached={**own, **(reached or {})},
        met={"gathers": "gather #2 of chunk 0"},
    )


def told(*reports, left=None):
    found = deadlock({answer.rank: answer for answer in reports}, left or {})
    return None if found is None else found.lines


def test_of_two_gathers_under_one_number_both_are_named():
    lines = told(report(0, wait(what="chunk 1")), report(1, wait(what="chunk 2")))
    assert lines == (
        "gather #3 is not the same on all ranks, and cannot end: rank 0 waits in gather #3 of chunk 1; it is "
        "at train.py:1. And rank 1 waits in gather #3 of chunk 2; it is at train.py:1",
        "Do the same.",
    )


def test_who_waits_in_another_collective_is_named_with_its_last_gather():
    elsewhere = wait(7, channel="dp", what="axis dp", patience=None)
    (line, _) = told(report(0, wait()), report(1, elsewhere, reached={"gathers": 2}))
    assert "And rank 1 waits in all_reduce #7 of axis dp; it was last in gather #2 of chunk 0; it is" in line


def test_who_has_left_is_named():
    (line, _) = told(report(0, wait()), left={1: DepartedRank("(host, pid 7) has left", {"gathers": 2})})
    assert line.endswith("And rank 1 (host, pid 7) has left")


def test_those_that_wait_in_vain_for_the_same_are_named_together():
    three = [report(rank, wait(partners=(0, 1, 2))) for rank in (0, 1)]
    (line, _) = told(*three, left={2: DepartedRank("has left", {})})
    assert "cannot end: ranks 0, 1 wait in gather #3" in line


def test_a_report_from_before_a_rank_had_come_and_left_is_no_reason():
    assert told(report(0, wait()), left={1: DepartedRank("has left", {"gathers": 3})}) is None


MAY_COME = {
    "computes": report(1, reached={"gathers": 2}),
    "has come": report(1, reached={"gathers": 3}),
    "is further": report(1, wait(4), reached={"gathers": 4}),
    "says nothing": None,
    "waits for one that computes": report(1, wait(9, channel="tp", partners=(1, 2)), reached={"gathers": 2}),
    "waits for one of two": report(
        1,
        wait(9, channel="tp", partners=(1, 2), patience=None),
        wait(9, channel="dp", patience=None),
        reached={"gathers": 2},
    ),
}


@pytest.mark.parametrize("other", MAY_COME.values(), ids=MAY_COME)
def test_who_may_still_come_is_waited_for(other):
    assert told(report(0, wait()), *([other] if other else []), report(2)) is None


def test_only_a_meeting_that_has_waited_long_enough_asks_for_it():
    def both(**options):
        return told(*(report(rank, wait(what=f"chunk {rank}", **options)) for rank in (0, 1)))

    assert both() is not None
    assert both(seconds=9.0) is None
    assert both(patience=None) is None


def test_collectives_of_a_backward_hold_a_rank_only_where_it_must_end_first():
    pending = wait(7, channel="dp", what="axis dp", patience=None)
    computing = report(1, in_backward=(pending,), reached={"gathers": 2, "dp": 7})
    (line, _) = told(report(0, wait(after_backwards=True)), computing)
    assert "And rank 1 waits in all_reduce #7 of axis dp" in line
    assert told(report(0, wait()), computing) is None
    assert told(report(0, wait(after_backwards=True), reached={"dp": 7}), computing) is None


class Job:
    """Ranks that run programs: the numbers of the channels at which they meet one another.

    Args:
        channels: The ranks of each.
        programs: By rank.
        computes_forever: Whether who computes does so until the end.
    """

    def __init__(self, channels, programs, *, computes_forever):
        self.channels, self.programs, self.computes_forever = channels, programs, computes_forever
        self.at = [0] * len(programs)
        self.waits = [False] * len(programs)
        self.reached = [dict.fromkeys(range(len(channels)), 0) for _ in programs]
        self.reports, self.left = {}, {}

    def is_over(self, rank):
        return self.at[rank] == len(self.programs[rank])

    def all_have_come(self, rank, channel):
        number = self.reached[rank][channel]
        return all(self.reached[other][channel] >= number for other in self.channels[channel])

    def step(self, rank):
        """Go on by a step, if that is possible."""
        if self.is_over(rank):
            return
        channel = self.programs[rank][self.at[rank]]
        if channel == COMPUTES:
            self.at[rank] += not self.computes_forever
        elif not self.waits[rank]:
            self.waits[rank] = True
            self.reached[rank][channel] += 1
        elif self.all_have_come(rank, channel):
            self.waits[rank] = False
            self.at[rank] += 1

    def look(self, rank):
        """Let a rank say where it is."""
        reached = {f"c{channel}": number for channel, number in self.reached[rank].items()}
        if self.is_over(rank):
            self.left[rank] = DepartedRank("has left", reached)
            return
        held = []
        if self.waits[rank]:
            channel = self.programs[rank][self.at[rank]]
            name, number = f"c{channel}", self.reached[rank][channel]
            held = [wait(number, channel=name, partners=self.channels[channel], what=name)]
        self.reports[rank] = report(rank, *held, reached=reached)

    def run(self, order, times):
        """Run to the end, or until nobody moves; return who never comes to the end."""
        ranks = range(len(self.programs))
        for time, rank in enumerate([*order, *(ROUNDS * [*ranks])]):
            for other in (other for other in ranks if times[other] == time):
                self.look(other)
            self.step(rank)
        return {rank for rank in ranks if not self.is_over(rank)}


@st.composite
def jobs(draw):
    """Draw programs of ranks, and for each rank after how many steps of the job it reports."""
    num_ranks = draw(st.integers(2, 4))
    members = st.lists(st.integers(0, num_ranks - 1), min_size=2, max_size=num_ranks, unique=True)
    channels = draw(st.lists(members, min_size=1, max_size=3))
    programs = []
    for rank in range(num_ranks):
        own = [number for number, ranks in enumerate(channels) if rank in ranks]
        programs.append(draw(st.lists(st.sampled_from([*own, COMPUTES]), max_size=6)))
    order = draw(st.lists(st.integers(0, num_ranks - 1), max_size=60))
    times = [draw(st.integers(0, 80)) for _ in range(num_ranks)]
    return channels, programs, order, times


@pytest.mark.parametrize("num_jobs", [80, further(300)])
def test_whoever_is_named_never_goes_on_though_reports_are_of_different_times(num_jobs):
    settings(max_examples=num_jobs)(given(jobs())(never_goes_on))()


def never_goes_on(drawn):
    channels, programs, order, times = drawn
    job = Job(channels, programs, computes_forever=False)
    unfinished = job.run(order, times)
    found = deadlock(job.reports, job.left)
    assert found is None or set(found.blamed) - set(job.left) <= unfinished


@pytest.mark.parametrize("num_jobs", [80, further(300)])
def test_when_nobody_moves_any_more_all_that_cannot_are_found(num_jobs):
    settings(max_examples=num_jobs)(given(jobs())(all_are_found))()


def all_are_found(drawn):
    channels, programs, order, _ = drawn
    job = Job(
        channels, [[each for each in own if each != COMPUTES] for own in programs], computes_forever=True
    )
    end = len(order) + ROUNDS * len(programs) - 1
    unfinished = job.run(order, [end] * len(programs))
    found = deadlock(job.reports, job.left)
    assert (set() if found is None else set(found.blamed) - set(job.left)) == unfinished
