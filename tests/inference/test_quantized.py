"""Weights in few bits: each product against the weight that its codes stand for; texts, bytes, refusals."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from colossalai.inference import LLM, EngineOptions, SamplingParams, quantization_report, save_quantized
from colossalai.inference._build import build_engine
from colossalai.inference._load import load_model
from colossalai.inference.products import (
    QuantizationWay,
    QuantizedLinear,
    QuantizedWeight,
    _quantized_products,
    make_faster,
    quantize,
    without_rounded_rows,
)
from colossalai.inference.products._faster import FastBlock
from colossalai.inference.products._products import PlainProduct
from colossalai.inference.products._quantized_linear import make_product
from colossalai.inference.products._quantized_products import DequantizingProduct
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.tiers import further

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

WAYS = ("int8", "int8-weights", "int4:32")
NUM_TOKENS = 12


def weight_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return rows rounded to 127 steps of their largest, by float64."""
    precise = x.double()
    step = precise.abs().amax(-1, keepdim=True) / 127
    return torch.floor(precise / step + 0.5) * step


@pytest.mark.parametrize("name", ["int8", "int8-weights", "int4", "int4:32", "int4:128", "int4:256"])
def test_codes_are_the_nearest(name: str) -> None:
    way = QuantizationWay.of(name)
    weight = weight_of(7, 256)
    weight[3] = 0
    weight[4] = 0.25
    found = quantize(weight.float(), way)
    values = found.dequantized(torch.float64)
    if way.bits == 8:
        step = weight.abs().amax(1, keepdim=True) / 127
        assert found.num_bytes == weight.numel() + 7 * 4
        assert (values[3] == 0).all()
    else:
        grouped = weight.unflatten(1, (-1, way.group))
        step = ((grouped.amax(-1) - grouped.amin(-1)) / 15).repeat_interleave(way.group, 1)
        assert found.num_bytes == weight.numel() // 2 + 2 * 2 * 7 * 256 // way.group
    # Half a step; in 4 bits scales and zero points are bfloat16, which moves the ends of the range.
    slack = 1e-6 if way.bits == 8 else 0.01 * weight.abs().max()
    assert ((values - weight).abs() <= 0.5 * step + slack).all()
    codes = found.unpacked()
    assert codes.shape == weight.shape
    assert len(codes.unique()) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("num_rows", [1, 5, 33])
def test_each_product_is_that_of_the_weight_its_codes_stand_for(
    name: str, dtype: torch.dtype, num_rows: int
) -> None:
    weight = quantize(weight_of(48, 96).float(), QuantizationWay.of(name))
    x, bias = weight_of(num_rows, 96, 1).to(dtype), weight_of(1, 48, 2)[0].to(dtype)
    other = weight_of(num_rows, 48, 3).to(dtype)
    product = make_product(weight, bias, dtype)
    assert type(product) is not DequantizingProduct
    assert product.num_bytes == weight.num_bytes + bias.nbytes
    plainly = rounded(x.float()) if name == "int8" else x.double()
    expected = functional.linear(plainly, weight.dequantized(torch.float64), bias.double())
    is_precise = dtype == torch.float32 and weight.way.bits == 8
    bound = (1e-5 if name == "int8" else 3e-4) if is_precise else 0.02
    for made, wanted in (
        (product(x), expected),
        (product(x, act="silu"), functional.silu(expected)),
        (product(x, act="gelu_tanh"), functional.gelu(expected, approximate="tanh")),
        (product(x, add=other), expected + other.double()),
        (product(x, mul=other), expected * other.double()),
    ):
        assert made.dtype == dtype
        assert (made.double() - wanted).abs().max() <= bound * wanted.abs().max()


@settings(max_examples=60)
@given(
    rows=st.integers(1, 70),
    sizes=st.tuples(st.integers(1, 80) | st.sampled_from([32, 64, 96]), st.integers(1, 80)),
    name=st.sampled_from(["int8", "int8-weights"]),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_result_of_a_row_is_the_same_in_any_company(
    rows: int, sizes: tuple[int, int], name: str, seed: int, data: st.DataObject
) -> None:
    weight = quantize(weight_of(*sizes, seed).float(), QuantizationWay.of(name))
    product = make_product(weight, weight_of(1, sizes[0], seed + 1)[0].float(), torch.float32)
    x, other = (weight_of(rows, size, seed + 2).float() for size in (sizes[1], sizes[0]))
    x = x * torch.logspace(-6, 6, rows)[:, None]
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    # torch computes the last values of a tensor by another exp and erf, where 32 does not divide its size.
    activations = [{"act": "silu"}, {"act": "gelu"}] if sizes[0] % 32 == 0 else []
    for more in ({}, {"add": other}, {"mul": other}, *activations):
        fewer = {key: value if key == "act" else value[first:last] for key, value in more.items()}
        alone = product(x[first:last], **fewer)
        assert torch.equal(alone, product(x, **more)[first:last])


# Without VNNI sums of two such products are cut off at 32,767: random weights are wrong by 2 %, these by all.
@pytest.mark.parametrize("name", ["int8", "int8-weights"])
@pytest.mark.parametrize("is_halved", [False, True])
def test_the_largest_codes_do_not_saturate(
    name: str, is_halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_halved:
        monkeypatch.setattr(_quantized_products, "integer_products_saturate", lambda: True)
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(8)
    weight = quantize(signs[:, None].expand(16, 640), QuantizationWay.of(name))
    product = make_product(weight, None, torch.float32)
    rows = torch.stack((torch.ones(640), -torch.ones(640), torch.tensor([1.0, -1.0]).repeat(320)))
    expected = rows.sum(1)[:, None] * signs
    assert (product(rows) - expected).abs().max() <= 640 * 1e-6


def test_a_row_of_zeros_and_one_that_is_not_finite_leave_the_others() -> None:
    product = make_product(
        quantize(weight_of(8, 16).float(), QuantizationWay.of("int8")), None, torch.float32
    )
    x = weight_of(4, 16).float()
    expected = product(x)
    x[1], x[2] = 0, torch.nan
    found = product(x)
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
    assert (found[1] == 0).all()
    assert found[2].isnan().all()


def test_shapes_and_types_that_no_packed_product_takes_are_dequantized() -> None:
    for way, dtype, rows in (
        ("int4:32", torch.float32, 40),
        ("int8", torch.float64, 48),
        ("int8-weights", torch.float16, 48),
    ):
        weight = quantize(weight_of(rows, 64).float(), QuantizationWay.of(way))
        product = make_product(weight, None, dtype)
        assert type(product) is DequantizingProduct
        x = weight_of(3, 64, 1).to(dtype)
        plainly = rounded(x.float()) if way == "int8" else x.double()
        expected = plainly @ weight.dequantized(torch.float64).T
        bound = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
        assert (product(x).double() - expected).abs().max() <= bound * expected.abs().max()
    assert type(make_product(weight_of(4, 4), None, torch.float64)) is PlainProduct


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("Llama", intermediate_size=64).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def dequantized_twin(model: nn.Module) -> nn.Module:
    """Return a model whose linear layers are plain ones, with the weights that the codes stand for."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear):
            twin = nn.Linear(layer.weight.in_features, layer.weight.out_features, bias=layer.bias is not None)
            twin.weight.data = layer.weight.dequantized(layer.dtype)
            if layer.bias is not None and twin.bias is not None:
                twin.bias.data = layer.bias
            model.set_submodule(path, twin)
    return model


def texts(llm: LLM, lengths: tuple[int, ...] = MIXED) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    return [output.outputs[0].token_ids for output in llm.generate(prompts(*lengths), params)]


def assert_same_but_ties(
    model: nn.Module, prompt: list[int], found: tuple[int, ...], expected: tuple[int, ...], bound: float
) -> None:
    """Allow two texts to differ from a token on whose two logits differ by little."""
    pairs = list(zip(found, expected, strict=True))
    place = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:
        return
    logits = model(torch.tensor([prompt + list(expected[:place])])).logits[0, -1]
    assert logits[expected[place]] - logits[found[place]] <= bound * logits.abs().max()


# How far logits may be apart: by float32, and where rounding takes another code, or results are bfloat16.
TIES = {"int8-weights": 1e-3, "int8": 0.03, "int4:32": 0.03}


@pytest.mark.each_value
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT", further("Qwen3")])
def test_texts_are_those_of_the_dequantized_model(name: str, family: str, tmp_path: Path) -> None:
    sizes = {"Llama": {"intermediate_size": 64}, "Qwen3": {"intermediate_size": 64}, "OPT": {"ffn_dim": 64}}
    tiny(family, **sizes.get(family, {})).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), quantize=name, kv_memory=2**22)
    found = texts(llm)
    model = load_model(str(tmp_path), EngineOptions(quantize=name))
    assert any(isinstance(layer, QuantizedLinear) for layer in model.modules())
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    if name != "int8":  # which rounds activations, too: there the plain layers in codes are the twin
        model = dequantized_twin(model)
    for prompt, text in zip(prompts(*MIXED), found, strict=True):
        assert_same_but_ties(model, prompt, text, greedy(model, prompt, NUM_TOKENS), TIES[name])


@pytest.mark.parametrize("name", WAYS)
def test_whole_blocks_are_replaced_and_compared_with_the_dequantized_ones(name: str, folder: Path) -> None:
    def replaced(change: float) -> int:
        model = load_model(str(folder), EngineOptions(quantize=name, is_owned=True))
        runner = build_engine(model, None, EngineOptions(quantize=name, kv_memory=2**22)).executor.runner
        runner.allocate(0)
        original = QuantizedWeight.dequantized
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                QuantizedWeight, "dequantized", lambda weight, dtype: original(weight, dtype) * change
            )
            make_faster(runner, 200)
        return sum(isinstance(part, FastBlock) for part in model.modules())

    assert replaced(1) == 4
    assert replaced(1.1) == 0  # what is compared with is other than what is made


def test_int8_texts_are_the_same_alone_and_in_company(folder: Path) -> None:
    options = {"quantize": "int8", "kv_memory": 2**22, "has_prefix_cache": False, "is_batch_invariant": True}
    together = texts(LLM(str(folder), **options))
    alone = LLM(str(folder), **options)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
    assert together == [alone.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts(*MIXED)]


@pytest.mark.each_value
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_a_saved_one_is_loaded_as_it_was(name: str, is_tied: bool, tmp_path: Path) -> None:
    tiny("Llama", intermediate_size=64, tie_word_embeddings=is_tied).save_pretrained(tmp_path / "plain")
    model = load_model(str(tmp_path / "plain"), EngineOptions(quantize=name))
    save_quantized(model, tmp_path / "saved", source=tmp_path / "plain")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization"] == {"way": name}
    assert (tmp_path / "saved" / "generation_config.json").is_file()
    loaded = load_model(str(tmp_path / "saved"), EngineOptions())
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert "model.layers.0.self_attn.q_proj.codes" in state
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert all(state[key].dtype == expected[key].dtype for key in expected)
    found = texts(LLM(str(tmp_path / "saved"), kv_memory=2**22), (5, 30))
    assert found == texts(LLM(str(tmp_path / "plain"), quantize=name, kv_memory=2**22), (5, 30))
    with pytest.raises(ValueError, match=f"quantize='int4:128'; saved was saved as {name}: leave it out"):
        load_model(str(tmp_path / "saved"), EngineOptions(quantize="int4:128"))


def test_a_model_in_memory_is_quantized_where_it_is_given_away(folder: Path) -> None:
    loaded = load_model(str(folder), EngineOptions(quantize="int8"))
    given = tiny("Llama", intermediate_size=64)
    with pytest.raises(ValueError, match="goes on belonging to its owner"):
        LLM(given, quantize="int8")
    quantized = load_model(given, EngineOptions(quantize="int8", is_owned=True))
    state, expected = quantized.state_dict(), loaded.state_dict()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    with pytest.raises(ValueError, match="the model is not quantized"):
        build_engine(tiny("Llama"), None, EngineOptions(quantize="int8"))


def test_what_does_not_fit_is_refused_in_words(folder: Path, tmp_path: Path) -> None:
    for name in ("int7", "int4:48", "int4:", "int8:64", "INT8"):
        with pytest.raises(
            ValueError, match=f"quantize='{name}'; it must be int8, int8-weights, int4, or one"
        ):
            EngineOptions(quantize=name)
    with pytest.raises(ValueError, match="no linear layer that can be stored as int4:256: none has inputs"):
        load_model(str(folder), EngineOptions(quantize="int4:256"))
    with pytest.raises(ValueError, match="is not quantized: load it with quantize="):
        save_quantized(tiny("Llama"), tmp_path / "saved")
    tiny("Llama", num_hidden_layers=3).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="nothing was loaded"):
        load_model(str(folder), EngineOptions(quantize="int8", checkpoint=str(tmp_path / "other")))


def test_a_report_says_bytes_and_errors(folder: Path) -> None:
    # 4 blocks of 32 x (32 + 16 + 16 + 32 + 3 x 64) weights, and a head of 200 x 32; outputs: their scales.
    weights, outputs, groups = 4 * 32 * 288 + 200 * 32, 4 * (96 + 64 + 64 + 32) + 200, 4 * 288 + 200
    bytes_of = {"int8": weights + 4 * outputs, "int4:32": weights // 2 + 4 * groups}
    bytes_of["int8-weights"] = bytes_of["int8"]
    model = tiny("Llama", intermediate_size=64)
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    errors = []
    for name in ("int8", "int8-weights", "int4:32"):
        found = quantization_report(str(folder), name)
        assert (found.bytes_before, found.product_bytes_before) == (whole, 4 * weights)
        assert found.product_bytes_after == bytes_of[name]
        assert found.bytes_before - found.bytes_after == 4 * weights - bytes_of[name]
        assert 0 < found.largest_error < found.largest_logit
        assert f"{name}: " in found.describe()
        errors.append(found.largest_error)
    assert errors[1] < errors[0] < errors[2]
    partly = quantization_report(str(folder), "int4:64")
    assert len(partly.kept) == 4 * 6 + 1  # all but down_proj have 32 inputs
    with pytest.raises(ValueError, match="no tokenizer for the text"):
        quantization_report(str(folder), "int8", text="a text")
    with pytest.raises(ValueError, match="name its folder"):
        quantization_report(tiny("Llama"), "int8")


def test_rounding_of_rows_is_left_out_within_the_block_only(folder: Path) -> None:
    model = load_model(str(folder), EngineOptions(quantize="int8"))
    tokens = torch.tensor([prompts(9)[0]])
    rounding = model(tokens).logits
    with without_rounded_rows(model):
        exact = model(tokens).logits
    assert torch.equal(model(tokens).logits, rounding)
    twin = dequantized_twin(model)(tokens).logits
    assert (exact - twin).abs().max() <= 1e-4 * twin.abs().max()
    assert (rounding - twin).abs().max() > 1e-3 * twin.abs().max()
