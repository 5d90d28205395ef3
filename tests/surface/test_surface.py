"""Every documented name imports, from its documented place, whatever a script imports first."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SURFACE = Path(__file__).with_name("surface.txt")


def _rows(path: Path = SURFACE) -> list[tuple[str, str]]:
    """Return (module, names) of every row."""
    lines = (line.strip() for line in path.read_text().splitlines())
    rows = [line.partition(":") for line in lines if line and line[0] not in "#["]
    return [(module.strip(), names.strip()) for module, _, names in rows]


def promises_in(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of every name in a list."""
    return [(module, name) for module, names in _rows(path) for name in names.split(", ")]


@pytest.mark.parametrize(("module", "names"), _rows(), ids=[module for module, _ in _rows()])
def test_names_import(module: str, names: str) -> None:
    scope: dict[str, object] = {}
    exec(f"from {module} import {names}", scope)  # as a script does it; a submodule counts as a name
    for name in names.split(", "):
        assert scope[name] is not None


def test_the_list_is_complete() -> None:
    promises = promises_in(SURFACE)
    assert len(set(promises)) == len(promises), "a name is promised once"
    assert len({module for module, _ in promises}) >= 42
    assert len(promises) >= 224


# Every row is the first import of a process of its own: a fork of one that has imported torch and the package
# only, as Python itself does first for every row.
FIRST_IMPORTS = """
import os, sys, traceback
import torch
import colossalai
for line in sys.stdin.read().splitlines():
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            exec(line)
        except BaseException:
            print(line, traceback.format_exc(), sep="\\n", file=sys.stderr, flush=True)
            code = 1
        os._exit(code)
    os.waitpid(pid, 0)
"""


LIMIT_S = 900.0  # for what takes a minute on an idle machine


@pytest.mark.long  # a fork for every row; the other tests here import them all in one process
def test_every_row_can_be_the_first_import() -> None:
    lines = "\n".join(f"from {module} import {names}" for module, names in _rows())
    run = subprocess.run(
        [sys.executable, "-c", FIRST_IMPORTS],
        input=lines,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.stderr == ""
    assert run.returncode == 0


def test_the_aliases_of_documented_modules_are_the_only_ones() -> None:
    from colossalai._aliases import ALIASES

    documented = {module for module, _ in _rows()}
    assert set(ALIASES) <= documented
    for module in documented:
        assert importlib.import_module(module).__name__ == ALIASES.get(module, module)
