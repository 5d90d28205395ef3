"""Engine: what fails one request fails no other, and what fails a step leaves nothing behind."""

from dataclasses import replace

import pytest
import torch

from colossalai.inference import Request, RequestFailed, RequestRefused, SamplingParams, Structure
from colossalai.inference._build import build_engine
from colossalai.inference._llm import LLM
from colossalai.inference._load import EngineOptions
from colossalai.inference.products._products import PackedProduct, with_rounded_rows
from colossalai.inference.sampling import StructureMatcher
from tests.inference.engine.setups import (
    GREEDY,
    NUM_TOKENS,
    POOL,
    PROMPT,
    SPOKEN,
    RecordedDeltas,
    heard,
    is_empty,
    model,
    small_pool,
    speaker,
    speaking,
)
from tests.inference.models import VOCAB, greedy, prompts, tiny
from tests.tiers import further

pytestmark = pytest.mark.unit

BROKEN = VOCAB - 1  # a token whose embedding is a NaN or an infinity
SOUND = [[token % BROKEN for token in prompt] for prompt in prompts(5, 40, 9, 21)]
BAD = [*SOUND[1][:20], BROKEN, *SOUND[1][20:]]


def broken(value=torch.nan, **options):
    """Return an engine whose model computes NaN where a prompt has one token; the values change unseen."""
    they = RecordedDeltas(build_engine(tiny("Llama"), None, EngineOptions(**{"kv_memory": POOL, **options})))
    table = they.engine.executor.runner.model.get_input_embeddings().weight.data
    whole = table[BROKEN].clone()
    table[BROKEN] = value
    return they, lambda: table[BROKEN].copy_(whole)


KINDS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=1, max_tokens=NUM_TOKENS),
    "narrow": SamplingParams(seed=1, max_tokens=NUM_TOKENS, top_k=3, top_p=0.5),
    "several": SamplingParams(seed=1, max_tokens=NUM_TOKENS, n=3, logprobs=2),
    "scored": replace(GREEDY, prompt_logprobs=2),
    "scored_alone": replace(GREEDY, prompt_logprobs=2, max_tokens=0),
}
FIRST_KINDS = ("narrow", "several", "scored")


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "int8"}, {"is_batch_invariant": True}], ids=str)
@pytest.mark.parametrize("kind", [kind if kind in FIRST_KINDS else further(kind) for kind in KINDS])
def test_a_request_whose_logits_are_nan_fails_alone(kind, options):
    # A pool so small that the blocks in which the NaN was are given to others.
    options = {**options, "block_size": 4, "kv_memory": 2**18, "max_length": 80}
    they, sound = (broken(max_tokens_per_step=24, max_running=8, **options)[0] for _ in range(2))
    for round_number in range(2):
        for number, prompt in enumerate(SOUND):
            for each in (they, sound):
                each.submit(f"{round_number}-{number}", prompt)
            if number == 1:
                they.submit(f"bad-{round_number}", BAD, KINDS[kind])
        they.finish()
        sound.finish()
    assert set(they.errors) == {"bad-0", "bad-1"}
    for error in they.errors.values():
        assert isinstance(error, RequestFailed)
        assert "NaN" in str(error)
    assert all(they.tokens(name) == sound.tokens(name) != () for name in sound.deltas)
    assert is_empty(they.engine)


def test_what_a_nan_was_in_is_found_by_nobody():
    they, mend = broken()
    they.submit("bad", BAD)
    they.finish()
    assert isinstance(they.errors["bad"], RequestFailed)
    mend()
    they.submit("again", BAD)
    they.finish()
    assert they.tokens("again") == greedy(tiny("Llama"), BAD, NUM_TOKENS)
    assert they.engine.stats().prefix_hit_tokens == 0


def test_a_request_that_rules_out_every_token_is_refused_alone():
    they = heard()
    every = replace(GREEDY, min_tokens=2, stop_token_ids=tuple(range(VOCAB)))
    they.submit("none", SOUND[0], every)
    they.submit("other", SOUND[1])
    they.finish()
    assert isinstance(they.errors["none"], RequestRefused)
    assert "rule out all" in str(they.errors["none"])
    assert they.tokens("other") == greedy(model("Llama"), SOUND[1], NUM_TOKENS)
    assert is_empty(they.engine)


def test_a_failed_engine_holds_nothing():
    they = heard(max_running=2, max_tokens_per_step=16)
    for name, prompt in zip("abc", prompts(5, 40, 7), strict=True):
        they.submit(name, prompt, replace(GREEDY, n=1 + (name == "a")))
    they.engine.step()
    they.engine.fail(RuntimeError("a rank is gone"))
    assert set(they.errors) == set("abc")
    assert is_empty(they.engine)
    assert they.engine.stats().blocks["cached"] == 0


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_interrupted_step_leaves_nothing_to_the_next(place):
    """Ctrl-C in the midst of a step: its blocks hold nothing, and its tokens are those of nobody."""
    llm = LLM(tiny("Llama"), kv_memory=POOL)
    runner = llm.engine.executor.runner
    run, calls = runner.run, []

    def interrupted(arrays, received=None):
        calls.append(arrays)
        if place == "after":
            run(arrays, received)
        raise KeyboardInterrupt

    runner.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(SOUND, GREEDY)
    assert len(calls) == 1
    assert is_empty(llm.engine)
    runner.run = run
    outputs = llm.generate(SOUND, GREEDY)
    assert [each.token_ids for each in outputs] == [
        greedy(model("Llama"), prompt, NUM_TOKENS) for prompt in SOUND
    ]
    assert llm.engine.stats().prefix_hit_tokens == 0


def test_a_listener_may_abort_its_request_at_its_first_word():
    they = heard()
    (prompt,) = prompts(9)
    reasons = []

    def on_delta(delta):
        reasons.append((delta.index, delta.finish_reason))
        if len(reasons) == 1:
            they.engine.abort("several")

    request = Request(request_id="several", prompt_token_ids=tuple(prompt), params=replace(GREEDY, n=3))
    they.engine.submit(request, on_delta)
    they.submit("other", prompt)
    they.finish()
    assert reasons == [(0, None), (0, "abort"), (1, "abort"), (2, "abort")]
    assert they.tokens("other") == greedy(model("Llama"), prompt, NUM_TOKENS)
    assert is_empty(they.engine)


def test_tokens_of_a_prompt_are_counted_once_though_it_is_read_again():
    llm = LLM(model("Llama"), kv_memory=small_pool("Llama", 144), max_length=144, has_prefix_cache=False)
    batch = prompts(19, 18, 17, 16)
    llm.generate(batch, replace(GREEDY, max_tokens=60, n=2))
    stats = llm.engine.stats()
    assert stats.preemptions > 0
    assert stats.prompt_tokens == 19 + 18 + 17 + 16


def test_without_a_bar_nothing_is_written(capfd):
    llm = LLM(model("Llama"), kv_memory=POOL)
    llm.generate(SOUND, GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate(SOUND, GREEDY, shows_progress=True)
    assert "answers" in capfd.readouterr().out


def test_rows_of_products_have_few_numbers_and_the_same_results():
    """A kernel is kept for each number: a service whose steps have any would grow for hours."""
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 32), torch.randn(24)
    product = PackedProduct(weight, bias)
    sizes = {}
    for count in [*range(1, 70), 100, 512, 513]:
        x, other = torch.randn(count, 32), torch.randn(count, 24)
        sizes[count] = len(with_rounded_rows(x))
        plain = torch.nn.functional.linear(x, weight, bias)
        for made, expected in (
            (product(x), plain),
            (product(x, act="silu"), torch.nn.functional.silu(plain)),
            (product(x, add=other), plain + other),
            (product(x, mul=other), plain * other),
        ):
            assert made.shape == expected.shape
            torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert all(sizes[count] == count for count in (*range(1, 17), 32, 64, 512))
    assert all(count <= size <= 1.125 * count for count, size in sizes.items())
    assert len({with_rounded_rows(torch.empty(count, 1)).shape for count in range(1, 1025)}) == 16 + 6 * 8


@pytest.mark.parametrize("place", ["mask", "accept"])
@pytest.mark.parametrize("num_answers", [1, 2])
def test_a_grammar_that_fails_on_its_way_fails_its_request_alone(place, num_answers, monkeypatch):
    """As llguidance does where a text needs more items of its parser than it has."""
    engine = speaking().engine
    calls = []

    def failing(self, *args):
        calls.append(args)
        if len(calls) > 3:
            raise AssertionError("the parser has too many items")
        return sound(self, *args)

    sound = getattr(StructureMatcher, place)
    monkeypatch.setattr(StructureMatcher, place, failing)
    they = RecordedDeltas(engine)
    structure = Structure(kind="regex", source="(the|dog|fox)( [a-z]{2,5}){2,30}!")
    params = replace(SPOKEN, max_tokens=100, structure=structure, n=num_answers)
    prompt = speaker()[1](PROMPT)["input_ids"]
    they.submit("grammar", prompt, params)
    they.submit("other", prompt, SPOKEN)
    they.finish()
    assert isinstance(they.errors["grammar"], RequestFailed)
    assert "too many items" in str(they.errors["grammar"])
    (expected,) = speaking().generate(PROMPT, SPOKEN)
    assert they.tokens("other") == expected.token_ids
    assert is_empty(engine)


def test_a_request_that_cannot_be_begun_leaves_nothing(monkeypatch):
    from colossalai.inference import _engine

    engine = speaking().engine

    def failing(*args, **kwargs):
        raise OSError("no file of the tokenizer")

    monkeypatch.setattr(_engine, "TextStream", failing)
    they = RecordedDeltas(engine)
    with pytest.raises(OSError, match="no file"):
        they.submit("a", [5, 6], SPOKEN)
    assert is_empty(engine)
