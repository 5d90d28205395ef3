"""The tensor assertions: what passes, what fails."""

from collections.abc import Callable

import pytest
import torch

from colossalai.testing import (
    assert_close,
    assert_close_loose,
    assert_equal,
    assert_not_equal,
    check_state_dict_equal,
)

pytestmark = pytest.mark.unit

ONES = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("check", "error"),
    [
        (assert_close, 1e-3),
        (assert_close_loose, 1e-2),
        (assert_equal, 1e-15),
    ],
)
def test_a_difference_fails(check: Callable[..., None], error: float) -> None:
    check(ONES, ONES.clone())
    with pytest.raises(AssertionError):
        check(ONES, ONES + error)


def test_rounding_passes() -> None:
    assert_close(ONES, ONES + 1e-12)
    assert_close(ONES, ONES + 1e-3, rtol=0, atol=1e-2)
    assert_close_loose(ONES, ONES + 1e-3)


def test_not_equal() -> None:
    assert_not_equal(ONES, ONES + 1e-15)
    assert_not_equal(ONES, torch.ones(4))
    with pytest.raises(AssertionError, match="are equal"):
        assert_not_equal(ONES, ONES.clone())


def test_state_dicts() -> None:
    def state(**changed: object) -> dict[str, object]:
        return {
            "step": 3,
            "groups": [{"lr": 0.1}],
            0: {"moment": torch.tensor([1.0, float("nan")])},
            **changed,
        }

    check_state_dict_equal(state(), state())
    for changed, message in [
        ({"step": 4}, "step is 3 in the first and 4 in the second"),
        ({"step": 3.0}, "step is 3 in the first and 3.0"),
        ({"groups": [{"lr": 0.2}]}, r"groups\.0\.lr is 0.1"),
        ({"groups": []}, "groups has 1 items in the first and 0"),
        ({"more": 1}, r"only the first has \[\], only the second \['more'\]"),
    ]:
        with pytest.raises(AssertionError, match=message):
            check_state_dict_equal(state(), state(**changed))
    other = state()
    other[0] = {"moment": torch.tensor([2.0, float("nan")])}
    with pytest.raises(AssertionError, match=r"^0\.moment: "):
        check_state_dict_equal(state(), other)
