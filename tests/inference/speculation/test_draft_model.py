"""Drafts of a small model: what a plain forward of it says, whatever its cache has seen."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.inference import LLM, SamplingParams
from colossalai.inference._build import check_ranks
from colossalai.inference._load import EngineOptions
from colossalai.inference.speculation import DraftModel, RowPace
from tests.inference.engine.setups import GREEDY, POOL, expected, is_empty, model, small_pool, speaker, texts
from tests.inference.models import MIXED, greedy, prompts, tiny
from tests.inference.speculation.makers import speculating
from tests.inference.speculation.test_ngram import sequence_of
from tests.inference.tiny_tokenizers import metaspace
from tests.tiers import further

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a model of other sizes, with the same tokens."""
    path = tmp_path_factory.mktemp("small")
    tiny("GPT2", n_layer=2, n_positions=128).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def same(tmp_path_factory):
    """Return the model that is served: its guesses are right."""
    path = tmp_path_factory.mktemp("same")
    model("Llama").save_pretrained(path)
    return path


def maker(folder, *, num_blocks=40, max_tokens=512, block_size=4):
    """Return a small model of its own, and the model that it is."""
    llm = LLM(folder, kv_memory=POOL, block_size=block_size)
    runner = llm.engine.executor.runner
    runner.allocate(num_blocks)
    return DraftModel(runner, num_blocks=num_blocks, max_length=128, max_tokens=max_tokens)


def plainly(served, tokens, number):
    return list(greedy(served, tokens, number))


PLAIN = tiny("GPT2", n_layer=2, n_positions=128)


some_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=4)
some_rounds = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 199)), min_size=4, max_size=4),
    min_size=4,
    max_size=4,
)


@given(some_lengths, some_rounds)
@settings(max_examples=8)
def test_guesses_are_those_of_generate_whatever_was_refused(folder, lengths, rounds):
    check_guesses(folder, lengths, rounds)


@pytest.mark.long
@given(some_lengths, some_rounds)
@settings(max_examples=40)
def test_any_of_many_guesses_is_that_of_generate_whatever_was_refused(folder, lengths, rounds):
    check_guesses(folder, lengths, rounds)


def check_guesses(folder, lengths, rounds):
    """In each round a sequence wants so many guesses; so many of them are taken, and another token."""
    drafts = maker(folder, num_blocks=60)
    sequences = [sequence_of(prompt) for prompt in prompts(*lengths)]
    for turns in rounds:
        wanted = {sequence: turn[0] for sequence, turn in zip(sequences, turns, strict=False) if turn[0]}
        found = drafts.drafts(wanted)
        assert found.keys() == wanted.keys()
        for sequence, (number, taken, other) in zip(sequences, turns, strict=False):
            if number:
                assert found[sequence] == plainly(PLAIN, sequence.tokens, number)
                sequence.tokens += [*found[sequence][:taken], other]
                assert 1 <= drafts.lag(sequence) <= 1 + number
            else:  # it goes on without a guess
                sequence.tokens += [other, taken]
        drafts._pool.check([each.blocks for each in drafts._cached.values()])
    for sequence in sequences:
        drafts.forget(sequence)
    assert drafts.num_used == 0


def test_a_long_prompt_is_read_in_parts_while_others_are_guessed_on(folder):
    drafts = maker(folder, max_tokens=16)
    short, long = (sequence_of(prompt) for prompt in prompts(5, 40))
    first = drafts.drafts({short: 2, long: 2})
    assert first == {short: plainly(PLAIN, short.tokens, 2)}
    assert drafts.lag(long) == 40 - 11
    for lag in (14, 0):
        short.tokens.append(3)
        found = drafts.drafts({short: 2, long: 2})
        assert found[short] == plainly(PLAIN, short.tokens, 2)
        assert drafts.lag(long) == lag
    assert found[long] == plainly(PLAIN, long.tokens, 2)


def test_a_known_beginning_is_not_read_again(folder):
    drafts = maker(folder)
    (prompt,) = prompts(30)
    first, second = sequence_of(prompt), sequence_of([*prompt[:22], 1, 2])
    drafts.drafts({first: 2})
    drafts.forget(first)
    rows = []
    run = drafts._runner.run
    drafts._runner.run = lambda arrays: rows.append(len(arrays.token_ids)) or run(arrays)
    assert drafts.drafts({second: 2})[second] == plainly(PLAIN, second.tokens, 2)
    assert rows == [24 - 20, 1]


def test_who_waits_without_blocks_loses_those_of_the_small_model(folder):
    drafts = maker(folder, num_blocks=10)
    held, waits, third = (sequence_of(prompt) for prompt in prompts(16, 16, 12))
    held.blocks = [0]
    assert len(drafts.drafts({held: 1, waits: 1})) == 2
    assert drafts.num_used == 8
    assert drafts.drafts({third: 4, held: 1})[third] == plainly(PLAIN, third.tokens, 4)
    assert waits not in drafts._cached
    # Nothing is taken from those who run: who finds no room has no guess.
    third.blocks = [1]
    assert list(drafts.drafts({waits: 4, held: 1, third: 1})) == [held, third]


def test_nothing_is_guessed_behind_the_window(folder):
    drafts = maker(folder)
    assert [drafts.reach(sequence_of([1] * length), 4)[0] for length in (10, 124, 126, 128, 150)] == [
        4,
        4,
        2,
        0,
        0,
    ]


@pytest.mark.parametrize("num_running", [further(1), 16])
def test_texts_are_those_of_generate(folder, num_running):
    llm = speculating("Llama", speculate=f"{folder}:4", max_running=num_running)
    assert texts(llm.generate(prompts(*MIXED), GREEDY)) == expected("Llama")
    assert llm.engine.stats().draft_tokens > 0
    assert is_empty(llm.engine)
    assert llm.engine._speculator.maker.num_used == 0


def test_the_model_itself_guesses_right(same):
    llm = speculating("Llama", speculate=f"{same}:3")
    llm.engine._speculator._pace = Free()
    (prompt,) = prompts(40)
    (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=61))
    assert output.token_ids == greedy(model("Llama"), prompt, 61)
    stats = llm.engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens
    # One step reads the prompt, a few are careful, and then each makes four tokens.
    assert stats.steps < 1 + 61 / 4 + 5
    assert llm.engine._speculator.maker.num_used == 0


class Free(RowPace):
    def seconds(self, num_rows):
        return 0.0


def test_preempted_requests_have_the_texts_of_generate(same):
    llm = speculating(
        "Llama", speculate=f"{same}:3", kv_memory=2 * small_pool("Llama", 140), max_length=132, block_size=2
    )
    assert texts(llm.generate(prompts(*MIXED), GREEDY)) == expected("Llama")
    assert llm.engine.stats().preemptions > 0
    assert llm.engine.stats().accepted_draft_tokens > 20
    assert is_empty(llm.engine)
    assert llm.engine._speculator.maker.num_used == 0


def test_both_caches_share_the_memory(same):
    alone = LLM(model("Llama"), kv_memory=POOL, max_running=512)
    both = LLM(model("Llama"), kv_memory=POOL, max_running=512, speculate=f"{same}:3")
    found = [llm.engine.scheduler.pool.num_blocks for llm in (alone, both)]
    assert found[1] == found[0] // 2


def test_another_vocabulary_is_refused(folder, tmp_path):
    larger = tiny("Llama", vocab_size=300)
    with pytest.raises(ValueError, match=r"has 200 tokens, and the model that is served 300"):
        LLM(larger, kv_memory=POOL, speculate=f"{folder}:2")
    larger.save_pretrained(tmp_path / "larger")
    options = EngineOptions(speculate=f"{folder}:2")
    with pytest.raises(ValueError, match=r"has 200 tokens, and the model that is served 300"):
        check_ranks(str(tmp_path / "larger"), options, tp=2, pp=1)
    served, tokenizer = speaker()
    served.save_pretrained(tmp_path / "other")
    metaspace().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"tokenizer of .* has other tokens"):
        LLM(served, tokenizer=tokenizer, kv_memory=POOL, speculate=f"{tmp_path / 'other'}:2")
    with pytest.raises(ValueError, match="nowhere"):
        LLM(model("Llama"), kv_memory=POOL, speculate="nowhere/at/all:2")


def test_weights_of_the_large_model_may_change(same):
    served = tiny("Llama")
    llm = speculating(served=served, speculate=f"{same}:3")
    (prompt,) = prompts(40)
    llm.generate([prompt], GREEDY)
    with torch.no_grad():
        for param in served.parameters():
            param.mul_(1.1)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0))
    assert output.token_ids == greedy(served, prompt, 20)
