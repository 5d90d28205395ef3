"""A process that is killed at any moment while it saves leaves a complete training state."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_training_state,
    save_training_state,
)
from tests.checkpoint_io.storage.moments import die_at_call, num_calls_of
from tests.tiers import further

pytestmark = pytest.mark.unit


def state_of(step: int) -> TrainingState:
    """A state all of whose values tell the step."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
    return TrainingState(model=model, optimizer=optimizer, extra={"told": step})


def save_for_ever(folder: Path, first_step: int, num_saves: int, moment: int) -> None:
    """Save one state after the other, and die at a moment that counts from the end of a number of saves."""
    step = first_step
    while True:
        if step == first_step + num_saves:
            die_at_call(moment)
        # Every third step overwrites the one before: folders are exchanged as well as added.
        save_training_state(folder, state_of(step), step=step - step % 3 // 2, keep_last=1)
        step += 1


def killed_after(num_saves: int, moment: int, folder: Path, first_step: int) -> None:
    """Let a writer be killed at a moment after it has saved a number of states."""
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, first_step, num_saves, moment)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("num_kills", [6, further(40)])
def test_kill_at_any_moment(num_kills: int, tmp_path: Path) -> None:
    generator = random.Random(20)
    save_training_state(tmp_path, state_of(0), step=0)
    num_moments = num_calls_of(lambda: save_training_state(tmp_path, state_of(0), step=0))
    assert num_moments > 50
    last = 0
    for number in range(num_kills):
        num_saves = number % 3  # none: in its first, or before it
        killed_after(num_saves, generator.randrange(2 * num_moments), tmp_path, last + 1)
        path = latest_training_state(tmp_path)
        assert path is not None, "no complete training state is left"
        loaded = state_of(-1)
        told = load_training_state(path, loaded)["told"]
        assert told >= last + num_saves, "an older state than the last that was saved"
        last = told
        for parameter in loaded.model.parameters():
            assert parameter.detach().eq(told).all()
            assert loaded.optimizer.state[parameter]["momentum_buffer"].eq(told).all()
