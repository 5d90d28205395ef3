"""A save that not all ranks call: the job ends with a sentence on each rank; a late rank is waited for."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from colossalai.checkpoint_io import _collective
from colossalai.core import global_context as gpc
from tests.monitor.hanging import notices, num_notices, wait_for
from tests.ranks import RanksError, run_ranks
from tests.tiers import after_the_first

pytestmark = pytest.mark.dist
PATIENCE_S = 0.3


class Training:
    """A model in training.

    Args:
        backend: Of the job.
        plugin: How it is trained.
        folder: For reports and checkpoints.
        notice: Seconds until a wait is written to stderr.
    """

    def __init__(self, backend: str, plugin: Plugin, folder: Path, *, notice: float = 60.0) -> None:
        options = {"timeout": 900.0, "notice": notice, "folder": str(folder)}
        colossalai.launch_from_torch({"watchdog": options}, backend=backend, verbose=False)
        _collective.PATIENCE_S = PATIENCE_S  # of this rank's process, which ends with the test
        self.rank, self.folder = dist.get_rank(), folder
        self.booster = Booster(plugin=plugin)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.step()

    def step(self) -> None:
        self.booster.backward(self.model(torch.ones(2, 4)).sum(), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_model(self) -> None:
        self.booster.save_model(self.model, self.folder / "model.pt")

    def save(self) -> None:
        self.booster.save(self.folder / "states", self.model, self.optimizer, step=1)


def saves_a_model_on_rank_0(training: Training) -> None:
    if training.rank == 0:
        training.save_model()
    training.step()


def saves_a_state_on_rank_0(training: Training) -> None:
    if training.rank == 0:
        training.save()
    training.step()


def saves_what_others_do_not(training: Training) -> None:
    if training.rank == 0:
        training.save()
    else:
        training.save_model()


def has_left(training: Training) -> None:
    if training.rank == 0:
        training.save_model()
    gpc.destroy()


def zero() -> Plugin:
    return LowLevelZeroPlugin(stage=2, precision="fp32")


CASES: list[tuple[Callable[[Training], None], str, Callable[[], Plugin], str, str]] = [
    (saves_a_model_on_rank_0, "gloo", TorchDDPPlugin, "save #1 of a model", "rank 1 waits in "),
    (saves_a_model_on_rank_0, "shared_memory", zero, "save #1 of a model", "rank 1 waits in "),
    (
        saves_a_state_on_rank_0,
        "shared_memory",
        TorchDDPPlugin,
        "save #1 of a training state",
        "rank 1 waits in ",
    ),
    (saves_a_state_on_rank_0, "gloo", zero, "save #1 of a training state", "rank 1 waits in "),
    (
        saves_what_others_do_not,
        "gloo",
        TorchDDPPlugin,
        "save #1 of a training state",
        "rank 1 waits in save #1 of a model",
    ),
    (has_left, "gloo", TorchDDPPlugin, "save #1 of a model", r"rank 1 \(.*\) has left the job"),
]


def run(case: Callable[[Training], None], backend: str, plugin: Callable[[], Plugin], folder: Path) -> None:
    case(Training(backend, plugin(), folder))


@pytest.mark.parametrize(("case", "backend", "plugin", "save", "other"), after_the_first(CASES))
def test_a_save_on_one_rank_ends_the_job_and_says_so_on_all(
    tmp_path: Path,
    case: Callable[[Training], None],
    backend: str,
    plugin: Callable[[], Plugin],
    save: str,
    other: str,
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(run, 2, case, backend, plugin, tmp_path)
    text = str(caught.value)
    lines = [line for line in text.splitlines() if re.search(r"HangError: .* cannot end: ", line)]
    assert len(lines) == (1 if case is has_left else 2), text
    for line in lines:
        assert f"rank 0 waits in {save}; it is in saving or loading a checkpoint" in line
        assert re.search(other, line), line
        assert line.endswith(
            "all ranks call them, also where only rank 0 writes. Take the call out of `if rank == 0:`"
        )


def comes_late(folder: Path) -> bool:
    """Rank 1 comes when it has been asked for twice more."""
    with notices(folder) as told:
        training = Training("gloo", TorchDDPPlugin(), folder, notice=PATIENCE_S)
        if training.rank == 1:
            wait_for(told)
            before = num_notices()
            wait_for(lambda: num_notices() >= before + 2)
        training.save_model()
        training.save_model()
        training.step()
        gpc.destroy()
    return (folder / "model.pt").exists()


class Interrupt(BaseException):
    """Ctrl-C in a notebook."""


def is_interrupted(folder: Path) -> bool:
    """Rank 0 waits, is interrupted, and saves again; rank 1 saves once."""
    training = Training("gloo", TorchDDPPlugin(), folder)
    if training.rank == 0:

        def interrupt(seconds: float) -> None:
            raise Interrupt

        _collective.time = SimpleNamespace(sleep=interrupt)  # of this thread alone
        with pytest.raises(Interrupt):
            training.save_model()
        _collective.time = time
        (folder / "interrupted").touch()
    wait_for((folder / "interrupted").exists)
    training.save_model()
    training.step()
    gpc.destroy()
    return (folder / "model.pt").exists()


def test_a_save_that_was_interrupted_can_be_called_again(tmp_path: Path) -> None:
    assert run_ranks(is_interrupted, 2, tmp_path) == [True, True]
    assert not list(tmp_path.glob("hang-*"))


def test_a_late_rank_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(comes_late, 2, tmp_path) == [True, True]
    assert not list(tmp_path.glob("hang-*"))
