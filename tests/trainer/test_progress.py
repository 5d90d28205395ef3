"""The display: a bar on a terminal, lines elsewhere, nothing on other ranks; and the screen after Ctrl-C."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest

from colossalai.trainer import Trainer, _progress
from colossalai.trainer.hooks import LogMetricByStepHook, LossHook
from tests.harness.clocks import FakeClock
from tests.trainer.fakes import FakeEngine, Lines, Probe, make_batches

pytestmark = pytest.mark.unit

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_terminal_gets_a_bar_with_the_metrics(terminal: Terminal) -> None:
    trainer = Trainer(FakeEngine())
    with redirect_stderr(terminal):
        trainer.fit(
            make_batches(),
            epochs=2,
            test_dataloader=make_batches((2,)),
            hooks=[LossHook(), LogMetricByStepHook()],
            display_progress=True,
        )
    written = terminal.getvalue()
    for text in ("Epoch 1/2 train", "3/3", "Loss ", "Epoch 1 test", "1/1", "Epoch 2/2 train"):
        assert text in written
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)


def test_ctrl_c_gives_the_cursor_back(terminal: Terminal) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with redirect_stderr(terminal):
        with pytest.raises(KeyboardInterrupt):
            Trainer(FakeEngine()).fit(
                make_batches(), epochs=1, hooks=[Probe("after_train_iter", interrupt)], display_progress=True
            )
        assert sys.stderr is terminal
    written = terminal.getvalue()
    assert written.rindex(SHOW_CURSOR) > written.rindex(HIDE_CURSOR)
    assert written.endswith(("\n", SHOW_CURSOR))


def test_a_bar_is_drawn_anew_ten_times_a_second(terminal: Terminal) -> None:
    time_of_test, drawn = FakeClock(), []
    with (
        redirect_stderr(terminal),
        _progress.show_progress("work", 9, logger=Lines(), shown=True, clock=time_of_test.clock) as advance,
    ):
        for number in range(1, 9):
            before = len(terminal.getvalue())
            time_of_test.sleep(0.04)
            advance("")
            if f"{number}/9" in terminal.getvalue()[before:]:
                drawn.append(number)
    assert drawn == [3, 6]


def test_elsewhere_lines_come_now_and_then() -> None:
    time_of_test, lines = FakeClock(), Lines()
    with _progress.show_progress("work", 7, logger=lines, shown=True, clock=time_of_test.clock) as advance:
        for number in range(7):
            time_of_test.sleep(4.0)
            advance(f"Loss {number}")
    assert lines.lines == ["work 3/7 Loss 2", "work 6/7 Loss 5", "work 7/7 Loss 6"]


def test_an_epoch_ends_with_a_line_of_its_metrics() -> None:
    lines = Lines()
    Trainer(FakeEngine(), logger=lines).fit(
        make_batches((2,) * 7), epochs=1, hooks=[LossHook(), LogMetricByStepHook()], display_progress=True
    )
    assert lines.lines[-1].startswith("Epoch 1/1 train 7/7 ")
    assert "Loss " in lines.lines[-1]


def test_a_loop_of_unknown_length_has_lines_too() -> None:
    lines = Lines()
    with _progress.show_progress("work", None, logger=lines, shown=True) as advance:
        advance("")
    assert lines.lines == ["work 1/?"]


@pytest.mark.parametrize(("rank", "display_progress"), [(1, True), (0, False)])
def test_other_ranks_and_unwanted_displays_show_nothing(
    terminal: Terminal, rank: int, display_progress: bool
) -> None:
    engine, lines = FakeEngine(), Lines()
    engine.mesh = SimpleNamespace(rank=rank, world_size=1)
    with redirect_stderr(terminal):
        Trainer(engine, logger=lines).fit(make_batches(), epochs=1, display_progress=display_progress)
    assert terminal.getvalue() == ""
    assert lines.lines == []


def test_rich_is_imported_only_for_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    Trainer(FakeEngine(), logger=Lines()).fit(make_batches(), epochs=1, display_progress=True)
    assert "rich" not in sys.modules
