"""A step does not get longer: files of the package that an action enters, and switches between them.

tools/reading_distance.py has the rule of counting and writes `distances.json`; neither time nor the machine
changes the figures. Not here: `ssh start`, which starts processes of its own.
"""

import json
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tools.recorded_actions import ACTIONS, Entry, figures, record

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "design" / "README.md"
ROW = re.compile(r"^\| ([\w\- ]+): .*? \| (?:[\d-]+ -> )?(\d+) \| (?:[\d-]+ -> )?(\d+) \|", re.MULTILINE)
COMMITTED = Path(__file__).with_name("distances.json")
MOST_CHANGE = 0.1  # of a committed figure
EXPLAIN = 'python tools/reading_distance.py --explain "{action}"'
WRITE = "python tools/reading_distance.py --before 6655e74 --write"

# What a dense step under plain DDP enters: a folder with its files, or one file, and what for. Whatever
# `assemble` does not install, a step does not call.
STEP = {
    "engine": "Engine, which the user calls",
    "runtime": "the model's wrapper, and TrainingStep",
    "amp": "the loss, clipping and the update, in the precision of the plan",
    "nn/parallel": "DDP averages the gradients",
    "tensor": "shards of parameters, of whose gradients the norm is taken",
    "monitor/_sections.py": "the watchdog reports where a rank is",
}


def record_in_rank(action: str, folder: Path) -> list[Entry]:
    return record(action, folder)


@cache
def entries_of(action: str, folder: Path) -> list[Entry]:
    found: list[Entry] = run_ranks(record_in_rank, ACTIONS[action].num_ranks, action, folder)[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def changes(action: str, now: dict[str, int], committed: dict[str, int]) -> Iterator[str]:
    """Yield what is more than `MOST_CHANGE` off its committed figure, with what to do."""
    for name, old in committed.items():
        change = now[name] - old
        what = f"{action}: {now[name]} {name}, committed are {old}"
        if change > MOST_CHANGE * old:
            yield f"{what}. Shorten it: {EXPLAIN.format(action=action)} shows what it enters most"
        elif change < -MOST_CHANGE * old:
            yield f"{what}. Commit the lower figure: {WRITE}"


def differences(entered: set[str], allowed: set[str]) -> Iterator[str]:
    """Yield each file that is entered and not allowed, and what is allowed and not entered any more.

    Args:
        entered: Files, as in `Entry`.
        allowed: Folders and files.
    """
    used = {name for file in entered for name in (file, file.rpartition("/")[0]) if name in allowed}
    for file in sorted(entered):
        if not {file, file.rpartition("/")[0]} & allowed:
            yield f"a dense step enters {file}: install it where its feature is used ({EXPLAIN})".format(
                action="Engine step"
            )
    yield from (f"a dense step does not enter {name} any more: remove it" for name in sorted(allowed - used))


@pytest.mark.dist
@pytest.mark.parametrize("action", ACTIONS)
def test_an_action_is_as_long_as_committed(action: str, folder: Path) -> None:
    now = figures(entries_of(action, folder / action))
    found = list(changes(action, now, json.loads(COMMITTED.read_text())[action]))
    assert not found, "\n".join(found)


@pytest.mark.dist
def test_a_dense_step_enters_nothing_else(folder: Path) -> None:
    action = "Engine step"
    entered = {entry.file for entry in entries_of(action, folder / action)}
    found = list(differences(entered, {*STEP}))
    assert not found, "\n".join(found)


@pytest.mark.unit
def test_all_actions_are_committed() -> None:
    assert list(json.loads(COMMITTED.read_text())) == list(ACTIONS)


@pytest.mark.unit
def test_the_page_shows_the_committed_figures() -> None:
    committed = json.loads(COMMITTED.read_text())
    shown = {
        action: {"files": int(files), "switches": int(switches)}
        for action, files, switches in ROW.findall(PAGE.read_text())
        if action in committed
    }
    assert shown == committed, f"write both: {WRITE}"


@pytest.mark.unit
def test_an_action_that_an_old_commit_cannot_do_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    table = runpy.run_path(str(ROOT / "tools" / "reading_distance.py"))["table"]
    now = {"files": 2, "switches": 3, "calls": 9, "model_files": 1}
    longest = {"file": (5, "a.py"), "function": (4, "a.py:f")}
    old = {"actions": {"save": {**now, "switches": 6}, "load": None}, "longest": longest}
    lines = table({"actions": {"save": now, "load": now}, "longest": longest}, old)
    assert [line.split(" | ", 1)[1] for line in lines[2:4]] == [
        "2 -> 2 | 6 -> 3 | 0.50 | 9 -> 9 | 1 |",
        "- -> 2 | - -> 3 |  | - -> 9 | 1 |",
    ]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("now", "found"),
    [
        ({"files": 22, "switches": 110}, []),
        ({"files": 18, "switches": 90}, []),
        ({"files": 23, "switches": 100}, ["step: 23 files, committed are 20. Shorten"]),
        (
            {"files": 17, "switches": 111},
            ["step: 17 files, committed are 20. Commit", "step: 111 switches, committed are 100. Shorten"],
        ),
    ],
)
def test_a_change_of_more_than_a_tenth_is_found(now: dict[str, int], found: list[str]) -> None:
    lines = list(changes("step", now, {"files": 20, "switches": 100}))
    assert [line[: len(begin)] for line, begin in zip(lines, found, strict=True)] == found


@pytest.mark.unit
def test_a_planted_feature_and_a_stale_exception_are_found() -> None:
    entered = {"amp/_optimizer.py", "amp/fp8/_cast.py", "zero/_reducer.py", "monitor/_sections.py"}
    found = list(differences(entered, {"amp", "monitor/_sections.py", "lazy"}))
    assert [line.split(":")[0] for line in found] == [
        "a dense step enters amp/fp8/_cast.py",
        "a dense step enters zero/_reducer.py",
        "a dense step does not enter lazy any more",
    ]


@pytest.mark.unit
def test_what_counts() -> None:
    """Each entry into another file is a switch; models are apart."""
    names = ["engine/_engine.py", "model_zoo/gpt/_model.py", "engine/_engine.py", "amp/_a.py", "amp/_a.py"]
    found = figures([Entry(name, "f") for name in names])
    assert found == {
        "files": 2,
        "switches": 1,
        "calls": 4,
        "model_files": 1,
        "names": ["amp/_a.py", "engine/_engine.py"],
    }
