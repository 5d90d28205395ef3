"""Row tables: products with one row, of which models they are kept, and texts with and without them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from colossalai.inference import LLM, EngineOptions, SamplingParams, serving_memory
from colossalai.inference.products import _products, _row_tables, quantize, served_products
from colossalai.inference.products._products import PackedProduct
from colossalai.inference.products._quantized_products import (
    integer_products_saturate,
    make_quantized_product,
)
from colossalai.inference.products._quantized_weight import QuantizationWay
from tests.inference.models import greedy, prompts, tiny

pytestmark = pytest.mark.unit

NO_VNNI = pytest.mark.skipif(integer_products_saturate(), reason="integer products without VNNI are rounded")
INT8 = pytest.param("int8", marks=NO_VNNI)
NO_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 on this processor"
)
POOL = 2**22
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables are faster on this machine, whichever it is."""
    monkeypatch.setattr(_row_tables, "are_faster", lambda samples, tables: set(samples))
    return


def test_groups_waste_little() -> None:
    for out_features in (1, 16, 24, 640, 1280, 1728, 2048, 3456, 8192, 50257):
        number, size = _row_tables.groups_of(out_features)
        assert size % 16 == 0
        assert size <= 320
        assert out_features <= number * size <= max(1.05 * out_features, out_features + 15 * number)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)])
@pytest.mark.parametrize(("out_features", "in_features"), [(24, 40), (700, 33), (320, 1), (1, 8)])
def test_products_with_tables_are_those_of_plain_weights(
    out_features: int, in_features: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_products, "fewest_rows", lambda _: 1)
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    other = torch.randn(1, out_features, generator=generator).to(dtype)
    x = torch.randn(3, in_features, generator=generator).to(dtype)
    kept = weight.clone()
    # In bfloat16 the product is rounded before something is added to it, as plain layers do.
    close = (
        partial(torch.testing.assert_close, atol=0.1, rtol=0.02)
        if dtype == torch.bfloat16
        else torch.testing.assert_close
    )
    with torch.inference_mode():
        product = PackedProduct(weight, bias)
        product.row_table = product.make_row_table()
        counted = _row_tables.row_table_bytes(out_features, in_features, dtype)
        assert product.row_table.num_bytes == counted
        expected = functional.linear(x.double(), weight.double(), bias.double()).to(dtype)
        close(product(x), expected)  # more rows go their own way
        x, expected = x[1:2], expected[1:2]
        close(product(x), expected)
        close(product(x, act="silu"), functional.silu(expected))
        close(product(x, add=other), expected + other)
        close(product(x, mul=other), expected * other)
    assert torch.equal(weight, kept)


@NO_VNNI
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(24, 40), (330, 2500), (320, 1)])
def test_int8_products_have_the_same_bits_with_tables(
    out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    rows = torch.randn(8, in_features, generator=generator).to(dtype)
    rows[0] = 1  # the largest codes, whose sums are beyond what float32 counts
    weight[0] = 1
    with torch.inference_mode():
        codes = quantize(weight, QuantizationWay.of("int8"))
        product = make_quantized_product(codes, bias, dtype)
        expected = product(rows)
        product.row_table = product.make_row_table()
        counted = _row_tables.row_table_bytes(out_features, in_features, torch.int8)
        assert product.row_table.num_bytes == counted
        found = torch.cat([product(row[None]) for row in rows])
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("faster")
def test_int8_tables_are_dropped_without_vnni() -> None:
    weight = torch.randn(330, 250, generator=torch.Generator().manual_seed(0))
    product = make_quantized_product(quantize(weight, QuantizationWay.of("int8")), None, torch.float32)
    product._is_halved = True  # type: ignore[attr-defined]
    assert _row_tables.keep_row_tables([product], is_wanted=True, free_memory=lambda: 0.0) == 0
    assert product.row_table is None


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize(
    ("family", "num_products", "quantize_way"),
    [
        ("Llama", 4 * 5 + 1, None),
        ("OPT", 4 * 6 + 1, None),
        pytest.param("Llama", 4 * 4 + 1, "int8", marks=NO_VNNI),
    ],
)
def test_texts_are_the_same_with_tables(
    family: str, num_products: int, quantize_way: str | None, tmp_path: Path
) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    found = []
    for is_kept in (True, False):
        llm = LLM(tmp_path, kv_memory=POOL, quantize=quantize_way, has_row_tables=is_kept)
        products = served_products(llm.engine.executor.runner.model)  # type: ignore[union-attr]
        assert sum(product.row_table is not None for product in products) == is_kept * num_products
        assert len(products) == num_products
        found.append([llm.generate(each, GREEDY)[0].outputs[0].token_ids for each in prompts(5, 33)])
    assert found[0] == found[1]
    if quantize_way is None:
        assert found[0] == [greedy(model, each, 12) for each in prompts(5, 33)]


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("quantize_way", [None, INT8])
def test_new_weights_are_in_the_tables(quantize_way: str | None, tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path / "old")
    new = tiny("Llama")
    with torch.no_grad():
        for param in new.parameters():
            param.mul_(0.5).add_(0.01)
    new.save_pretrained(tmp_path / "new")
    llm = LLM(tmp_path / "old", kv_memory=POOL, quantize=quantize_way, has_row_tables=True)
    llm.update_weights(tmp_path / "new")
    products = served_products(llm.engine.executor.runner.model)  # type: ignore[union-attr]
    assert all(product.row_table is not None for product in products)
    again = LLM(tmp_path / "new", kv_memory=POOL, quantize=quantize_way, has_row_tables=True)
    (prompt,) = prompts(9)
    assert llm.generate(prompt, GREEDY)[0].outputs == again.generate(prompt, GREEDY)[0].outputs


def test_tables_that_are_not_faster_or_not_right_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [PackedProduct(torch.randn(24, 40), None), PackedProduct(torch.full((8, 40), 1.0), None)]
    keep = _row_tables.keep_row_tables
    monkeypatch.setattr(_row_tables, "are_faster", lambda samples, tables: set())
    assert keep(products, is_wanted=True, free_memory=lambda: 0.0) == 0
    assert all(product.row_table is None for product in products)
    kind = (8, 40, torch.float32, torch.float32)
    monkeypatch.setattr(_row_tables, "are_faster", lambda samples, tables: {kind})
    counted = _row_tables.row_table_bytes(8, 40, torch.float32)
    assert keep(products, is_wanted=True, free_memory=lambda: 0.0) == counted
    assert [product.row_table is None for product in products] == [True, False]
    products[1].row_table = None
    monkeypatch.setattr(_row_tables.FloatRowTable, "multiply", lambda self, x: torch.zeros(1, 8))
    assert keep(products, is_wanted=True, free_memory=lambda: 0.0) == 0


@pytest.mark.usefixtures("faster")
def test_the_free_memory_decides_where_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    product = PackedProduct(torch.randn(64, 64), None)
    needed = _row_tables.row_table_bytes(64, 64, torch.float32)
    keep = _row_tables.keep_row_tables
    assert keep([product], is_wanted=None, free_memory=lambda: 1e12) == 0  # a cache holds it
    monkeypatch.setattr(_row_tables, "_LEAST_BYTES", 0)
    assert keep([product], is_wanted=None, free_memory=lambda: 10 * needed - 1) == 0
    assert "more than a tenth of the free memory" in capfd.readouterr().err
    assert keep([product], is_wanted=False, free_memory=lambda: 1e12) == 0
    assert keep([product], is_wanted=None, free_memory=lambda: 10 * needed) == needed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"is_batch_invariant": True}, "is_batch_invariant"),
        ({"quantize": "int4:32"}, "no product of this model"),
        ({"dtype": "float64"}, "no product of this model"),
    ],
)
def test_tables_that_cannot_be_are_refused(options: dict[str, object], said: str, tmp_path: Path) -> None:
    tiny("Llama", hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=said):
        LLM(tmp_path, kv_memory=POOL, has_row_tables=True, **options)


def test_a_model_of_somebody_else_is_not_copied() -> None:
    model: nn.Module = tiny("Llama")
    with pytest.raises(ValueError, match="is_owned"):
        LLM(model, kv_memory=POOL, has_row_tables=True)


@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("quantize_way", [None, INT8])
def test_tables_are_counted(quantize_way: str | None, tmp_path: Path) -> None:
    tiny("OPT").save_pretrained(tmp_path)
    options = EngineOptions(quantize=quantize_way, has_row_tables=True)
    (stage,) = serving_memory(tmp_path, options).stages
    llm = LLM(tmp_path, kv_memory=POOL, quantize=quantize_way, has_row_tables=True)
    products = served_products(llm.engine.executor.runner.model)  # type: ignore[union-attr]
    held = sum(product.row_table.num_bytes for product in products if product.row_table is not None)
    assert stage.row_table_bytes == held > 0
    found = serving_memory(tmp_path, options)
    assert found.num_fitting(stage, stage.weight_bytes + held) == 0
    assert found.num_fitting(stage, stage.weight_bytes + held - 1) == -1
    with pytest.raises(ValueError, match="no product"):
        serving_memory(tmp_path, EngineOptions(dtype="float64", has_row_tables=True))
