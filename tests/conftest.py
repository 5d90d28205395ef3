"""What holds for every test: no leaks, the ranks' zygote, `gpu` tests only where there is an accelerator."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from colossalai.kernel import _profile_cache, renew_profile, why_unavailable
from colossalai.kernel._probe import processor_and_version
from colossalai.kernel._profile_cache import cache_file, is_due
from tests._zygote import MODULES_OF_WORDS
from tests.forced import force_choices
from tests.harness.ports import reserved_port
from tests.harness.properties import load_profile
from tests.ranks import start_zygote, stop_zygote
from tests.tiers import mark_combinations

# Threads that a library starts once and keeps.
KEPT_THREADS = ("TMonitor", "tqdm_monitor", "execnet", "pydevd")
# Variables that pytest, torch and scikit-learn set when they are first used.
CHANGING_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
}


load_profile()  # as early as that: decorators of tests read it when they are imported


def pytest_configure(config: pytest.Config) -> None:
    force_choices()
    tqdm.monitor_interval = 0  # no thread that outlives a library's bar: some tests count those that live
    torch.set_num_threads(1)  # results do not depend on the machine, and the ranks have the cores
    let_children_heed_signals()
    if not hasattr(config, "workerinput"):  # workers come after it
        measure_products()


def measure_products() -> None:
    """Keep one measurement of products for all jobs of the session, whose tests compare bits between jobs."""
    file = cache_file()
    kept = {} if file is None else _profile_cache._read(file)
    if why_unavailable() is None and is_due(kept.get(processor_and_version(), ()), time.time()):
        any(renew_profile().found.is_believed for _ in range(3))  # again while the machine is busy


def let_children_heed_signals() -> None:
    """Give what tests start the disposition of signals that a terminal gives.

    A script's background job ignores SIGINT and SIGQUIT, `nohup` SIGHUP, and every program inherits that, but
    not a handler. So this process goes on ignoring them by handlers that do nothing.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_combinations(items)
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator: torch.accelerator.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the zygote if a test will need it; it imports while the first tests run."""
    paths = {item.path for item in session.items if item.get_closest_marker("dist")}
    is_controller = session.config.getoption("numprocesses", None) and not hasattr(
        session.config, "workerinput"
    )
    if paths and not is_controller and not session.config.option.collectonly:
        texts = [path.read_bytes() for path in paths]
        wanted = [names for word, names in MODULES_OF_WORDS.items() if any(word in text for text in texts)]
        start_zygote(*chain.from_iterable(wanted))


def pytest_sessionfinish() -> None:
    stop_zygote()


@pytest.fixture
def job_port() -> Iterator[int]:
    """Reserve a port for what a test starts by a number that is known before."""
    with reserved_port() as port:
        yield port


@pytest.fixture
def thread_end_s() -> float:
    """Seconds in which a thread ends that was told to: a wait for the thread, not a pause."""
    return 120.0


@pytest.fixture(autouse=True)
def no_leaks(thread_end_s: float) -> Iterator[None]:
    """Fail a test that leaves an environment variable, a process group or a thread; and clean up after it."""
    env = _environment()
    had_group = dist.is_initialized()
    threads = set(threading.enumerate())
    yield
    leaks = _env_leaks(env)
    if dist.is_initialized() and not had_group:
        leaks.append("a process group: call torch.distributed.destroy_process_group() or gpc.destroy()")
        dist.destroy_process_group()
    leaks += [f"a thread: {thread!r}" for thread in _new_threads(threads, thread_end_s)]
    if leaks:
        pytest.fail("the test leaks " + "; ".join(leaks), pytrace=False)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in CHANGING_VARIABLES}


def _env_leaks(before: dict[str, str]) -> list[str]:
    """Name the variables that differ from `before`, and set them back."""
    after = _environment()
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    leaks = [
        f"environment variable {name}: was {before.get(name)!r}, is {after.get(name)!r}" for name in changed
    ]
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return leaks


def _new_threads(before: set[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Return the threads that a test started and that do not end by themselves."""
    end = time.monotonic() + seconds
    new = [thread for thread in threading.enumerate() if thread not in before and not _is_kept(thread)]
    for thread in new:
        thread.join(max(0.0, end - time.monotonic()))
    return [thread for thread in new if thread.is_alive()]


def _is_kept(thread: threading.Thread) -> bool:
    is_known = type(thread).__name__ in KEPT_THREADS or thread.name.startswith(KEPT_THREADS)
    return thread.daemon and is_known
