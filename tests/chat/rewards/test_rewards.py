"""Rewards: time limits in processes and threads, sums, models with own tokenizers; all ranks hear."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, ModelReward, RewardError, RewardSum, TimedReward, chat_data, with_value_head
from colossalai.chat.data import encode_prompt, make_toy_data, make_toy_tokenizer
from colossalai.chat.rewards import AnswerText, scorer_of
from colossalai.chat.rewards._timed_calls import RewardCallError, ThreadCalls
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.tiny import causal, tokenizer
from tests.harness.clocks import FakeClock
from tests.ranks import run_ranks

SAMPLING = SamplingParams(max_tokens=6)
LONG_S = 600.0  # of a call that hangs: no test waits for its end


def length(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return float(len(answer))


def right(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return float(row["answer"] in answer)


def of_process(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """Return the process; do what the answer says."""
    if answer == "hang":
        time.sleep(LONG_S)
    if answer == "raise":
        raise KeyError("no key")
    if answer == "exit":
        os._exit(3)
    if answer == "wait":
        time.sleep(0.2)
    return float(os.getpid())


def answers(*texts: str) -> list[Any]:
    row: Any = {"answer": "7"}
    return [AnswerText("3+4=", text, row, [5, 6], [7], False) for text in texts]


def scorer(reward: Any) -> Any:
    return scorer_of(reward, device=torch.device("cpu"), rows_at_once=2, pad=0)


@pytest.mark.unit
@pytest.mark.long  # its processes import torch; one that is killed is in ..._hangs_on_one_rank_...
def test_processes_call_a_function_and_are_ended() -> None:
    at_work = scorer(TimedReward(function=of_process, seconds=LONG_S, workers=2))
    try:
        assert multiprocessing.active_children() == []  # none before the first answers
        found = at_work.scores(answers("wait", "wait", "wait"))
        assert len(set(found)) == 2
        assert float(os.getpid()) not in found
        assert set(at_work.scores(answers("a"))) <= set(found)  # they go on
        assert at_work.scores([]) == []
    finally:
        at_work.close()
    assert multiprocessing.active_children() == []


@pytest.mark.unit
@pytest.mark.long  # each begins a process, which imports torch
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("hang", r"answer 'hang' to the prompt '3\+4=': it took longer than seconds=0.5"),
        ("raise", r"answer 'raise' to the prompt '3\+4=': KeyError: 'no key'"),
        ("exit", r"answer 'exit' to the prompt '3\+4=': it ended its process, with exit code 3"),
    ],
)
def test_a_call_that_fails_in_a_process_is_named_and_no_process_is_left(answer: str, words: str) -> None:
    at_work = scorer(TimedReward(function=of_process, seconds=0.5 if answer == "hang" else LONG_S))
    # A limit that is short is of a call that hangs, and of no other: that could be late on a busy machine.
    texts = ("hang", "fine") if answer == "hang" else ("fine", answer, "fine")
    with pytest.raises(RewardCallError, match=words) as caught:
        at_work.scores(answers(*texts))
    assert multiprocessing.active_children() == []
    assert answer != "raise" or "in of_process" in caught.value.__notes__[0]


@pytest.mark.unit
def test_the_limit_is_of_a_call_not_of_those_that_wait_for_it() -> None:
    time_of_test = FakeClock()

    def slow(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
        time.sleep(0.02)  # without it, a call has ended before its limit is looked at
        time_of_test.sleep(400.0)
        return float(len(answer))

    calls = ThreadCalls(slow, seconds=2000.0, workers=1, clock=time_of_test.clock)
    found = calls.rewards([("3+4=", "a" * number, {}) for number in range(12)])
    assert found == [float(number) for number in range(12)]
    assert time_of_test.seconds == 4800.0  # in all, and no call is late


@pytest.mark.unit
def test_what_does_not_pickle_is_called_in_threads() -> None:
    done, called = threading.Event(), []

    def hang(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
        called.append(os.getpid())
        if answer == "hang":
            done.wait()
            return 2.0
        if answer == "raise":
            raise KeyError("no key")
        if answer == "leave":
            sys.exit(3)
        return 1.0

    at_work = scorer(TimedReward(function=hang, seconds=LONG_S))
    try:
        assert at_work.scores(answers("a", "b")) == [1.0, 1.0]
        with pytest.raises(RewardCallError, match=r"'raise' to the prompt '3\+4=': KeyError: 'no key'"):
            at_work.scores(answers("raise"))
        with pytest.raises(RewardCallError, match=r"'leave' to the prompt '3\+4=': SystemExit: 3"):
            at_work.scores(answers("leave"))
        calls = ThreadCalls(hang, seconds=0.3, workers=1)
        with pytest.raises(RewardCallError, match=r"took longer than seconds=0.3"):
            calls.rewards([("3+4=", "hang", {})])
        calls.seconds = LONG_S
        done.set()
        assert calls.rewards([("3+4=", "a", {})]) == [1.0]  # not what the late call answers
    finally:
        done.set()
        at_work.close()
    assert set(called) == {os.getpid()}


@pytest.mark.unit
def test_a_sum_has_its_parts() -> None:
    torch.manual_seed(0)
    model = with_value_head(causal())
    reward = RewardSum({"length": (0.5, length), "model": (2.0, model), "right": (-1.0, right)})
    total, parts = scorer(reward).parts(answers("7", "123", "12"))
    assert parts["reward/length"] == [1.0, 3.0, 2.0]
    assert parts["reward/right"] == [1.0, 0.0, 0.0]
    values = model(torch.tensor([[5, 6, 7]]))[0, -1].item()
    assert parts["reward/model"] == pytest.approx([values] * 3, abs=1e-12)
    assert total == pytest.approx([0.5 + 2 * values - 1, 1.5 + 2 * values, 1 + 2 * values], abs=1e-12)


@pytest.mark.unit
def test_a_model_reads_its_own_tokens() -> None:
    own = make_toy_tokenizer()
    assert len(own) != len(tokenizer())
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = with_value_head(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(own), max_position_embeddings=64, **shape)).double()
    )
    (row,) = chat_data(make_toy_data("sums", 1, 0, stage="prompts"), "prompts")
    prompt = encode_prompt(row, own, 64)
    assert prompt is not None
    given = [
        AnswerText("not looked at", "12", row, [1, 2, 3], [4], is_cut) for is_cut in (False, True, False)
    ]
    found = scorer(ModelReward(model=model, tokenizer=own)).scores(given)
    for value, end in zip(found, ([own.eos_token_id], [], [own.eos_token_id]), strict=True):
        ids = [*prompt, *own("12", add_special_tokens=False).input_ids, *end]
        assert value == pytest.approx(model(torch.tensor([ids]))[0, -1].item(), abs=1e-12)
    short = ModelReward(model=model, tokenizer=own, max_length=4)
    with pytest.raises(ValueError, match="reads 4 tokens, and an answer has more"):
        scorer(short).scores([given[0]._replace(answer="123456789")])


@pytest.mark.unit
def test_mistakes() -> None:
    model = with_value_head(causal())
    for make, words in (
        (lambda: TimedReward(function=length, seconds=0), "seconds=0: give a number above 0"),
        (lambda: TimedReward(function=length, seconds=1.0, workers=0), "workers=0"),
        (lambda: TimedReward(function=model, seconds=1.0), "TimedReward of ValueModel"),
        (lambda: RewardSum({}), "RewardSum of nothing"),
        (lambda: RewardSum({"a": (math.nan, length)}), "the weight of reward 'a' is nan"),
        (lambda: RewardSum({"a": length}), r"reward 'a' is a function: give a pair \(weight, reward\)"),
        (lambda: RewardSum({"a": (1.0, causal())}), "the reward 'a' is a LlamaForCausalLM: of models give"),
        (lambda: RewardSum({"a": (1.0, "length")}), "the reward 'a' is a str: give a function"),
        (lambda: RewardSum({"a": (1.0, RewardSum({"b": (1.0, length)}))}), "'a' is a sum itself"),
        (lambda: ModelReward(model=causal(), tokenizer=tokenizer()), "ModelReward of LlamaForCausalLM"),
        (lambda: ModelReward(model=model, tokenizer=tokenizer(), max_length=1), "max_length=1"),
    ):
        with pytest.raises(ValueError, match=words):
            make()  # type: ignore[no-untyped-call]
    model.config.vocab_size = 7
    with pytest.raises(ValueError, match="the reward model has 7"):
        ModelReward(model=model, tokenizer=tokenizer())


def hang(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    time.sleep(LONG_S)
    return float(len(answer))


def fit(reward: Any, steps: int, more: dict[str, Any] | None = None) -> Any:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    rows = make_toy_data("sums", 6, 0, stage="prompts")
    try:
        return (
            GRPO(reward=reward, group_size=2)
            .fit(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                booster=Booster(),
                data=chat_data(rows, "prompts"),
                tokenizer=tokenizer(),
                sampling=SAMPLING,
                steps=steps,
                batch_size=2 // gpc.mesh.world_size,
                **(more or {}),
            )
            .records
        )
    finally:
        gpc.destroy()
        assert multiprocessing.active_children() == []


def fail(reward: Any) -> str:
    with pytest.raises(RewardError) as caught:
        fit(reward, 3)
    return str(caught.value)


def fail_on_rank_1() -> str:
    """Call in a process on rank 1 alone: that on rank 0 would import torch for nothing."""
    assert multiprocessing.active_children() == []
    return fail(TimedReward(function=hang, seconds=1.0) if os.environ["RANK"] == "1" else length)


@pytest.mark.dist
def test_a_call_that_hangs_on_one_rank_is_heard_of_on_all() -> None:
    found = run_ranks(fail_on_rank_1, 2)
    assert found[0] == found[1]
    assert found[0].startswith("the reward failed on rank 1, and no step was made: of the answer ")
    assert found[0].endswith("it took longer than seconds=1.0")


def not_a_number(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    return math.inf


@pytest.mark.dist
def test_a_part_that_is_no_number_is_named() -> None:
    for text in run_ranks(fail, 2, RewardSum({"length": (1.0, length), "odd": (0.0, not_a_number)})):
        assert "rewards of 'odd' are not finite numbers, the first is inf" in text


@pytest.mark.dist
@pytest.mark.long  # `make test` has the parts of a sum in one process, and the means over ranks of any record
def test_parts_are_written_down_as_in_one_process() -> None:
    reward = RewardSum({"length": (0.5, length), "right": (2.0, right)})
    (alone,) = run_ranks(fit, 1, reward, 3)
    for found in run_ranks(fit, 2, reward, 3):
        for own, other in zip(found, alone, strict=True):
            parts = own["reward/length"], own["reward/right"]
            assert own["reward"] == pytest.approx(0.5 * parts[0] + 2 * parts[1], abs=1e-12)
            for name in ("reward", "reward_deviation", "reward/length", "reward/right", "loss"):
                assert own[name] == pytest.approx(other[name], abs=1e-10), name
            assert own["reward_deviation"] > 0


def import_nothing(folder: str) -> str:
    """Call a function of a module that a process of its own does not find."""
    import sys

    Path(folder, "here_only.py").write_text("def reward(prompt, answer, row):\n    return 1.0\n")
    sys.path.insert(0, folder)
    import here_only  # type: ignore[import-not-found]

    Path(folder, "here_only.py").unlink()
    at_work = scorer(TimedReward(function=here_only.reward, seconds=LONG_S))
    with pytest.raises(RewardCallError) as caught:
        at_work.scores(answers("a"))
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.long
def test_a_function_that_a_process_cannot_import_is_told(tmp_path: Path) -> None:
    (text,) = run_ranks(import_nothing, 1, str(tmp_path))
    assert "cannot import the reward function: ModuleNotFoundError: No module named 'here_only'" in text
