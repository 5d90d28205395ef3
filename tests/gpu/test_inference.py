"""Texts on an accelerator: a folder is served there, and answers as it does on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.inference import LLM, SamplingParams
from tests.inference.models import MIXED, greedy, prompts, tiny

pytestmark = pytest.mark.gpu
NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
DRAWN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny("Llama").save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_batch_invariant": True},
        {"speculate": "ngram:3"},
        {"max_tokens_per_step": 16, "max_running": 8},
    ],
    ids=["plain", "batch-invariant", "speculative", "in pieces"],
)
def test_texts_are_those_of_generate(folder: Path, options: dict[str, Any]) -> None:
    torch.accelerator.reset_peak_memory_stats()
    llm = LLM(folder, kv_memory=2**22, **options)
    given, model = prompts(*MIXED), tiny("Llama")
    found = [answer.token_ids for answer in llm.generate(given, GREEDY)]
    assert found == [greedy(model, prompt, NUM_TOKENS) for prompt in given]
    assert torch.accelerator.max_memory_allocated() > 2**22, "the cache is somewhere else"


@pytest.mark.parametrize("family", ["OPT", "GPT2", "Bloom", "Qwen3", "Phi3"])
def test_families(family: str, tmp_path: Path) -> None:
    model, given = tiny(family), prompts(*MIXED[:6])
    model.save_pretrained(tmp_path)
    found = [answer.token_ids for answer in LLM(tmp_path, kv_memory=2**22).generate(given, GREEDY)]
    assert found == [greedy(model, prompt, NUM_TOKENS) for prompt in given]


def test_a_seed_draws_what_it_draws_on_the_cpu(folder: Path) -> None:
    given = prompts(*MIXED)
    here, on_cpu = LLM(folder, kv_memory=2**22), LLM(tiny("Llama"), kv_memory=2**22)
    texts = [[answer.token_ids for answer in llm.generate(given, DRAWN)] for llm in (here, on_cpu)]
    assert texts[0] == texts[1]


# In float64 the CPU multiplies by the same numbers; its product of int4 rounds float32 to 16 bits.
@pytest.mark.parametrize(
    ("way", "dtype"),
    [("int8", torch.float32), ("int8-weights", torch.float32), ("int4:32", torch.float64)],
)
def test_quantized_texts_are_those_of_the_cpu(folder: Path, way: str, dtype: torch.dtype) -> None:
    given = prompts(*MIXED[:6])
    on_cpu = LLM(tiny("Llama", dtype), kv_memory=2**22, quantize=way, is_owned=True)
    here = LLM(folder, kv_memory=2**22, quantize=way)
    texts = [[answer.token_ids for answer in llm.generate(given, GREEDY)] for llm in (here, on_cpu)]
    assert texts[0] == texts[1]


def test_new_weights_are_those_of_a_folder(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    other = tiny("Llama")
    with torch.no_grad():
        for param in other.parameters():
            param.copy_(torch.randn_like(param) * 0.3)
    other.save_pretrained(tmp_path)
    llm, given = LLM(folder, kv_memory=2**22), prompts(*MIXED[:6])
    before = [answer.token_ids for answer in llm.generate(given, GREEDY)]
    llm.update_weights(tmp_path)
    found = [answer.token_ids for answer in llm.generate(given, GREEDY)]
    assert found != before
    assert found == [greedy(other, prompt, NUM_TOKENS) for prompt in given]


def test_a_model_in_memory_is_served_where_it_is(folder: Path) -> None:
    model = tiny("Llama").to(torch.accelerator.current_accelerator())
    given = prompts(*MIXED[:6])
    found = [answer.token_ids for answer in LLM(model, kv_memory=2**22).generate(given, GREEDY)]
    assert found == [greedy(tiny("Llama"), prompt, NUM_TOKENS) for prompt in given]
