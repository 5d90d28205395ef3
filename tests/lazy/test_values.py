"""Lazily built models have the values of an eager build, bit for bit, and draw as many random numbers."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from colossalai.lazy import LazyInitContext, is_lazy, materialize
from colossalai.model_zoo.resnet import resnet18
from tests.model_zoo.tiny import build

pytestmark = pytest.mark.unit

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
TEXT = TINY | {"vocab_size": 99, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
HUGGING_FACE = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64},
    "BertForMaskedLM": TEXT,
    "ViTForImageClassification": TINY | {"image_size": 32, "patch_size": 8},
    "OPTForCausalLM": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 37,
        "vocab_size": 99,
        "word_embed_proj_dim": 32,
    },
    "LlamaForCausalLM": TEXT | {"rope_parameters": LLAMA3, "dtype": "bfloat16", "tie_word_embeddings": True},
    "T5ForConditionalGeneration": {
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 37,
        "num_layers": 2,
        "num_heads": 4,
    },
    "AlbertForMaskedLM": TEXT | {"embedding_size": 16},
    "WhisperModel": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 99,
        "pad_token_id": 1,
        "decoder_start_token_id": 2,
    },
}


def check(build_model: Callable[[], nn.Module]) -> nn.Module:
    """Compare an eager, a lazy and a copied lazy model; return the second."""
    torch.manual_seed(5)
    eager, after = build_model(), torch.get_rng_state()
    torch.manual_seed(5)
    with LazyInitContext():
        lazy = build_model()
    assert torch.equal(torch.get_rng_state(), after)
    assert all(param.is_meta for param in lazy.parameters())
    copied = copy.deepcopy(lazy)
    for model in (lazy, copied):
        assert is_lazy(model)
        assert materialize(model) is model
        assert not is_lazy(model)
        compare(model, eager)
    assert torch.equal(torch.get_rng_state(), after)
    return lazy


def compare(found: nn.Module, wanted: nn.Module) -> None:
    found_tensors, wanted_tensors = tensors_of(found), tensors_of(wanted)
    assert found_tensors.keys() == wanted_tensors.keys()
    for name, tensor in found_tensors.items():
        other = wanted_tensors[name]
        assert torch.equal(tensor, other), name
        assert (type(tensor), tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad) == (
            type(other),
            other.dtype,
            other.stride(),
            other.device,
            other.requires_grad,
        ), name


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    params = model.named_parameters(remove_duplicate=False)
    return dict(params) | dict(model.named_buffers(remove_duplicate=False))


class Initialized(nn.Module):
    """Every way in which users initialize."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("normal_", "uniform_", "xavier_normal_", "kaiming_uniform_", "orthogonal_", "eye_"):
            weight = nn.Parameter(torch.empty(24, 20))
            getattr(nn.init, name)(weight)
            self.register_parameter(name, weight)
        self.truncated = nn.Parameter(torch.Tensor(24, 20), requires_grad=False)
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.03, b=0.03)
        self.scaled = nn.Parameter(torch.randn(7, 3) * 0.02)
        self.small = nn.Parameter(torch.full((5,), 1e-5))
        self.embedding = nn.Embedding(20, 4, padding_idx=2)
        self.embedding.weight.data.normal_(std=3.0)
        with torch.no_grad():
            self.embedding.weight[2].zero_()
        self.columns = nn.Parameter(torch.zeros(6, 8))
        self.columns.data[:, ::2].normal_()  # a part of the memory, not contiguous


class Computed(nn.Module):
    """Buffers, and values that Python asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(int(torch.arange(4).sum())))
        self.drop = torch.linspace(0, 0.1, 5).tolist()
        self.array = torch.linspace(0, 0.1, 5).numpy()
        self.register_buffer("causal", torch.tril(torch.ones(4, 4, dtype=torch.bool)).view(1, 1, 4, 4))
        positions = torch.arange(10.0)
        self.register_buffer("masked", positions[positions > 3])
        angles = positions[:, None] * torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
        table = torch.zeros(10, 8)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("bits", torch.bernoulli(torch.full((40,), 0.3)))
        self.register_buffer("order", torch.randperm(9))
        self.register_buffer("likes", torch.rand_like(table))
        self.register_buffer("picks", torch.multinomial(torch.ones(5), 3))
        generator = torch.Generator().manual_seed(4)
        self.register_buffer("own", torch.empty(20).normal_(generator=generator))
        self.register_buffer("own_again", torch.randn(20, generator=generator))
        self.register_buffer("dropped", nn.functional.dropout(torch.ones(30)))
        self.register_buffer("early", torch.ones(3) * self.layers[0].weight.detach().sum())
        with torch.no_grad():
            self.layers[0].weight.mul_(2)  # `early` has seen what it was before


class Parametrized(nn.Module):
    """Weights that are functions of others, tied ones, and other types."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.short = nn.Linear(3, 3).half()
        self.moved = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("cpu", torch.bfloat16).cpu()
        self.like = nn.Parameter(torch.randn(2, 3, device=self.short.weight.device))


@pytest.mark.parametrize("model", [Initialized, Computed, Parametrized])
def test_what_users_do(model: type[nn.Module]) -> None:
    check(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_type_is_that_of_the_time_of_building(dtype: torch.dtype) -> None:
    class Ratio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("ratio", torch.arange(5) / 7)

    torch.manual_seed(5)
    torch.set_default_dtype(dtype)
    try:
        wanted = Ratio()
        torch.manual_seed(5)
        with LazyInitContext():
            lazy = Ratio()
    finally:
        torch.set_default_dtype(torch.float32)
    compare(materialize(lazy), wanted)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    "build_model",
    [
        lambda: nn.Transformer(16, 2, 2, 2, 32),
        lambda: nn.LSTM(4, 5, num_layers=2),
        lambda: resnet18(num_classes=4, in_channels=1, width=4),
    ],
)
def test_modules_of_torch_and_convolutions(build_model: Callable[[], nn.Module]) -> None:
    check(build_model)


def test_a_recurrent_module_runs_once_it_is_materialized() -> None:
    lstm = check(lambda: nn.LSTM(4, 5, num_layers=2))
    output, _ = lstm(torch.randn(3, 2, 4))
    output.sum().backward()
    assert lstm.weight_hh_l1.grad is not None


@pytest.mark.parametrize("name", ["gpt", "bert", "vit"])
def test_models_of_the_zoo(name: str) -> None:
    check(lambda: build(name))


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_models_of_hugging_face(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name)
    config = model_class.config_class(**HUGGING_FACE[name])
    lazy = check(lambda: model_class(config))
    if name == "GPT2LMHeadModel":
        assert lazy.get_output_embeddings().weight is lazy.get_input_embeddings().weight
