"""The GPT of this package, served out of memory while its owner goes on training it."""

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from colossalai.inference import LLM, SamplingParams
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.inference.models import prompts
from tests.ranks import run_ranks

NUM_TOKENS = 10
CONFIG = GPTConfig(
    vocab_size=96,
    max_position_embeddings=64,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    init_std=0.2,
)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


def built() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).double().eval()


@torch.no_grad()
def greedy(model: GPT, prompt: list[int]) -> tuple[int, ...]:
    """Return what whole forwards say, token by token."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def given() -> list[list[int]]:
    return [[token % CONFIG.vocab_size for token in prompt] for prompt in prompts(3, 17, 40, 3)]


@pytest.mark.unit
@pytest.mark.parametrize("options", [{}, {"max_tokens_per_step": 8, "max_running": 4}, {"is_owned": True}])
def test_texts_are_those_of_whole_forwards(options: dict[str, bool | int]) -> None:
    model = built()
    expected = [greedy(model, prompt) for prompt in given()]
    llm = LLM(model, kv_memory=2**20, block_size=4, **options)
    assert [output.token_ids for output in llm.generate(given(), GREEDY)] == expected


@pytest.mark.unit
def test_a_step_of_an_optimizer_changes_the_texts_and_the_model_is_what_it_was() -> None:
    model = built()
    llm = LLM(model, kv_memory=2**20, block_size=4)
    before = llm.generate(given(), GREEDY)
    tokens = torch.tensor(given()[2:3])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()
    with pytest.raises(ValueError, match="call its eval"):
        llm.generate(given(), GREEDY)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.eval()
    after = llm.generate(given(), GREEDY)
    assert [output.token_ids for output in after] == [greedy(model, prompt) for prompt in given()]
    assert [output.token_ids for output in after] != [output.token_ids for output in before]


def refused() -> str:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    with pytest.raises(ValueError, match="are cut over ranks") as error:
        LLM(GPT(CONFIG).eval(), kv_memory=2**20)
    gpc.destroy()
    return str(error.value)


@pytest.mark.dist
def test_a_model_that_is_cut_is_refused() -> None:
    for said in run_ranks(refused, 2):
        assert "serve the saved model" in said
