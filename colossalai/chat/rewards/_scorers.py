"""Rewards of answers: functions, models and sums of them, and common errors of all ranks.

A reward is a value that users write. A run builds a `Scorer` of it, which owns the resources: processes,
models on a device.
"""

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from colossalai.chat._heads import ValueModel, last_values
from colossalai.chat.data import ChatRow, EncodedText, collate, encode_sft
from colossalai.chat.rewards._timed_calls import ProcessCalls, RewardCallError, ThreadCalls, TimedCalls
from colossalai.cluster import gather_values

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
"""Maps the prompt, an answer to it, and the prompt's row to the reward of the answer."""


class RewardError(RuntimeError):
    """A reward has failed on some rank; raised on all of them, before the step."""


@dataclass(frozen=True, kw_only=True)
class TimedReward:
    """A reward function with a time limit for each call, and several concurrent calls.

    A function that can be pickled is called in separate processes, which are started with the first answers
    and end with the training; a process that exceeds the limit is killed. They import the function's module,
    so a script needs `if __name__ == "__main__":`. Another function, such as a lambda, is called in threads,
    which share one interpreter and cannot be ended: a hanging thread stays until the program ends.

    Attributes:
        function: The function of the prompt, an answer, and the row, which is a plain dict here.
        seconds: Time limit of a call; exceeding it is a `RewardError` on all ranks.
        workers: Number of concurrent calls on each rank.

    Raises:
        ValueError: `seconds` is not above 0, `workers` is below 1, or `function` is not a function.
    """

    function: RewardFunction
    seconds: float
    workers: int = 1

    def __post_init__(self) -> None:
        if not callable(self.function) or isinstance(self.function, nn.Module):
            raise ValueError(
                f"TimedReward of {type(self.function).__name__}: give a function (prompt, answer, row)"
            )
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds}: give a number above 0, the time limit of a call")
        if type(self.workers) is not int or self.workers < 1:
            raise ValueError(f"workers={self.workers!r}: give an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class ModelReward:
    """A reward model with another tokenizer than the policy's.

    Rows and answers are written with the model's own template and tokenized with its own tokenizer. An answer
    ends with its end-of-sequence token, unless it was truncated.

    Attributes:
        model: A model of `with_value_head` or `load_reward_model`.
        tokenizer: Its tokenizer.
        max_length: Maximum number of tokens of prompt and answer; the prompt is truncated at the beginning.
            Default: the model's window.

    Raises:
        ValueError: `model` has no value head, or `tokenizer` has tokens outside its vocabulary, or no
            end-of-sequence token.
    """

    model: ValueModel
    tokenizer: Any
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, ValueModel):
            raise ValueError(
                f"ModelReward of {type(self.model).__name__}: give a model of with_value_head or "
                "load_reward_model"
            )
        known, used = self.model.config.vocab_size, len(self.tokenizer)
        if used > known:
            raise ValueError(
                f"the tokenizer has {used} tokens and the reward model has {known}: give the tokenizer "
                "that it was trained with"
            )
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer of the reward model has no end-of-sequence token: set eos_token")
        window = getattr(self.model.config, "max_position_embeddings", None)
        if self.max_length is not None and not 1 < self.max_length <= (window or math.inf):
            raise ValueError(
                f"max_length={self.max_length}: give at least 2 tokens, and at most the {window} that the "
                "reward model sees"
            )

    @property
    def length(self) -> int:
        """Maximum number of tokens of a text."""
        window: int = getattr(self.model.config, "max_position_embeddings", None) or 1 << 30
        return window if self.max_length is None else self.max_length


RewardPart = RewardFunction | ValueModel | ModelReward | TimedReward


@dataclass(frozen=True)
class RewardSum:
    """A weighted sum of rewards. Records have the unweighted mean of each as `reward/NAME`.

    Attributes:
        parts: Weight and reward, by name.

    Raises:
        ValueError: `parts` is empty, or has an entry that is not a pair, a weight that is not finite, a sum,
            or a value that is not a reward.
    """

    parts: Mapping[str, tuple[float, RewardPart]]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("RewardSum of nothing: give at least one {name: (weight, reward)}")
        for name, part in self.parts.items():
            if not isinstance(part, tuple) or len(part) != 2:
                raise ValueError(f"reward {name!r} is a {type(part).__name__}: give a pair (weight, reward)")
            weight, reward = part
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ValueError(f"the weight of reward {name!r} is {weight!r}: give a finite number")
            if isinstance(reward, RewardSum):
                raise ValueError(f"reward {name!r} is a sum itself: write its parts into this one")
        check_reward(self)


Reward = RewardPart | RewardSum
"""A function, a reward model of the policy's tokens, or one of the classes of this file."""


def parts_of(reward: Reward) -> dict[str, RewardPart]:
    """Return the parts of a reward, by names for errors."""
    if not isinstance(reward, RewardSum):
        return {"reward": reward}
    return {f"reward {name!r}": part for name, (_, part) in reward.parts.items()}


def check_reward(reward: Reward) -> None:
    """Check that a value is a reward.

    Raises:
        ValueError: `reward`, or a part of it, is a model without a value head of its own, or not a function.
    """
    for name, part in parts_of(reward).items():
        kind = type(part).__name__
        if isinstance(part, nn.Module) and not isinstance(part, ValueModel):
            raise ValueError(
                f"the {name} is a {kind}: of models give one of with_value_head or load_reward_model, as it "
                "is, neither boosted nor with adapters (merge adds those into it); a model that reads texts "
                "is called by a function (prompt, answer, row)"
            )
        if not callable(part) and not isinstance(part, ModelReward | TimedReward):
            raise ValueError(
                f"the {name} is a {kind}: give a function (prompt, answer, row), a reward model, or a "
                "ModelReward, TimedReward or RewardSum"
            )


def reward_records(reward: Reward) -> tuple[str, ...]:
    """Return the names of the metrics of a sum's parts."""
    return tuple(f"reward/{name}" for name in reward.parts) if isinstance(reward, RewardSum) else ()


class AnswerText(NamedTuple):
    """Input of a reward: an answer with its prompt.

    Attributes:
        prompt: The text of the prompt.
        answer: The text of the answer.
        row: The row of the prompt.
        prompt_ids: The policy's tokens of the prompt.
        answer_ids: The policy's tokens of the answer.
        is_cut: Whether the answer was truncated at the maximum length.
    """

    prompt: str
    answer: str
    row: ChatRow
    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    is_cut: bool


class Scores(NamedTuple):
    """Rewards of some answers.

    Attributes:
        total: Reward of each answer.
        parts: Rewards of each answer by the parts of a sum, by the names of their metrics.
    """

    total: list[float]
    parts: Mapping[str, list[float]]


class Scorer(ABC):
    """Abstract: evaluates a reward, and owns its resources."""

    @abstractmethod
    def scores(self, answers: Sequence[AnswerText]) -> list[float]:
        """Return the reward of each answer."""

    def parts(self, answers: Sequence[AnswerText]) -> Scores:
        """Return the reward of each answer, with the parts of a sum."""
        return Scores(self.scores(answers), {})

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free the resources."""


def scorer_of(reward: Reward, *, device: torch.device, rows_at_once: int, pad: int) -> Scorer:
    """Build the scorer of a reward.

    Args:
        reward: The reward.
        device: Device of reward models.
        rows_at_once: Maximum number of answers in a forward of a reward model.
        pad: Padding token of the policy's tokens.
    """
    if isinstance(reward, RewardSum):
        made = {
            name: scorer_of(part, device=device, rows_at_once=rows_at_once, pad=pad)
            for name, (_, part) in reward.parts.items()
        }
        return _SumScorer(reward, made)
    if isinstance(reward, ValueModel):
        return _ModelScorer(reward, _policy_text, device=device, rows_at_once=rows_at_once, pad=pad)
    if isinstance(reward, ModelReward):
        own = reward.tokenizer.pad_token_id
        return _ModelScorer(
            reward.model,
            lambda answer: _own_text(reward, answer),
            device=device,
            rows_at_once=rows_at_once,
            pad=reward.tokenizer.eos_token_id if own is None else own,
        )
    if isinstance(reward, TimedReward):
        return _TimedScorer(reward)
    return _FunctionScorer(reward)


class _FunctionScorer(Scorer):
    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def scores(self, answers: Sequence[AnswerText]) -> list[float]:
        return [float(self._function(each.prompt, each.answer, each.row)) for each in answers]


class _ModelScorer(Scorer):
    """Scorer of a reward model.

    Args:
        model: The model.
        encode: Returns the model's tokens of an answer.
        device: Device of the model.
        rows_at_once: Maximum number of answers in a forward.
        pad: Padding token.
    """

    def __init__(
        self,
        model: ValueModel,
        encode: Callable[[AnswerText], list[int]],
        *,
        device: torch.device,
        rows_at_once: int,
        pad: int,
    ) -> None:
        self._model, self._encode = model.to(device).eval(), encode
        self._device, self._size, self._pad = device, rows_at_once, pad

    @torch.no_grad()
    def scores(self, answers: Sequence[AnswerText]) -> list[float]:
        found: list[float] = []
        for start in range(0, len(answers), self._size):
            ids = [self._encode(each) for each in answers[start : start + self._size]]
            texts = [EncodedText(each, [False] * len(each)) for each in ids]
            made = collate(texts, pad_token_id=self._pad)
            data = {name: made[name].to(self._device) for name in ("input_ids", "attention_mask")}
            found += last_values(self._model(**data), data["attention_mask"]).tolist()
        return found


def _policy_text(answer: AnswerText) -> list[int]:
    return [*answer.prompt_ids, *answer.answer_ids]


def _own_text(reward: ModelReward, answer: AnswerText) -> list[int]:
    """Return the input of a reward model, in its own tokens."""
    row = replace(answer.row, stage="sft", dialogue=answer.row.dialogue.with_answer(answer.answer))
    encoded = encode_sft(row, reward.tokenizer, reward.length)
    if encoded is None:
        raise ValueError(
            f"{row.place}: the reward model reads {reward.length} tokens, and an answer has more: give fewer "
            "max_tokens"
        )
    return encoded.input_ids[:-1] if answer.is_cut else encoded.input_ids


class _TimedScorer(Scorer):
    def __init__(self, reward: TimedReward) -> None:
        self._calls: TimedCalls
        limits: dict[str, Any] = {"seconds": reward.seconds, "workers": reward.workers}
        try:
            self._calls = ProcessCalls(pickle.dumps(reward.function), **limits)
        except (pickle.PicklingError, AttributeError, TypeError):  # cannot be pickled: see `TimedReward`
            self._calls = ThreadCalls(reward.function, **limits)

    def scores(self, answers: Sequence[AnswerText]) -> list[float]:
        return self._calls.rewards([(each.prompt, each.answer, dict(each.row)) for each in answers])

    def close(self) -> None:
        self._calls.close()


class _SumScorer(Scorer):
    def __init__(self, reward: RewardSum, scorers: Mapping[str, Scorer]) -> None:
        self._weights = {name: weight for name, (weight, _) in reward.parts.items()}
        self._scorers = scorers

    def scores(self, answers: Sequence[AnswerText]) -> list[float]:
        return self.parts(answers).total

    def parts(self, answers: Sequence[AnswerText]) -> Scores:
        found = {name: each.scores(answers) for name, each in self._scorers.items()}
        total = [
            sum(self._weights[name] * values[place] for name, values in found.items())
            for place in range(len(answers))
        ]
        return Scores(total, {f"reward/{name}": values for name, values in found.items()})

    def close(self) -> None:
        for each in self._scorers.values():
            each.close()


class AgreedScores(NamedTuple):
    """Rewards of this rank's answers, without a failure on any rank.

    Attributes:
        scores: The rewards.
        mean: Mean over the counting answers of all ranks; 0 if there are none.
    """

    scores: Scores
    mean: float


def agreed_rewards(score: Callable[[], Scores], *, counts: Sequence[bool], rank: int) -> AgreedScores:
    """Return the rewards of this rank's answers, or raise on all ranks; collective.

    Args:
        score: Returns the rewards.
        counts: Whether each answer counts.
        rank: This rank.

    Raises:
        RewardError: `score` has raised, or returned a number that is not finite, on some rank.
    """
    found = Scores([], {})
    problem: str | None = None
    cause: BaseException | None = None
    try:
        found = score()
    except RewardCallError as error:
        problem, cause = str(error), error
    except (Exception, SystemExit) as error:  # any error of a user's function: other ranks wait below
        problem, cause = f"{type(error).__name__}: {error}", error
    for name, values in (*found.parts.items(), ("", found.total)):
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            of = f" of {name.removeprefix('reward/')!r}" if name else ""
            problem = (
                f"{len(wrong)} of {len(values)} rewards{of} are not finite numbers, the first is {wrong[0]}"
            )
            break
    kept = [value for value, is_counted in zip(found.total, counts, strict=False) if is_counted]
    own = [problem, 0.0 if problem else math.fsum(kept), len(kept)]
    told = cast(list[tuple[str | None, float, int]], gather_values(own))  # all-gather before the step
    failed = [number for number, (each, _, _) in enumerate(told) if each is not None]
    if failed:
        where = ", ".join(map(str, failed))
        raise RewardError(
            f"the reward failed on rank {where}, and no step was made: {told[failed[0]][0]}"
        ) from cause
    count = sum(number for _, _, number in told)
    return AgreedScores(found, math.fsum(each for _, each, _ in told) / max(count, 1))
