"""Packed products: any number of rows, what is done with them, and rows that are filled up."""

import pytest
import torch
from torch.nn import functional

from colossalai.inference.products import _products, fewest_rows
from colossalai.inference.products._products import PackedProduct, with_rounded_rows

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("fewest", [1, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 5, 17])
def test_products_of_few_rows_are_those_of_plain_weights(
    num_rows: int, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_products, "fewest_rows", lambda _: fewest)
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(24, 40, generator=generator), torch.randn(24, generator=generator)
    x, other = torch.randn(num_rows, 40, generator=generator), torch.randn(num_rows, 24, generator=generator)
    product = PackedProduct(weight, bias)
    expected = functional.linear(x, weight, bias)
    with torch.inference_mode():
        torch.testing.assert_close(product(x), expected)
        torch.testing.assert_close(product(x, act="silu"), functional.silu(expected))
        torch.testing.assert_close(product(x, add=other), expected + other)
        torch.testing.assert_close(product(x, mul=other), expected * other)


@pytest.mark.parametrize("num_rows", range(40))
def test_rows_are_filled_up_to_few_numbers(num_rows: int) -> None:
    x = torch.randn(num_rows, 3)
    for fewest in (1, 4):
        filled = with_rounded_rows(x, fewest)
        assert torch.equal(filled[:num_rows], x)
        assert filled.is_contiguous()
        assert len(filled) <= max(fewest, 1.125 * num_rows)
        assert len(filled) >= min(fewest, num_rows * fewest)


def test_the_fewest_rows_are_measured_once() -> None:
    found = fewest_rows(torch.float32)
    assert found in (1, 4)
    hits = fewest_rows.cache_info().hits
    assert fewest_rows(torch.float32) == found
    assert fewest_rows.cache_info().hits == hits + 1
