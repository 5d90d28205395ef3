"""Ranks that save for ever, are killed at a random call that changes files, and what they leave.

Used by storage/test_kills.py and by tools/checkpoint_kills.py. The caller is a process that has run nothing:
the ranks are forked from it, which takes no time.
"""

import mmap
import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_training_state,
    save_training_state,
)
from tests.checkpoint_io.storage.moments import die_at_call
from tests.harness.ports import reserved_port

MOST_SAVES = 3  # before the one in which the kill falls
NUM_CALLS = (130, 20)  # that change files, of a save, by rank
GRACE_S = 0.05  # for a rank that was not killed: it may notice or not
_BEGUN, _DONE = range(2)


@dataclass(frozen=True)
class Kill:
    """What happened in one try.

    Attributes:
        victims: The ranks that were killed at once; the others a little later.
        is_async: Whether they saved in the background.
        done: The last save that had ended.
        begun: The last that had begun.
        told: The one that was found.
        num_left: Number of entries of the folder that no complete save would have left.
    """

    victims: tuple[int, ...]
    is_async: bool
    done: int
    begun: int
    told: int
    num_left: int


class _Death(NamedTuple):
    """The moment at which a rank is killed: the number of a call, from the end of a number of saves."""

    rank: int
    num_saves: int
    call: int


class Counters:
    """Two numbers that the forked ranks and their keeper share."""

    def __init__(self) -> None:
        self._memory = memoryview(mmap.mmap(-1, 16)).cast("q")

    def __getitem__(self, place: int) -> int:
        return self._memory[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._memory[place] = value


def state_of(step: int) -> TrainingState:
    """A state all of whose values tell the step."""
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        nn.init.constant_(param, step)
        optimizer.state[param]["momentum_buffer"] = torch.full_like(param, step)
    return TrainingState(model=model, optimizer=optimizer, extra={"told": step})


def run_tries(folder: Path, *, num_tries: int, seed: int, num_ranks: int = 2) -> list[Kill]:
    """Kill ranks that save, again and again in one folder, and look at what is left each time.

    One rank is a process without a process group, which does not save in the background.

    Raises:
        AssertionError: No complete training state was left, or not the last or the one before.
    """
    keeper = Keeper(folder, seed, num_ranks)
    save_training_state(folder, state_of(0), step=0)
    return [keeper.one_try() for _ in range(num_tries)]


class Keeper:
    """Starts the ranks, kills them, and looks at what they leave.

    Args:
        folder: Where they save.
        seed: Of all that is random.
        num_ranks: How many ranks there are, 1 or 2.
    """

    def __init__(self, folder: Path, seed: int, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._source = random.Random(seed)
        self._last = 0

    def one_try(self) -> Kill:
        """Let ranks save, kill them, and return what happened."""
        victims = self._source.choice([(0,), (1,), (0, 1)] if self._num_ranks > 1 else [(0,)])
        is_async = self._source.random() < 0.5 and self._num_ranks > 1
        num_saves = self._source.randint(0, MOST_SAVES)
        first = self._source.choice(victims)
        death = _Death(first, num_saves, int(self._source.uniform(0, 1.5 * NUM_CALLS[first])))
        counters = Counters()
        counters[_DONE] = self._last
        with tempfile.TemporaryFile("w+") as log, reserved_port() as port:
            pids = [
                self._fork(rank, port, is_async, counters, death, log.fileno())
                for rank in range(self._num_ranks)
            ]
            try:
                os.waitid(os.P_PID, pids[first], os.WEXITED | os.WNOWAIT)
                for rank in victims:
                    os.kill(pids[rank], signal.SIGKILL)
                time.sleep(GRACE_S)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                ends = [os.waitpid(pid, 0)[1] for pid in pids]
            log.seek(0)
            assert os.WIFSIGNALED(ends[first]), f"rank {first} ended by itself\n{log.read()}"
        done, begun = counters[_DONE], counters[_BEGUN]
        self._last = told_by(self._folder)
        assert done <= self._last <= max(begun, done), (
            f"{self._last} was found after {done} had been saved and {begun} had begun"
        )
        left = [entry for entry in self._folder.iterdir() if entry.name.startswith(".")]
        return Kill(victims, is_async, done, begun, self._last, len(left))

    def _fork(self, rank: int, port: int, is_async: bool, counters: Counters, death: _Death, log: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(log, 2)
                os.environ |= {
                    **{"RANK": str(rank), "WORLD_SIZE": str(self._num_ranks)},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                }
                if self._num_ranks > 1:
                    dist.init_process_group("gloo")
                    dist.barrier()
                _save_for_ever(
                    self._folder,
                    self._last + 1,
                    is_async,
                    counters if rank == 0 else Counters(),
                    death if rank == death.rank else None,
                )
            finally:
                os._exit(1)
        return pid


def told_by(folder: Path) -> int:
    """Return which save the newest complete training state is of, all of whose values must tell it."""
    path = latest_training_state(folder)
    assert path is not None, f"no complete training state is left in {folder}"
    loaded = state_of(-1)
    told = load_training_state(path, loaded)["told"]
    for param in loaded.model.parameters():
        assert param.detach().eq(told).all(), f"{path}: a weight is not of save {told}"
        assert loaded.optimizer.state[param]["momentum_buffer"].eq(told).all(), f"{path}: a state is not"
    return told


def _save_for_ever(
    folder: Path, first_step: int, is_async: bool, counters: Counters, death: _Death | None
) -> NoReturn:
    step = first_step
    while True:
        counters[_BEGUN] = step
        if death is not None and step == first_step + death.num_saves:
            die_at_call(death.call)
        # Every third step overwrites the one before: folders are exchanged as well as added.
        save_training_state(
            folder, state_of(step), step=step - step % 3 // 2, keep_last=1, save_async=is_async
        )
        counters[_DONE] = step - 1 if is_async else step
        step += 1
