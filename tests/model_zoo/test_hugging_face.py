"""Models that take over the weights of Hugging Face models give the same logits, in every tensor mode."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.model_zoo import bert, gpt, vit
from colossalai.model_zoo.gpt._hugging_face import config_of
from colossalai.nn.layer import head_cut
from colossalai.tensor import cut_dims
from tests.model_zoo.tiny import BATCH, SEQ, VOCAB, make_batch
from tests.parity.table import MODES
from tests.ranks import run_ranks
from tests.tiers import further

FAMILIES = {"gpt": gpt, "bert": bert, "vit": vit}
ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def hugging_face(name: str, **settings) -> nn.Module:
    """Build a model of theirs in which no parameter has a value that hides a mistake, such as 0 or 1."""
    theirs = pytest.importorskip("transformers")
    torch.manual_seed(5)
    if name == "gpt":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 48}
        special = {"bos_token_id": None, "eos_token_id": None}
        settings = {"n_positions": SEQ, "vocab_size": VOCAB} | settings
        config = theirs.GPT2Config(**sizes, **special, **settings)
        model = theirs.GPT2LMHeadModel(config)
    elif name == "bert":
        settings = {"max_position_embeddings": SEQ, "vocab_size": VOCAB} | settings
        config = theirs.BertConfig(**ENCODER, **settings)
        model = theirs.BertForMaskedLM(config)
    else:
        config = theirs.ViTConfig(image_size=8, patch_size=4, num_labels=4, **ENCODER, **settings)
        model = theirs.ViTForImageClassification(config)
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    return model.eval()


def inputs_of(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    inputs, _ = make_batch(name, BATCH, 1)
    if name == "vit":
        return {"pixel_values": inputs.to(dtype)}
    lengths = torch.arange(BATCH) % 4 + SEQ - 3
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    segments = {"token_type_ids": (torch.arange(SEQ) > 2).long().expand(BATCH, -1)} if name == "bert" else {}
    return {"input_ids": inputs, "attention_mask": mask, **segments}


def apply(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    renamed = {"images" if key == "pixel_values" else key: value for key, value in inputs.items()}
    return model.eval()(**renamed)


@pytest.mark.unit
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits(name, dtype, tolerance):
    theirs = hugging_face(name).to(dtype)
    mine = FAMILIES[name].from_hugging_face(theirs).to(dtype)
    inputs = inputs_of(name, dtype)
    torch.testing.assert_close(apply(mine, inputs), theirs(**inputs).logits, atol=tolerance, rtol=tolerance)
    assert all(param.numel() for param in mine.parameters())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt", {"activation_function": "relu"}, "the activation is 'relu'"),
        ("bert", {"hidden_act": "silu"}, "the activation is 'silu'"),
        ("vit", {"qkv_bias": False}, "qkv_bias is False"),
    ],
)
def test_what_the_models_do_not_have_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].from_hugging_face(hugging_face(name, **settings))


@pytest.mark.unit
def test_weights_go_back_to_their_names_and_layout():
    theirs = hugging_face("gpt")
    back = gpt.to_hugging_face(gpt.from_hugging_face(theirs).state_dict(), config_of(theirs.config))
    expected = theirs.state_dict()
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


@pytest.mark.unit
def test_overrides_replace_what_the_config_says():
    model = gpt.from_hugging_face(hugging_face("gpt"), dropout=0.0)
    assert (model.config.dropout, model.config.attention_dropout) == (0.0, 0.1)


class Recorded:
    """A model of theirs as far as its import sees it: the ranks need not import their library."""

    def __init__(self, config: dict, state: dict) -> None:
        self.config = SimpleNamespace(**config)
        self.state_dict = partial(dict, state)


def compare(name, mode, theirs, inputs, expected, *, padded=0):
    torch.set_default_dtype(torch.float64)
    colossalai.launch_from_torch({"parallel": {"tensor": MODES[mode]}}, verbose=False)
    model = FAMILIES[name].from_hugging_face(theirs, vocab_parallel_limit=1)
    logits = apply(model, inputs)
    cut = head_cut(gpc.tensor_mode)
    expected = nn.functional.pad(expected, (0, padded), value=float("-inf"))
    spec = cut_dims(expected.shape, (cut.batch, *[()] * (expected.dim() - 2), cut.features), gpc.mesh)
    torch.testing.assert_close(logits, spec.cut(expected), atol=1e-10, rtol=1e-10)
    return logits.numel()


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1d", "2d", further("2.5d"), further("3d")])
@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_in_every_mode(name, mode):
    model = hugging_face(name).double()
    inputs = inputs_of(name, torch.float64)
    expected = model(**inputs).logits.detach()
    theirs = Recorded(model.config.to_dict() | {"num_labels": 4}, model.state_dict())
    num_ranks = MODES[mode]["size"]
    sizes = run_ranks(compare, num_ranks, name, mode, theirs, inputs, expected)
    assert sum(sizes) == expected.numel()


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "padded"), [("1d", 1), further("3d", 3)])
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_same_logits_of_a_vocabulary_that_is_padded(name, mode, padded):
    model = hugging_face(name, vocab_size=13).double()
    inputs = inputs_of(name, torch.float64)
    inputs["input_ids"] = inputs["input_ids"].clamp(max=12)
    expected = model(**inputs).logits.detach()
    theirs = Recorded(model.config.to_dict(), model.state_dict())
    run_ranks(partial(compare, padded=padded), MODES[mode]["size"], name, mode, theirs, inputs, expected)


def test_a_config_goes_to_transformers_and_back() -> None:
    config = gpt.GPTConfig(
        vocab_size=96,
        max_position_embeddings=32,
        hidden_size=24,
        num_layers=3,
        num_attention_heads=4,
        gelu="tanh",
    )
    assert config_of(gpt.to_hugging_face_config(config)) == config
