"""Proximal policy optimization (1707.06347) of a language model: the third stage of InstructGPT (2203.02155).

A token is an action. The reward of an answer comes with its last token, and each token is penalized for a
higher log-probability than under a reference. A critic estimates the expected future reward, and the
advantage of a token is relative to it (1506.02438). Pretraining texts can be mixed in against forgetting
(PPO-ptx).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from colossalai.booster import Booster
from colossalai.chat import losses
from colossalai.chat._answers import ScoredAnswer, answer_mask
from colossalai.chat._callbacks import check_max_kl
from colossalai.chat._course import CourseOptions, course_of
from colossalai.chat._fit import Batch, FitResult, forward_only, step_of
from colossalai.chat._reward_run import RewardRun, RunInputs
from colossalai.chat._text_method import (
    check_length,
    check_readable,
    encoded_of,
    logits_of,
    padding_of,
    text_batch,
)
from colossalai.chat.data import ChatData, EncodedData
from colossalai.chat.rewards import Reward, check_reward
from colossalai.chat.rollout import RolloutOptions
from colossalai.communication import all_reduce_in_place
from colossalai.context import ParallelMode
from colossalai.inference import SamplingParams

_BATCH_SIZE = 8  # prompts of a batch, the documented default


@dataclass(frozen=True, kw_only=True)
class PPO:
    """Proximal policy optimization with a critic.

    Attributes:
        reward: A reward model of the same tokens, or a function of the prompt, an answer and the prompt's row
            that returns the reward, higher for better answers. Or a `ModelReward`, `TimedReward` or
            `RewardSum`.
        max_length: Maximum number of tokens of a prompt, and of a pretraining text.
        iterations: Number of passes over the same answers.
        minibatches: Number of steps in each pass.
        clip: Clip of the ratio: tokens outside 1 - clip and 1 + clip get no gradient.
        value_clip: Clip of the change of the critic's values; math.inf for none.
        gamma: Discount factor of rewards per token.
        lam: Lambda of generalized advantage estimation (1506.02438).
        kl_coef: Coefficient of the per-token divergence from the reference, an argument of `fit`.
        max_kl: Largest divergence from the reference, the mean of k3 over the tokens of a step; 10
            consecutive steps above it end the run. None for no limit.
        ptx_coef: Weight of the pretraining texts, an argument of `fit`.

    Raises:
        ValueError: An attribute is out of range.
    """

    reward: Reward
    max_length: int = 512
    iterations: int = 4
    minibatches: int = 1
    clip: float = 0.2
    value_clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.1
    max_kl: float | None = None
    ptx_coef: float = 0.0

    def __post_init__(self) -> None:
        check_reward(self.reward)
        check_length(self.max_length)
        for name in ("iterations", "minibatches"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: give an integer of at least 1")
        for name in ("kl_coef", "ptx_coef"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be a finite number of at least 0")
        check_max_kl(self.max_kl, self.kl_coef)
        one, mask = torch.zeros(1, 1), torch.ones(1, 1) > 0  # let the losses check their options
        losses.ppo_policy_loss(one, one, one, mask, self.clip)
        losses.value_loss(one, one, one, mask, self.value_clip)
        losses.gae(one, one, mask, self.gamma, self.lam)

    def fit(  # noqa: PLR0913 - two models with their optimizers
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        critic: nn.Module,
        critic_optimizer: Optimizer,
        booster: Booster,
        data: ChatData | EncodedData,
        tokenizer: Any,
        reference: nn.Module | None = None,
        pretrain: ChatData | EncodedData | None = None,
        sampling: SamplingParams | None = None,
        rows_at_once: int = 32,
        tokens_at_once: int | None = None,
        rollouts: RolloutOptions = RolloutOptions(),  # noqa: B008 - a frozen value
        samples_every: int | None = None,
        ptx_batch_size: int = 1,
        **course: Unpack[CourseOptions],
    ) -> FitResult:
        """Train a model and its critic; collective.

        Args:
            model: The policy, as it is or boosted together with `optimizer`; with any parallel methods.
            optimizer: Its optimizer.
            critic: A model of `with_value_head`, with separate parameters; it is trained as well.
            critic_optimizer: Its optimizer.
            booster: The parallel methods.
            data: Prompts: rows of stage "prompts", with further keys for a reward function.
            tokenizer: The tokenizer of all models.
            reference: The reference of `kl_coef`: a separate model, which is not changed. None with a model
                with
                adapters: that model without them.
            pretrain: Pretraining texts, rows of stage "sft", for a `ptx_coef` above 0.
            sampling: Sampling parameters; `n`, `seed` and `logprobs` are set here. Default: temperature 1 and
                up to 64 tokens. The model is trained at that temperature.
            rows_at_once: Maximum number of answers in a forward and backward.
            tokens_at_once: Maximum number of tokens in a forward and backward, with padding, so that batches
                of short answers have more of them. None for no limit.
            samples_every: Interval in steps at which rank 0 writes some prompts, answers and rewards to
                `samples.jsonl` in the folder `log`.
            rollouts: Placement and schedule of the rollouts.
            ptx_batch_size: Number of pretraining texts for each batch of prompts.
            course: Length, optimization and records: the attributes of `Course`, with `steps` or `epochs`.

        Raises:
            ValueError: `data` or `pretrain` is of another stage; `reference` and `kl_coef`, or `pretrain` and
                `ptx_coef`, do not agree; or a number is out of range.
            PolicyDriftError: The divergence from the reference was above `max_kl` for 10 steps; records and,
                with `save`, a training state are written first.
            RewardError: The reward failed on some rank.
            FloatingPointError: An advantage is not finite, because of the critic's values or the rewards.
        """
        if type(ptx_batch_size) is not int or ptx_batch_size < 1:
            raise ValueError(f"ptx_batch_size={ptx_batch_size!r}: give an integer of at least 1")
        texts = self._texts(pretrain, tokenizer, model)
        made = course_of(course, batch_size=_BATCH_SIZE)
        run = RewardRun(
            self,
            {"model": (model, optimizer), "critic": (critic, critic_optimizer)},
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
                course=made,
            ),
            num_answers=1,
        )
        learned = _ActorCritic(self, run, reference=reference, booster=booster)
        num_texts, steps = ptx_batch_size * made.accumulation, self.iterations * self.minibatches
        loop = run.loop(learned.policy_loss, measured=(), steps=steps)
        run.trained["critic"][0].train()
        with run, loop:
            for answers in run.windows(loop, steps=steps):
                parts = learned.parts(answers)
                generating = run.time_so_far()
                for number in range(min(self.iterations * len(parts), loop.total - loop.done)):
                    part = parts[number % len(parts)]
                    beside = self._pretraining_batches(texts, loop.done, num_texts, tokenizer, booster)
                    learned.weigh(beside, part)
                    # The critic first: the training state, saved in the policy's step, contains both.
                    more = generating | {"value_loss": learned.learn_values(part, max_norm=made.max_norm)}
                    is_last = number == self.iterations * len(parts) - 1 or loop.done == loop.total - 1
                    loop.step([*part, *beside], more=more, saves=is_last)
                    learned.is_first = False
                learned.is_first = True
        return loop.result()

    def _texts(
        self, pretrain: ChatData | EncodedData | None, tokenizer: Any, model: nn.Module
    ) -> EncodedData | None:
        """Return the pretraining texts."""
        if (pretrain is None) != (self.ptx_coef == 0.0):
            raise ValueError(
                f"ptx_coef={self.ptx_coef} and pretrain={type(pretrain).__name__}: texts of pretraining are "
                "learned with a ptx_coef above 0; give both, or neither"
            )
        if pretrain is None:
            return None
        encoded = encoded_of(pretrain, tokenizer, self.max_length)
        if encoded.stage != "sft":
            raise ValueError(
                f"pretrain has rows of stage {encoded.stage!r}: give rows of 'sft', texts to learn"
            )
        assert isinstance(encoded, EncodedData), "of stage sft"
        check_readable(encoded.texts, model)
        return encoded

    def _pretraining_batches(
        self, texts: EncodedData | None, step: int, size: int, tokenizer: Any, booster: Booster
    ) -> list[Batch]:
        """Return the next pretraining texts of a step, different ones on each rank."""
        if texts is None:
            return []
        replicas, replica = booster.mesh.axis_size("dp"), booster.mesh.axis_rank("dp")
        first = (step * replicas + replica) * size
        rows = [texts.texts[(first + place) % len(texts)] for place in range(size)]
        pipeline = booster.plan.pipeline
        missing = 0 if pipeline is None else -size % pipeline.num_microbatches  # equal microbatches
        data, labels = text_batch([*rows, *[rows[-1]] * missing], pad=padding_of(tokenizer))
        labels["counts"][size:] = False
        moved = {name: each.to(booster.device) for name, each in (data | labels).items()}
        return [({name: moved[name] for name in data}, {name: moved[name] for name in labels})]


class _ActorCritic:
    """Batches and losses of PPO.

    Args:
        method: The options.
        run: The run, with the answerer, the policy and the critic.
        reference: The reference of the divergence penalty.
        booster: The parallel methods.

    Attributes:
        is_first: Whether the next step is the first one of its answers.
    """

    def __init__(
        self,
        method: PPO,
        run: RewardRun,
        *,
        reference: nn.Module | None,
        booster: Booster,
    ) -> None:
        self._method, self._answerer, self._model = method, run.answerer, run.model
        self._critic, self._critic_optimizer = run.trained["critic"]
        self._reference, self._booster = reference, booster
        self._weight_of_texts = torch.zeros(())
        self.is_first = True

    def parts(self, answers: Sequence[ScoredAnswer]) -> list[list[Batch]]:
        """Return the batches of each step, with advantages and returns; the same number on every rank."""
        found = []
        for own in self._divide(answers):
            rewards = torch.tensor([each.reward for each in own], dtype=torch.float64)
            batches = self._answerer.batches(own, rewards=rewards)
            for data, labels in batches:
                self._add(data, labels, labels.pop("rewards"))
            found.append(batches)
        self._whiten([labels for batches in found for _, labels in batches])
        return found

    def _divide(self, answers: Sequence[ScoredAnswer]) -> Iterator[list[ScoredAnswer]]:
        """Yield the answers of each step: over all ranks the same as in one process.

        All ranks have the same number of answers in a step, since each forward may be a collective: ranks
        with fewer answers add padding ones, which do not count. So does a step without answers of its own.
        """
        mesh, number = self._booster.mesh, self._method.minibatches
        replicas, replica = mesh.axis_size("dp"), mesh.axis_rank("dp")
        kept = [each for each in answers if each.counts]
        total = torch.tensor(float(len(kept)), device=self._booster.device)
        all_reduce_in_place(total, ParallelMode.DATA)  # answers that count, of all replicas
        ends = [int(total) * (place + 1) // number for place in range(number)]
        for start, end in zip([0, *ends], ends, strict=False):
            # Prompts are assigned round-robin: answer n of all is on replica n % replicas.
            dealt = [range(start + (rank - start) % replicas, end, replicas) for rank in range(replicas)]
            own = [kept[place // replicas] for place in dealt[replica]]
            size = max(1, *map(len, dealt))
            yield own + [answers[0]._replace(counts=False)] * (size - len(own))

    def policy_loss(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of tokens and their number, which is 0 for pretraining texts."""
        if "advantages" not in labels:  # a text of pretraining, see `weigh`
            mask = answer_mask(labels)
            logp = losses.token_logprobs(logits_of(output)[:, :-1], labels["input_ids"][:, 1:])
            return -self._weight_of_texts * torch.where(mask, logp, 0.0).sum(), torch.zeros_like(mask.sum())
        logits, mask = self._answerer.tempered(output), answer_mask(labels)
        logp = losses.token_logprobs(logits, labels["input_ids"][:, 1:])
        advantages = labels["advantages"].to(logp.dtype)
        loss = losses.ppo_policy_loss(
            logp, labels["old_logp"], advantages, mask, self._method.clip, num_tokens=1
        )
        clip = (self._method.clip, self._method.clip)
        self._answerer.measure_tokens(
            logits, logp.detach(), labels["old_logp"], labels, clip=clip, is_first=self.is_first
        )
        return loss, mask.sum()

    def learn_values(self, batches: Sequence[Batch], *, max_norm: float | None) -> float:
        """Make a step of the critic; return its mean loss."""
        return step_of(
            batches,
            self._critic,
            self._critic_optimizer,
            booster=self._booster,
            criterion=self._value_loss,
            max_norm=max_norm,
        )

    def weigh(self, texts: Sequence[Batch], answers: Sequence[Batch]) -> None:
        """Set the weight of pretraining tokens relative to answer tokens, over which a step takes the mean.

        With A tokens of answers and B of texts on all ranks, the mean over A equals the sum of both mean
        losses if texts are weighted by ptx_coef A / B.
        """
        if not texts:
            return
        counts = [sum(float(answer_mask(labels).sum()) for _, labels in each) for each in (answers, texts)]
        both = torch.tensor(counts, dtype=torch.float64).to(self._booster.device)
        all_reduce_in_place(both, ParallelMode.DATA)  # tokens of answers and of texts, over all replicas
        self._weight_of_texts = self._method.ptx_coef * both[0] / both[1].clamp(min=1)

    def _value_loss(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        mask = answer_mask(labels)
        values: Tensor = output[:, :-1]
        old, returns = labels["old_values"], labels["returns"].to(values.dtype)
        loss = losses.value_loss(values, old, returns, mask, self._method.value_clip, num_tokens=1)
        return loss, mask.sum()

    @torch.no_grad()
    def _add(self, data: Mapping[str, Tensor], labels: dict[str, Any], rewards: Tensor) -> None:
        """Add outputs of the models before their update, with advantages and returns."""
        mask = labels["loss_mask"][:, 1:]
        if "old_logp" not in labels:
            labels["old_logp"] = self._answerer.logprobs(self._model, data)
        old = labels["old_logp"]
        if self._method.kl_coef > 0.0:
            labels["ref_logp"] = self._answerer.reference_logprobs(self._model, self._reference, data)
        labels["old_values"] = values = forward_only(
            self._critic, data, lambda output: output[:, :-1], booster=self._booster
        )
        of_tokens = losses.token_rewards(
            rewards.to(old), old, labels.get("ref_logp", old), mask, self._method.kl_coef
        )
        labels["advantages"], labels["returns"] = losses.gae(
            of_tokens, values.to(of_tokens.dtype), mask, self._method.gamma, self._method.lam
        )

    def _whiten(self, batches: Sequence[dict[str, Any]]) -> None:
        """Normalize advantages to mean 0 and deviation 1 over the counting tokens of all ranks.

        Raises:
            FloatingPointError: An advantage is not finite; raised on all ranks, before the step.
        """
        device = self._booster.device
        chosen = [labels["advantages"].double()[answer_mask(labels)] for labels in batches]
        own = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.float64, device=device)
        sums = torch.stack([torch.tensor(float(len(own)), device=device).double(), own.sum()])
        all_reduce_in_place(sums, ParallelMode.DATA)  # ranks of a replica have equal sums
        count, mean = sums[0], sums[1] / sums[0].clamp(min=1)
        squares = (own - mean).square().sum().reshape(1)
        all_reduce_in_place(squares, ParallelMode.DATA)  # of centered values, to avoid cancellation
        deviation = (squares[0] / (count - 1).clamp(min=1) + 1e-8).sqrt()
        if not math.isfinite(float(deviation)):  # a NaN of any rank makes it NaN on every rank
            raise FloatingPointError(
                "advantages of answers are not finite, and no step was made: the values of the critic have "
                "grown without bounds, or rewards have; give a smaller learning rate of the critic, or "
                "max_norm, or smaller rewards"
            )
        for labels in batches:
            labels["advantages"] = (labels["advantages"].double() - mean) / deviation
