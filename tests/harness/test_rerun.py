"""What a failing, crashing or hanging test does to the exit status of a run (tests/harness/rerun.py)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.rerun import HUNG, MOST_RERUN, Run, Silence
from tests.ranks import ROOT

pytestmark = pytest.mark.unit

HEAD = """
import os, pathlib, signal, threading
import pytest

def is_first(name):
    try:
        pathlib.Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def test_passes():
    pass
"""
ONCE = """
@pytest.mark.parametrize("name", ["a b", "c[d]", "e::f"])
def test_once(name):
    assert not is_first(name.replace(":", "")), "the first\\ntime"

@pytest.fixture
def begins_badly():
    if is_first("begins"):
        raise ValueError("in the set-up")

@pytest.fixture
def ends_badly():
    yield
    if is_first("ends"):
        raise ValueError("in the tear-down")

def test_begins_badly(begins_badly):
    pass

def test_ends_badly(ends_badly):
    pass
"""
CRASHES_ONCE = """
def test_crashes_once():
    if is_first("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
"""
CRASHES = "def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)"
FAILS = "def test_fails(): assert 1 == 2"
FAILS_AND_IS_SKIPPED = """
def test_is_skipped():
    assert not is_first("skip")
    pytest.skip("it does not want to")
"""
FAILS_AND_IS_GONE = """
@pytest.mark.parametrize("name", ["then"] if pathlib.Path("gone").exists() else ["now"])
def test_is_gone(name):
    pathlib.Path("gone").touch()
    assert name == "then"
"""
MANY = f"""
@pytest.mark.parametrize("number", range({MOST_RERUN + 1}))
def test_many(number):
    assert not is_first(str(number))
"""
WAITS = """
def test_waits():
    pathlib.Path("pid").write_text(f"{os.getpid()}\\n")
    threading.Event().wait()
"""
EXITS = "def test_exits(): os._exit(0)"
FAILS_ONCE_AND_STOPS = """
def test_once(request):
    request.session.shouldfail = "as by --exitfirst"
    assert not is_first("once")

def test_then():
    assert False
"""
UNRAISABLE = """
import gc

class Raises:
    def __del__(self):
        raise ValueError("nobody hears of it")

def test_leaves_garbage():
    gc.disable()
    garbage = [Raises()]
    garbage.append(garbage)

@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_collects_it():
    gc.collect()
"""
CONFTEST_THAT_RAISES = """
def pytest_unconfigure():
    raise ValueError("at the end")
"""
HANGS = "def test_hangs(): threading.Event().wait()"


def start(folder: Path, text: str, *arguments: str, ini: str = "") -> subprocess.Popen[str]:
    """Start a run of a file of tests in a folder of its own."""
    (folder / "test_planted.py").write_text(HEAD + text)
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p no:cacheprovider\n{ini}")
    command = [sys.executable, "-m", "tests.harness.rerun", *arguments]
    # Without the plugins that are installed: some import for seconds.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(folder: Path, text: str, *arguments: str, ini: str = "") -> tuple[int, str]:
    """Return the exit status and the output of a run of a file of tests."""
    process = start(folder, text, *arguments, ini=ini)
    output, _ = process.communicate()
    return process.returncode, output


PARALLEL = ("-p", "xdist", "--numprocesses=2")


def test_what_passes_is_run_once(tmp_path: Path) -> None:
    busy = "import time\ndef test_computes():\n    while time.process_time() < 1: pass"
    costs = tmp_path / "costs.json"
    status, output = run(tmp_path, busy, f"--costs={costs}", *PARALLEL)
    assert status == 0, output
    assert output.count(" passed") == 1
    assert "again" not in output
    num_tests, wall_s, processor_s = map(int, re.findall(r"^the run +(\d+) +(\d+) +(\d+)$", output, re.M)[0])
    assert num_tests == 2
    assert wall_s >= 0
    assert processor_s >= 1
    found = json.loads(costs.read_text())
    assert {name: cost["num_tests"] for name, cost in found.items()} == {
        "test_planted.py::test_passes": 1,
        "test_planted.py::test_computes": 1,
    }
    assert found["test_planted.py::test_computes"]["processor_s"] > 0


def test_what_fails_the_first_time_only_is_named_and_passes(tmp_path: Path) -> None:
    status, output = run(tmp_path, ONCE + CRASHES_ONCE, *PARALLEL)
    assert status == 0, output
    found = dict(re.findall(r"^unstable: test_planted.py::(.+) \((.+)\)$", output, re.MULTILINE))
    crashed = found.pop("test_crashes_once")
    assert re.fullmatch(r"worker 'gw\d' crashed while running 'test_planted.py::test_crashes_once'", crashed)
    assert found == {
        **{f"test_once[{name}]": "AssertionError: the first" for name in ("a b", "c[d]", "e::f")},
        "test_begins_badly": "ValueError: in the set-up",
        "test_ends_badly": "ValueError: in the tear-down",
    }


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        (FAILS, 1, "failed: test_planted.py::test_fails (has not passed when it was run again)"),
        (FAILS_AND_IS_SKIPPED, 1, "failed: test_planted.py::test_is_skipped (has not passed"),
        (FAILS_AND_IS_GONE, 4, "not found: "),
        (MANY, 1, f"not run again: {MOST_RERUN + 1} tests failed, more than {MOST_RERUN}"),
        ("import no_such_module", 2, "not run again: pytest ended with status 2"),
        (CRASHES, 137, "not run again: pytest did not come to its end (exit status -9)"),
        (EXITS, 1, "not run again: pytest did not come to its end (exit status 0)"),
        (
            FAILS_ONCE_AND_STOPS,
            1,
            "not run again: 1 tests have not run, the first is test_planted.py::test_then",
        ),
        (UNRAISABLE, 1, "not run again: an unraisable exception is that of an earlier test"),
    ],
    ids=["fails", "is skipped", "is gone", "many", "collection", "crashes", "exits", "stops", "unraisable"],
)
def test_what_fails_again_fails(tmp_path: Path, text: str, status: int, words: str) -> None:
    found, output = run(tmp_path, text)
    assert (found, words in output) == (status, True), output
    assert "unstable:" not in output


def test_what_crashes_again_or_is_not_collected_by_workers_fails(tmp_path: Path) -> None:
    status, output = run(tmp_path, CRASHES, *PARALLEL)
    assert status == 137, output
    assert "failed: test_planted.py::test_crashes (has not passed when it was run again)" in output
    status, output = run(tmp_path, "import no_such_module", *PARALLEL)
    assert status == 1, output
    assert "not run again: these were not collected: test_planted.py" in output


def test_crashes_after_which_no_worker_is_left_fail(tmp_path: Path) -> None:
    one = ("-p", "xdist", "--numprocesses=1", "--max-worker-restart=0")
    status, output = run(tmp_path, f"{CRASHES_ONCE}\n{FAILS}", *one)
    assert status == 1, output
    assert "not run again: 1 tests have not run, the first is test_planted.py::test_fails" in output


def test_an_exception_of_pytest_itself_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST_THAT_RAISES)
    status, output = run(tmp_path, "def test_once(): assert not is_first('once')")
    assert status == 1, output
    assert "not run again: pytest did not come to its end (exit status 1)" in output


def test_a_test_that_hangs_is_ended_with_its_stack(tmp_path: Path) -> None:
    ini = "faulthandler_timeout = 2\nfaulthandler_exit_on_timeout = true\n"
    status, output = run(tmp_path, HANGS, *PARALLEL, ini=ini)
    assert status == 1, output
    assert "in test_hangs" in output
    assert "failed: test_planted.py::test_hangs (has not passed when it was run again)" in output
    status, output = run(tmp_path, HANGS, ini=ini)
    assert status == 1, output
    assert "not run again: pytest did not come to its end (exit status 1)" in output


def test_a_run_in_which_nothing_happens_is_ended_with_its_stacks(tmp_path: Path) -> None:
    text = "def hang(): threading.Event().wait()\nhang()"
    status, output = run(tmp_path, text, "--silence=10", *PARALLEL)
    assert status == HUNG, output
    assert "no test has reported for 10 s: the run is ended" in output
    assert output.count("in hang\n") == 2  # one for each worker


def test_a_run_that_is_terminated_leaves_no_process(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS)
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert process.poll() is None, process.communicate()[0]
    process.terminate()
    output, _ = process.communicate()  # it ends when all that have inherited the pipe have
    assert process.returncode == 128 + 15, output
    assert not Path(f"/proc/{int(pid.read_text())}").exists()


def test_a_pause_of_the_machine_is_no_silence() -> None:
    now, size = [0.0], [0]
    silence = Silence(lambda: size[0], lambda: now[0])
    found = []
    for seconds, grows in ((0.5, False), (3600.0, False), (0.5, False), (0.5, True), (0.5, False)):
        now[0] += seconds
        size[0] += grows
        found.append(silence.seconds())
    assert found == [0.5, 1.5, 2.0, 0.0, 0.5]


FAILED = ("failed", "a::b", "E: 1")
CRASH = [("worker down", "gw0", "down"), ("crashed", "a::c", "worker 'gw0' crashed")]
ENDED = [(event, name, "") for name in ("a::b", "a::c") for event in ("collected", "ended")]
FINISHED = ("finished", "1", "")


@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        (1, (FAILED, *CRASH, *ENDED, FINISHED), None),
        (1, (FAILED, CRASH[0], *ENDED, FINISHED), "a worker crashed between tests"),
        (0, (CRASH[0], *ENDED, FINISHED), "a worker crashed between tests"),
        (1, (*ENDED, FINISHED), "pytest failed without a test that did"),
        (1, (FAILED, *ENDED), "pytest did not come to its end (exit status 1)"),
        (-11, (FAILED, *ENDED), "pytest did not come to its end (exit status -11)"),
        (1, (FAILED, *ENDED[:3], FINISHED), "1 tests have not run, the first is a::c"),
        (
            1,
            (FAILED, ("internal error", "", "E: 2"), *ENDED, FINISHED),
            "pytest had an error of its own: E: 2",
        ),
    ],
)
def test_what_is_wrong_beside_failures(
    status: int, events: tuple[tuple[str, str, str], ...], words: str | None
) -> None:
    assert Run(status, events).defect() == words


def test_the_first_error_of_a_test_is_told() -> None:
    run = Run(1, (FAILED, ("failed", "a::b", "in the tear-down"), *CRASH))
    assert run.failures == {"a::b": "E: 1", "a::c": "worker 'gw0' crashed"}
