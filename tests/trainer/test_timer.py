"""Timers."""

from __future__ import annotations

import pytest

from colossalai.trainer import MultiTimer, Timer

pytestmark = pytest.mark.unit


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is one second later than the look before by one more: 0, 1, 3, 6, 10, ..."""
    looks = iter(number * (number + 1) / 2 for number in range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(looks))


@pytest.mark.usefixtures("_clock")
def test_a_timer_measures_and_remembers() -> None:
    timer = Timer()
    assert not timer.has_history
    timer.start()
    assert timer.stop() == timer.get_elapsed_time() == 1.0
    assert not timer.has_history
    for wanted in (3.0, 5.0):
        timer.start()
        assert timer.stop(keep_in_history=True) == wanted
    assert timer.has_history
    assert (timer.get_history_sum(), timer.get_history_mean()) == (8.0, 4.0)
    assert timer.current_time == 21.0
    timer.reset()
    assert (timer.get_elapsed_time(), timer.get_history_sum(), timer.has_history) == (0.0, 0.0, False)


def test_a_timer_that_does_not_run_cannot_stop() -> None:
    timer = Timer()
    with pytest.raises(ValueError, match="call start"):
        timer.stop()
    timer.start()
    timer.stop()
    with pytest.raises(ValueError, match="call start"):
        timer.stop()
    with pytest.raises(ValueError, match="no history"):
        timer.get_history_mean()


@pytest.mark.usefixtures("_clock")
def test_timers_by_name() -> None:
    timers = MultiTimer()
    timers.start("a")
    timers.start("b")
    assert timers.stop("a", keep_in_history=True) == 3.0
    assert timers.stop("b") == 5.0
    assert [(name, timer.get_elapsed_time()) for name, timer in timers] == [("a", 3.0), ("b", 5.0)]
    timers.reset("a")
    assert [timer.get_elapsed_time() for _, timer in timers] == [0.0, 5.0]
    timers.reset()
    assert [timer.get_elapsed_time() for _, timer in timers] == [0.0, 0.0]
    timers.reset("never started")


def test_timers_can_be_off() -> None:
    timers = MultiTimer(on=False)
    timers.start("a")
    assert timers.stop("a") == 0.0
    assert list(timers) == []
    timers.set_status(True)
    assert timers.is_on
    with pytest.raises(ValueError, match="no timer 'a' has been started; started are: none"):
        timers.get_timer("a")


def test_the_clock_waits_for_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.synchronize", lambda: waits.append(1))
    timer = Timer()
    timer.start()
    timer.stop()
    assert len(waits) == 2
