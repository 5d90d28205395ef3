"""The fit of alpha and beta: known ones are found again in noisy times."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossalai.device import PROFILE_SIZES, AlphaBeta, fit_alpha_beta

pytestmark = pytest.mark.unit

NOISE, ALLOWED = 0.10, 0.15
alphas = st.floats(1e-7, 1e-1)


def times(line: AlphaBeta, noise: list[float]) -> list[float]:
    return [line.seconds(size) * (1 + each) for size, each in zip(PROFILE_SIZES, noise, strict=True)]


def assert_found(line: AlphaBeta, fitted: AlphaBeta, allowed: float) -> None:
    assert fitted.alpha == pytest.approx(line.alpha, rel=allowed)
    assert fitted.beta == pytest.approx(line.beta, rel=allowed)


@given(alphas, st.floats(1 << 12, 1 << 22))
def test_times_on_a_line_give_the_line(alpha: float, bend: float) -> None:
    line = AlphaBeta(alpha, alpha / bend)
    fitted = fit_alpha_beta(PROFILE_SIZES, times(line, [0.0] * 8))
    assert_found(line, fitted, 1e-8)
    assert fitted.error < 1e-8


@given(alphas, st.floats(1 << 16, 1 << 18), st.lists(st.floats(-NOISE, NOISE), min_size=8, max_size=8))
def test_the_worst_noise_of_10_percent(alpha: float, bend: float, noise: list[float]) -> None:
    """Where both parts are seen by as many sizes, no noise of 10 % moves the line by 15 %."""
    line = AlphaBeta(alpha, alpha / bend)
    fitted = fit_alpha_beta(PROFILE_SIZES, times(line, noise))
    assert_found(line, fitted, ALLOWED)
    assert fitted.error <= 1.2 * NOISE


@given(alphas, st.floats(1 << 14, 1 << 20), st.integers(0, 2**32 - 1))
def test_random_noise_of_10_percent(alpha: float, bend: float, seed: int) -> None:
    """Any start-up time that weighs as much as 16 KB to 1 MB."""
    line = AlphaBeta(alpha, alpha / bend)
    noise = np.random.default_rng(seed).uniform(-NOISE, NOISE, 8).tolist()
    assert_found(line, fit_alpha_beta(PROFILE_SIZES, times(line, noise)), ALLOWED)


@given(st.lists(st.floats(1e-6, 1e2), min_size=8, max_size=8))
def test_nothing_is_ever_negative(seconds: list[float]) -> None:
    fitted = fit_alpha_beta(PROFILE_SIZES, seconds)
    assert 0 <= fitted.alpha < math.inf
    assert 0 <= fitted.beta < math.inf
    assert fitted.alpha + fitted.beta > 0


def test_small_sizes_do_not_drown() -> None:
    """Ordinary least squares would take a large time that is 10 % too long for 10 times the start-up time."""
    noise = [0.0] * 7 + [0.1]
    fitted = fit_alpha_beta(PROFILE_SIZES, times(AlphaBeta(1e-4, 1e-9), noise))
    assert fitted.alpha == pytest.approx(1e-4, rel=0.02)


def test_the_error_is_that_of_the_fit() -> None:
    assert fit_alpha_beta([1e3, 1e3, 1e6], [1.0, 3.0, 2.0]).error == pytest.approx(math.sqrt(1 / 6), rel=1e-6)


def test_falling_times_are_all_start_up() -> None:
    fitted = fit_alpha_beta([1e3, 1e6], [2.0, 1.0])
    assert fitted.beta == 0.0
    assert fitted.alpha == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([1, 2, 3], [1.0, 2.0], "3 sizes, 3 of them different, and 2 times"),
        ([5, 5], [1.0, 2.0], "2 sizes, 1 of them different"),
        ([1, 2], [1.0, 0.0], "finite and above 0"),
        ([1, 2], [1.0, math.nan], "finite and above 0"),
        ([0, 2], [1.0, 1.0], "finite and above 0"),
    ],
)
def test_what_is_no_measurement_is_refused(sizes: list[float], seconds: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_alpha_beta(sizes, seconds)


def test_times_that_grow_faster_than_a_line_have_no_start_up() -> None:
    fitted = fit_alpha_beta([1e3, 1e4, 1e5], [1.0, 20.0, 400.0])
    assert fitted.alpha == 0.0
    assert 1e-3 < fitted.beta < 4e-3
