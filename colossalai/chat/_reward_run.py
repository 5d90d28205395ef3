"""Run that learns from rewards: the common part of its methods.

All arguments are checked before anything is changed. Then models are boosted, an engine for the policy's
answers is built, and a loop is created; a method prepares batches of answers and makes the steps.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.booster import Booster, has_adapters
from colossalai.chat._answers import MEASURED, MEASURED_OF_REFERENCE, Answerer, Prompt, ScoredAnswer
from colossalai.chat._callbacks import RewardWatch, SampleLog, check_samples
from colossalai.chat._course import Course
from colossalai.chat._fit import Batch, Criterion, FitLoop, Task, boost
from colossalai.chat._heads import has_value_head
from colossalai.chat._memory import tell_memory
from colossalai.chat._text_method import check_readable, encoded_of
from colossalai.chat.data import ChatData, EncodedData
from colossalai.chat.rewards import ModelReward, Reward, parts_of, reward_records
from colossalai.chat.rollout import RolloutOptions
from colossalai.inference import SamplingParams
from colossalai.runtime import ModelWrapper


class RewardMethod(Protocol):
    """Common options of methods that learn from rewards."""

    @property
    def reward(self) -> Reward:
        """The reward."""

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt."""

    @property
    def kl_coef(self) -> float:
        """Coefficient of the divergence from the reference."""

    @property
    def max_kl(self) -> float | None:
        """The divergence from the reference that ends a run."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Arguments of a `fit` other than the trained models; see its docstring."""

    booster: Booster
    data: ChatData | EncodedData
    tokenizer: Any
    sampling: SamplingParams | None
    reference: nn.Module | None
    rows_at_once: int
    tokens_at_once: int | None
    rollouts: RolloutOptions
    samples_every: int | None
    course: Course


class RewardRun:
    """A run: boosted models, a rollout engine and a training loop.

    A context manager: its exit ends the scorer and the engine.

    Args:
        method: The method.
        trained: The policy, as "model", and other trained models, with their optimizers.
        inputs: The other arguments.
        num_answers: Number of answers to a prompt.

    Attributes:
        answerer: Source of the answers.
        trained: The boosted models with their boosted optimizers.
        most_tokens: Maximum number of tokens of an answer.

    Raises:
        ValueError: `inputs` contradict each other; nothing was changed.
    """

    def __init__(
        self,
        method: RewardMethod,
        trained: Mapping[str, tuple[nn.Module, Optimizer]],
        inputs: RunInputs,
        *,
        num_answers: int,
    ) -> None:
        self._method, self._inputs, course = method, inputs, inputs.course
        check_reference(trained["model"][0], inputs.reference, method.kl_coef)
        check_samples(inputs.samples_every, course.log)
        name = type(method).__name__
        self._prompts = encode_prompts(inputs.data, inputs.tokenizer, method.max_length, name)
        sampling = sampling_of(inputs.sampling, num_answers, inputs.tokenizer)
        check_ahead(inputs.rollouts, sampling)
        check_models(
            {name: model for name, (model, _) in trained.items()},
            reference=inputs.reference,
            reward=method.reward,
            tokenizer=inputs.tokenizer,
            sampling=sampling,
            prompts=self._prompts,
            rows_at_once=inputs.rows_at_once,
        )
        self.most_tokens = most_tokens(sampling)
        longest = max(len(each.encoded) for each in self._prompts) + self.most_tokens
        check_tokens_at_once(inputs.tokens_at_once, longest)
        self.trained: dict[str, tuple[ModelWrapper, OptimizerWrapper]] = {
            name: boost(inputs.booster, *each) for name, each in trained.items()
        }
        self._watch = RewardWatch(inputs.tokenizer, max_kl=method.max_kl)
        self.answerer = Answerer(
            self.model,
            booster=inputs.booster,
            tokenizer=inputs.tokenizer,
            sampling=sampling,
            reward=method.reward,
            max_length=longest,
            num_prompts=course.batch_size * course.accumulation,
            rows_at_once=inputs.rows_at_once,
            tokens_at_once=inputs.tokens_at_once,
            seed=course.seed,
            watch=self._watch,
            rollouts=inputs.rollouts,
        )
        self._started = time.monotonic()

    @property
    def model(self) -> ModelWrapper:
        """The policy."""
        return self.trained["model"][0]

    def loop(self, criterion: Criterion, *, measured: Sequence[str], steps: int) -> FitLoop:
        """Return the loop of the run, after a report of the memory of its models.

        Args:
            criterion: The loss of the policy.
            measured: Further metrics of the method.
            steps: Number of steps per window.
        """
        inputs, method = self._inputs, self._method
        names = (*MEASURED, *measured, *reward_records(method.reward))
        task = Task(
            rows=self._prompts,
            collate=prompt_batch,
            goes_through=False,
            criterion=criterion,
            measures=self.answerer.measures,
            measured=(*names, *(MEASURED_OF_REFERENCE if method.kl_coef > 0.0 else ())),
            watch=self._watch,
        )
        loop = FitLoop(
            *self.trained["model"],
            booster=inputs.booster,
            task=task,
            course=inputs.course,
            steps_a_window=steps,
            companions={name: each for name, each in self.trained.items() if name != "model"},
        )
        if inputs.reference is not None:
            # The plan of a boosted reference has already placed and sharded it.
            is_placed = isinstance(inputs.reference, ModelWrapper)
            (inputs.reference if is_placed else inputs.reference.to(inputs.booster.device)).eval()
        tell_memory(
            {"actor" if name == "model" else name: each for name, each in self.trained.items()},
            booster=inputs.booster,
            course=inputs.course,
            reference=inputs.reference,
            reward=method.reward,
            engine=self.answerer.engine,
        )
        return loop

    def windows(self, loop: FitLoop, *, steps: int) -> Iterator[list[ScoredAnswer]]:
        """Yield the answers to each window; make its steps before the next one."""
        inputs = self._inputs
        samples = SampleLog(
            inputs.course.log,
            every=inputs.samples_every,
            first=loop.done,
            writes=inputs.booster.mesh.rank == 0,
        )
        self._started = time.monotonic()
        for answers in self.answerer.windows(loop, steps=steps):
            samples.add(partial(self.answerer.samples, answers), done=loop.done, steps=steps)
            yield answers
            self._started = time.monotonic()

    def time_so_far(self) -> dict[str, float]:
        """Return the time since the end of the last window, as a record."""
        return {"seconds_generating": time.monotonic() - self._started}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.answerer.__exit__(*error)


def encode_prompts(
    data: ChatData | EncodedData, tokenizer: Any, max_length: int, method: str
) -> list[Prompt]:
    """Tokenize prompts.

    Raises:
        ValueError: `data` is not chat data or is of another stage, or `tokenizer` has no end-of-sequence
            token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-sequence token, so an answer could never end: set "
            "tokenizer.eos_token"
        )
    encoded = encoded_of(data, tokenizer, max_length)
    if encoded.stage != "prompts":
        raise ValueError(
            f"{method} learns from prompts, and these rows are of stage {encoded.stage!r}: give "
            "chat_data(..., stage='prompts')"
        )
    assert isinstance(encoded, EncodedData), "of stage prompts"
    return [
        Prompt(number, text, row)
        for number, (text, row) in enumerate(zip(encoded.texts, encoded.sources, strict=True))
    ]


def prompt_batch(rows: Sequence[Prompt]) -> Batch:
    """Return prompts as a batch of the training loop."""
    return {"prompts": tuple(rows)}, {"counts": torch.ones(len(rows), dtype=torch.bool)}


def sampling_of(given: SamplingParams | None, num_answers: int, tokenizer: Any) -> SamplingParams:
    """Complete the sampling parameters of answers; by default up to 64 tokens.

    An answer also ends at the tokenizer's end token, which SFT trains at the end of answers and which may
    differ from the end tokens of the model's config.

    Raises:
        ValueError: `given` is of another type, is greedy, or has no limit of tokens.
    """
    sampling = SamplingParams(max_tokens=64) if given is None else given
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling is a {type(sampling).__name__}: give SamplingParams(max_tokens=...)")
    if not sampling.temperature > 0 or sampling.max_tokens is None:
        raise ValueError(
            f"temperature={sampling.temperature}, max_tokens={sampling.max_tokens}: answers differ only "
            "where tokens are drawn, and have to end: give a temperature above 0, and max_tokens"
        )
    ends = () if sampling.ignore_eos else (tokenizer.eos_token_id,)
    return replace(sampling, n=num_answers, stop_token_ids=(*sampling.stop_token_ids, *ends))


def check_ahead(rollouts: RolloutOptions, sampling: SamplingParams) -> None:
    """Check that ratios are defined: the engine returns probabilities before the temperature.

    Raises:
        ValueError: `rollouts` are a step ahead, and `sampling` has another temperature than 1.
    """
    if rollouts.ahead and sampling.temperature != 1:
        raise ValueError(
            f"ahead={rollouts.ahead} and temperature={sampling.temperature}: one step ahead a token is "
            "weighed by the probability from the engine, which is that at temperature 1: give that, or "
            "leave ahead out"
        )


def check_tokens_at_once(tokens_at_once: int | None, longest: int) -> None:
    """Check that a batch can hold one answer.

    Raises:
        ValueError: `tokens_at_once` is not an integer, or is below the `longest` prompt with its answer.
    """
    if tokens_at_once is None:
        return
    if type(tokens_at_once) is not int or tokens_at_once < longest:
        raise ValueError(
            f"tokens_at_once={tokens_at_once!r}: give an integer of at least {longest}, the tokens that a "
            "prompt and its answer can have"
        )


def check_models(
    trained: Mapping[str, Any],
    *,
    reference: nn.Module | None,
    reward: Reward,
    tokenizer: Any,
    sampling: SamplingParams,
    prompts: Sequence[Prompt],
    rows_at_once: int,
) -> None:
    """Check that models fit together, before any of them is changed.

    Args:
        trained: The policy and a critic, by name.
        reference: The reference of the divergence penalty.
        reward: The reward.
        tokenizer: The tokenizer of the model.
        sampling: Sampling parameters of the answers.
        prompts: The prompts.
        rows_at_once: Maximum number of answers of a batch.

    Raises:
        ValueError: A model shares parameters with one of `trained` or has another vocabulary; a prompt
            and its answer exceed the window of a model that reads them; a critic has no value head, or a
            model or reference has one; `tokenizer` has tokens outside the vocabulary; or `rows_at_once` is
            below 1.
    """
    if type(rows_at_once) is not int or rows_at_once < 1:
        raise ValueError(f"rows_at_once={rows_at_once!r}: give an integer of at least 1")
    config = trained["model"].config
    texts, longest_answer = [each.encoded for each in prompts], most_tokens(sampling)
    if len(tokenizer) > config.vocab_size:  # a model may have more, with a rounded-up vocabulary
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model has {config.vocab_size}: give the "
            "tokenizer of the model, or resize the model (resize_token_embeddings)"
        )
    owner_of: dict[nn.Parameter, str] = {}
    for name, given in {**trained, "reference": reference, **parts_of(reward)}.items():
        other = given.model if isinstance(given, ModelReward) else given
        if not isinstance(other, nn.Module):
            continue
        # A reference must not be trained along, and a reward must not change.
        shared = {owner_of[param] for param in other.parameters() if param in owner_of}
        if shared:
            raise ValueError(
                f"the {name} shares parameters with the {min(shared)}, which is trained: give it a copy "
                "(copy.deepcopy)"
            )
        _check_kind(name, other)
        if name in trained:
            owner_of |= dict.fromkeys(other.parameters(), name)
        theirs: Any = getattr(other, "config", config)
        if theirs.vocab_size != config.vocab_size and not isinstance(given, ModelReward):
            raise ValueError(
                f"the {name} has a vocabulary of {theirs.vocab_size} tokens, and the model one of "
                f"{config.vocab_size}: it reads the tokens that the model draws, so give one with the same "
                "tokenizer, or as reward a ModelReward, which has a tokenizer of its own"
            )
        if not isinstance(given, ModelReward):  # it has its own maximum length
            check_readable(texts, other, name=name, most_tokens=longest_answer)


def _check_kind(name: str, model: nn.Module) -> None:
    """Reject a critic without a value head, and a model or reference with one."""
    kind = type(model.unwrap() if isinstance(model, ModelWrapper) else model).__name__
    if name == "critic" and not has_value_head(model):
        raise ValueError(
            f"the critic is a {kind} without a value head with one output per token: give the result of "
            "with_value_head(model) or load_reward_model(folder)"
        )
    if name in ("model", "reference") and has_value_head(model):
        raise ValueError(f"the {name} has a value head, and no probabilities: give a causal language model")


def check_reference(model: nn.Module, reference: nn.Module | None, kl_coef: float) -> None:
    """Reject a reference without a penalty, and a penalty without a reference; see `reference_logprobs`.

    Raises:
        ValueError: `reference` is given and `kl_coef` is 0; or `kl_coef` is above 0, `reference` is None, and
            `model` has no adapters (it would be the reference without them).
    """
    is_missing = kl_coef > 0.0 and reference is None and not has_adapters(model)
    if is_missing or (kl_coef == 0.0 and reference is not None):
        raise ValueError(
            f"kl_coef={kl_coef} and reference={type(reference).__name__}: a kl_coef above 0 holds the model "
            "to a reference; give both, or neither. A model with adapters (LoRA of peft, "
            "--lora_rank of the scripts) needs none: without them it is the reference"
        )


def most_tokens(sampling: SamplingParams) -> int:
    """Return the maximum number of tokens of an answer."""
    assert sampling.max_tokens is not None, "sampling_of has asked for it"
    return sampling.max_tokens
