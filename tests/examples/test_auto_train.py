"""The example of automatic parallelism: on 4 ranks the losses of one process."""

import re

import pytest

from tests.examples.scripts import run_script
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (4, ("--model", "gpt2", "--mesh", "2", "2")),
        in_soak(4, ("--model", "resnet")),
        further(2, ("--model", "gpt2", "--solver-preference", "tp")),
        further(4, ("--model", "resnet", "--mesh", "2", "2", "--solver-preference", "tp")),
    ],
)
def test_losses_are_those_of_one_process(
    num_ranks: int, options: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    if "gpt2" in options:
        pytest.importorskip("transformers")
    losses = []
    model = options[: options.index("--mesh")] if "--mesh" in options else options[:2]
    for ranks, own in ((num_ranks, options), (1, model)):
        run_ranks(run_script, ranks, "auto_parallel/train.py", *own, "--steps", "2", "--batch", "4")
        captured = capfd.readouterr()
        losses.append([float(each) for each in re.findall(r"loss ([\d.]+),", captured.out + captured.err)])
    assert len(losses[0]) == len(losses[1]) > 0
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
