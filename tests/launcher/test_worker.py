"""The worker: the script must not notice that it was not started by `python SCRIPT`."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from colossalai.launcher import _worker

pytestmark = pytest.mark.unit

SEES = """
import json, sys
import __main__
ours = [name for name in sys.modules if name.partition(".")[0] in ("torch", "colossalai")]
names = {name: str(value) for name, value in vars(__main__).items() if name.startswith("__")}
print(json.dumps({**names, "argv": sys.argv, "path": sys.path, "modules": ours}))
"""


def _python(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _work(folder: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    error_file = str(folder / "error.json")
    return _python(
        folder,
        _worker.__file__,
        str(os.getpid()),
        "-",
        *args,
        TORCHELASTIC_ERROR_FILE=error_file,
        **environment,
    )


def _seen(ended: subprocess.CompletedProcess[str]) -> dict:
    """Return what the script saw, without the memory addresses in it."""
    assert ended.returncode == 0, ended.stderr
    return json.loads(re.sub(r" at 0x\w+", "", ended.stdout))


def _error(folder: Path) -> dict:
    return json.loads((folder / "error.json").read_text())["message"]


@pytest.mark.parametrize("safe_path", ["", "1"])
@pytest.mark.parametrize("target", ["job.py", "sub/link.py"])
def test_a_script_sees_what_python_shows_it(tmp_path: Path, target: str, safe_path: str):
    (tmp_path / "job.py").write_text(SEES)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "job.py")
    plain = _python(tmp_path, target, "--x", "y", PYTHONSAFEPATH=safe_path)
    ours = _work(tmp_path, "script", target, "--x", "y", PYTHONSAFEPATH=safe_path)
    assert _seen(ours) == _seen(plain)
    assert ours.stderr == ""


def test_a_folder_is_run(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SEES)
    plain, ours = _seen(_python(tmp_path, "folder", "x")), _seen(_work(tmp_path, "script", "folder", "x"))
    assert ours["path"] == plain["path"]
    assert ours["argv"][1:] == plain["argv"][1:] == ["x"]


def test_a_module_sees_what_python_shows_it(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text(SEES)
    plain = _seen(_python(tmp_path, "-m", "package.job", "-v"))
    ours = _seen(_work(tmp_path, "module", "package.job", "-v"))
    for name in ("__name__", "__file__", "__package__", "__spec__", "argv", "path", "modules"):
        assert ours[name] == plain[name]


def test_an_error_goes_to_the_file_without_our_frames(tmp_path: Path):
    (tmp_path / "job.py").write_text("import atexit\natexit.register(print, 'ended')\n1 / 0\n")
    ended = _work(tmp_path, "script", "job.py")
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "ended\n", "")
    assert _error(tmp_path)["message"] == "ZeroDivisionError: division by zero"
    plain = _python(tmp_path, "job.py").stderr
    assert _error(tmp_path)["extraInfo"]["py_callstack"] == plain


def test_an_error_that_cannot_be_written_is_printed(tmp_path: Path):
    (tmp_path / "job.py").write_text("1 / 0")
    (tmp_path / "error.json").mkdir()
    ended = _work(tmp_path, "script", "job.py")
    assert ended.returncode == 1
    assert "ZeroDivisionError: division by zero" in ended.stderr


@pytest.mark.parametrize(
    ("code", "said", "recorded"), [("3", "", "sys.exit(3)"), ("'why'", "why\n", "sys.exit('why')")]
)
def test_an_exit_is_python_s_and_is_noted(tmp_path: Path, code: str, said: str, recorded: str):
    (tmp_path / "job.py").write_text(f"import sys; sys.exit({code})")
    ended = _work(tmp_path, "script", "job.py")
    plain = _python(tmp_path, "job.py")
    assert (ended.returncode, ended.stderr) == (plain.returncode, plain.stderr) == (plain.returncode, said)
    assert _error(tmp_path)["message"] == recorded
    assert _error(tmp_path)["extraInfo"]["exit_code"] == plain.returncode


def test_a_good_exit_and_an_interrupt_leave_no_error(tmp_path: Path):
    (tmp_path / "job.py").write_text("import sys; sys.exit(0)")
    assert _work(tmp_path, "script", "job.py").returncode == 0
    (tmp_path / "job.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    ended = _work(tmp_path, "script", "job.py")
    assert (ended.returncode, ended.stderr) == (-2, "")
    assert not (tmp_path / "error.json").exists()


def test_a_forked_child_is_not_the_rank(tmp_path: Path):
    (tmp_path / "job.py").write_text("import os\nif os.fork() == 0:\n    1 / 0\nos.wait()\n")
    ended = _work(tmp_path, "script", "job.py")
    assert ended.returncode == 0
    assert "ZeroDivisionError" in ended.stderr
    assert not (tmp_path / "error.json").exists()


CHURNS = """
import ctypes
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
before = libc.sbrk(0)
bytearray(48 << 20)
print((libc.sbrk(0) - before) >> 20)
"""


CRASHES = """
import ctypes, sys
libc = ctypes.CDLL(None)
if sys.argv[1] == "here":
    libc.abort()
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
while True:
    pass
"""


@pytest.mark.parametrize(("thread", "shows_python"), [("here", True), ("elsewhere", False)])
def test_a_crash_shows_python_where_it_stands_still(tmp_path: Path, thread: str, shows_python: bool):
    # A thread of gloo aborts while Python runs on in another: frames that go away must not be read.
    (tmp_path / "job.py").write_text(CRASHES)
    ended = _work(tmp_path, "script", "job.py", thread)
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr
    assert ("job.py" in ended.stderr) == shows_python


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt")
def test_freed_memory_is_kept_for_the_next_step(tmp_path: Path):
    """By how many MiB the heap is larger after the memory has been freed."""
    (tmp_path / "job.py").write_text(CHURNS)
    ours, plain = _work(tmp_path, "script", "job.py"), _python(tmp_path, "job.py")
    assert int(ours.stdout) >= 48, "the heap has not kept the 48 MiB"
    assert int(plain.stdout) == 0
    told = _work(tmp_path, "script", "job.py", MALLOC_MMAP_THRESHOLD_="33554432")
    assert int(told.stdout) == 0, "a user's own setting is left alone"


def test_a_worker_whose_launcher_has_ended_ends(tmp_path: Path):
    (tmp_path / "job.py").write_text("print('started')")
    ended = _python(tmp_path, _worker.__file__, "1", "-", "script", "job.py")
    assert (ended.returncode, ended.stdout) == (-9, "")


def _work_on(folder: Path, cpus: str) -> subprocess.CompletedProcess[str]:
    """Be the second of two ranks, which starts a process and a thread and says what they may use."""
    (folder / "job.py").write_text(
        "import json, os, subprocess, sys, threading\n"
        "code = 'import os; print(*os.sched_getaffinity(0))'\n"
        "child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout\n"
        "seen = [sorted(os.sched_getaffinity(0)), sorted(map(int, child.split()))]\n"
        "thread = threading.Thread(target=lambda: seen.append(sorted(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(json.dumps(seen))\n"
    )
    return subprocess.run(
        [sys.executable, _worker.__file__, str(os.getpid()), cpus, "script", "job.py"],
        cwd=folder,
        env={**os.environ, "RANK": "1", "LOCAL_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def test_a_worker_and_what_it_starts_use_its_cpus(tmp_path: Path):
    *_, last = sorted(os.sched_getaffinity(0))
    assert json.loads(_work_on(tmp_path, f"0;{last}").stdout) == [[last]] * 3
    assert json.loads(_work_on(tmp_path, "-").stdout) == [sorted(os.sched_getaffinity(0))] * 3


def test_a_worker_that_cannot_be_bound_works(tmp_path: Path):
    ended = _work_on(tmp_path, "0;99999")
    assert json.loads(ended.stdout)[0] == sorted(os.sched_getaffinity(0))
    assert "rank 1 is not bound to CPUs 99999: " in ended.stderr
