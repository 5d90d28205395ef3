"""Speculation: texts are those without drafts, whoever guesses, in any company, after a preemption."""

from dataclasses import replace

import pytest
import torch

from colossalai.inference import SamplingParams, Structure
from colossalai.inference._llm import LLM
from colossalai.inference.speculation import _speculator
from tests.inference.engine.setups import (
    GREEDY,
    NUM_TOKENS,
    POOL,
    PROMPT,
    expected,
    is_empty,
    model,
    small_pool,
    speaker,
    texts,
)
from tests.inference.engine.test_texts import SAMPLED, SETTINGS
from tests.inference.models import MIXED, prompts, tiny
from tests.inference.speculation.makers import Oracle, speculating
from tests.tiers import after_the_first, further

pytestmark = pytest.mark.unit

FAMILIES = ("Llama", "GPT2")
BATCH = prompts(*MIXED)
EACH = [SAMPLED[number % len(SAMPLED)] for number in range(len(BATCH))]


def known(family):
    return [[*prompt, *text] for prompt, text in zip(BATCH, expected(family), strict=True)]


FIRST_SETTINGS = ("small_chunks", "small_blocks", "without_prefixes", "invariant")


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name if name in FIRST_SETTINGS else further(name) for name in SETTINGS])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_generate(family, name):
    llm = speculating(family, Oracle(known(family), 0.7), **SETTINGS[name])
    assert texts(llm.generate(BATCH, GREEDY)) == expected(family)
    stats = llm.engine.stats()
    assert 5 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.generated_tokens == NUM_TOKENS * len(BATCH)
    assert is_empty(llm.engine)
    alone = [texts(llm.generate([prompt], GREEDY))[0] for prompt in BATCH]
    assert alone == expected(family)
    assert is_empty(llm.engine)


@pytest.mark.parametrize("family", after_the_first(FAMILIES))
def test_preempted_requests_have_the_texts_of_generate(family):
    small = {"kv_memory": small_pool(family, 140), "max_length": 132, "block_size": 2}
    llm = speculating(family, Oracle(known(family), 0.7), **small)
    assert texts(llm.generate(BATCH, GREEDY)) == expected(family)
    stats = llm.engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_draft_tokens > 20
    assert is_empty(llm.engine)


@pytest.mark.parametrize("probability", [1.0, 0.5])
def test_seeded_samples_are_those_without_drafts(probability):
    plain = LLM(model("Llama"), kv_memory=POOL)
    without = plain.generate(BATCH, EACH)
    maker = Oracle([[*p, *o.token_ids] for p, o in zip(BATCH, without, strict=True)], probability)
    llm = speculating("Llama", maker)
    assert texts(llm.generate(BATCH, EACH)) == texts(without)
    assert [texts(llm.generate([p], s))[0] for p, s in zip(BATCH, EACH, strict=True)] == texts(without)
    assert llm.engine.stats().accepted_draft_tokens > 50
    if probability == 1:
        assert llm.engine.stats().accepted_draft_tokens == llm.engine.stats().draft_tokens
        assert llm.engine.stats().steps < plain.engine.stats().steps * len(BATCH) / 2


def test_a_repeating_text_takes_fewer_steps():
    (prompt,) = prompts(6)
    loop = SamplingParams(max_tokens=60, temperature=0, logit_bias=dict.fromkeys((3, 4, 5), 100.0))
    plain, drafted = LLM(model("GPT2"), kv_memory=POOL), speculating("GPT2")
    assert texts(drafted.generate([prompt], loop)) == texts(plain.generate([prompt], loop))
    assert plain.engine.stats().steps == 60
    assert drafted.engine.stats().steps < 40


@pytest.mark.parametrize("family", after_the_first(FAMILIES))
def test_bits_are_the_same_with_and_without_drafts(family):
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
    batch = prompts(*MIXED[:6])
    without = LLM(model(family), kv_memory=POOL, is_batch_invariant=True).generate(batch, params)
    maker = Oracle([[*p, *o.token_ids] for p, o in zip(batch, without, strict=True)], 0.7)
    llm = speculating(family, maker, is_batch_invariant=True)
    together = llm.generate(batch, params)
    alone = [llm.generate([prompt], params)[0] for prompt in batch]
    for one, other, third in zip(without, together, alone, strict=True):
        assert one.outputs == other.outputs == third.outputs
    assert llm.engine.stats().accepted_draft_tokens > 10


def test_several_answers_to_one_prompt():
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=3, n=4, logprobs=1)
    batch = prompts(5, 16, 33, 1)
    without = LLM(model("Llama"), kv_memory=POOL, is_batch_invariant=True).generate(batch, params)
    maker = Oracle([[*p, *a.token_ids] for p, o in zip(batch, without, strict=True) for a in o.outputs], 0.8)
    llm = speculating("Llama", maker, is_batch_invariant=True)
    for one, other in zip(without, llm.generate(batch, params), strict=True):
        assert one.outputs == other.outputs
    assert llm.engine.stats().accepted_draft_tokens > 30
    assert is_empty(llm.engine)
    assert len(maker.forgotten) == 16


ENDS = {
    "regex": {"structure": Structure(kind="regex", source="[a-z]{3,9}(, [a-z]{2,5}){2,6}[.]")},
    "json": {"structure": Structure(kind="json", source='{"enum": ["the quick brown fox", "the lazy dog"]}')},
    "stop": {"stop": ("e", "th")},
    "stop_token": {"stop_token_ids": tuple(range(0, 200, 3)), "min_tokens": 3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
    "min_tokens": {"min_tokens": 12},
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("probability", [further(1.0), 0.6])
def test_structures_stops_and_penalties(name, probability):
    served, tokenizer = speaker()
    settings = {"served": served, "tokenizer": tokenizer, "is_batch_invariant": True, "kv_memory": POOL}
    plain = LLM(settings["served"], **{k: v for k, v in settings.items() if k != "served"})
    params = [SamplingParams(max_tokens=24, seed=seed, **ENDS[name]) for seed in range(8)]
    without = plain.generate([PROMPT] * 8, params)
    assert len({each.text for each in without}) > 1
    maker = Oracle([[*o.prompt_token_ids, *o.token_ids] for o in without], probability)
    llm = speculating(maker=maker, **settings)
    for one, other in zip(without, llm.generate([PROMPT] * 8, params), strict=True):
        assert one.outputs == other.outputs
    assert llm.engine.stats().accepted_draft_tokens > 5
    assert is_empty(llm.engine)


def test_a_text_may_fill_the_window():
    """Where a position behind the window has no embedding, a guess there would be an error."""
    served = tiny("GPT2", n_positions=32)
    plain = LLM(served, kv_memory=POOL).generate(prompts(20), SamplingParams(max_tokens=None, temperature=0))
    maker = Oracle([[*prompts(20)[0], *plain[0].token_ids, *[1] * 20]])
    llm = speculating(maker=maker, served=served, num_tokens=8)
    again = llm.generate(prompts(20), SamplingParams(max_tokens=None, temperature=0))
    assert texts(again) == texts(plain)
    assert len(again[0].token_ids) == 12
    assert llm.engine.stats().accepted_draft_tokens > 0


def test_a_guess_takes_no_block_from_a_prompt_or_an_answer():
    """With as many blocks as are needed without drafts nobody is preempted for one."""
    batch, text = prompts(16, 16), replace(GREEDY, max_tokens=16)
    plain = LLM(model("Llama"), kv_memory=small_pool("Llama", 64), max_length=32, block_size=4)
    without = plain.generate(batch, text)
    assert plain.engine.stats().preemptions == 0
    maker = Oracle([[*p, *o.token_ids] for p, o in zip(batch, without, strict=True)], 0.5)
    llm = speculating(
        maker=maker, num_tokens=8, kv_memory=small_pool("Llama", 64), max_length=32, block_size=4
    )
    assert texts(llm.generate(batch, text)) == texts(without)
    assert llm.engine.stats().preemptions == 0
    assert llm.engine.stats().draft_tokens > 0


@pytest.mark.long  # `make test` compares seeded texts, which the same draws make, token by token
@pytest.mark.parametrize("is_drafted", [True, False])
def test_tokens_without_a_seed_have_the_distribution_of_the_model(is_drafted, monkeypatch):
    """Chi-square over pairs of tokens; drafts are guesses that a draw agrees with now and then."""
    for name, value in (("_LEAST_CHANCE", 0.0), ("_MARGIN", 0.0)):  # though guesses are mostly wrong
        monkeypatch.setattr(_speculator, name, value)
    served = tiny("Llama", torch.float64, num_hidden_layers=1)
    (prompt,) = prompts(9)
    num_requests, kept = 3000, 4
    params = SamplingParams(max_tokens=3, top_k=kept, temperature=1.0)
    with torch.no_grad():
        first, second = _probabilities(served, prompt, kept)
    likely = max(second, key=lambda pair: first[pair[0]] * second[pair])
    maker = Oracle([[*prompt, token, *_most_likely(second, token)] for token in first], 0.8)
    llm = speculating(maker=maker, served=served, max_running=16)
    if not is_drafted:
        llm = LLM(served, kv_memory=POOL)
    outputs = llm.generate([prompt] * num_requests, params)
    counts = dict.fromkeys(second, 0)
    for output in outputs:
        counts[output.token_ids[:2]] += 1
    chances = {pair: first[pair[0]] * second[pair] for pair in second}
    assert abs(sum(chances.values()) - 1) < 1e-9
    assert counts[likely] > 0
    terms = [(counts[p] - num_requests * c) ** 2 / (num_requests * c) for p, c in chances.items()]
    # 15 degrees of freedom: 50 is exceeded once in 100,000 runs.
    assert sum(terms) < 50
    stats = llm.engine.stats()
    assert (stats.accepted_draft_tokens > 100) == is_drafted


def _probabilities(served, prompt, kept):
    """Return the probabilities of the first token, and of the second behind each of those that are kept."""

    def after(tokens):
        values, ids = served(torch.tensor([tokens])).logits[0, -1].topk(kept)
        return dict(zip(ids.tolist(), values.softmax(-1).tolist(), strict=True))

    first = after(prompt)
    return first, {(a, b): chance for a in first for b, chance in after([*prompt, a]).items()}


def _most_likely(second, token):
    return max((pair for pair in second if pair[0] == token), key=second.get)[1:]
