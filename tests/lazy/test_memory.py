"""Memory of a process that builds a large model lazily and materializes a part of it."""

import ctypes
from pathlib import Path

import pytest
from torch import nn

from colossalai.lazy import LazyInitContext, is_lazy, materialize
from tests.harness.allocations import Allocations
from tests.ranks import run_ranks
from tests.tiers import further

MIB = 2**20
LAYER = 4 * MIB
NUM_LAYERS = 40


def build(num_layers: int, initialize: str) -> nn.Sequential:
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(num_layers)])
    for layer in model:
        getattr(nn.init, initialize)(layer.weight)
    return model


@pytest.mark.unit
@pytest.mark.parametrize("initialize", ["normal_", further("kaiming_uniform_")])
def test_peak_is_that_of_the_part_and_of_one_tensor(initialize: str) -> None:
    with LazyInitContext():
        build(1, initialize)  # what is imported on first use
    with Allocations() as building, LazyInitContext():
        model = build(NUM_LAYERS, initialize)
    with Allocations() as materializing:
        materialize(model[10:20])
    assert [is_lazy(layer) for layer in model] == [True] * 10 + [False] * 10 + [True] * 20
    # All draws are into one tensor's memory: memory of their own for each would fragment the heap.
    assert [size for size in building.sizes if size > LAYER // 8] == [LAYER]
    assert LAYER <= building.peak < 1.5 * LAYER
    assert 10 * LAYER <= materializing.left <= materializing.peak < 10.5 * LAYER


def resident(line: str) -> float:
    """Return the resident memory (VmRSS) or its peak (VmHWM), in bytes."""
    entries = Path("/proc/self/status").read_text().splitlines()
    fields = dict(entry.split(":", 1) for entry in entries)
    return int(fields[line].split()[0]) * 1024


def measure() -> tuple[float, float]:
    """Return the peaks after building 40 layers and after materializing 10 of them."""
    with LazyInitContext():
        build(1, "normal_")  # what is imported on first use
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be used again, and not seen
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with LazyInitContext():
        model = build(NUM_LAYERS, "normal_")
    built = resident("VmHWM") - before
    materialize(model[10:20])
    return built, resident("VmHWM") - before


@pytest.mark.long  # the one measurement of resident memory, which sees what counts do not: a fragmented heap
@pytest.mark.dist
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs /proc/self/clear_refs to reset the peak"
)
def test_resident_memory_grows_by_far_less_than_the_model() -> None:
    [(built, peak)] = run_ranks(measure, 1)
    assert built < NUM_LAYERS * LAYER / 2
    assert 9 * LAYER < peak < NUM_LAYERS * LAYER * 3 / 4
