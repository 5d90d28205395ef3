"""What counts as waiting: the same thing, look after look; not the time in which nobody looked."""

import pytest

from colossalai.monitor import _wait_timer
from colossalai.monitor._last_calls import MessageRecord
from colossalai.monitor._sections import expected_wait, innermost_sections, meeting, section
from colossalai.monitor._wait_timer import WaitTimer
from tests.harness.clocks import Clock

pytestmark = pytest.mark.unit

LOOK_S, TIMEOUT_S = 1.0, 3.0


class World:
    """A clock, and what the flight recorder says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.status = {"0/0": (5, 5)}
        monkeypatch.setattr(_wait_timer, "progress", lambda: dict(self.status))
        self.watch = self.timer()

    def timer(self, *, watches_sections=False):
        clock = Clock(now=lambda: self.now)
        return WaitTimer(MessageRecord(), watches_sections=watches_sections, clock=clock)

    def looks(self, count, *, every=LOOK_S):
        found = []
        for _ in range(count):
            self.now += every
            self.watch.look(LOOK_S)
            found.append(self.watch.overdue(TIMEOUT_S))
        return found


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_a_collective_that_does_not_end_is_overdue(world):
    world.status = {"0/0": (6, 5)}
    *before, last = world.looks(5)
    assert not any(before)
    assert last.startswith("has been in a collective (of group 0/0) for more than 3 s")


def test_one_that_ends_now_and_then_is_not(world):
    for number in range(6, 12):
        world.status = {"0/0": (number, number - 1)}
        assert not any(world.looks(3))


def test_time_in_which_the_process_did_not_run_does_not_count(world):
    world.status = {"0/0": (6, 5)}
    assert not any(world.looks(2, every=1000.0))


def test_a_wait_is_told_of_once(world):
    world.status = {"0/0": (6, 5)}
    assert world.looks(5)[-1]
    world.watch.forgive()
    assert not any(world.looks(5))
    world.status = {"0/0": (7, 6)}
    assert world.looks(5)[-1]


def test_a_notice_is_asked_for_once_and_does_not_keep_the_report_back(world):
    world.status = {"0/0": (6, 5)}
    world.looks(3)
    assert not world.watch.slow(2.0)
    world.looks(1)
    assert world.watch.slow(2.0)
    world.watch.mark_noticed()
    assert world.looks(1)[-1]
    assert not world.watch.slow(2.0)
    world.status = {"0/0": (7, 6)}
    world.looks(4)
    assert world.watch.slow(2.0)


def test_a_long_step_asks_for_no_notice_and_a_wait_for_a_file_server_does(monkeypatch, world):
    world.watch = world.timer(watches_sections=True)
    with section("the forward"):
        assert world.looks(5)[-1]
        assert not world.watch.slow(2.0)
    with section("a write", is_wait=True):
        world.looks(5)
        assert world.watch.slow(2.0) == "has been in a write for more than 2 s"


def test_an_expected_wait_asks_for_no_notice_and_is_reported_when_overdue(world):
    world.status = {"0/0": (6, 5)}
    with expected_wait():
        assert world.looks(5)[-1]
        assert not world.watch.slow(2.0)
    assert world.watch.slow(2.0)


def test_what_an_earlier_job_left_pending_does_not_count(monkeypatch, world):
    world.status = {"0/0": (6, 5)}
    world.watch = world.timer()
    assert not any(world.looks(6))


def test_sections_nest_and_may_be_entered_again():
    forward, loading = section("the forward"), section("data loading")
    with forward:
        with loading:
            assert [item.name for item in innermost_sections()] == ["data loading"]
        with forward:
            assert [item.name for item in innermost_sections()] == ["the forward"]
        assert [item.name for item in innermost_sections()] == ["the forward"]
    assert innermost_sections() == []


def test_a_meeting_with_a_patience_asks_again_and_again(monkeypatch, world):
    ordinary = meeting("a save", channel="saves", number=1, partners=(0, 1))
    gather = meeting("chunk 1", channel="gathers", number=1, partners=(0, 1), op="gather", patience=2.0)
    with ordinary:
        world.looks(3)
        assert not world.watch.is_impatient()
    with gather:
        world.looks(2)
        assert not world.watch.is_impatient()
        world.looks(1)
        assert world.watch.is_impatient()
        world.watch.mark_noticed()
        world.looks(2)
        assert not world.watch.is_impatient()
        world.looks(1)
        assert world.watch.is_impatient()
        world.watch.forgive()
        world.looks(3)
        assert not world.watch.is_impatient()
    assert not world.watch.is_impatient()
