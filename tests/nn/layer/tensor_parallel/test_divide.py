"""Division that must come out even."""

import pytest

from colossalai.nn.layer.utils import divide

pytestmark = pytest.mark.unit


def test_divide():
    assert divide(12, 4) == 3
    for numerator, denominator in [(7, 2), (1, 0)]:
        with pytest.raises(ValueError, match=f"{numerator} is not divisible by {denominator}"):
            divide(numerator, denominator)
