"""Bounds on measured seconds, sleeps and private imports of tests: their counts can fall, not rise."""

import json
from textwrap import dedent

import pytest

from tests.layers import machine

pytestmark = pytest.mark.unit


def num_found(rule: str, text: str) -> int:
    return len(machine.findings(dedent(text))[rule])


def test_no_count_has_risen() -> None:
    risen = machine.risen(json.loads(machine.COUNTS.read_text()), machine.counts())
    assert not risen, (
        "more findings than before; `python -m tests.layers.machine FILE` lists them. A clock is an argument "
        "(tests.harness.clocks), a wait is for an event, private names are imported by few: "
        + "; ".join(risen)
    )


def test_a_larger_count_or_a_new_one_has_risen() -> None:
    before = {"sleeps": {"a.py": 2, "b.py": 1}}
    now = {"sleeps": {"a.py": 3, "b.py": 1, "c.py": 1}, "private_imports": {"zero": 1}}
    assert machine.risen(before, now) == [
        "sleeps: a.py: 2 -> 3",
        "sleeps: c.py: 0 -> 1",
        "private_imports: zero: 0 -> 1",
    ]
    assert machine.risen(now, before) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time\nbegun = time.monotonic()\nassert time.monotonic() - begun < 5",
        "import time\nbegun = time.time()\nassert 5 >= time.time() - begun",
        "import time\nbegun = time.perf_counter()\nit = time.perf_counter() - begun\nassert 1 < it < 5",
        "from time import process_time as now\nbegun = now()\nwork()\nassert now() - begun <= 5",
        "import time\nfirst, begun = 0, time.monotonic_ns()\nassert (time.monotonic_ns() - begun) / 1e9 < 5",
        "import time\nbegun = time.time()\nended = time.time()\nassert ended - begun < 5",
        "import time\ndef work():\n    begun = time.time()\n    return time.time() - begun < 5",
        "import time\nend = time.monotonic() + 5\nwork()\nassert time.monotonic() < end",
        "import time\nfor each in range(3):\n    begun = time.time()\n    assert time.time() - begun < 5",
        "assert seconds_of(work) < 5",
        "assert clocks.timed(work) < 2 * clocks.timed(other)",
        "lasted = timed(work)\nassert lasted < 5",
        "status, seconds = work()\nassert status == 0 and seconds < 5",
        "assert report.data['seconds'] < 5",
        "assert seconds['a'] < 0.1 <= seconds['b']",
        "program = '''\nimport time\nbegun = time.time()\nassert time.time() - begun < 5\n'''",
    ],
)
def test_planted_upper_bounds_are_found(text: str) -> None:
    assert num_found("upper_bounds", text) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import time\nend = time.monotonic() + 300\nwhile not done():\n    assert time.monotonic() < end",
        "import time\nend = time.monotonic() + 300\nwhile time.monotonic() < end and not done():\n    pass",
        "import time\nbegun = time.time()\nif time.time() - begun > 300:\n    raise TimeoutError",
        "import time\nbegun = time.time()\nif time.time() - begun < 300:\n    again()",
        "import time\nbegun = time.monotonic()\nassert time.monotonic() - begun >= 0.3",
        "import time\nbegun = time.monotonic()\nassert 0.3 <= time.monotonic() - begun",
        "assert seconds >= 0.3",
        "assert cost.seconds <= slowest",
        "assert seconds[0] > seconds[-1]",
        "assert clock.seconds < 66",
        "assert clock.now() - begun == 0",
        "assert num_taken < 5",
    ],
)
def test_lower_bounds_waits_and_predictions_are_not_found(text: str) -> None:
    assert num_found("upper_bounds", text) == 0


def test_the_measurements_of_the_long_tier_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def test_speed():\n    assert seconds_of(work) < 60"
    assert num_found("upper_bounds", text) == 1
    monkeypatch.setitem(machine.MEASUREMENTS, "test_speed", "the one measurement of time")
    assert num_found("upper_bounds", text) == 0


def test_every_measurement_exists() -> None:
    texts = [path.read_text() for path in machine.TESTS.rglob("test_*.py")]
    gone = [name for name in machine.MEASUREMENTS if not any(f"def {name}(" in text for text in texts)]
    assert not gone, "allowed, but not there: " + ", ".join(gone)


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.sleep(1)",
        "from time import sleep\nsleep(1)",
        "import time as t\nt.sleep(1)",
        "import time\nfor rank in range(4):\n    if rank == 1:\n        time.sleep(1)",
        "import time\nwhile True:\n    send()\n    time.sleep(1)",
        "import time\nwhile not done():\n    def slow():\n        time.sleep(1)",
        "import time\nif rank == 1:\n    time.sleep(1)",
    ],
)
def test_planted_sleeps_are_found(text: str) -> None:
    assert num_found("sleeps", text) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import time\nwhile not done():\n    time.sleep(0.01)",
        "import time\nwhile True:\n    if done():\n        break\n    time.sleep(0.01)",
        "import time\nfor _ in range(1000):\n    if done():\n        return\n    time.sleep(0.01)",
        "clock.sleep(1)",
        "program = 'import time; time.sleep(60)'",
    ],
)
def test_polling_and_fake_sleeps_are_not_found(text: str) -> None:
    assert num_found("sleeps", text) == 0


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("from colossalai.zero._buckets import Bucket", 1),
        ("from colossalai._clock import Clock", 1),
        ("from colossalai.launcher import _protocol, run", 1),
        ("from colossalai.zero import (\n    Bucket,\n    _held,\n)", 1),
        ("import colossalai.launcher._protocol", 1),
        ("def test():\n    from colossalai.zero import _buckets, _steps", 1),
        ("from colossalai.zero import Bucket", 0),
        ("from colossalai.zero import Bucket as _bucket", 0),
        ("from colossalai import __version__", 0),
        ("from tests._zygote import Rank", 0),
        ("from torch._utils import _flatten", 0),
    ],
)
def test_private_imports_are_counted_by_statement(text: str, num: int) -> None:
    assert num_found("private_imports", text) == num


def test_a_measured_time_of_a_new_test_is_counted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zero" / "gemini").mkdir(parents=True)
    planted = "import time\nfrom colossalai.zero import _a\ntime.sleep(1)\nassert seconds < 1\n"
    (tmp_path / "zero" / "gemini" / "test_new.py").write_text(planted)
    (tmp_path / "test_top.py").write_text(planted)
    monkeypatch.setattr(machine, "TESTS", tmp_path)
    each = {"test_top.py": 1, "zero/gemini/test_new.py": 1}
    assert machine.counts() == {
        "upper_bounds": each,
        "sleeps": each,
        "private_imports": {"test_top.py": 1, "zero": 1},
    }
