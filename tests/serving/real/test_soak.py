"""A soak of a thousand requests: `benchmarks/soak.py` names what does not add up, and ends with 1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.command import ROOT
from tests.tiers import in_soak

pytestmark = pytest.mark.unit
LIMIT_S = 600.0


@pytest.mark.parametrize("num_requests", [in_soak(1000)])
def test_requests_add_up(num_requests: int, tmp_path: Path) -> None:
    words = ("--requests", f"{num_requests}", "--warm-up", "500", "--json", str(tmp_path / "soak.json"))
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
    assert every["sent"] == every["answered"] + every["refused"] + every["left"] == num_requests
    assert min(every["answered"], every["refused"], every["left"]) > 30
