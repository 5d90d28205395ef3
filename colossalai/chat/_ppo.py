"""Proximal policy optimization (1707.06347) of a language model: the third stage of InstructGPT (2203.02155).

A token is an action. The reward of an answer comes with its last token; each token pays for being more likely
than under a reference. A critic learns what is still to come, and tells which tokens did better than that
(1506.02438). Texts of pretraining may be learned beside, so that nothing is forgotten (PPO-ptx).
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

_BATCH_SIZE = 8  # prompts of a batch, as documented


@dataclass(frozen=True, kw_only=True)
class PPO:
    """Proximal policy optimization with a critic.

    Attributes:
        reward: A reward model of the same tokens, or a function of the prompt and an answer as texts, and the
            row that the prompt is from: how good the answer is. Or a `ModelReward`, `TimedReward` or
            `RewardSum`.
        max_length: Most tokens of a prompt, and of a text of pretraining.
        iterations: How often the same answers are learned from.
        minibatches: Number of steps that the answers are divided into, each time.
        clip: How far the probability of a token may move before it has no gradient.
        value_clip: How far a value of the critic may move; math.inf: as far as it likes.
        gamma: What a reward is worth a token earlier.
        lam: How far ahead advantages look before they trust the critic (1506.02438).
        kl_coef: What a token pays for being more likely than under the reference, which `fit` is given.
        max_kl: Largest divergence from the reference, the mean of k3 over the tokens of a step; 10 steps in a
            row above it end the run. None: any.
        ptx_coef: The weight of texts of pretraining, which `fit` is given.

    Raises:
        ValueError: An attribute is out of its range.
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
        one, mask = torch.zeros(1, 1), torch.ones(1, 1) > 0  # the losses know what their options may be
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
        """Train a model and its critic; every rank calls it.

        Args:
            model: The policy, as it is or boosted together with `optimizer`; under any methods.
            optimizer: Its optimizer.
            critic: A model of `with_value_head`, with parameters of its own; it is trained as well.
            critic_optimizer: Its optimizer.
            booster: The parallel methods.
            data: Prompts: rows of stage "prompts", whose further keys a reward function gets.
            tokenizer: That of all models.
            reference: What `kl_coef` holds the model to: a model of its own, which is not changed. None with
                a model of adapters: that model without them.
            pretrain: Texts that are learned beside, rows of stage "sft", for a `ptx_coef` above 0.
            sampling: How answers are drawn; `n`, `seed` and `logprobs` are set here. Default: temperature 1
                and up to 64 tokens. The model is trained as it is at that temperature.
            rows_at_once: Most answers that a forward and backward computes.
            tokens_at_once: Most tokens that it computes, of prompts and answers with their padding, so that
                there are more short answers in a batch than long ones. None: any number.
            samples_every: Of every so many steps some prompts, answers and rewards of rank 0 are written to
                `samples.jsonl` in the folder `log`.
            rollouts: Where and when answers are drawn.
            ptx_batch_size: Texts of pretraining beside each batch of prompts.
            course: How long and how, and what is written down: the attributes of `Course`, of which
                `steps` or `epochs` has to be given.

        Raises:
            ValueError: `data` or `pretrain` is of another stage; `reference` and `kl_coef`, or `pretrain` and
                `ptx_coef`, do not go together; or a number is out of range.
            PolicyDriftError: The model has been further than `max_kl` from the reference for 10 steps; its
                records and, with `save`, its training state are written before.
            RewardError: The reward failed on some rank.
            FloatingPointError: Values of the critic, or rewards, have led to advantages that are not finite.
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
                    beside = self._beside(texts, loop.done, num_texts, tokenizer, booster)
                    learned.weigh(beside, part)
                    # The critic first: a training state is written in the policy's step, and holds both.
                    more = generating | {"value_loss": learned.learn_values(part, max_norm=made.max_norm)}
                    is_last = number == self.iterations * len(parts) - 1 or loop.done == loop.total - 1
                    loop.step([*part, *beside], more=more, saves=is_last)
                    learned.is_first = False
                learned.is_first = True
        return loop.result()

    def _texts(
        self, pretrain: ChatData | EncodedData | None, tokenizer: Any, model: nn.Module
    ) -> EncodedData | None:
        """Return the texts of pretraining."""
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

    def _beside(
        self, texts: EncodedData | None, step: int, size: int, tokenizer: Any, booster: Booster
    ) -> list[Batch]:
        """Return the texts of pretraining of a step: those that come next, other ones on each rank."""
        if texts is None:
            return []
        replicas, replica = booster.mesh.axis_size("dp"), booster.mesh.axis_rank("dp")
        first = (step * replicas + replica) * size
        rows = [texts.texts[(first + place) % len(texts)] for place in range(size)]
        pipeline = booster.plan.pipeline
        missing = 0 if pipeline is None else -size % pipeline.num_microbatches  # microbatches are alike
        data, labels = text_batch([*rows, *[rows[-1]] * missing], pad=padding_of(tokenizer))
        labels["counts"][size:] = False
        moved = {name: each.to(booster.device) for name, each in (data | labels).items()}
        return [({name: moved[name] for name in data}, {name: moved[name] for name in labels})]


class _ActorCritic:
    """What PPO makes of answers.

    Args:
        method: The options.
        run: What answers, policy and critic.
        reference: What the policy is held to.
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
        """Return the batches of each step, with advantages and returns; as many on every rank."""
        found = []
        for own in self._divided(answers):
            rewards = torch.tensor([each.reward for each in own], dtype=torch.float64)
            batches = self._answerer.batches(own, rewards=rewards)
            for data, labels in batches:
                self._add(data, labels, labels.pop("rewards"))
            found.append(batches)
        self._whiten([labels for batches in found for _, labels in batches])
        return found

    def _divided(self, answers: Sequence[ScoredAnswer]) -> Iterator[list[ScoredAnswer]]:
        """Yield the answers of each step: the same ones on all ranks together as in one process.

        Ranks have as many answers in a step, since each forward may be a collective: those that lack one have
        an answer in its place that does not count. So has a step of fewer answers than there are steps.
        """
        mesh, number = self._booster.mesh, self._method.minibatches
        replicas, replica = mesh.axis_size("dp"), mesh.axis_rank("dp")
        kept = [each for each in answers if each.counts]
        total = torch.tensor(float(len(kept)), device=self._booster.device)
        all_reduce_in_place(total, ParallelMode.DATA)  # answers that count, of all replicas
        ends = [int(total) * (place + 1) // number for place in range(number)]
        for start, end in zip([0, *ends], ends, strict=False):
            # Prompts are dealt out like cards: answer n of all is on replica n % replicas.
            dealt = [range(start + (rank - start) % replicas, end, replicas) for rank in range(replicas)]
            own = [kept[place // replicas] for place in dealt[replica]]
            size = max(1, *map(len, dealt))
            yield own + [answers[0]._replace(counts=False)] * (size - len(own))

    def policy_loss(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of tokens, and how many there are; of texts of pretraining, none."""
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
        """Say what the tokens of texts count beside those of answers, of which a step takes the mean.

        With A tokens of answers and B of texts on all ranks, the mean over A is that of both losses if those
        of texts are weighted by ptx_coef A / B.
        """
        if not texts:
            return
        counts = [sum(float(answer_mask(labels).sum()) for _, labels in each) for each in (answers, texts)]
        both = torch.tensor(counts, dtype=torch.float64).to(self._booster.device)
        all_reduce_in_place(both, ParallelMode.DATA)
        self._weight_of_texts = self._method.ptx_coef * both[0] / both[1].clamp(min=1)

    def _value_loss(self, output: Any, labels: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        mask = answer_mask(labels)
        values: Tensor = output[:, :-1]
        old, returns = labels["old_values"], labels["returns"].to(values.dtype)
        loss = losses.value_loss(values, old, returns, mask, self._method.value_clip, num_tokens=1)
        return loss, mask.sum()

    @torch.no_grad()
    def _add(self, data: Mapping[str, Tensor], labels: dict[str, Any], rewards: Tensor) -> None:
        """Add what the models say of answers before they change."""
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
        """Give advantages mean 0 and deviation 1 over the tokens of all ranks that count.

        Raises:
            FloatingPointError: An advantage is not finite; on all ranks, before the step.
        """
        device = self._booster.device
        chosen = [labels["advantages"].double()[answer_mask(labels)] for labels in batches]
        own = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.float64, device=device)
        sums = torch.stack([torch.tensor(float(len(own)), device=device).double(), own.sum()])
        all_reduce_in_place(sums, ParallelMode.DATA)  # the ranks of a replica have the same
        count, mean = sums[0], sums[1] / sums[0].clamp(min=1)
        squares = (own - mean).square().sum().reshape(1)
        all_reduce_in_place(squares, ParallelMode.DATA)  # of what is left, not of large numbers
        deviation = (squares[0] / (count - 1).clamp(min=1) + 1e-8).sqrt()
        if not math.isfinite(float(deviation)):  # of a NaN anywhere it is one, on every rank
            raise FloatingPointError(
                "advantages of answers are not finite, and no step was made: the values of the critic have "
                "grown without bounds, or rewards have; give a smaller learning rate of the critic, or "
                "max_norm, or smaller rewards"
            )
        for labels in batches:
            labels["advantages"] = (labels["advantages"].double() - mean) / deviation
