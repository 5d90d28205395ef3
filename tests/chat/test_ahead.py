"""One step ahead: answers by the weights before a step, drawn while it is made; the same on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.chat import GRPO, PPO, RewardError, RolloutOptions, with_value_head
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams
from tests.chat.cells import assert_same, beside_one_process, without_times
from tests.chat.test_grpo import SAMPLING, prompts
from tests.chat.tiny import PLUGINS, causal, tokenizer
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def odd(prompt: str, answer: str, row: Any) -> float:
    """Tell almost all answers apart."""
    return sum(ord(each) for each in answer) % 7 / 7


def fit(plan: str, method: str, *, lr: float = 0.5, ahead: int = 1, **course: Any) -> list[dict[str, float]]:
    """Train, and return the records, without times."""
    colossalai.launch_from_torch({}, verbose=False)
    model = causal("gpt2")
    booster = Booster(plugin=PLUGINS[plan]())
    common: dict[str, Any] = {
        "booster": booster,
        "data": prompts(6),
        "tokenizer": tokenizer(),
        "sampling": SAMPLING,
        "batch_size": 2 // booster.mesh.axis_size("dp"),
        "rollouts": RolloutOptions(ahead=ahead),
        **({"steps": 4} | course),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if method == "grpo":
        records = GRPO(reward=odd, group_size=4, max_length=32).fit(model, optimizer, **common).records
    else:
        torch.manual_seed(1)
        critic = with_value_head(causal("gpt2"))
        common |= {"critic": critic, "critic_optimizer": torch.optim.SGD(critic.parameters(), lr=0.05)}
        made = PPO(reward=odd, max_length=32, iterations=2, kl_coef=0.0)
        records = made.fit(model, optimizer, **common, rows_at_once=2).records
    gpc.destroy()
    return without_times(records)


@pytest.mark.parametrize(
    ("plan", "method"),
    [
        ("ddp", "grpo"),
        *(further(plan, "grpo") for plan in ("zero 1", "fsdp", "gemini", "tp 2", "tp 2, zero 1")),
        *(further(plan, "ppo") for plan in ("zero 2", "gemini", "pp 2", "tp 2, zero 1")),
    ],
)
def test_ranks_are_one_process(plan: str, method: str) -> None:
    cells = [(plan, method)]
    for cell, found, expected in beside_one_process(
        fit, cells, 4 if "," in plan else 2, lambda plan, method: ("ddp", method)
    ):
        assert "logprob_gap" not in expected[0]
        assert expected[1]["kl"] > 1e-9  # the model has made a step since
        assert_same(found, expected, cell)


def all_of(cells: list[dict[str, Any]]) -> list[Any]:
    return [fit("ddp", "grpo", **cell) for cell in cells]


def test_answers_are_those_of_the_weights_before() -> None:
    still, ahead, exact = run_ranks(all_of, 1, [{"lr": 0.0}, {}, {"ahead": 0}])[0]

    def drawn(records: Any) -> list[tuple[float, float]]:
        return [(each["reward"], each["length"]) for each in records]

    # Of a model that moves, the second answers are still by the first weights, unless the step is waited for.
    assert drawn(still)[:2] == drawn(ahead)[:2]
    assert drawn(still)[1] != drawn(exact)[1]
    assert drawn(still)[2] != drawn(ahead)[2]
    assert exact[0]["loss"] == pytest.approx(ahead[0]["loss"], abs=1e-5)  # engine and trainer are one model


def resume(folder: str) -> Any:
    """Train four steps at once, with states on the way; and two, then all four from the second state."""
    whole = fit("zero 1", "grpo", save=f"{folder}/whole", save_every=2)
    parts = {"save": f"{folder}/parts", "resume": f"{folder}/parts", "save_every": 2}
    fit("zero 1", "grpo", **parts, steps=2)
    return whole, fit("zero 1", "grpo", **parts)


@pytest.mark.long  # `make test` resumes a run that is not ahead: tests/chat/test_ppo.py
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path) -> None:
    for whole, parts in run_ranks(resume, 2, str(tmp_path)):
        assert whole[3]["kl"] > 1e-9  # between states it is a step ahead
        assert parts == whole[2:]


def fails(prompt: str, answer: str, row: Any) -> float:
    return 1.0 / (gpc.get_global_rank() - 1)


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = causal("gpt2")
    given: dict[str, Any] = {
        "booster": Booster(),
        "data": prompts(6),
        "tokenizer": tokenizer(),
        "rollouts": RolloutOptions(ahead=1),
        "steps": 3,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"ahead=1 and temperature=0\.5"):
        GRPO(reward=odd, max_length=32).fit(
            model, optimizer, **given, sampling=SamplingParams(temperature=0.5, max_tokens=4)
        )
    with pytest.raises(ValueError, match="ahead=2: give 0 or 1 step"):
        RolloutOptions(ahead=2)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="failed on rank 1, and no step was made: ZeroDivisionError"):
        GRPO(reward=fails, group_size=2, max_length=32).fit(model, optimizer, **given, sampling=SAMPLING)
    with pytest.raises(ValueError, match=r"kv_memory=0\.5: give bytes"):
        RolloutOptions(kv_memory=0.5)
    method = GRPO(reward=odd, group_size=2, max_length=32)
    few = given | {"rollouts": RolloutOptions(kv_memory=2000.0)}
    with pytest.raises(ValueError, match=r"kv_memory=2000\.0 does not hold one block"):
        method.fit(model, optimizer, **few, sampling=SAMPLING)
    one = RolloutOptions(kv_memory=16.0 * 2 * 2 * 32 * 8)  # a block of a model in float64, of 16 tokens
    with pytest.raises(
        RewardError, match=r"failed on rank 0, 1, .* the engine did not answer: RequestRefused"
    ):
        method.fit(model, optimizer, **given | {"rollouts": one}, sampling=SamplingParams(max_tokens=20))
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 2)
