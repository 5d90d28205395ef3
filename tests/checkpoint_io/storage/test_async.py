"""A save in the background is of the moment of the call, and its errors come at the next step."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossalai.checkpoint_io import (
    TrainingState,
    _save_plan,
    load_training_state,
    save_training_state,
    wait_for_saves,
)
from colossalai.checkpoint_io.storage._async_save import BackgroundSave, _CommonCount
from tests.checkpoint_io.killed_ranks import state_of
from tests.checkpoint_io.models import group
from tests.ranks import run_ranks

WAIT_S = 120.0


@contextmanager
def held_back(patch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no save write before the event is set, or the block ends."""
    may_write, write = threading.Event(), _save_plan._write_own

    def wait_and_write(*args: Any, **options: Any) -> Any:
        assert may_write.wait(WAIT_S)
        return write(*args, **options)

    patch.setattr(_save_plan, "_write_own", wait_and_write)
    yield may_write
    may_write.set()


def fill(state: TrainingState, value: float) -> None:
    """Change all that there is, in place."""
    with torch.no_grad():
        for param in state.model.parameters():
            param.fill_(value)
            state.optimizer.state[param]["momentum_buffer"].fill_(value)
    state.optimizer.param_groups[0]["lr"] = value
    state.extra["told"] = value


def assert_told(path: Path, value: float) -> None:
    found = state_of(-1)
    assert load_training_state(path, found)["told"] == value
    for param in found.model.parameters():
        assert param.detach().eq(value).all()
        assert found.optimizer.state[param]["momentum_buffer"].eq(value).all()


def values_of_the_moment(folder: Path) -> None:
    with group(), pytest.MonkeyPatch.context() as patch:
        state = state_of(1)
        with held_back(patch) as may_write:
            path = save_training_state(folder, state, step=1, save_async=True)
            fill(state, 2.0)
            assert not path.exists()
            may_write.set()
            wait_for_saves()
        lr = 0.1
        assert_told(path, 1.0)
        found = state_of(-1)
        found.optimizer.param_groups[0]["lr"] = 5.0
        load_training_state(path, found)
        assert found.optimizer.param_groups[0]["lr"] == lr
        # The memory of the copies is used again: the next save has its own values all the same.
        second = save_training_state(folder, state, step=2, save_async=True)
        fill(state, 3.0)
        third = save_training_state(folder, state, step=3, save_async=True)
        assert second.exists()
        fill(state, 4.0)
        wait_for_saves()
        assert_told(second, 2.0)
        assert_told(third, 3.0)


@pytest.mark.dist
def test_what_is_saved_is_that_of_the_moment(tmp_path: Path) -> None:
    run_ranks(values_of_the_moment, 2, tmp_path)


def second_waits_for_the_first(folder: Path) -> None:
    with group(), pytest.MonkeyPatch.context() as patch:
        with held_back(patch) as may_write:
            first = save_training_state(folder, state_of(1), step=1, save_async=True)
            assert not first.exists()
            wait = BackgroundSave.wait

            def let_write_and_wait(save: BackgroundSave) -> None:
                assert not first.exists()
                may_write.set()
                wait(save)

            patch.setattr(BackgroundSave, "wait", let_write_and_wait)
            second = save_training_state(folder, state_of(2), step=2, save_async=True)
            patch.setattr(BackgroundSave, "wait", wait)
            assert may_write.is_set()
            assert first.exists()
        wait_for_saves()
        assert second.exists()


@pytest.mark.dist
def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    run_ranks(second_waits_for_the_first, 2, tmp_path)


def full_disk(folder: Path) -> None:
    raise OSError(28, "No space left on device")


def gone_folder(folder: Path) -> None:
    for hidden in folder.glob(".step-00000002.new-*"):
        shutil.rmtree(hidden)


def step_of_the_error(folder: Path, harm: Callable[[Path], None], rank: int) -> tuple[int, str]:
    """Save in the background where one rank fails; return the step at which each is told, and what."""
    with group(), pytest.MonkeyPatch.context() as patch:
        state = state_of(1)
        save_training_state(folder, state, step=1)
        write = _save_plan._write_own

        def fail(*args: Any, **options: Any) -> Any:
            if dist.get_rank() == rank:
                harm(folder)
            return write(*args, **options)

        patch.setattr(_save_plan, "_write_own", fail)
        save_training_state(folder, state, step=2, save_async=True)
        for step in range(10_000):
            for param in state.model.parameters():
                param.grad = torch.ones_like(param)
                dist.all_reduce(param.grad)  # as in training: a rank that is told later would hang here
            try:
                state.optimizer.step()
            except OSError as error:
                told = step, str(error)
                break
        else:
            raise AssertionError("the error was never raised")
        state.optimizer.step()  # once is enough
        wait_for_saves()
        return told


@pytest.mark.dist
@pytest.mark.parametrize("harm", [full_disk, gone_folder])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_is_raised_at_the_same_step_on_all_ranks(
    harm: Callable[[Path], None], rank: int, tmp_path: Path
) -> None:
    told = run_ranks(step_of_the_error, 2, tmp_path, harm, rank)
    assert told[0][0] == told[1][0]
    for _, text in told:
        assert f"cannot write {tmp_path}/step-00000002" in text
        assert "bytes needed" in text
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def error_at_the_next_save(folder: Path) -> str:
    with group():
        state = TrainingState(model=nn.Linear(2, 2))
        (folder / "file").touch()
        save_training_state(folder / "file" / "x", state, step=1, save_async=True)
        with pytest.raises(OSError, match="cannot write") as caught:
            save_training_state(folder, state, step=2, save_async=True)
        save_training_state(folder, state, step=3)
        return str(caught.value)


@pytest.mark.dist
def test_an_error_is_raised_by_the_next_save(tmp_path: Path) -> None:
    told = run_ranks(error_at_the_next_save, 2, tmp_path)
    assert all(f"cannot write {tmp_path}/file/x" in text for text in told)
    assert not (tmp_path / "step-00000002").exists()
    assert (tmp_path / "step-00000003").exists()


class Meeting:
    """What threads agree with, in one process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self._values: list[Any] = [None] * num_ranks

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        return type("Gathering", (), {"gather": staticmethod(gather)})()


@pytest.mark.unit
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_ranks_that_are_at_different_steps(ahead: int) -> None:
    """One main thread runs ahead of the other, as far as it can without its collectives."""
    meeting, counts = Meeting(2), [_CommonCount(), _CommonCount()]
    reached: list[int] = [0, 0]

    def pass_by(rank: int) -> None:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            reached[rank] += 1
            if counts[rank].reached():
                return
        reached[rank] = 0

    for _ in range(ahead):
        assert not counts[1].reached()
    threads = [threading.Thread(target=pass_by, args=(rank,)) for rank in range(2)]
    threads += [threading.Thread(target=counts[rank].agree, args=(meeting.of(rank),)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert reached[0] == reached[1] + ahead > 0
