"""The example of checkpoint solvers: less and less memory, the same losses."""

import pytest

from tests.examples.scripts import run_script
from tests.ranks import run_ranks
from tests.tiers import after_the_first

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("model", after_the_first(["resnet", "gpt"]))
def test_all_rows_have_the_same_loss(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--model", model, "--batch", "2", "--steps", "2")
    run_ranks(run_script, 1, "auto_parallel/checkpoint.py", *options)
    captured = capfd.readouterr()
    lines = [line.rpartition(" || ")[2] for line in (captured.out + captured.err).splitlines()]
    rows = [[each.strip() for each in line.split("|")[-7:-1]] for line in lines if " MiB |" in line]
    assert len(rows) >= 3
    assert len({row[-1] for row in rows}) == 1
    peaks = [float(row[1].removesuffix(" MiB")) for row in rows[1:]]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) >= 2
