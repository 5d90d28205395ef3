"""A save in the background: its error reaches every rank at the same step, and no end of the job loses it."""

import ctypes
import os
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.checkpoint_io import _save_plan
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

PLUGINS = {"ddp": TorchDDPPlugin, "zero": lambda: LowLevelZeroPlugin(precision="fp32")}
SAVED_AT = 2
STEPS = 10_000  # more than a save takes


def make_slow(seconds: float, *, only: int | None = None, then: Exception | None = None) -> None:
    """Let a rank take its time to write its part, and fail then."""
    write = _save_plan.write_items

    def write_slowly(*args: Any, **options: Any) -> Any:
        if only in (None, gpc.get_global_rank()):
            time.sleep(seconds)
            if then is not None:
                raise then
        return write(*args, **options)

    _save_plan.write_items = write_slowly


def until_it_fails(step_once: Any) -> tuple[int, str]:
    """Return the step that raises, and what."""
    for step in range(SAVED_AT, STEPS):
        try:
            step_once()
        except OSError as error:
            return step, str(error)
        time.sleep(0.01 * gpc.get_global_rank())  # ranks do not pass by at the same time
    return STEPS, ""


def booster_fails(plugin: str, folder: str) -> tuple[int, str]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[plugin]())
    model = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))

    def step_once() -> None:
        booster.backward(model(torch.ones(2, 4)).mean(), optimizer)
        optimizer.step()

    step_once()
    make_slow(0.1, only=1, then=OSError("the disk is gone"))
    booster.save(folder, model, optimizer, step=SAVED_AT, save_async=True)
    found = until_it_fails(step_once)
    step_once()  # it is raised once, and training can go on
    gpc.destroy()
    return found


@pytest.mark.parametrize("plugin", [further("ddp"), "zero"])
def test_an_error_is_raised_by_the_same_step_on_all_ranks(plugin: str, tmp_path: Path) -> None:
    found = run_ranks(booster_fails, 2, plugin, str(tmp_path))
    assert found[0][0] == found[1][0] < STEPS
    assert all("the disk is gone" in text for _, text in found)
    assert "rank 1" in found[0][1]
    assert not list(tmp_path.glob("step-*"))


def make_engine(config: dict[str, Any]) -> Engine:
    colossalai.launch_from_torch(config, verbose=False)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = colossalai.initialize(model, optimizer, nn.MSELoss(), verbose=False)
    return engine


def engine_fails(folder: str) -> tuple[int, str]:
    engine = make_engine({"gradient_accumulation": 3})

    def microbatch() -> bool:
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, 4)).mean())
        return engine.step()

    while not microbatch():
        pass
    make_slow(0.1, only=0, then=OSError("the disk is gone"))
    engine.save(folder, step=SAVED_AT, save_async=True)
    found = until_it_fails(microbatch)
    gpc.destroy()
    return found


def test_an_error_is_raised_at_the_end_of_an_accumulation_window(tmp_path: Path) -> None:
    found = run_ranks(engine_fails, 2, str(tmp_path))
    assert found[0][0] == found[1][0] < STEPS
    assert (found[0][0] - SAVED_AT) % 3 == 2
    assert all("the disk is gone" in text for _, text in found)


def destroys_at_once(folder: str, fails: bool) -> str:
    engine = make_engine({})
    make_slow(0.3, only=1, then=OSError("the disk is gone") if fails else None)
    engine.save(folder, step=1, save_async=True)
    try:
        gpc.destroy()
    except OSError as error:
        assert not gpc.is_launched
        return str(error)
    return ""


def test_the_end_of_the_job_waits(tmp_path: Path) -> None:
    assert run_ranks(destroys_at_once, 2, str(tmp_path), False) == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (tmp_path / "step-00000001" / "manifest.json").is_file()


def test_the_end_of_the_job_raises_what_went_wrong(tmp_path: Path) -> None:
    texts = run_ranks(destroys_at_once, 2, str(tmp_path), True)
    assert all("the disk is gone" in text for text in texts)


SCRIPT = """
    import os, signal, sys, torch
    import colossalai
    from tests.checkpoint_io.storage.test_background import make_engine, make_slow

    folder, end = sys.argv[1:]
    engine = make_engine({})
    engine.save(folder, step=0)
    make_slow(0.5, only=1 if end == "fails" else None, then=OSError("disk gone") if end == "fails" else None)
    engine.save(folder, step=1, keep_last=1, save_async=True)
    if end == "error and ctrl-c" and torch.distributed.get_rank() == 1:
        raise KeyError("a mistake of the script")
    if end == "error and ctrl-c":
        os.kill(os.getpid(), signal.SIGINT)
"""


def end_of_the_interpreter(folder: str, end: str) -> tuple[int, str]:
    """Run the script to the end of its interpreter; return the exit code and what is on stderr."""
    with tempfile.TemporaryFile("w+") as log:
        pid = os.fork()
        if pid == 0:
            os.dup2(log.fileno(), 2)
            sys.argv = ["script", folder, end]
            python = ctypes.pythonapi  # what `python script.py` does, but for its start
            python.Py_Exit(-python.PyRun_SimpleString(textwrap.dedent(SCRIPT).encode()))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        return code, log.read()


@pytest.mark.long  # the next test waits at the same end, and hears of an error there
@pytest.mark.parametrize("end", ["falls off", "error and ctrl-c"])
def test_no_end_of_a_script_loses_it(end: str, tmp_path: Path) -> None:
    codes, texts = zip(*run_ranks(end_of_the_interpreter, 2, str(tmp_path / "states"), end), strict=True)
    assert codes == ((0, 0) if end == "falls off" else (1, 1)), texts
    assert (tmp_path / "states" / "step-00000001" / "manifest.json").is_file(), texts
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["step-00000001"]


def test_an_error_that_only_the_end_of_a_script_sees_is_its_exit_code(tmp_path: Path) -> None:
    codes, texts = zip(*run_ranks(end_of_the_interpreter, 2, str(tmp_path), "fails"), strict=True)
    assert codes == (120, 120), texts
    assert all("disk gone" in text.splitlines()[-1] for text in texts), texts
    assert not any("Exception ignored" in text for text in texts), texts
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
