"""The vision transformer reaches the accuracy it promises, whatever its config says about processes."""

import re

import pytest

from tests.examples.scripts import EXAMPLES, run_script
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("config", "num_ranks"), [("data", 2), further("pipeline", 2), further("hybrid", 4)])
def test_the_promised_accuracy_is_reached(
    config: str, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / "vit" / "configs" / f"{config}.py"
    run_ranks(run_script, num_ranks, "vit/train.py", f"--config={path}")
    captured = capfd.readouterr()
    *_, accuracy = re.findall(r"test: .*Accuracy ([\d.]+)", captured.out + captured.err)
    assert float(accuracy) > 0.95
