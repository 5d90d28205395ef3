"""Rollout batches: answers of the model in training to prompts, drawn, scored, and collated for the loss.

All methods that learn from rewards share this code; they differ in their use of the rewards.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster import Booster, adapters_off
from colossalai.chat import losses
from colossalai.chat._callbacks import KL_NAME, LARGEST_GAP, AnswerSample, Gap, RewardWatch
from colossalai.chat._fit import TRAINING_RATE, Batch, FitLoop, forward_only
from colossalai.chat._records import Measures
from colossalai.chat._text_method import logits_of, padding_of
from colossalai.chat.data import ChatRow, EncodedText, collate, places_in_batches
from colossalai.chat.rewards import (
    AnswerText,
    Reward,
    RewardCallError,
    Scores,
    agreed_rewards,
    scorer_of,
)
from colossalai.chat.rollout import Rollout, RolloutEngine, RolloutOptions
from colossalai.cluster import gather_values
from colossalai.communication import all_reduce_in_place
from colossalai.context import ParallelMode
from colossalai.inference import EngineStopped, RequestFailed, RequestRefused, SamplingParams
from colossalai.runtime import ModelWrapper

_ROLLOUT_RATE = "tokens_per_second_generating"
MEASURED = (
    *("reward", "reward_deviation", "length", "share_cut", "clip_share", "entropy", "kl", "kl_k1"),
    *("logprob_gap", LARGEST_GAP, _ROLLOUT_RATE, TRAINING_RATE),
)
"""Metrics of each step: mean and standard deviation of rewards, tokens of an answer, share of truncated
answers, share of clipped tokens, entropy in nats, k3 and k1 divergence from the model that drew the answers,
mean and largest |log p(engine) - log p(trainer)| of a token, tokens generated per second, and tokens trained
on per second. Metrics of rewards and answers are part of the first step that uses them."""
MEASURED_OF_REFERENCE = (KL_NAME, f"{KL_NAME}_k1")
"""The divergence from the reference."""
_SAMPLED_PROMPTS = 4
_OF_ALL_RANKS = (RequestRefused, RequestFailed, EngineStopped)
"""Errors of an engine of several ranks that all of them raise."""


class Prompt(NamedTuple):
    """A prompt with its number and its row."""

    number: int
    encoded: EncodedText
    row: ChatRow


class ScoredAnswer(NamedTuple):
    """An answer and its reward.

    Attributes:
        prompt: The prompt.
        rollout: The answer.
        reward: Its reward.
        counts: Whether it is trained on; False for the answers to a padding prompt.
    """

    prompt: Prompt
    rollout: Rollout
    reward: float
    counts: bool


class _Drawn(NamedTuple):
    """Answers to each prompt of a share, and the time to draw them."""

    rollouts: list[list[Rollout]]
    seconds: float


class Answerer:
    """Draws and scores answers to prompts, and collates them; the same answers on any number of ranks.

    Args:
        model: The boosted model.
        booster: Its parallel methods.
        tokenizer: The tokenizer of the model.
        sampling: Sampling parameters, with the number of answers to a prompt.
        reward: The reward.
        max_length: Maximum number of tokens of a prompt and its answer.
        num_prompts: Number of prompts of a step on this rank.
        rows_at_once: Maximum number of answers of a batch.
        tokens_at_once: Maximum number of tokens of a batch; None for no limit.
        seed: Seed of the draws.
        watch: Receives the largest difference between engine and trainer.
        rollouts: Placement and schedule of the rollouts.

    A context manager: its exit ends the scorer and the engine.

    [Note: one step ahead]
    With `rollouts.ahead` the next window is read, and a thread draws its answers, during the steps on this
    one. The engine has a copy of the weights, so no step disturbs it. Drawing is not a collective: ranks
    synchronize when they score, in order, on their main threads. A window is not read ahead across a training
    state: a run resumed from it reads the window with the weights of the state, as does an unbroken run.

    Attributes:
        engine: The engine.
        measures: Metrics of answers and their tokens.

    Raises:
        ValueError: `model` cannot be served.
    """

    def __init__(
        self,
        model: ModelWrapper,
        *,
        booster: Booster,
        tokenizer: Any,
        sampling: SamplingParams,
        reward: Reward,
        max_length: int,
        num_prompts: int,
        rows_at_once: int,
        tokens_at_once: int | None,
        seed: int,
        watch: RewardWatch,
        rollouts: RolloutOptions,
    ) -> None:
        self._model, self._booster, self._tokenizer = model, booster, tokenizer
        self._team = booster.mesh.axis(booster.mesh.replica_axes)
        self._sampling, self._seed, self._watch = sampling, seed, watch
        self._scorer = scorer_of(
            reward, device=booster.device, rows_at_once=rows_at_once, pad=padding_of(tokenizer)
        )
        self._rows_at_once, self._tokens_at_once = rows_at_once, tokens_at_once
        self.engine = RolloutEngine(
            model,
            tokenizer,
            max_length=max_length,
            max_running=min(-(-num_prompts // self._team.size) * sampling.n, 256),
            placement=rollouts.placement,
            resources=rollouts.resources,
            has_copy=rollouts.ahead > 0,
            kv_memory=rollouts.kv_memory,
            tp_size=rollouts.tp_size,
            pp_size=rollouts.pp_size,
        )
        self._is_ahead = rollouts.ahead > 0
        self._thread = ThreadPoolExecutor(1, "rollouts")  # started by the first window ahead
        self.measures = Measures(
            roots=("reward_deviation",),
            largest=(LARGEST_GAP,),
            rates=(_ROLLOUT_RATE, TRAINING_RATE),
            replicas=booster.mesh.axis_size("dp"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._scorer.close()
        self.engine.close()

    def windows(self, loop: FitLoop, *, steps: int) -> Iterator[list[ScoredAnswer]]:
        """Yield the answers to each window of a loop, ordered by prompt.

        Every rank iterates, and makes the steps of a window before the next one. The ranks of a replica have
        read the same prompts: each answers and scores a share of them.

        Args:
            loop: The loop.
            steps: Number of steps per window.

        Raises:
            RewardError: The reward, or the engine, failed on some rank.
        """
        if loop.done > 0:
            self.engine.sync()  # the copy was made before the training state was loaded
        windows = loop.windows()
        window = next(windows, None)
        pending: Future[_Drawn] | None = None
        while window is not None:
            # The first synchronization since the prompts were read: ranks with short answers wait here.
            draw: Callable[[], _Drawn] = partial(self._draw, window, loop.done)
            if pending is not None:
                draw = pending.result
            if self.engine.num_ranks > 1:
                draw = _finished_draw(draw)
            answers = self._score_window(window, draw)
            following, pending = None, None
            if self._is_ahead and loop.may_read_on(steps):  # see [Note: one step ahead]
                following = next(windows)
                pending = self._thread.submit(self._draw, following, loop.done + steps)
            yield answers
            if pending is not None:
                wait([pending])  # the thread must not draw while the copy changes
            self.engine.sync()  # collective: copies the new weights, or drops cached results of the old ones
            window = next(windows, None) if following is None else following

    def _share(self, window: Sequence[Batch]) -> list[tuple[Prompt, bool]]:
        """Return this rank's share of the prompts, with whether they count."""
        counts = [bool(each) for _, labels in window for each in labels["counts"]]
        return list(zip(_prompts(window), counts, strict=True))[self._team.rank :: self._team.size]

    def _draw(self, window: Sequence[Batch], step: int) -> _Drawn:
        """Return this rank's answers; collective only over the ranks that share its engine."""
        own = self._share(window)
        params = [replace(self._sampling, seed=_seed_of(self._seed, step, each.number)) for each, _ in own]
        started = time.monotonic()
        rollouts = self.engine.generate([each.encoded.input_ids for each, _ in own], params)
        return _Drawn(rollouts, time.monotonic() - started)

    def _score_window(self, window: Sequence[Batch], draw: Callable[[], _Drawn]) -> list[ScoredAnswer]:
        """Return all answers of a replica with their rewards; collective."""
        own, unscored, seconds = self._share(window), list[ScoredAnswer](), 0.0

        def score() -> Scores:
            nonlocal seconds
            try:
                rollouts, seconds = draw()
            except Exception as error:  # of the engine: reported on all ranks, like an error of a reward
                raise RewardCallError(
                    f"the engine did not answer: {type(error).__name__}: {error}"
                ) from error
            unscored.extend(
                ScoredAnswer(prompt, rollout, 0.0, is_counted)
                for (prompt, is_counted), group in zip(own, rollouts, strict=True)
                for rollout in group
            )
            return self._scores(unscored)

        size = self._sampling.n
        told, mean = agreed_rewards(
            score, counts=[each for _, each in own for _ in range(size)], rank=self._booster.mesh.rank
        )
        prompts = _prompts(window)
        counts = [bool(each) for _, labels in window for each in labels["counts"]]
        scored = [each._replace(reward=reward) for each, reward in zip(unscored, told.total, strict=True)]
        found, (scores, parts) = self._gather_answers(prompts, counts, scored, told)
        kept = [each for each in found if each.counts]
        length = float(sum(len(each.rollout.token_ids) for each in kept))
        sums = {name: self._sum_of(values, found) for name, values in parts.items()}
        self.measures.add(
            float(len(kept)),
            reward=self._sum_of(scores, found),
            reward_deviation=self._sum_of([(each - mean) ** 2 for each in scores], found),
            length=torch.tensor(length),
            share_cut=torch.tensor(float(sum(each.rollout.is_cut for each in kept))),
            **sums,
        )
        self.measures.add_rate(_ROLLOUT_RATE, length, seconds)
        return found

    def _gather_answers(
        self, prompts: Sequence[Prompt], counts: Sequence[bool], own: list[ScoredAnswer], scores: Scores
    ) -> tuple[list[ScoredAnswer], Scores]:
        """All-gather the answers of a replica's ranks, in the order of the prompts."""
        if self._team.size == 1:
            return own, scores
        told: list[Any] = gather_values(
            [
                [
                    [*each.rollout.token_ids],
                    [*each.rollout.logprobs],
                    each.rollout.text,
                    each.rollout.is_cut,
                    each.reward,
                    {name: values[place] for name, values in scores.parts.items()},
                ]
                for place, each in enumerate(own)
            ],
            self._team.group,
        )
        found, parts, size = list[ScoredAnswer](), dict[str, list[float]](), self._sampling.n
        for number, (prompt, is_counted) in enumerate(zip(prompts, counts, strict=True)):
            place, rank = divmod(number, self._team.size)
            for ids, logprobs, text, is_cut, reward, of_parts in told[rank][place * size :][:size]:
                rollout = Rollout(token_ids=tuple(ids), logprobs=tuple(logprobs), text=text, is_cut=is_cut)
                found.append(ScoredAnswer(prompt, rollout, reward, is_counted))
                for name, value in of_parts.items():
                    parts.setdefault(name, []).append(value)
        return found, Scores([each.reward for each in found], parts)

    @staticmethod
    def _sum_of(values: Sequence[float], answers: Sequence[ScoredAnswer]) -> Tensor:
        """Return the sum over the answers that count."""
        kept = [value for value, each in zip(values, answers, strict=True) if each.counts]
        return torch.tensor(sum(kept), dtype=torch.float64)

    def samples(self, answers: Sequence[ScoredAnswer]) -> list[AnswerSample]:
        """Return the first few prompts and all answers to them, as texts."""
        size = self._sampling.n
        groups = [answers[start : start + size] for start in range(0, len(answers), size)]
        return [
            AnswerSample(
                self._text_of(group[0].prompt),
                [each.rollout.text for each in group],
                [each.reward for each in group],
            )
            for group in groups[:_SAMPLED_PROMPTS]
        ]

    def batches(self, answers: Sequence[ScoredAnswer], **numbers: Tensor) -> list[Batch]:
        """Return batches of answers, with masked prompts; collective.

        Answers of similar lengths share a batch, to reduce padding; losses are sums, which do not depend on
        the order. All ranks return the same number of batches, since a forward may be a collective.

        Args:
            answers: The answers, the same number on all ranks.
            numbers: Further labels, with one entry per answer.
        """
        pipeline = self._booster.plan.pipeline
        divide = partial(
            places_in_batches,
            [_num_tokens(each) for each in answers],
            rows=self._rows_at_once,
            tokens=self._tokens_at_once,
            multiple_of=1 if pipeline is None else pipeline.num_microbatches,
        )
        parts = divide()
        if self._tokens_at_once is not None:  # lengths differ between ranks: take the maximum of all
            most = torch.tensor([len(parts)], device=self._booster.device)
            all_reduce_in_place(most, ParallelMode.GLOBAL, dist.ReduceOp.MAX)
            parts = divide(at_least=int(most))
        return [
            self._batch(
                [answers[place] for place in part], {name: values[part] for name, values in numbers.items()}
            )
            for part in parts
        ]

    def logprobs(self, model: nn.Module, data: Mapping[str, Tensor]) -> Tensor:
        """Return a model's log-probabilities of all tokens but the first, (batch, length - 1)."""
        ids = data["input_ids"][:, 1:]
        return forward_only(
            model,
            data,
            lambda output: losses.token_logprobs(self.tempered(output), ids),
            booster=self._booster,
        )

    def reference_logprobs(
        self, model: nn.Module, reference: nn.Module | None, data: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the same for the reference; None: for the model without its adapters."""
        if reference is not None:
            return self.logprobs(reference, data)
        with adapters_off(model):
            return self.logprobs(model, data)

    def tempered(self, output: Any) -> Tensor:
        """Return the logits, divided by the temperature, that predict all tokens but the first."""
        logits = logits_of(output)[:, :-1]
        return logits if self._sampling.temperature == 1 else logits / self._sampling.temperature

    @torch.no_grad()
    def measure_tokens(
        self,
        logits: Tensor,
        logp: Tensor,
        old_logp: Tensor,
        labels: Mapping[str, Any],
        *,
        clip: tuple[float, float],
        is_first: bool,
    ) -> None:
        """Record metrics of the answers' tokens under the model in training.

        Args:
            logits: Result of `tempered`.
            logp: Log-probabilities of the labels under them.
            old_logp: The same when the answers were drawn.
            labels: Labels of the batch.
            clip: Lower and upper clip of the ratios.
            is_first: Whether the model has not changed since.
        """
        mask = answer_mask(labels)
        ratio = (logp - old_logp)[mask].exp()
        sums = {
            "clip_share": ((ratio < 1 - clip[0]) | (ratio > 1 + clip[1])).double().sum(),
            "entropy": losses.entropy(logits)[mask].sum(),
            "kl": losses.kl(old_logp, logp, "k3")[mask].sum(),
            "kl_k1": losses.kl(old_logp, logp, "k1")[mask].sum(),
        }
        if "ref_logp" in labels:
            k3, k1 = MEASURED_OF_REFERENCE
            sums[k3] = losses.kl(logp, labels["ref_logp"], "k3")[mask].sum()
            sums[k1] = losses.kl(logp, labels["ref_logp"], "k1")[mask].sum()
        trainer = old_logp
        if self._sampling.temperature != 1 and is_first:  # the engine's are before the temperature
            trainer = losses.token_logprobs(logits * self._sampling.temperature, labels["input_ids"][:, 1:])
        # One step ahead, the old log-probabilities are those of the engine.
        if not self._is_ahead and (self._sampling.temperature == 1 or is_first):
            engine = labels["engine_logp"].to(trainer.dtype)
            gaps = (trainer - engine).abs().where(mask, 0.0)  # (batch, length - 1)
            sums["logprob_gap"] = gaps.sum()
            largest, place = gaps.flatten().max(0)
            self.measures.add_largest(**{LARGEST_GAP: largest})
            self._watch.note(Gap(largest, place, labels["input_ids"], labels["loss_mask"], engine, trainer))
        self.measures.add(float(mask.sum()), **sums)

    def _scores(self, answers: Sequence[ScoredAnswer]) -> Scores:
        texts = {each.prompt.number: each.prompt for each in answers}
        prompts = {number: self._text_of(prompt) for number, prompt in texts.items()}
        return self._scorer.parts(
            [
                AnswerText(
                    prompt=prompts[prompt.number],
                    answer=rollout.text,
                    row=prompt.row,
                    prompt_ids=prompt.encoded.input_ids,
                    answer_ids=rollout.token_ids,
                    is_cut=rollout.is_cut,
                )
                for prompt, rollout, _, _ in answers
            ]
        )

    def _text_of(self, prompt: Prompt) -> str:
        text: str = self._tokenizer.decode(prompt.encoded.input_ids, skip_special_tokens=True)
        return text

    def _batch(self, answers: Sequence[ScoredAnswer], numbers: Mapping[str, Tensor]) -> Batch:
        pipeline = self._booster.plan.pipeline
        # Microbatches have equal sizes: pad with answers that do not count.
        missing = 0 if pipeline is None else -len(answers) % pipeline.num_microbatches
        answers = [*answers, *[answers[-1]._replace(counts=False)] * missing]
        texts = []
        for prompt, rollout, _, _ in answers:
            ids = prompt.encoded.input_ids
            mask = [False] * len(ids) + [True] * len(rollout.token_ids)
            texts.append(EncodedText([*ids, *rollout.token_ids], mask))
        device = self._booster.device
        collated = collate(texts, pad_token_id=padding_of(self._tokenizer))
        made = {name: each.to(device) for name, each in collated.items()}
        engine_logp = torch.zeros(collated["input_ids"][:, 1:].shape)
        for row, (prompt, rollout, _, _) in enumerate(answers):
            start = len(prompt.encoded.input_ids) - 1
            engine_logp[row, start : start + len(rollout.logprobs)] = torch.tensor(rollout.logprobs)
        data = {name: made[name] for name in ("input_ids", "attention_mask")}
        labels = {name: made[name] for name in ("input_ids", "loss_mask")}
        labels["engine_logp"] = engine_logp.to(device)
        if self._is_ahead:
            labels["old_logp"] = labels["engine_logp"]
        labels["counts"] = torch.tensor([each.counts for each in answers], device=device)
        for name, values in numbers.items():
            labels[name] = torch.cat([values, values[-1:].expand(missing)]).to(device)
        return data, labels


def _finished_draw(draw: Callable[[], _Drawn]) -> Callable[[], _Drawn]:
    """Draw, and return a function that returns the answers or raises an error common to the engine's ranks.

    Any other error is raised here: the other ranks are inside a step of the engine and cannot be notified.
    """
    made = Future[_Drawn]()
    try:
        made.set_result(draw())
    except _OF_ALL_RANKS as error:
        made.set_exception(error)
    return made.result


def _num_tokens(answer: ScoredAnswer) -> int:
    return len(answer.prompt.encoded.input_ids) + len(answer.rollout.token_ids)


def _prompts(window: Sequence[Batch]) -> list[Prompt]:
    return [prompt for data, _ in window for prompt in data["prompts"]]


def answer_mask(labels: Mapping[str, Any]) -> Tensor:
    """Return the mask of answers that count, for all tokens but the first, (batch, length - 1)."""
    mask: Tensor = labels["loss_mask"][:, 1:] & labels["counts"].unsqueeze(1)
    return mask


def _seed_of(seed: int, step: int, number: int) -> int:
    """Return the seed of the answers to a prompt in a step, the same on any number of ranks."""
    told = hashlib.sha256(f"{seed} {step} {number}".encode()).digest()
    return int.from_bytes(told[:7], "big")
