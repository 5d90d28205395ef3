"""The vision transformer reaches the accuracy it promises, whatever its config says about processes."""

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, run_script
from tests.ranks import RanksError, run_ranks
from tests.tiers import in_soak

pytestmark = pytest.mark.dist


def test_a_training_that_is_too_short_is_a_failure(tmp_path: Path) -> None:
    """All of the script, in a third of its epochs; that it keeps what it promises is in the long tier."""
    config = tmp_path / "short.py"
    base = (EXAMPLES / "vit" / "configs" / "base.py").read_text()
    config.write_text(f"{base}\nBATCH_SIZE = 32\nNUM_EPOCHS = 4\n")
    with pytest.raises(RanksError) as caught:
        run_ranks(run_script, 2, "vit/train.py", f"--config={config}")
    percents = re.findall(r"test accuracy ([\d.]+)% is not above 95%", str(caught.value))
    assert min(map(float, percents)) > 20, "a guess is right in 10 %"


@pytest.mark.long
@pytest.mark.parametrize(("config", "num_ranks"), [("data", 2), ("pipeline", 2), in_soak("hybrid", 4)])
def test_the_promised_accuracy_is_reached(
    config: str, num_ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / "vit" / "configs" / f"{config}.py"
    run_ranks(run_script, num_ranks, "vit/train.py", f"--config={path}")
    captured = capfd.readouterr()
    *_, accuracy = re.findall(r"test: .*Accuracy ([\d.]+)", captured.out + captured.err)
    assert float(accuracy) > 0.95
