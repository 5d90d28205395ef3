"""Hugging Face models cut into stages, chained in one process, against the whole model."""

import pytest
import torch
from torch import nn

from colossalai.lazy import LazyInitContext
from colossalai.pipeline.stages._split_model import cut_model
from colossalai.pipeline.stages._trace import can_try, dissect, guess_sample, run_trial
from tests.pipeline.stages.chain import check_cut
from tests.pipeline.stages.models import VOCAB, Case, hugging_face, images, tokens
from tests.tiers import after_the_first, further

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

TEXT = ["GPT2LMHeadModel", "BertForMaskedLM", "OPTForCausalLM", "LlamaForCausalLM"]
TEXT += ["GPTNeoXForCausalLM", "PhiForCausalLM"]


# Where a model is cut and how it attends have nothing to do with each other: not every pair is tried.
@pytest.mark.each_value
@pytest.mark.parametrize("name", after_the_first(TEXT, 4))
@pytest.mark.parametrize(("num_stages", "attention"), [(2, "sdpa"), (3, "eager"), (4, "sdpa")])
def test_text_model_is_the_same_in_stages(name, num_stages, attention):
    case = Case(hugging_face(name, attn_implementation=attention), tokens)
    check_cut(case, num_stages)


@pytest.mark.parametrize("num_stages", [further(2), 4])
def test_a_bloom_is_the_same_in_stages(num_stages):
    """Its biases for positions are made once, before the blocks, and read in each of them."""
    check_cut(Case(hugging_face("BloomForCausalLM"), tokens), num_stages)


@pytest.mark.parametrize(("num_stages", "attention"), [further(2, "eager"), (4, "sdpa")])
def test_image_model_is_the_same_in_stages(num_stages, attention):
    case = Case(hugging_face("ViTForImageClassification", attn_implementation=attention), images)
    check_cut(case, num_stages)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).double()


def translation() -> dict[str, torch.Tensor]:
    return {**tokens(), "decoder_input_ids": torch.arange(1, 21).reshape(4, 5)}


@pytest.mark.parametrize("sample", [further(None), translation()])
def test_encoder_decoder_is_cut_along_its_encoder(sample):
    """Blocks hand on a tuple with None in it; the decoder runs behind them and uses the embedding, too."""
    stages = check_cut(Case(t5, translation), 3, sample=sample)
    assert [tie.stages for tie in stages[0].ties] == [(0, 2)]


@pytest.mark.parametrize(
    "names", [(TEXT[1], "ViTForImageClassification"), further((TEXT[0], *TEXT[2:], "BloomForCausalLM"))]
)
def test_models_of_hugging_face_get_a_trial_run(names):
    """Which parts run before and after the blocks is seen, not taken from the order of registration."""
    for name in names:
        model = hugging_face(name)()
        anatomy = dissect(model)
        assert can_try(model)
        sample = guess_sample(model, "")
        parts = [part for part in anatomy.parts if "token" not in part.rpartition(".")[2]]
        assert run_trial(model, sample, stack=anatomy.stack, parts=parts).used_at


def test_built_lazily_the_stage_has_the_values_of_an_eager_build():
    whole = hugging_face("GPT2LMHeadModel")()
    with LazyInitContext():
        model = hugging_face("GPT2LMHeadModel")()
    stage = LazyInitContext.materialize(cut_model(model, 3, [2]))
    assert {name.partition(".h.")[0] for name, _ in stage.named_parameters()} >= {"lm_head.weight"}
    for name, param in stage.named_parameters():
        assert torch.equal(param, whole.get_parameter(name)), name
    assert model.transformer.wpe.weight.is_meta
