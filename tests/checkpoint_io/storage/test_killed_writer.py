"""A process that is killed at any moment while it saves leaves a complete training state."""

import os
import random
import signal
import time
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


def save_for_ever(folder: Path, first_step: int, saved: int) -> None:
    """Save one state after the other; write a byte into a pipe for each."""
    step = first_step
    while True:
        # Every third step overwrites the one before: folders are exchanged as well as added.
        save_training_state(folder, state_of(step), step=step - step % 3 // 2, keep_last=1)
        os.write(saved, b".")
        step += 1


def killed_after(num_saves: int, seconds: float, folder: Path, first_step: int) -> None:
    """Kill a writer some time after it has saved a number of states."""
    ours, saved = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_for_ever(folder, first_step, saved)
        finally:
            os._exit(1)
    os.close(saved)
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        for _ in range(num_saves):
            assert pipe.read(1), "the writer ended by itself"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"


@pytest.mark.parametrize("num_kills", [3, further(8)])
def test_kill_at_any_moment(num_kills: int, tmp_path: Path) -> None:
    generator = random.Random(20)
    for _ in range(2):  # the second tells how long a save takes on this machine, just now
        begin = time.monotonic()
        save_training_state(tmp_path, state_of(0), step=0)
    seconds = time.monotonic() - begin
    last = 0
    for number in range(num_kills):
        num_saves = number % 3  # none: in its first, or before it
        killed_after(num_saves, seconds * generator.uniform(0, 2), tmp_path, last + 1)
        path = latest_training_state(tmp_path)
        assert path is not None, "no complete training state is left"
        loaded = state_of(-1)
        told = load_training_state(path, loaded)["told"]
        assert told >= last + num_saves, "an older state than the last that was saved"
        last = told
        for parameter in loaded.model.parameters():
            assert parameter.detach().eq(told).all()
            assert loaded.optimizer.state[parameter]["momentum_buffer"].eq(told).all()
