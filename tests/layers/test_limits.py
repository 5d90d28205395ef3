"""Tests have no limits of time that a busy machine exceeds; hangs are found by progress."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).resolve().parents[1]
SHORTEST_S = 300.0  # of a limit for a job of ranks
OWN_LIMITS = (
    "test_ranks.py",
    "harness/properties.py",
)  # the limits of ranks are tested, those of examples set


def short_limits(text: str) -> Iterator[str]:
    """Yield calls that limit ranks to less than `SHORTEST_S`, or an example of hypothesis at all."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        for keyword in node.keywords:
            is_short = keyword.arg in ("timeout", "idle_s") and not _is_long(keyword.value)
            if (name == "run_ranks" and is_short) or (name == "settings" and keyword.arg == "deadline"):
                yield f"line {node.lineno}: {name}({ast.unparse(keyword)})"


def _is_long(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value >= SHORTEST_S
    )


def test_no_test_has_a_short_limit() -> None:
    paths = [path for path in TESTS.rglob("*.py") if str(path.relative_to(TESTS)) not in OWN_LIMITS]
    found = [
        f"{path.relative_to(TESTS)}, {each}" for path in paths for each in short_limits(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("run_ranks(work, 2, timeout=20.0)", 1),
        ("ranks.run_ranks(work, 2, idle_s=5)", 1),
        ("run_ranks(work, 2, timeout=LIMIT)", 1),
        ("run_ranks(work, 2, timeout=300.0)", 0),
        ("run_ranks(work, 2, 20.0)", 0),
        ("@settings(deadline=200, max_examples=3)\ndef check(): ...", 1),
        ("@hypothesis.settings(PROFILE, deadline=None)\ndef check(): ...", 1),
        ("subprocess.run(command, timeout=5)", 0),
    ],
)
def test_planted_limits_are_found(text: str, num_found: int) -> None:
    assert len(list(short_limits(text))) == num_found
