"""Group relative policy optimization (2402.03300): a model learns from rewards of its own answers.

Each prompt gets a group of answers, drawn from the model as it is; an answer that has a higher reward than
its group becomes more likely, one with a lower reward less. There is no critic.

The rows of a batch are prompts. They become answers and rewards (`_answers.py`), advantages, and batches of
texts that the common loop (`_fit.py`) trains on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from colossalai.booster import Booster
from colossalai.chat import losses
from colossalai.chat._answers import Answerer, ScoredAnswer, answer_mask
from colossalai.chat._callbacks import check_max_kl
from colossalai.chat._course import CourseOptions, course_of
from colossalai.chat._fit import Batch, FitResult
from colossalai.chat._reward_run import RewardRun, RunInputs
from colossalai.chat._text_method import check_length
from colossalai.chat.data import ChatData, EncodedData
from colossalai.chat.rewards import Reward, check_reward
from colossalai.chat.rollout import RolloutOptions
from colossalai.inference import SamplingParams
from colossalai.runtime import ModelWrapper


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group relative policy optimization, and its relatives.

    Attributes:
        reward: A function of the prompt and an answer as texts, and the row that the prompt is from: how good
            the answer is, a higher number is better. Or a reward model of the same tokens, or a
            `ModelReward`, `TimedReward` or `RewardSum`.
        group_size: Number of answers to a prompt.
        max_length: Most tokens of a prompt; what is longer loses its begin.
        iterations: Number of steps that are made of the same answers.
        epsilon: How far the probability of a token may fall before it has no gradient.
        epsilon_high: How far it may rise; None: as far. DAPO (2503.14476) takes 0.28.
        level: Whose ratio that is: of a "token", or of the "sequence" (GSPO, 2507.18071).
        normalize: What a mean is over: "batch" (all tokens: DAPO), "sequence" (tokens of an answer, then
            answers: 2402.03300), "constant" (the longest answer there may be: Dr. GRPO, 2503.20783).
        scale: What advantages are divided by: the deviation of the "group", or "none" (Dr. GRPO).
        kl_coef: Holds the model to a reference, which `fit` is given then.
        max_kl: Largest divergence from the reference, the mean of k3 over the tokens of a step; 10 steps in a
            row above it end the run. None: any.

    Raises:
        ValueError: An attribute is out of its range.
    """

    reward: Reward
    group_size: int = 8
    max_length: int = 512
    iterations: int = 1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    level: Literal["token", "sequence"] = "token"
    normalize: Literal["sequence", "batch", "constant"] = "batch"
    scale: Literal["group", "none"] = "group"
    kl_coef: float = 0.0
    max_kl: float | None = None

    def __post_init__(self) -> None:
        check_reward(self.reward)
        check_length(self.max_length)
        for name in ("iterations", "group_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give an integer of at least 1")
        if self.scale not in ("group", "none"):
            raise ValueError(f"scale is {self.scale!r}; it must be 'group' or 'none'")
        if not 0.0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef is {self.kl_coef}; it must be a finite number of at least 0")
        check_max_kl(self.max_kl, self.kl_coef)
        losses.group_advantages(torch.zeros(self.group_size), self.group_size)
        self._loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), torch.ones(1, 1) > 0, None, 1)

    def fit(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        booster: Booster,
        data: ChatData | EncodedData,
        tokenizer: Any,
        sampling: SamplingParams | None = None,
        reference: nn.Module | None = None,
        rows_at_once: int = 32,
        tokens_at_once: int | None = None,
        rollouts: RolloutOptions = RolloutOptions(),  # noqa: B008 - a frozen value
        samples_every: int | None = None,
        **course: Unpack[CourseOptions],
    ) -> FitResult:
        """Train a model; every rank calls it.

        Args:
            model: The model, as it is or boosted together with `optimizer`; under any methods.
            optimizer: Its optimizer.
            booster: The parallel methods.
            data: Prompts: rows of stage "prompts", whose further keys the reward function gets.
            tokenizer: That of the model.
            sampling: How answers are drawn; `n`, `seed` and `logprobs` are set here. Default: temperature 1
                and up to 64 tokens. The model is trained as it is at that temperature.
            reference: What `kl_coef` holds the model to: a model of its own, which is not changed. None with
                a model of adapters: that model without them.
            rows_at_once: Most answers that a forward and backward computes.
            tokens_at_once: Most tokens that it computes, of prompts and answers with their padding, so that
                there are more short answers in a batch than long ones. None: any number.
            rollouts: Where and when answers are drawn.
            samples_every: Of every so many steps some prompts, answers and rewards of rank 0 are written to
                `samples.jsonl` in the folder `log`.
            course: How long and how, and what is written down: the attributes of `Course`, of which
                `steps` or `epochs` has to be given.

        Raises:
            ValueError: `data` is of another stage, `reference` and `kl_coef` do not go together, or a number
                is out of range.
            PolicyDriftError: The model has been further than `max_kl` from the reference for 10 steps; its
                records and, with `save`, its training state are written before.
            RewardError: `reward` failed on some rank.
        """
        run = RewardRun(
            self,
            {"model": (model, optimizer)},
            RunInputs(
                booster=booster,
                data=data,
                tokenizer=tokenizer,
                sampling=sampling,
                reference=reference,
                rows_at_once=rows_at_once,
                tokens_at_once=tokens_at_once,
                rollouts=rollouts,
                samples_every=samples_every,
                course=course_of(course),
            ),
            num_answers=self.group_size,
        )
        groups = _AnswerGroups(self, run.answerer, most_tokens=run.most_tokens)
        loop = run.loop(groups.criterion, measured=_OF_GROUPS, steps=self.iterations)
        with run, loop:
            for answers in run.windows(loop, steps=self.iterations):
                batches = groups.batches(answers, run.model, reference)
                generating = run.time_so_far()
                # A training state knows which prompts were read, and not what was made of them: it is written
                # after the last step of a window, or when the run ends.
                for number in range(min(self.iterations, loop.total - loop.done)):
                    is_last = number == self.iterations - 1 or loop.done == loop.total - 1
                    groups.is_first = number == 0
                    loop.step(batches, more=generating, saves=is_last)
        return loop.result()

    def _loss(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        ref_logp: Tensor | None,
        max_tokens: int,
    ) -> Tensor:
        """Return the sum of the losses of answers."""
        divisor = {"num_tokens": 1} if self.normalize == "batch" else {"num_sequences": 1}
        return losses.grpo_loss(
            logp,
            old_logp,
            advantages,
            mask,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            level=self.level,
            normalize=self.normalize,
            max_length=max_tokens if self.normalize == "constant" else None,
            ref_logp=ref_logp,
            kl_coef=0.0 if ref_logp is None else self.kl_coef,
            **divisor,
        )


_OF_GROUPS = ("reward_spread", "groups_alike")
"""What is written down beside: the deviation of rewards within a group, and groups of equal rewards."""


class _AnswerGroups:
    """What GRPO makes of answers.

    Args:
        method: The options.
        answerer: What answers.
        most_tokens: Of an answer.

    Attributes:
        is_first: Whether the next step is the first one of its answers.
    """

    def __init__(self, method: GRPO, answerer: Answerer, *, most_tokens: int) -> None:
        self._method, self._answerer, self._most_tokens = method, answerer, most_tokens
        self.is_first = True

    def batches(
        self, answers: Sequence[ScoredAnswer], model: ModelWrapper, reference: nn.Module | None
    ) -> list[Batch]:
        """Return batches of answers with their advantages."""
        size, method = self._method.group_size, self._method
        rewards = torch.tensor([each.reward for each in answers], dtype=torch.float64)
        self._measure(rewards.view(-1, size), [each.counts for each in answers[::size]])
        advantages = losses.group_advantages(rewards, size, method.scale)
        found = self._answerer.batches(answers, advantages=advantages)
        for data, labels in found:
            if (
                method.iterations > 1 and "old_logp" not in labels
            ):  # in the first step the model is the one that drew the answers
                labels["old_logp"] = self._answerer.logprobs(model, data)
            if method.kl_coef > 0.0:
                labels["ref_logp"] = self._answerer.reference_logprobs(model, reference, data)
        return found

    def criterion(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of answers, and what it is divided by."""
        logits, mask = self._answerer.tempered(output), answer_mask(labels)
        logp = losses.token_logprobs(logits, labels["input_ids"][:, 1:])
        old_logp = labels.get("old_logp", logp.detach())
        loss = self._method._loss(
            logp,
            old_logp,
            labels["advantages"].to(logp.dtype),
            mask,
            labels.get("ref_logp"),
            self._most_tokens,
        )
        low, high = self._method.epsilon, self._method.epsilon_high or self._method.epsilon
        self._answerer.measure_tokens(
            logits, logp.detach(), old_logp, labels, clip=(low, high), is_first=self.is_first
        )
        return loss, mask.sum() if self._method.normalize == "batch" else labels["counts"].sum()

    def _measure(self, rewards: Tensor, counts: Sequence[bool]) -> None:
        """Note what groups are like, (prompts, group); stand-ins are left out."""
        kept = rewards[torch.tensor(counts)]
        self._answerer.measures.add(
            float(len(kept)),
            reward_spread=kept.std(1).sum() if len(kept) else torch.zeros(()),
            groups_alike=(kept == kept[:, :1]).all(1).double().sum(),
        )
