"""`LLM`: prompts in, answers out, in this process and on ranks of their own."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from colossalai.inference import LLM, EngineStopped, RequestRefused, SamplingParams
from colossalai.inference._build import _free_memory
from colossalai.inference._remote import RemoteEngine
from tests.inference.models import MIXED, VOCAB, greedy, prompts, tiny

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("llama")
    tiny("Llama").save_pretrained(path)
    return path


@pytest.mark.unit
def test_ranks_on_cpus_share_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1200))
    four_ranks = SimpleNamespace(num_ranks=4)
    assert _free_memory(torch.device("cpu"), None) == 1200
    assert _free_memory(torch.device("cpu"), four_ranks) == 300  # type: ignore[arg-type]


@pytest.mark.unit
def test_a_folder_answers_as_generate_does(folder: Path) -> None:
    llm = LLM(folder, kv_memory=2**22)
    model = tiny("Llama")
    given = prompts(*MIXED)
    found = llm.generate(given, GREEDY)
    assert [output.token_ids for output in found] == [greedy(model, prompt, NUM_TOKENS) for prompt in given]
    assert {output.finish_reason for output in found} == {"length"}
    assert found[1].usage.prompt_tokens == MIXED[1]
    assert found[1].usage.completion_tokens == NUM_TOKENS
    assert llm.generate(given[3], GREEDY)[0].token_ids == found[3].token_ids  # one prompt alone


@pytest.mark.unit
def test_a_cache_beyond_the_free_memory_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_memory=1125899906842624: the cache would take .* give it less"):
        LLM(folder, kv_memory=2**50, max_running=10**12)


@pytest.mark.unit
def test_a_step_that_reads_a_prompt_and_draws_nothing(folder: Path) -> None:
    """Its logits have no rows, on packed parts, too."""
    llm = LLM(folder, kv_memory=2**22, max_running=4, max_tokens_per_step=16)
    prompt = prompts(60)[0]
    assert llm.generate(prompt, GREEDY)[0].token_ids == greedy(tiny("Llama"), prompt, NUM_TOKENS)


@pytest.mark.unit
def test_a_prompt_that_can_never_be_answered_is_refused_before_any_is_begun(folder: Path) -> None:
    llm = LLM(folder, kv_memory=2**22)
    with pytest.raises(RequestRefused, match=f"token {VOCAB} is not one of the {VOCAB}"):
        llm.generate([[1, 2], [VOCAB]], GREEDY)
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts"):
        llm.generate([[1, 2]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    assert llm.engine.step() is False


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float31"}, "dtype='float31'; it must be"),
        ({"block_size": 0}, "block_size=0; it must be a whole number, at least 1"),
        ({"kv_memory": 1100.0}, "kv_memory=1100.0 does not hold one block of 16 tokens"),
        ({"max_length": 10**6}, "max_length=1000000; the window of the model is 2048 tokens"),
        ({"max_tokens_per_step": 8}, "max_tokens_per_step=8 is less than max_running=64"),
        ({"checkpoint": "/nowhere"}, "nowhere"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(folder: Path, options: dict, reason: str) -> None:
    with pytest.raises((ValueError, OSError), match=reason):
        LLM(folder, **options)


@pytest.mark.unit
def test_a_model_in_memory_stays_its_owners() -> None:
    model = tiny("Qwen3")
    prompt = prompts(9)[0]
    before = model(torch.tensor([prompt])).logits
    llm = LLM(model, kv_memory=2**22)
    assert llm.generate(prompt, GREEDY)[0].token_ids == greedy(model, prompt, NUM_TOKENS)
    assert torch.equal(model(torch.tensor([prompt])).logits, before)
    assert model.config._attn_implementation == tiny("Qwen3").config._attn_implementation
    with pytest.raises(ValueError, match="start ranks of their own"):
        LLM(model, tp_size=2)


@pytest.mark.unit
def test_a_step_of_an_optimizer_voids_what_is_known_of_prompts() -> None:
    model = tiny("Llama")
    llm = LLM(model, kv_memory=2**22)
    prompt = prompts(60)[0]
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].usage.cached_tokens == 48
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
    optimizer.step()
    found = llm.generate(prompt, GREEDY)[0]
    assert found.usage.cached_tokens == 0
    assert found.token_ids == greedy(model, prompt, NUM_TOKENS)
    assert llm.generate(prompt, GREEDY)[0].usage.cached_tokens == 48


@pytest.mark.dist
def test_ranks_of_their_own_give_the_same_texts(folder: Path) -> None:
    given = prompts(*MIXED)
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=3, n=2, logprobs=1, prompt_logprobs=0)
    alone = LLM(folder, kv_memory=2**22)
    with LLM(folder, tp_size=2, kv_memory=2**22) as llm:
        assert [o.token_ids for o in llm.generate(given, GREEDY)] == [
            o.token_ids for o in alone.generate(given, GREEDY)
        ]
        found, expected = llm.generate(given[:3], params), alone.generate(given[:3], params)
        for one, other in zip(found, expected, strict=True):
            assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
            assert one.usage == other.usage
            assert one.logprobs is not None
            assert other.logprobs is not None
            values = [[each.logprob for each in output.logprobs or ()] for output in (one, other)]
            torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-4, rtol=0)
            assert len(one.prompt_logprobs or ()) == len(one.prompt_token_ids) - 1
        with pytest.raises(RequestRefused, match="is not one of the"):
            llm.generate([[VOCAB]], GREEDY)
        assert isinstance(llm.engine, RemoteEngine)
        llm.engine._process.kill()
        with pytest.raises(EngineStopped, match="the ranks of the engine have ended"):
            llm.generate(given, GREEDY)


@pytest.mark.long
@pytest.mark.dist
def test_ranks_that_cannot_begin_say_why(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"max_length=100000; the window of the model is \d+"):
        LLM(folder, tp_size=2, max_length=100_000)
