"""Memory of a process that builds a large model lazily and materializes a part of it."""

import ctypes
from pathlib import Path

import pytest
from torch import nn

from colossalai.lazy import LazyInitContext, is_lazy, materialize
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(),
        reason="needs /proc/self/clear_refs to reset the peak",
    ),
]

LAYER_MIB = 4
SLACK_MIB = 10


def resident(line: str) -> float:
    """Return the resident memory (VmRSS) or its peak (VmHWM), in MiB."""
    entries = Path("/proc/self/status").read_text().splitlines()
    fields = dict(entry.split(":", 1) for entry in entries)
    return int(fields[line].split()[0]) / 1024


def build(num_layers: int, initialize: str) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)])
    for layer in model:
        getattr(nn.init, initialize)(layer.weight)
    return model


def measure(initialize: str) -> tuple[float, float]:
    """Return the peaks after building 40 layers and after materializing 10 of them, in MiB."""
    with LazyInitContext():
        build(1, initialize)  # what is imported on first use
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again, and not seen
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with LazyInitContext():
        model = build(40, initialize)
    built = resident("VmHWM") - before
    materialize(model[10:20])
    assert [is_lazy(layer) for layer in model] == [True] * 10 + [False] * 10 + [True] * 20
    return built, resident("VmHWM") - before


@pytest.mark.parametrize("initialize", ["normal_", further("kaiming_uniform_")])
def test_peak_is_that_of_the_part_and_of_one_tensor(initialize: str) -> None:
    [(built, peak)] = run_ranks(measure, 1, initialize)
    assert built < LAYER_MIB + SLACK_MIB
    assert 9 * LAYER_MIB < peak < 11 * LAYER_MIB + SLACK_MIB
