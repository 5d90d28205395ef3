"""An error at the end of a script is shown, and is its exit code, whatever else is done at the end."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
# The module alone: the package imports torch, which takes seconds.
SCRIPT = """
    import atexit, importlib.util, sys

    spec = importlib.util.spec_from_file_location("ending", sys.argv[1])
    ending = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ending)
    atexit.register(lambda: print("also done", flush=True))
    atexit.register(lambda: print("also told", file=sys.stderr, flush=True))
    atexit.register(ending.fail_at_end, OSError("the disk is gone"))
    if sys.argv[2] == "raises":
        raise KeyError("a mistake")
"""


def run_script(folder: Path, how: str, *before: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    module = str(ROOT / "colossalai/context/_supervision.py")
    return subprocess.run(
        [sys.executable, *before, "script.py", module, how],
        cwd=folder, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.long  # of a job it is in tests/checkpoint_io/storage/test_background.py
def test_it_is_the_exit_code(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ends")
    assert done.returncode == 120
    assert done.stderr.splitlines() == ["OSError: the disk is gone", "also told"]
    assert done.stdout == "also done\n"


def test_the_error_of_the_script_comes_first(tmp_path: Path) -> None:
    done = run_script(tmp_path, "raises")
    assert done.returncode == 1
    assert "KeyError: 'a mistake'" in done.stderr
    assert "and at the end of the script: OSError: the disk is gone" in done.stderr


@pytest.mark.long  # how a rank that fails is named is in tests/launcher/test_run.py
def test_the_launcher_names_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, "ends", "-m", "colossalai.cli", "run", "--nproc_per_node", "2")
    assert done.returncode in (1, 120), done.stderr  # 1 if its message is there before its end
    assert "failed with exit code" in done.stderr
    assert "OSError: the disk is gone" in done.stderr
    assert done.stdout.count("also done") > 0
