"""Engine: each request ends as it is said to, and is refused where it can never be answered."""

import json
import re
from dataclasses import replace

import pytest
import torch

from colossalai.inference import QueueFull, Request, RequestRefused, SamplingParams, Structure
from colossalai.inference._build import build_engine
from colossalai.inference._engine import InferenceEngine
from colossalai.inference._llm import LLM
from colossalai.inference._load import EngineOptions
from colossalai.inference.scheduling import BlockPool
from tests.inference.engine.setups import (
    GREEDY,
    NUM_TOKENS,
    POOL,
    PROMPT,
    SPOKEN,
    RecordedDeltas,
    expected,
    heard,
    is_empty,
    model,
    speaker,
    speaking,
)
from tests.inference.models import MIXED, VOCAB, greedy, prompts, tiny

pytestmark = pytest.mark.unit


def test_texts_are_those_of_the_tokenizer():
    (output,) = speaking().generate(PROMPT, SPOKEN)
    tokenizer = speaker()[1]
    assert output.prompt == PROMPT
    assert list(output.prompt_token_ids) == tokenizer(PROMPT)["input_ids"]
    assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert output.finish_reason == "length"
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(output.prompt_token_ids), 24)


def test_an_answer_ends_before_a_stop_string():
    tokenizer = speaker()[1]
    letters = dict.fromkeys(tokenizer.convert_tokens_to_ids(list("abcdefghij")), 100.0)
    spoken = replace(SPOKEN, logit_bias=letters)
    (whole,) = speaking().generate(PROMPT, spoken)
    for stop in (whole.text[1:3], whole.text[12:15], whole.text[-2:]):
        (output,) = speaking().generate(PROMPT, replace(spoken, stop=("never of this", stop)))
        first = whole.text.index(stop)
        assert output.text == whole.text[:first]
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: first + len(stop)]


def test_an_answer_ends_with_a_stop_token():
    (whole,) = speaking().generate(PROMPT, SPOKEN)
    stop = whole.token_ids[7]
    first = whole.token_ids.index(stop)
    (output,) = speaking().generate(PROMPT, replace(SPOKEN, stop_token_ids=(stop,)))
    assert output.token_ids == whole.token_ids[: first + 1]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert output.text == speaker()[1].decode(whole.token_ids[:first])


def test_the_end_token_of_the_model_ends_an_answer_unless_it_is_ignored():
    spoken, tokenizer = speaker()
    end = tokenizer.eos_token_id
    likely = replace(SPOKEN, ignore_eos=False, logit_bias={end: 100.0})
    (output,) = speaking().generate(PROMPT, likely)
    assert (output.token_ids, output.text) == ((end,), "")
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    (output,) = speaking().generate(PROMPT, replace(likely, ignore_eos=True))
    assert (output.token_ids, output.finish_reason) == ((end,) * 24, "length")
    (output,) = speaking().generate(PROMPT, replace(likely, min_tokens=5))
    assert end not in output.token_ids[:5]
    assert (output.token_ids[5:], output.finish_reason) == ((end,), "stop")
    (output,) = speaking().generate(PROMPT, replace(SPOKEN, stop_token_ids=(end,), min_tokens=24))
    assert end not in output.token_ids
    assert spoken.config.eos_token_id == end


def test_max_tokens_beyond_the_window_is_cut():
    llm = LLM(model("GPT2"), kv_memory=POOL, max_length=40)
    (prompt,) = prompts(33)
    for most in (None, 8, 1000):
        (output,) = llm.generate([prompt], replace(GREEDY, max_tokens=most))
        assert (output.token_ids, output.finish_reason) == (greedy(model("GPT2"), prompt, 7), "length")


def test_a_request_is_aborted_in_each_of_its_states():
    they = heard(max_running=3, max_tokens_per_step=16)
    first, second, third = prompts(5, 60, 7)
    they.submit("answered", first)
    they.engine.step()
    they.submit("read", second)
    they.engine.step()
    they.submit("new", third)
    they.submit("several", third, replace(GREEDY, n=3))
    running = [each.request.request_id for each in they.engine.scheduler.running]
    assert running == ["answered", "read"]
    assert they.engine.scheduler.running[1].num_left > 0
    for name in ("answered", "read", "new", "several", "never there"):
        they.engine.abort(name)
        they.engine.abort(name)
    assert they.tokens("answered") == greedy(model("Llama"), first, 2)
    for name in ("answered", "read", "new"):
        assert they.reasons(name) == [(0, "abort")]
    assert they.reasons("several") == [(0, "abort"), (1, "abort"), (2, "abort")]
    assert is_empty(they.engine)
    assert not they.engine.step()


def test_one_of_several_answers_may_end_before_the_others_are_aborted():
    they = heard()
    (prompt,) = prompts(9)
    they.submit("alone", prompt, SamplingParams(seed=1, n=3, max_tokens=2))
    they.finish()
    stop = they.tokens("alone", 1)[0]
    they.submit("one", prompt, SamplingParams(seed=1, n=3, stop_token_ids=(stop,)))
    they.engine.step()
    they.engine.step()
    they.engine.abort("one")
    assert (1, "stop") in they.reasons("one")
    assert [index for index, _ in they.reasons("one")] == [0, 1, 2]
    assert is_empty(they.engine)


def test_aborts_leave_the_others_as_they_are():
    they = heard()
    batch = prompts(*MIXED)
    for number, prompt in enumerate(batch):
        they.submit(str(number), prompt)
    for number in (0, 3, 7, 11):
        they.engine.step()
        they.engine.abort(str(number))
    they.finish()
    for number, text in enumerate(expected("Llama")):
        reason = "abort" if number in (0, 3, 7, 11) else "length"
        assert they.reasons(str(number)) == [(0, reason)]
        found = they.tokens(str(number))
        assert found == (text if reason == "length" else text[: len(found)])
    assert is_empty(they.engine)


def test_a_request_ends_with_what_it_has_when_its_time_is_over():
    now = [100.0]
    built = build_engine(model("Llama"), None, EngineOptions(kv_memory=POOL))
    engine = InferenceEngine(built.executor, built.scheduler, built.limits, clock=lambda: now[0])
    they = RecordedDeltas(engine)
    first, second = prompts(5, 6)
    they.submit("short", first, timeout_s=2.0)
    they.submit("long", second, timeout_s=200.0)
    they.submit("free", second)
    engine.step()
    engine.step()
    now[0] += 1.9
    engine.step()
    assert they.reasons("short") == []
    now[0] += 0.1
    engine.step()
    assert they.reasons("short") == [(0, "timeout")]
    assert they.tokens("short") == greedy(model("Llama"), first, 3)
    they.finish()
    assert they.reasons("long") == they.reasons("free") == [(0, "length")]
    assert they.tokens("long") == greedy(model("Llama"), second, NUM_TOKENS)
    they.submit("queued", first, timeout_s=1.0)
    now[0] += 1.0
    assert not engine.step()
    assert they.reasons("queued") == [(0, "timeout")]
    assert is_empty(engine)


def test_more_requests_than_may_wait_are_turned_away():
    they = heard(max_queue=2, max_running=1)
    (prompt,) = prompts(5)
    they.submit("a", prompt)
    they.engine.step()
    they.submit("b", prompt)
    they.submit("c", prompt)
    with pytest.raises(QueueFull, match="2 requests wait, as many as may; try again later"):
        they.submit("d", prompt)
    they.engine.abort("b")
    they.submit("d", prompt)
    they.finish()
    assert {name: they.reasons(name) for name in "abcd"} == {
        "a": [(0, "length")],
        "b": [(0, "abort")],
        "c": [(0, "length")],
        "d": [(0, "length")],
    }


@pytest.mark.parametrize("is_streamed", [True, False])
def test_prompts_wait_for_those_who_read_and_for_nobody_else(is_streamed):
    engine = LLM(model("Llama"), kv_memory=POOL).engine
    heard = RecordedDeltas(engine)
    heard.submit("first", prompts(5)[0], is_streamed=is_streamed)
    engine.step()
    engine._pace.prompt_tokens = 8
    heard.submit("second", prompts(40)[0], is_streamed=False)
    engine.step()
    assert engine.stats().prompt_tokens == 5 + (8 if is_streamed else 40)


def test_each_prompt_that_waits_for_a_seat_brings_its_own_share_of_a_step():
    engine = LLM(model("Llama"), kv_memory=POOL, max_running=3).engine
    heard = RecordedDeltas(engine)
    heard.submit("first", prompts(5)[0], is_streamed=True)
    engine.step()
    engine._pace.prompt_tokens = 8
    for name in ("second", "third", "fourth"):  # the last one finds no seat
        heard.submit(name, prompts(40)[0], is_streamed=False)
    engine.step()
    assert engine.stats().prompt_tokens == 5 + 2 * 8


def test_requests_of_one_name_are_refused_while_the_first_is_under_way():
    they = heard()
    (prompt,) = prompts(5)
    they.submit("a", prompt)
    with pytest.raises(ValueError, match="a request 'a' is in flight; each needs a name of its own"):
        they.submit("a", prompt)
    they.finish()
    they.deltas.clear()
    they.submit("a", prompt)
    they.engine.abort("a")
    assert they.reasons("a") == [(0, "abort")]


def test_urgent_requests_go_first():
    they = heard(max_running=1)
    (prompt,) = prompts(5)
    ended = []
    for name, priority in (("b", 1), ("c", 1), ("a", 0)):
        they.submit(name, prompt, priority=priority)
    while they.engine.has_work:
        they.engine.step()
        ended += [name for name in "abc" if they.reasons(name) and name not in ended]
    assert ended == ["a", "b", "c"]


ENDLESS = SamplingParams(max_tokens=None)
REFUSED = {
    "empty": ([], GREEDY, "the prompt has no token: give it at least one"),
    "unknown token": ([3, VOCAB], GREEDY, f"token {VOCAB} is not one of the {VOCAB} of the model"),
    "negative token": ([-1], GREEDY, f"token -1 is not one of the {VOCAB} of the model"),
    "unknown bias": ([1], replace(GREEDY, logit_bias={999: 1.0}), "token 999 is not one of the"),
    "unknown stop": ([1], replace(GREEDY, stop_token_ids=(VOCAB,)), f"token {VOCAB} is not one of the"),
    "too long": (
        [1] * 64,
        GREEDY,
        "the prompt has 64 tokens, and the model takes 64 of prompt and answer together: at most 63",
    ),
    "pool": ([1] * 37, GREEDY, "prompt and answer may come to 49 tokens, and all blocks together hold 48"),
    "pool without end": (
        [1],
        ENDLESS,
        "prompt and answer may come to 64 tokens, and all blocks together hold",
    ),
    "answers": ([1], replace(GREEDY, n=5), "n=5; at most 4 answers are made at a time"),
    "stop": ([1], replace(GREEDY, stop=("end",)), "stop strings and structures need a tokenizer"),
    "structure": (
        [1],
        replace(GREEDY, structure=Structure(kind="regex", source="a")),
        "stop strings and structures need a tokenizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_answered_is_refused(name):
    prompt, params, message = REFUSED[name]
    they = heard(max_length=64, max_running=4)
    they.engine.scheduler.pool = BlockPool(3, 16)
    with pytest.raises(RequestRefused) as refused:
        they.submit("a", prompt, params)
    assert message in str(refused.value)
    assert not they.engine.has_work
    they.submit("a", [1] * 36, GREEDY)


def test_an_unknown_adapter_is_refused():
    with pytest.raises(RequestRefused, match="there is no adapter 'poet'"):
        heard().submit("a", [1], adapter="poet")


def test_structures_that_cannot_be_followed_are_refused():
    engine = speaking().engine
    params = replace(SPOKEN, structure=Structure(kind="regex", source="(("))
    with pytest.raises(RequestRefused, match="regular expression"):
        engine.check(Request(request_id="a", prompt_token_ids=(1,), params=params))


def test_an_answer_is_in_its_language():
    pattern = "(the|dog|fox)( [a-z]{2,5}){2,3}!"
    schema = (
        '{"type": "object", "properties": {"n": {"enum": [1, 22]}}, '
        '"required": ["n"], "additionalProperties": false}'
    )
    structures = [Structure(kind="regex", source=pattern), Structure(kind="json", source=schema)]
    for seed in range(3):
        each = [SamplingParams(max_tokens=200, seed=seed, structure=kind, n=2) for kind in structures]
        outputs = speaking().generate([PROMPT] * 2, each)
        for word in outputs[0].outputs:
            assert re.fullmatch(pattern, word.text), word
        for text in outputs[1].outputs:
            assert json.loads(text.text)["n"] in (1, 22)
        for output in outputs:
            assert {each.finish_reason for each in output.outputs} == {"stop"}
    assert is_empty(speaking().engine)


def test_an_answer_that_may_only_end_ends_before_min_tokens():
    """The language leaves the end only, and min_tokens forbids it: one request must not end all of them."""
    (other,) = prompts(5)
    only = speaker()[1].convert_tokens_to_ids("a")
    asked = [
        replace(SPOKEN, ignore_eos=False, structure=Structure(kind="regex", source="a"), min_tokens=9),
        replace(SPOKEN, structure=Structure(kind="regex", source="a"), stop_token_ids=(only,), min_tokens=9),
        replace(
            SPOKEN, ignore_eos=False, structure=Structure(kind="regex", source="a|aaa|b{5}"), min_tokens=9
        ),
        SPOKEN,
    ]
    outputs = speaking().generate([PROMPT, PROMPT, PROMPT, other], asked)
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "stop", "length"]
    assert outputs[0].text == "a"
    assert re.fullmatch("a|aaa|b{5}", outputs[2].text)


def test_an_engine_that_fails_tells_all():
    they = heard(max_running=2, max_tokens_per_step=16)
    for name, prompt in zip("abc", prompts(5, 40, 7), strict=True):
        they.submit(name, prompt, replace(GREEDY, n=1 + (name == "a")))
    they.engine.step()
    error = RuntimeError("a rank is gone")
    they.engine.fail(error)
    assert they.errors == dict.fromkeys("abc", error)
    they.engine.fail(error)
    they.engine.abort("a")


def test_weights_that_change_void_the_prefixes_and_texts_go_on():
    changing = tiny("Llama")
    they = RecordedDeltas(build_engine(changing, None, EngineOptions(kv_memory=POOL)))
    batch = prompts(40, 23)
    they.submit("before", batch[0])
    they.finish()
    they.submit("through", batch[1])
    for _ in range(4):
        they.engine.step()
    with torch.no_grad():
        for param in changing.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    they.engine.begin_again()
    they.submit("after", batch[0])
    they.finish()
    head = greedy(model("Llama"), batch[1], 4)
    assert they.tokens("through") == head + greedy(changing, [*batch[1], *head], NUM_TOKENS - 4)
    assert they.tokens("before") == greedy(model("Llama"), batch[0], NUM_TOKENS)
    assert they.tokens("after") == greedy(changing, batch[0], NUM_TOKENS)
    assert they.engine.stats().prefix_hit_tokens == 0
    they.submit("again", batch[0])
    they.finish()
    assert they.engine.stats().prefix_hit_tokens == 32
    they.engine.weights_changed()
    they.submit("later", batch[0])
    they.finish()
    assert they.tokens("later") == they.tokens("again") == they.tokens("after")
    assert they.engine.stats().prefix_hit_tokens == 32
    assert is_empty(they.engine)
