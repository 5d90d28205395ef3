"""Engine: texts are those of `generate`, whatever the company, the chunks, the blocks."""

from dataclasses import replace

import pytest
import torch

from colossalai.inference import RequestRefused, SamplingParams
from colossalai.inference._llm import LLM
from tests.inference.engine.setups import (
    FAMILIES,
    GREEDY,
    NUM_TOKENS,
    POOL,
    expected,
    is_empty,
    model,
    small_pool,
    texts,
)
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.tiers import after_the_first, further

pytestmark = pytest.mark.unit

SETTINGS = {
    "as_it_is": {},
    "small_chunks": {"max_tokens_per_step": 16, "max_running": 16},
    "few_at_a_time": {"max_running": 3},
    "small_blocks": {"block_size": 1},
    "odd_blocks": {"block_size": 5},
    "large_blocks": {"block_size": 64},
    "without_prefixes": {"has_prefix_cache": False},
    "invariant": {"is_batch_invariant": True},
}


# A model that is taken over answers with the settings as they are, below.
FURTHER_SETTINGS = ("as_it_is", "odd_blocks", "large_blocks")


@pytest.mark.each_value
@pytest.mark.parametrize("name", [further(name) if name in FURTHER_SETTINGS else name for name in SETTINGS])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_generate(family, name):
    llm = LLM(model(family), kv_memory=POOL, **SETTINGS[name])
    batch = prompts(*MIXED)
    assert texts(llm.generate(batch, GREEDY)) == expected(family)
    assert is_empty(llm.engine)
    # Again, with whatever has been kept of the prompts.
    assert texts(llm.generate(batch, GREEDY)) == expected(family)
    assert bool(llm.engine.stats().prefix_hit_tokens) == SETTINGS[name].get("has_prefix_cache", True)


@pytest.mark.parametrize("family", after_the_first(FAMILIES))
def test_a_prompt_alone_has_the_text_of_generate(family):
    llm = LLM(model(family), kv_memory=POOL)
    for prompt, text in zip(prompts(*MIXED), expected(family), strict=True):
        assert texts(llm.generate(prompt, GREEDY)) == [text]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_faster_parts_has_the_texts_of_generate(family):
    llm = LLM(tiny(family), kv_memory=POOL, is_owned=True)
    assert texts(llm.generate(prompts(*MIXED), GREEDY)) == expected(family)


@pytest.mark.parametrize("family", after_the_first(FAMILIES, 2))
def test_preempted_requests_have_the_texts_of_generate(family):
    llm = LLM(model(family), kv_memory=small_pool(family, 140), max_length=132, block_size=2)
    assert llm.engine.scheduler.pool.num_blocks == 70
    assert texts(llm.generate(prompts(*MIXED), GREEDY)) == expected(family)
    stats = llm.engine.stats()
    assert stats.preemptions > 0
    assert stats.generated_tokens == len(MIXED) * NUM_TOKENS
    assert stats.blocks["used"] == 0
    assert is_empty(llm.engine)


def test_tokens_that_come_from_the_prefix_cache_are_counted():
    llm = LLM(model("Llama"), kv_memory=POOL)
    (prompt,) = prompts(70)
    (first,) = llm.generate([prompt], GREEDY)
    (again,) = llm.generate([prompt], GREEDY)
    (longer,) = llm.generate([[*prompt[:40], 1, 2, 3]], GREEDY)
    assert [each.usage.cached_tokens for each in (first, again, longer)] == [0, 64, 32]
    assert texts([again]) == texts([first])
    assert texts([longer]) == [greedy(model("Llama"), [*prompt[:40], 1, 2, 3], NUM_TOKENS)]
    stats = llm.engine.stats()
    assert stats.prefix_hit_tokens == 96
    assert stats.prompt_tokens == 70 + 6 + 11


def test_hits_are_counted_once_though_a_request_is_preempted():
    llm = LLM(model("Llama"), kv_memory=small_pool("Llama", 144), max_length=144)
    common, *tails = prompts(16, 3, 3, 3, 3)
    long = replace(GREEDY, max_tokens=60)
    llm.generate([common], GREEDY)
    before = llm.engine.stats()
    outputs = llm.generate([[*common, *tail] for tail in tails], long)
    after = llm.engine.stats()
    assert after.preemptions > before.preemptions
    assert sum(output.usage.cached_tokens for output in outputs) == 64
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 64


SAMPLED = (
    SamplingParams(max_tokens=NUM_TOKENS, seed=3),
    SamplingParams(max_tokens=NUM_TOKENS, seed=4, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=NUM_TOKENS, seed=5, top_k=20, repetition_penalty=1.2),
    SamplingParams(max_tokens=NUM_TOKENS, seed=6, min_p=0.05, presence_penalty=1.0, frequency_penalty=0.5),
    replace(GREEDY, logit_bias={7: 5.0}),
)


@pytest.mark.parametrize(
    "name", [further("as_it_is"), further("small_chunks"), "few_at_a_time", further("invariant")]
)
def test_seeded_samples_are_the_same_alone_and_in_any_company(name):
    llm = LLM(model("Llama"), kv_memory=POOL, **SETTINGS[name])
    batch = prompts(*MIXED)
    each = [SAMPLED[number % len(SAMPLED)] for number in range(len(batch))]
    together = texts(llm.generate(batch, each))
    alone = [texts(llm.generate([prompt], params))[0] for prompt, params in zip(batch, each, strict=True)]
    assert together == alone
    assert texts(llm.generate(batch[::-1], each[::-1]))[::-1] == alone


def test_seeded_samples_are_the_same_after_a_preemption():
    large = LLM(model("Llama"), kv_memory=POOL)
    small = LLM(model("Llama"), kv_memory=small_pool("Llama", 140), max_length=132, block_size=2)
    params = replace(SAMPLED[0], n=2)
    for output, again in zip(*(llm.generate(prompts(*MIXED), params) for llm in (large, small)), strict=True):
        assert output.outputs == again.outputs
    assert small.engine.stats().preemptions > 0
    assert large.engine.stats().preemptions == 0


def test_seeds_differ_and_without_one_so_does_each_request():
    llm = LLM(model("Llama"), kv_memory=POOL)
    (prompt,) = prompts(9)
    seeded = [SamplingParams(max_tokens=NUM_TOKENS, seed=seed) for seed in range(3)]
    assert len(set(texts(llm.generate([prompt] * 3, seeded)))) == 3
    free = SamplingParams(max_tokens=NUM_TOKENS)
    assert len(set(texts(llm.generate([prompt] * 3, free)))) == 3


def test_several_answers_are_those_that_come_one_by_one():
    llm = LLM(model("Llama"), kv_memory=POOL)
    batch = prompts(5, 16, 33, 1)
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=3, n=4, logprobs=1)
    together = llm.generate(batch, params)
    for prompt, output in zip(batch, together, strict=True):
        assert [each.index for each in output.outputs] == [0, 1, 2, 3]
        assert len({each.token_ids for each in output.outputs}) == 4
        assert output.usage.completion_tokens == 4 * NUM_TOKENS
        (alone,) = llm.generate([prompt], params)
        assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in output.outputs]
        (single,) = llm.generate([prompt], replace(params, n=1))
        assert single.token_ids == output.outputs[0].token_ids
    (output,) = llm.generate([batch[0]], replace(GREEDY, n=3))
    assert {each.token_ids for each in output.outputs} == {greedy(model("Llama"), batch[0], NUM_TOKENS)}
    assert is_empty(llm.engine)


@pytest.mark.parametrize("name", ["as_it_is", "small_chunks"])
def test_logprobs_are_those_of_a_plain_forward(name):
    precise = tiny("Llama", torch.float64)
    llm = LLM(precise, kv_memory=POOL, **SETTINGS[name])
    batch = prompts(5, 40, 17, 40)
    params = SamplingParams(max_tokens=6, seed=1, temperature=0.5, logprobs=3, prompt_logprobs=2)
    llm.generate(batch, GREEDY)  # known prefixes must not leave logits of a prompt out
    for prompt, output in zip(batch, llm.generate(batch, params), strict=True):
        tokens = [*prompt, *output.token_ids]
        with torch.no_grad():
            logprobs = precise(torch.tensor([tokens])).logits[0].log_softmax(-1)
        found = [*output.prompt_logprobs, *output.logprobs]
        assert len(output.prompt_logprobs) == len(prompt) - 1
        assert len(output.logprobs) == 6
        for position, each in enumerate(found):
            top = 2 if position < len(prompt) - 1 else 3
            values, ids = logprobs[position].topk(top)
            assert each.token_id == tokens[position + 1]
            assert abs(each.logprob - logprobs[position, each.token_id]) < 1e-5
            assert [token for token, _ in each.top] == ids.tolist()
            assert torch.tensor([value for _, value in each.top]).sub(values).abs().max() < 1e-5


def test_logprobs_of_a_prompt_alone():
    llm = LLM(model("Llama"), kv_memory=POOL)
    (prompt,) = prompts(20)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate([prompt], asked)
    assert (output.token_ids, output.finish_reason) == ((), "length")
    (with_text,) = llm.generate([prompt], replace(GREEDY, prompt_logprobs=0))
    assert [each.token_id for each in output.prompt_logprobs] == prompt[1:]
    for one, other in zip(output.prompt_logprobs, with_text.prompt_logprobs, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-4
    assert llm.engine.stats().generated_tokens == NUM_TOKENS
    assert is_empty(llm.engine)


def test_a_prompt_whose_logprobs_are_asked_for_may_fill_the_window_and_no_more():
    llm = LLM(model("GPT2"), kv_memory=small_pool("GPT2", 128), max_length=32)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate(prompts(32), asked)
    assert len(output.prompt_logprobs) == 31
    with pytest.raises(RequestRefused, match=r"has 33 tokens, and the model takes 32"):
        llm.generate(prompts(33), asked)


def test_a_prompt_whose_logprobs_are_asked_for_needs_blocks_for_itself_only():
    llm = LLM(model("GPT2"), kv_memory=small_pool("GPT2", 32), max_length=64)
    asked = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = llm.generate(prompts(32), asked)
    assert len(output.prompt_logprobs) == 31
    with pytest.raises(RequestRefused, match=r"may come to 33 tokens, and all blocks together hold 32"):
        llm.generate(prompts(33), asked)


WIDE = {"hidden_size": 256, "intermediate_size": 688, "vocab_size": 1000, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "is_owned"),
    [
        *(further("Llama", is_owned) for is_owned in (False, True)),
        ("GPT2", False),
        further("GPT2", True),
        *(further("OPT", is_owned) for is_owned in (False, True)),
        further("Qwen3", False),
        further("Qwen3", True),
        *(further("Bloom", is_owned) for is_owned in (False, True)),
        further("wide", False),
        ("wide", True),
    ],
)
def test_log_probabilities_are_bit_for_bit_the_same_in_any_company(family, is_owned):
    made = tiny("Llama", **WIDE) if family == "wide" else tiny(family)
    llm = LLM(made, kv_memory=2**24, is_batch_invariant=True, is_owned=is_owned)
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, prompt_logprobs=0)
    batch = prompts(*MIXED[:9])
    together = llm.generate(batch, params)
    others = [llm.generate(batch[::-1], params)[::-1], [llm.generate([each], params)[0] for each in batch]]
    for other in others:
        for one, again in zip(together, other, strict=True):
            assert one.outputs == again.outputs
            assert one.prompt_logprobs == again.prompt_logprobs
    # And with a beginning that has been computed in another company.
    without_scores = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    for one, again in zip(together, llm.generate(batch, without_scores), strict=True):
        assert one.outputs == again.outputs
    assert llm.engine.stats().prefix_hit_tokens > 0
