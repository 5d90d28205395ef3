"""Rates: fits of known figures, counted bytes, and a quick measurement of this machine."""

from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import colossalai
from colossalai.auto_parallel.machine import _measure
from colossalai.auto_parallel.machine._machine import MachineProfile, measure_machine, time_of
from colossalai.auto_parallel.machine._measure import ByteCounter, measure_rates
from colossalai.auto_parallel.machine._rates import FlopRate, Kind, Rates, curve_through, fit_flop_rate
from colossalai.auto_parallel.machine._samples import DEVICE_POOL, POOL, Operands, Sample, all_samples
from colossalai.device import _profile
from tests.ranks import run_ranks
from tests.tiers import further

SHAPES = [(4, 4, 4), (512, 512, 512), (1, 512, 512), (512, 8, 512), (512, 512, 16), (1024, 64, 64)]


@pytest.mark.unit
@settings(max_examples=30)
@given(st.floats(1e9, 1e15), st.tuples(*[st.floats(0, 30)] * 3))
def test_times_of_a_rate_give_the_rate(peak: float, halves: tuple[float, float, float]) -> None:
    """`halves` are the extents at which the rate is half of the peak."""
    rate = FlopRate(peak, (halves[0] / peak, halves[1] / peak, halves[2] / peak))
    flops = [2.0 * np.prod(shape) for shape in SHAPES]
    times = [rate.seconds(each, shape) for each, shape in zip(flops, SHAPES, strict=True)]
    fitted = fit_flop_rate(flops, SHAPES, times)
    for each, shape, taken in zip(flops, SHAPES, times, strict=True):
        assert fitted.seconds(each, shape) == pytest.approx(taken, rel=1e-5)


@pytest.mark.unit
@settings(max_examples=30)
@given(st.lists(st.floats(1e-6, 1e-1), min_size=6, max_size=6))
def test_no_peak_is_far_above_the_best_measured_rate(times: list[float]) -> None:
    flops = [2.0 * np.prod(shape) for shape in SHAPES]
    fitted = fit_flop_rate(flops, SHAPES, times)
    best = max(each / taken for each, taken in zip(flops, times, strict=True))
    assert 0 < fitted.peak <= 1.25 * best * (1 + 1e-9)
    assert min(fitted.sides) >= 0


@pytest.mark.unit
@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_the_noise_of_a_launch_is_no_rate(seed: int) -> None:
    """Products of an accelerator: 20 us of launch, with a noise of 3, beside 0.01 to 300 us of product."""
    generator = np.random.default_rng(seed)
    shapes = [(4 * m, 4 * k, 4 * n) for m, k, n in SHAPES] + [(8192, 1024, 4096), (4096, 4096, 1024)]
    rate = FlopRate(6e14, (2e-13, 1e-13, 1e-13))
    flops = [2.0 * np.prod(shape) for shape in shapes]
    times = [rate.seconds(each, shape) for each, shape in zip(flops, shapes, strict=True)]
    noisy = np.array(times) + generator.uniform(0, 3e-6, len(times))
    fitted = fit_flop_rate(flops, shapes, noisy.tolist(), overhead=2e-5)
    assert fitted.seconds(flops[-2], shapes[-2]) == pytest.approx(times[-2], rel=0.3)
    large = (16384, 8192, 8192)
    assert fitted.seconds(1e12, large) == pytest.approx(rate.seconds(1e12, large), rel=0.4)


@pytest.mark.unit
def test_samples_that_took_no_time_do_not_count() -> None:
    assert fit_flop_rate([1.0, 2e6], [(1, 1, 1), (100, 100, 100)], [0.0, 1.0]).peak == pytest.approx(2e6)
    with pytest.raises(ValueError, match="no sample took longer than any operation does"):
        fit_flop_rate([1.0], [(1, 1, 1)], [0.0])


@pytest.mark.unit
def test_a_curve_never_falls() -> None:
    curve = curve_through([4, 1, 2, 2, 8, 0], [3.0, 1.0, 5.0, 3.0, 7.0, 9.0])
    assert curve.sizes == (1, 2, 4, 8)
    assert curve.seconds == (1.0, 4.0, 4.0, 7.0)
    assert [curve.at(size) for size in (0, 0.5, 1.5, 3, 16)] == [0.0, 0.5, 2.5, 4.0, 14.0]
    assert curve_through([0, 0], [1.0, 2.0]).at(1e9) == 0.0


@pytest.mark.unit
@pytest.mark.parametrize("is_fake", [False, True])
def test_bytes_are_those_that_kernels_move(is_fake: bool) -> None:
    def counted(call: Any) -> int:
        with ByteCounter() as counter:
            call()
        return counter.num_bytes

    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.enable_grad():
        x, weight = torch.ones(6, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
        table, ids = torch.ones(1000, 4), torch.tensor([1, 2, 3])
        assert counted(lambda: x + x) == 3 * 24 * 4
        assert counted(lambda: x.view(4, 6).t()[1:].expand(2, 5, 4)) == 0
        assert counted(lambda: x[:1].expand(100, 4) * 2) == 24 * 4 + 400 * 4, "the memory of an expanded one"
        assert counted(lambda: torch.empty(10)) == 0
        assert counted(lambda: functional.embedding(ids, table)) == 3 * 8 + 2 * 12 * 4
        assert counted(lambda: functional.linear(x, weight)) == 4 * (24 + 20 + 30)
        product = functional.linear(x, weight)
        gradient = torch.ones(6, 5)
        assert counted(lambda: product.backward(gradient)) == 2 * 4 * (24 + 20 + 30)


@pytest.mark.unit
def test_mistakes_are_said() -> None:
    for dtypes in ((), (torch.int64,)):
        with pytest.raises(ValueError, match="give at least one, all of them floating point types"):
            measure_rates(dtypes=dtypes)
    with pytest.raises(ValueError, match="seconds=0: give more than 0"):
        measure_rates(seconds=0)


def smaller_samples(*, scale: int, largest: int) -> Iterator[Sample]:
    """Yield samples of all kinds, those of a few bytes where there are larger ones."""
    return all_samples(scale=scale, largest=largest // 64)


def check_structure(rates: Rates, *, num_ranks: int) -> None:
    """Check what holds on any machine, however busy."""
    assert rates.num_ranks == num_ranks
    assert rates.num_threads == torch.get_num_threads()
    assert set(rates.operations) == set(get_args(Kind))
    for kind, by_dtype in rates.operations.items():
        assert set(by_dtype) == {"float32"}
        for rate in by_dtype["float32"].values():
            assert 0 < rate.overhead < 1
            assert list(rate.curve.sizes) == sorted(set(rate.curve.sizes))
            assert list(rate.curve.seconds) == sorted(rate.curve.seconds)
            assert rate.curve.seconds[-1] > 0 or kind == "view"
            assert rate.flops is None or 1e6 < rate.flops.peak < 1e16
    assert set(rates.optimizers) == {"adamw", "sgd"}
    for optimizer in rates.optimizers.values():
        assert optimizer.overhead + optimizer.per_tensor > 0


@pytest.mark.unit
@pytest.mark.parametrize(("scale", "pool"), [(1, POOL), (4, DEVICE_POOL)], ids=["cpu", "accelerator"])
def test_the_operands_of_each_sample_are_in_the_pool(scale: int, pool: int) -> None:
    operands = Operands(torch.float32, torch.device("meta"), pool)
    samples = list(all_samples(scale=scale, largest=pool))
    largest = max(tensor.numel() for sample in samples for tensor in sample.make(operands))
    assert largest == pool


@pytest.mark.unit
@pytest.mark.parametrize(("seconds", "samples"), [(0.1, smaller_samples), further(1.0, all_samples)])
def test_a_quick_profile_of_this_machine(
    seconds: float, samples: Callable[..., Iterator[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measure, "all_samples", samples)
    state = torch.random.get_rng_state()
    profile = measure_machine(dtypes=(torch.float32,), seconds=seconds, show_progress=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    check_structure(profile.rates, num_ranks=1)
    assert profile.links == ()
    assert not profile.is_published
    assert MachineProfile.from_json(profile.to_json()) == profile
    costs = {"dtype": torch.float32, "bytes": 0}
    large = time_of(profile, flops=1e9, kind="product", **costs)
    assert large > time_of(profile, flops=0, kind="product", **costs)


def measured(seconds: float, num_sizes: int, samples: Callable[..., Iterator[Sample]]) -> str:
    _measure.all_samples = samples
    colossalai.launch_from_torch({}, verbose=False)
    _profile.PROFILE_SIZES = _profile.PROFILE_SIZES[:num_sizes]  # of links
    state = torch.random.get_rng_state()
    profile = measure_machine(name="two", dtypes=(torch.float32,), seconds=seconds, show_progress=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    check_structure(profile.rates, num_ranks=2)
    assert not profile.is_published
    costs = {"dtype": torch.float32, "bytes": 0}
    large = time_of(profile, flops=1e9, kind="product", **costs)
    assert large > time_of(profile, flops=0, kind="product", **costs)
    assert len(profile.links) == 1
    assert profile.mesh_speed((2,)).machine == profile.machine
    assert profile.mesh_speed((4, 2)).cost("all_reduce", 1e6, "0") > 0
    return profile.to_json()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("seconds", "num_sizes", "samples"), [further(0.1, 4, smaller_samples), further(0.5, 8, all_samples)]
)
def test_two_ranks_have_the_same_profile(
    seconds: float, num_sizes: int, samples: Callable[..., Iterator[Sample]]
) -> None:
    one, other = run_ranks(measured, 2, seconds, num_sizes, samples)
    assert one == other
    assert MachineProfile.from_json(one).name == "two"
