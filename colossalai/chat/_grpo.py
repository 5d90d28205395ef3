"""Group relative policy optimization (2402.03300): a model learns from rewards of its own answers.

Each prompt gets a group of answers, drawn from the current model. An answer with a higher reward than the
group's mean becomes more likely, one with a lower reward less likely. There is no critic.

The rows of a batch are prompts. They are turned into answers and rewards (`_answers.py`), advantages, and
batches of texts for the common loop (`_fit.py`).
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
    """Group relative policy optimization and its variants.

    Attributes:
        reward: A function of the prompt, an answer and the prompt's row that returns the reward, higher for
            better answers. Or a reward model of the same tokens, or a `ModelReward`, `TimedReward` or
            `RewardSum`.
        group_size: Number of answers to a prompt.
        max_length: Maximum number of tokens of a prompt; longer ones are truncated at the beginning.
        iterations: Number of steps on the same answers.
        epsilon: Lower clip of the ratio: tokens below 1 - epsilon get no gradient.
        epsilon_high: Upper clip of the ratio. Default: `epsilon`. DAPO (2503.14476) uses 0.28.
        level: Level of the ratio: "token", or "sequence" (GSPO, 2507.18071).
        normalize: Mean of the loss: "batch" (over all tokens: DAPO), "sequence" (over the tokens of an
            answer, then over answers: 2402.03300), "constant" (over the maximum length: Dr. GRPO,
            2503.20783).
        scale: Divisor of advantages: the deviation of the "group", or "none" (Dr. GRPO).
        kl_coef: Coefficient of the divergence from a reference, an argument of `fit`.
        max_kl: Largest divergence from the reference, the mean of k3 over the tokens of a step; 10
            consecutive steps above it end the run. None for no limit.

    Raises:
        ValueError: An attribute is out of range.
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
        """Train a model; collective.

        Args:
            model: The model, as it is or boosted together with `optimizer`; with any parallel methods.
            optimizer: Its optimizer.
            booster: The parallel methods.
            data: Prompts: rows of stage "prompts", with further keys for the reward function.
            tokenizer: The tokenizer of the model.
            sampling: Sampling parameters; `n`, `seed` and `logprobs` are set here. Default: temperature 1 and
                up to 64 tokens. The model is trained at that temperature.
            reference: The reference of `kl_coef`: a separate model, which is not changed. None with a model
                with
                adapters: that model without them.
            rows_at_once: Maximum number of answers in a forward and backward.
            tokens_at_once: Maximum number of tokens in a forward and backward, with padding, so that batches
                of short answers have more of them. None for no limit.
            rollouts: Placement and schedule of the rollouts.
            samples_every: Interval in steps at which rank 0 writes some prompts, answers and rewards to
                `samples.jsonl` in the folder `log`.
            course: Length, optimization and records: the attributes of `Course`, with `steps` or `epochs`.

        Raises:
            ValueError: `data` is of another stage, `reference` and `kl_coef` do not agree, or a number is out
                of range.
            PolicyDriftError: The divergence from the reference was above `max_kl` for 10 steps; records and,
                with `save`, a training state are written first.
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
                # A training state has the position in the prompts, but not their answers: it is saved after
                # the last step of a window, or at the end of the run.
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
"""Further metrics: deviation of rewards within a group, and share of groups with equal rewards."""


class _AnswerGroups:
    """Batches and loss of GRPO.

    Args:
        method: The options.
        answerer: Source of the answers.
        most_tokens: Maximum number of tokens of an answer.

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
            ):  # in the first step the current model has drawn the answers
                labels["old_logp"] = self._answerer.logprobs(model, data)
            if method.kl_coef > 0.0:
                labels["ref_logp"] = self._answerer.reference_logprobs(model, reference, data)
        return found

    def criterion(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of answers, and its divisor."""
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
        """Record metrics of the groups, (prompts, group), without padding ones."""
        kept = rewards[torch.tensor(counts)]
        self._answerer.measures.add(
            float(len(kept)),
            reward_spread=kept.std(1).sum() if len(kept) else torch.zeros(()),
            groups_alike=(kept == kept[:, :1]).all(1).double().sum(),
        )
