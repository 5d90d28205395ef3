"""A soak of a thousand requests: `benchmarks/soak.py` names what does not add up, and ends with 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.command import ROOT

pytestmark = pytest.mark.unit
LIMIT_S = 600.0


@pytest.mark.long
def test_1000_requests_add_up(tmp_path: Path) -> None:
    words = ("--requests", "1000", "--warm-up", "500", "--json", str(tmp_path / "soak.json"))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (every, *_) = json.loads((tmp_path / "soak.json").read_text())["rows"]
    assert every["sent"] == every["answered"] + every["refused"] + every["left"] == 1000
    assert min(every["answered"], every["refused"], every["left"]) > 30
