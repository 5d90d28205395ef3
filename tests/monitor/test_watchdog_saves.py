"""A save in the background whose writer hangs (a dead file server) is a wait like any other."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from colossalai.checkpoint_io import (
    TrainingState,
    _save_plan,
    check_saves,
    save_training_state,
    wait_for_saves,
)
from colossalai.core import global_context as gpc
from colossalai.monitor import section, still_moving
from colossalai.monitor._sections import innermost_sections
from tests.monitor.hanging import TIMEOUT_S, hold, launch, report
from tests.ranks import run_ranks
from tests.tiers import further


@pytest.mark.unit
def test_a_section_that_gets_on_begins_anew():
    with section("a write", is_wait=True):
        (before,) = innermost_sections()
        still_moving()
        (after,) = innermost_sections()
        with section("a step"):
            still_moving()
    assert before.is_wait
    assert after.start > before.start
    still_moving()  # in no section


def save_with_a_dead_server(folder: Path, dead: tuple[int, ...], waits: bool) -> None:
    rank = launch(folder, waiting=(0, 1))
    write = _save_plan.write_items

    def hang(*args, **options):
        if rank in dead:
            hold(folder)
        return write(*args, **options)

    _save_plan.write_items = hang
    save_training_state(folder / "states", TrainingState(model=nn.Linear(2, 2)), step=5, save_async=True)
    if not waits:  # training goes on
        while not list(folder.glob("hang-*.txt")):
            torch.ones(10).sum()
            check_saves()
            time.sleep(0.01)
    wait_for_saves()
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("waits", [False, further(True)])  # the next test waits
def test_a_writer_that_hangs_is_named(waits: bool, tmp_path: Path) -> None:
    run_ranks(save_with_a_dead_server, 2, tmp_path, (1,), waits)
    first = report(tmp_path).splitlines()[1]
    assert first.startswith("rank 1 (")
    assert "did not enter step #" in first
    where = f"the save of {tmp_path}/states/step-00000005 in the background"
    assert f"of {where}; it is " in first
    assert f"another thread is in {where}, where nothing has moved for" in first
    assert (tmp_path / "states" / "step-00000005" / "manifest.json").exists()


@pytest.mark.dist
def test_a_server_that_is_dead_for_all(tmp_path: Path) -> None:
    run_ranks(save_with_a_dead_server, 2, tmp_path, (0, 1), True)
    text = report(tmp_path)
    assert f"step-00000005 in the background for more than {TIMEOUT_S:g} s" in text
