"""Hugging Face models cut into stages, chained in one process, against the whole model."""

import pytest

from tests.pipeline.chain import check_cut
from tests.pipeline.models import Case, hugging_face, images, tokens

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit

TEXT = ["GPT2LMHeadModel", "BertForMaskedLM", "OPTForCausalLM", "LlamaForCausalLM"]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_text_model_is_the_same_in_stages(name, num_stages, attention):
    case = Case(hugging_face(name, attn_implementation=attention), tokens)
    check_cut(case, num_stages)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_image_model_is_the_same_in_stages(num_stages, attention):
    case = Case(hugging_face("ViTForImageClassification", attn_implementation=attention), images)
    check_cut(case, num_stages)
