"""Rank 0 leaves last where it has the store: held ranks may ask it still, dead ones are not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.cluster._store_departure import StoreDeparture
from colossalai.core import global_context as gpc
from colossalai.monitor import PeerProcess
from colossalai.zero.gemini import _positions
from tests.harness.clocks import Clock, FakeClock, process
from tests.ranks import ROOT, run_ranks
from tests.tiers import further

WORLD_SIZE = 4


def departures(clock: FakeClock) -> list[StoreDeparture]:
    """Return those of ranks that have met, all of them in this process."""
    store = dist.HashStore()
    each = [
        StoreDeparture(store=store, rank=rank, world_size=WORLD_SIZE, timeout=60.0, clock=clock.clock)
        for rank in range(WORLD_SIZE)
    ]
    for departure in each:
        departure.announce()
    return each


def leave(departure: StoreDeparture) -> None:
    """Leave as at the end of a job."""
    departure.leave()
    departure.keep_store()


@pytest.mark.unit
def test_rank_0_waits_for_each_rank_and_no_longer() -> None:
    clock = FakeClock()
    first, *others = departures(clock)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if others:
            others.pop().leave()

    leave(replace(first, clock=Clock(now=lambda: 0.0, sleep=sleep)))
    assert len(waits) == WORLD_SIZE - 1
    assert clock.seconds == 0.0  # no other rank waits


@pytest.mark.unit
def test_a_line_names_who_is_missing_at_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    first, _, third, _ = departures(clock)
    third.leave()
    leave(first)
    assert 60.0 <= clock.seconds < 66.0
    lines = [line.rpartition(" | ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        "rank 0 has come to its end and waits for ranks 1, 3, which may still need its store; 60 s at most",
        "rank 0 has waited for 60 s at its end for ranks 1, 3, which have neither ended the job nor died: it "
        "leaves now, and the store with it",
    ]


@pytest.mark.unit
@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_rank_that_has_died_is_not_waited_for(is_reaped: bool) -> None:
    clock = FakeClock()
    first, *others = departures(clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        started = psutil.Process(child.pid).create_time()
        place = replace(PeerProcess.current(), pid=child.pid, started=started).to_json()
        for departure in others:
            departure.store.set(f"process/{departure.rank}", place)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        if is_reaped:
            child.wait()
        leave(first)
    assert clock.seconds == 0.0


@pytest.mark.unit
def test_no_rank_waits_while_an_error_is_on_its_way() -> None:
    clock = FakeClock()
    first, *_ = departures(clock)
    try:
        raise ValueError("of the script")
    except ValueError:
        leave(first)
    assert clock.seconds == 0.0


def build_models_late(folder: Path) -> None:
    """Hold ranks 1 and 2 where a model asks the store, while the others come to their end."""
    colossalai.launch_from_torch({}, verbose=False)
    rank, released = dist.get_rank(), folder / "released"
    take_numbers = _positions._take_numbers

    def held(key: str, count: int) -> tuple[int, int]:
        while rank in (1, 2) and not released.exists():
            time.sleep(0.01)
        return take_numbers(key, count)

    _positions._take_numbers = held
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if departure._missing(PeerProcess.current()) == [1, 2]:
            released.touch()
        time.sleep(seconds)

    departure = process.departure
    assert departure is not None
    process.departure = replace(departure, clock=Clock(sleep=sleep))
    Booster(plugin=GeminiPlugin(precision="fp32")).boost(nn.Linear(64, 64))
    gpc.destroy()
    if rank == 0:  # rank 3 can come here first
        released.touch()  # if rank 0 has not waited for them, they are to see it
    assert bool(waits) == (rank == 0)


@pytest.mark.dist
def test_held_ranks_build_their_models_while_rank_0_comes_to_its_end(tmp_path: Path) -> None:
    run_ranks(build_models_late, WORLD_SIZE, tmp_path)


SCRIPT = """
    import atexit, json, os, signal, sys, time
    from pathlib import Path

    import torch.distributed as dist
    import colossalai

    rank, how, backend = int(os.environ["RANK"]), *sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if rank == 0:
        atexit.register(lambda: print("rank 0 has gone", flush=True))  # what is registered first is done last
    colossalai.launch_from_torch({}, backend=backend, verbose=False, timeout=600)
    if rank == 0 and how == "is interrupted before":
        colossalai.context.before_end(lambda: signal.raise_signal(signal.SIGINT))  # as in a save's wait
    dist.barrier()
    store = dist.distributed_c10d._get_default_store().underlying_store
    if rank == 1:
        store.wait(["left/0"])
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "interrupts":
            os.kill(json.loads(store.get("process/0"))["pid"], signal.SIGINT)
            signal.pause()
        for _ in range(200):  # a rank 0 that does not wait is gone before
            store.add("number", 1)
            time.sleep(0.005)
        print("rank 1 has had its store", flush=True)
"""


def start_two(folder: Path, port: int, *words: str) -> list[subprocess.Popen[str]]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return [
        subprocess.Popen(
            [sys.executable, script, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT),
            },
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize(("how", "backend"), [("ends", "gloo"), further("dies", "shared_memory")])
def test_a_script_without_destroy(tmp_path: Path, job_port: int, how: str, backend: str) -> None:
    ranks = start_two(tmp_path, job_port, how, backend)
    (first, errors), (second, others) = (rank.communicate() for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0 if how == "ends" else -9], errors + others
    assert first == "rank 0 has gone\n"
    assert second == ("rank 1 has had its store\n" if how == "ends" else "")
    assert "has waited" not in errors


@pytest.mark.unit
@pytest.mark.parametrize("how", ["interrupts", further("is interrupted before")])
def test_an_interrupt_ends_the_wait(how: str, tmp_path: Path, job_port: int) -> None:
    first, second = start_two(tmp_path, job_port, how, "gloo")
    out, errors = first.communicate()
    second.kill()
    second.communicate()
    assert first.returncode == -signal.SIGINT, errors
    assert out == "rank 0 has gone\n"
    assert "Traceback" not in errors
