"""`make train` and `make setup`: which packages each installs, in either order (`make -n` only prints)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
TRAINING, ALL = "'.[hf,serve,tensorboard,plot]' -c requirements-dev.txt", "-r requirements-dev.txt"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "requirements-dev.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv").mkdir()
    return tmp_path


def plan(clone: Path, *words: str) -> str:
    command = ["make", "--no-print-directory", "-n", *words]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_training_installs_what_it_imports_once(clone: Path) -> None:
    first = plan(clone, "train")
    assert TRAINING in first
    assert ALL not in first
    assert "several GB" in first
    assert "make train TORCH_INDEX=" in first
    (clone / ".venv" / ".ready-train").touch()
    assert "pip install" not in plan(clone, "train")


def test_setup_goes_on_from_training_to_the_full_set(clone: Path) -> None:
    (clone / ".venv" / ".ready-train").touch()
    assert ALL in plan(clone, "setup")
    assert ALL in plan(clone, "test")


def test_training_uses_the_full_set_where_it_is_installed(clone: Path) -> None:
    (clone / ".venv" / ".ready").touch()
    assert "pip install" not in plan(clone, "train")
    assert "pip install" not in plan(clone, "setup")
    os.utime(clone / ".venv" / ".ready", (0, 0))  # its requirements have changed since
    later = plan(clone, "train")
    assert ALL in later
    assert TRAINING not in later
