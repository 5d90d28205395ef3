"""Models to serve by size: parameters as published, built without memory; what a config may name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from colossalai.inference import models
from colossalai.inference.models import resolve_model
from colossalai.lazy import is_lazy, materialize
from tests.harness.allocations import Allocations
from tests.tiers import further

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

OPT_TABLE = {  # name: nominal size, layers, heads, width; table 1 of 2205.01068
    "opt_125M": (125e6, 12, 12, 768),
    "opt_6B": (6.7e9, 32, 32, 4096),
    "opt_30B": (30e9, 48, 56, 7168),
    "opt_66B": (66e9, 64, 72, 9216),
    "opt_175B": (175e9, 96, 96, 12288),
}
BLOOM_TABLE = {  # name: parameters as its authors count them, layers, heads, width; 2211.05100
    "bloom_560M": (559_214_592, 24, 16, 1024),
    "bloom_7B": (7_069_016_064, 30, 32, 4096),
    "bloom_175B": (176_247_271_424, 70, 112, 14336),
}
VOCAB_OF_OPT, POSITIONS_OF_OPT = 50272, 2048 + 2


def num_parameters(name: str) -> int:
    """Return how many there are, by the paper's sizes; the embedding is the head's, too."""
    if name in BLOOM_TABLE:
        return BLOOM_TABLE[name][0]
    _, num_layers, _, width = OPT_TABLE[name]
    attention, mlp, norms = 4 * (width**2 + width), 8 * width**2 + 5 * width, 2 * 2 * width
    whole = (VOCAB_OF_OPT + POSITIONS_OF_OPT) * width + num_layers * (attention + mlp + norms) + 2 * width
    assert whole == pytest.approx(OPT_TABLE[name][0], rel=0.01)
    return whole


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("opt_125M", "opt_6B", "bloom_560M", "bloom_175B") else further(name)
        for name in (*OPT_TABLE, *BLOOM_TABLE)
    ],
)
def test_each_size_has_the_published_number_of_parameters_and_no_memory(name: str) -> None:
    with Allocations(with_objects=False) as building:
        model = resolve_model(name).build()
    assert building.tensors < 2**20  # 175B has 330 GiB
    assert sum(param.numel() for param in model.parameters()) == num_parameters(name)
    _, *shape = (OPT_TABLE | BLOOM_TABLE)[name]
    config = model.config
    assert [config.num_hidden_layers, config.num_attention_heads, config.hidden_size] == shape
    assert all(param.is_meta for param in model.parameters())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert not model.training


def test_what_is_listed_is_what_is_there() -> None:
    assert set(models.BUILT_IN) == {*OPT_TABLE, *BLOOM_TABLE}
    for name, function in models.BUILT_IN.items():
        assert getattr(models, name) is function
        resolved = resolve_model(function)
        assert resolved.name == name
        assert resolved.folder is None
        assert resolved.config.to_dict() == function().to_dict()


TINY = {"num_hidden_layers": 2, "hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 4, "vocab_size": 40}


def tiny_opt() -> object:
    return models.opt_125M(**TINY, word_embed_proj_dim=16, max_position_embeddings=32, dtype="float32")


def test_options_replace_fields() -> None:
    config = models.bloom_560M(n_layer=2, hidden_size=32)
    assert (config.n_layer, config.hidden_size, config.n_head, config.vocab_size) == (2, 32, 16, 250880)
    assert (config.pad_token_id, config.dtype) == (3, torch.float16)


def test_a_model_with_initial_values_is_that_of_an_eager_build() -> None:
    torch.manual_seed(3)
    eager = transformers.OPTForCausalLM(tiny_opt()).eval()
    torch.manual_seed(3)
    model = materialize(resolve_model(tiny_opt).build(initialize=True))
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, eager(ids).logits)


def test_a_model_to_be_loaded_draws_nothing_and_has_the_dtype_that_is_asked_for() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = resolve_model(tiny_opt).build(dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    assert is_lazy(model)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert {param.dtype for param in resolve_model(tiny_opt).build().parameters()} == {torch.float32}


def test_a_folder_is_read_without_its_values(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_opt().save_pretrained(folder)
    for given in (folder, str(folder)):
        resolved = resolve_model(given)
        assert resolved.name == "tiny"
        assert resolved.folder == folder
        assert type(resolved.build()).__name__ == "OPTForCausalLM"


def tiny_model() -> nn.Module:
    return transformers.OPTForCausalLM(tiny_opt())


def test_a_function_may_return_a_model() -> None:
    resolved = resolve_model(tiny_model)
    assert resolved.config.hidden_size == 16
    model = resolved.build(dtype=torch.float64)
    assert is_lazy(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert {param.dtype for param in model.parameters()} == {torch.float64}


def no_model() -> nn.Module:
    return nn.Linear(2, 2)


def test_what_is_no_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"")
    (tmp_path / "none").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    for given, message in (
        ("opt_125m", "model_class 'opt_125m' is no folder here .*did you mean 'opt_125M'"),
        (str(tmp_path / "weights.pt"), "weights.pt' is a file.*named by `checkpoint`"),
        (tmp_path / "none", "has no config.json"),
        (tmp_path / "broken", "config.json is not a config of transformers"),
        (nn.Linear, "is the class Linear, which has no sizes"),
        (no_model, "no_model returns a Linear without a config of transformers"),
        (dict, "dict returns a dict; it must return a config"),
        (7, r"model_class is a int, 7: give a function .*opt_125M, opt_6B"),
        (None, "model_class is a NoneType"),
        (transformers.ViTConfig, "ViTConfig is the config of no causal language model"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_model(given).build()
