"""Records of rewards: what each step tells, where it goes, what is warned of, and what ends a run."""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, PPO, PolicyDriftError
from colossalai.chat._answers import MEASURED, MEASURED_OF_REFERENCE
from colossalai.chat._records import Measures, StepLines, draw_curves
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from colossalai.trainer import CSVLogger, TensorboardLogger
from tests.chat.test_grpo import digits, prompts
from tests.chat.test_ppo import value_model
from tests.chat.tiny import causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

SAMPLING = SamplingParams(max_tokens=6)


def measure() -> tuple[dict[str, float], dict[str, float]]:
    """Measure on two ranks, of which the second one has nothing in the second step."""
    colossalai.launch_from_torch({}, verbose=False)
    rank, device = gpc.get_global_rank(), torch.device("cpu")
    names = ("mean", "root", "peak", "rate", "never")
    measures = Measures(roots=("root",), largest=("peak",), rates=("rate",), replicas=2)
    steps = []
    for values in ([1.0, 5.0], [3.0]) if rank == 0 else ([2.0], []):
        for value in values:
            measures.add(2.0, mean=torch.tensor(value), root=torch.tensor(value**2))
            measures.add_largest(peak=torch.tensor(value))
        if values:
            measures.add_rate("rate", 12.0 + rank, 2.0 + 2.0 * rank)
        steps.append(measures.take(names, device))
    gpc.destroy()
    return steps[0], steps[1]


def test_means_roots_peaks_and_rates_are_of_all_ranks() -> None:
    for first, second in run_ranks(measure, 2):
        # 12 and 13 of two replicas in the 4 seconds of the slower one
        assert first == pytest.approx({"mean": 8 / 6, "root": math.sqrt(30 / 6), "peak": 5.0, "rate": 25 / 4})
        assert second == pytest.approx({"mean": 1.5, "root": math.sqrt(9 / 2), "peak": 3.0, "rate": 12.0})


@pytest.mark.unit
def test_lines_keep_any_text(tmp_path: Path) -> None:
    lines = StepLines(tmp_path / "lines.jsonl", first=0)
    texts = ["一\u2028二", "\ud800 half a pair", 'quoted "x"\n']
    for step, text in enumerate(texts, 1):
        lines.add({"step": step, "text": text})
    assert [each["text"] for each in StepLines(tmp_path / "lines.jsonl", first=2).read()] == texts[:2]
    assert "一" in (tmp_path / "lines.jsonl").read_text(encoding="utf-8")


@pytest.mark.unit
def test_reward_divergence_and_entropy_are_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: dict[str, list[float]] = {}

    def savefig(self: Figure, *args: Any, **options: Any) -> None:
        drawn.update({each.get_ylabel(): list(each.get_lines()[0].get_xdata()) for each in self.axes})

    monkeypatch.setattr(Figure, "savefig", savefig)
    each_step = dict.fromkeys(("loss", *MEASURED, *MEASURED_OF_REFERENCE), 0.5)
    seldom = {name: value for name, value in each_step.items() if name != "reward"}
    assert draw_curves([{"step": 1, **each_step}, {"step": 2, **seldom}], tmp_path / "steps.png")
    assert drawn["reward"] == [1]  # of the first step that is made of some answers
    assert drawn.keys() == {"loss", "reward", "kl", "kl_to_reference", "entropy"}
    assert drawn["entropy"] == drawn["kl"] == [1, 2]


def fit(name: str, options: dict[str, Any], course: dict[str, Any]) -> list[Any]:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal()
    given: dict[str, Any] = {"reward": digits, "max_length": 32, **options}
    more: dict[str, Any] = {}
    if options.get("kl_coef", 0.1 if name == "ppo" else 0.0):
        more["reference"] = causal()
    if name == "ppo":
        more["critic"] = value_model()
        more["critic_optimizer"] = torch.optim.SGD(more["critic"].parameters(), lr=0.05)
    try:
        result = {"grpo": GRPO, "ppo": PPO}[name](**given).fit(
            model,
            torch.optim.SGD(model.parameters(), lr=course.pop("lr", 0.5)),
            booster=Booster(),
            data=prompts(),
            tokenizer=tokenizer(),
            batch_size=2,
            **{"sampling": SAMPLING, **more, **course},
        )
    finally:
        gpc.destroy()
    return list(result.records)


def fit_both() -> list[list[Any]]:
    return [fit(name, {"iterations": 2, "kl_coef": 0.1}, {"steps": 4}) for name in ("grpo", "ppo")]


def test_each_step_has_all_figures() -> None:
    first = {"reward", "reward_deviation", "length", "share_cut", "tokens_per_second_generating"}
    each = {"kl", "kl_k1", "kl_to_reference", "kl_to_reference_k1", "clip_share", "entropy"}
    each |= {"logprob_gap", "logprob_gap_largest", "tokens_per_second_training", "seconds", "loss"}
    for both in run_ranks(fit_both, 2):
        for records in both:
            for number, record in enumerate(records):
                assert record.keys() >= (each if number % 2 else first | each)
                assert all(math.isfinite(value) for value in record.values())
                # The gap is of the same tokens in each step that is made of them; floats of the engine.
                assert record["logprob_gap"] <= record["logprob_gap_largest"] < 1e-5
                assert record["tokens_per_second_training"] > 0
            assert records[0]["kl"] == records[0]["kl_k1"] == 0.0
            assert records[1]["kl"] > 0.0
            assert records[1]["kl_k1"] != records[1]["kl"]


def warm() -> list[Any]:
    records = []
    for temperature in (0.5, 2.0):
        given = SamplingParams(max_tokens=6, temperature=temperature)
        course = {"steps": 3, "lr": 0.0, "sampling": given}
        records += fit("grpo", {"group_size": 2, "kl_coef": 0.0}, course)
    return records


def test_gaps_are_of_log_probabilities_before_the_temperature() -> None:
    (records,) = run_ranks(warm, 1)
    assert len(records) == 6
    assert all(record["logprob_gap_largest"] < 1e-5 for record in records)


def loggers(folder: str, has_tensorboard: bool) -> None:
    places: tuple[Any, ...] = (CSVLogger(f"{folder}/csv"),)
    if has_tensorboard:
        places = (TensorboardLogger(f"{folder}/tb"), *places)
    for steps in (2, 4):
        course = {"steps": steps, "log": f"{folder}/log", "loggers": places, "samples_every": 2}
        fit("grpo", {"group_size": 3}, {**course, "save": f"{folder}/state", "resume": f"{folder}/state"})


def check_events(folder: Path, lines: list[dict[str, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    for name in ("loss", "reward", "logprob_gap_largest"):
        found = events.Scalars(f"train/{name}")
        assert [each.step for each in found] == [1, 2, 3, 4]
        assert [each.value for each in found] == pytest.approx([each[name] for each in lines], rel=1e-6)


@pytest.mark.parametrize("has_tensorboard", [False, further(True)])  # whose import takes a second
def test_records_go_to_loggers_and_samples_to_a_file(has_tensorboard: bool, tmp_path: Path) -> None:
    run_ranks(loggers, 2, str(tmp_path), has_tensorboard)
    lines = [json.loads(each) for each in (tmp_path / "log/steps.jsonl").read_text().splitlines()]
    if has_tensorboard:
        check_events(tmp_path / "tb", lines)
    assert len((tmp_path / "csv/train.csv").read_text().splitlines()) == 5
    rows = list(csv.DictReader((tmp_path / "csv/train.csv").read_text().splitlines()))
    for name in ("loss", "reward", "logprob_gap_largest"):
        values = [float(each[name]) for each in rows]
        assert values == pytest.approx([each[name] for each in lines], rel=1e-6)
    samples = [json.loads(each) for each in (tmp_path / "log/samples.jsonl").read_text().splitlines()]
    assert {each["step"] for each in samples} == {2, 4}
    for each in samples:
        assert each["prompt"]
        assert len(each["answers"]) == len(each["rewards"]) == 3
    assert len((tmp_path / "log/steps.png").read_bytes()) > 1000


def gap(name: str) -> tuple[list[str], list[float]]:
    """Let the engine of rank 1 tell other log-probabilities from the second step on."""
    from colossalai.chat import RolloutEngine

    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    plain = RolloutEngine.generate
    steps = 0

    def generate(self: Any, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        found = plain(self, *args)
        if steps > 1 and gpc.get_global_rank() == 1:
            from dataclasses import replace

            odd = found[0][-1]
            found[0][-1] = replace(odd, logprobs=(*odd.logprobs[:-1], odd.logprobs[-1] - 0.25))
        return found

    handler = Handler()
    logging.getLogger("colossalai").addHandler(handler)
    RolloutEngine.generate = generate  # type: ignore[method-assign]
    records = fit(name, {"group_size": 3} if name == "grpo" else {}, {"steps": 4 if name == "grpo" else 12})
    return [each for each in told if "log-probabilities of engine" in each], [
        each["logprob_gap_largest"] for each in records
    ]


@pytest.mark.parametrize("name", ["grpo", pytest.param("ppo", marks=pytest.mark.long)])
def test_a_wide_gap_is_warned_of_once_by_the_rank_that_has_it(name: str) -> None:
    (quiet, found), (told, others) = run_ranks(gap, 2, name)
    assert found == others
    assert found[0] < 1e-5
    assert max(found) == pytest.approx(0.25, abs=1e-5)
    assert quiet == []
    (text,) = told
    assert "differ by 0.2500, more than 0.02: token " in text
    assert re.search(r"number \d of an answer to '\S.*', has log-probability -", text)
    assert "from the engine and -" in text


def alike(prompt: str, answer: str, row: Any) -> float:
    return 0.1


def equal_groups() -> tuple[int, list[Any]]:
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("colossalai").addHandler(Handler())
    records = fit("grpo", {"group_size": 3, "kl_coef": 0.0, "reward": alike}, {"steps": 2})
    return sum("in each group all rewards are equal" in each for each in told), records


def test_groups_of_equal_rewards_teach_nothing_and_are_counted() -> None:
    for rank, (count, records) in enumerate(run_ranks(equal_groups, 2)):
        assert count == (rank == 0)
        for each in records:
            assert (each["groups_alike"], each["loss"]) == (1.0, 0.0)
            assert each["reward_deviation"] < 1e-15


def drift(name: str, folder: str) -> tuple[str, int]:
    more = {"steps": 40, "log": f"{folder}/log", "save": f"{folder}/state", "lr": 0.5}
    seen: list[Any] = []
    options = {"max_kl": 1e-6, "kl_coef": 1e-6, "iterations": 3}
    with pytest.raises(PolicyDriftError) as caught:
        fit(name, options, {**more, "on_step": seen.append})
    return str(caught.value), len(seen)


@pytest.mark.parametrize("name", ["grpo", pytest.param("ppo", marks=pytest.mark.long)])
def test_a_policy_that_drifts_away_ends_the_run_on_all_ranks(name: str, tmp_path: Path) -> None:
    found = run_ranks(drift, 2, name, str(tmp_path))
    assert found[0] == found[1]
    text, steps = found[0]
    assert steps == 11  # the first one is before the model has moved
    assert "above max_kl=1e-06 for 10 steps in a row, at step 11 it is" in text
    lines = [json.loads(each) for each in (tmp_path / "log/steps.jsonl").read_text().splitlines()]
    assert [each["kl_to_reference"] > 1e-6 for each in lines] == [False] + [True] * 10
    assert (tmp_path / "state/step-00000011").is_dir()


def step_of_nothing() -> list[Any]:
    more = {"minibatches": 3, "iterations": 1, "max_kl": 10.0}
    return fit("ppo", more, {"steps": 3})


def test_a_step_without_answers_tells_nothing_of_the_drift() -> None:
    (records,) = run_ranks(step_of_nothing, 1)
    assert ["kl_to_reference" in each for each in records] == [False, True, True]  # 2 answers in 3 steps


def mistakes(folder: str) -> None:
    for options, words in (
        ({"max_kl": 0.0, "kl_coef": 0.1}, "max_kl=0.0: give a number above 0"),
        ({"max_kl": 0.1, "kl_coef": 0.0}, "max_kl=0.1 and kl_coef=0"),
    ):
        for method in (GRPO, PPO):
            with pytest.raises(ValueError, match=words):
                method(reward=digits, **options)  # type: ignore[operator]
    for course, words in (
        ({"samples_every": 2}, "samples_every=2 without a folder: give log"),
        ({"samples_every": 0, "log": folder}, "samples_every=0"),
    ):
        for name in ("grpo", "ppo"):
            with pytest.raises(ValueError, match=words):
                fit(name, {"kl_coef": 0.0}, {"steps": 1, **course})


def test_mistakes(tmp_path: Path) -> None:
    run_ranks(mistakes, 1, str(tmp_path))
