"""A run that learns from rewards: what its methods have in common.

Everything that is given is compared before anything is changed. Then models are boosted, an engine is built
that answers by the policy, and there is a loop; a method says what it makes of answers, and makes the steps.
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
    """The options that methods have in common."""

    @property
    def reward(self) -> Reward:
        """How good answers are."""

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt."""

    @property
    def kl_coef(self) -> float:
        """What holds the model to a reference."""

    @property
    def max_kl(self) -> float | None:
        """The divergence from it that ends a run."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a fit is given beside the models that it trains; its docstring says what each is."""

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
    """A run: models that are boosted, an engine that answers, and a loop.

    It is a context, at whose end everything that was started is ended.

    Args:
        method: What is learned.
        trained: The policy, as "model", and other models that are trained, with their optimizers.
        inputs: What else there is.
        num_answers: How many answers there are to a prompt.

    Attributes:
        answerer: What answers.
        trained: The boosted models with their boosted optimizers.
        most_tokens: Most tokens of an answer.

    Raises:
        ValueError: The `inputs` do not go together; nothing was changed.
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
        """Return the loop of the run; what its models take is told, and compared with what there is.

        Args:
            criterion: The loss of the policy.
            measured: What the method writes down beside what all do.
            steps: How many steps are made of a window.
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
            # One that was boosted lies where its plan puts it, and is cut over the ranks as that says.
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
        """Yield the answers to each window, of which steps are made before the next ones are taken."""
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
        """Return how long it has taken to come from the end of the last window to here, as a record."""
        return {"seconds_generating": time.monotonic() - self._started}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.answerer.__exit__(*error)


def encode_prompts(
    data: ChatData | EncodedData, tokenizer: Any, max_length: int, method: str
) -> list[Prompt]:
    """Return the tokens of prompts.

    Raises:
        ValueError: `data` is no chat data or of another stage, or `tokenizer` has no end-of-sequence token.
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
    """Return prompts as a batch of the common loop."""
    return {"prompts": tuple(rows)}, {"counts": torch.ones(len(rows), dtype=torch.bool)}


def sampling_of(given: SamplingParams | None, num_answers: int, tokenizer: Any) -> SamplingParams:
    """Return how answers are drawn: so many to a prompt, by default up to 64 tokens.

    The end token of the tokenizer, which SFT learns behind an answer, ends one next to those of the model's
    config, which may be others.

    Raises:
        ValueError: `given` is not of this type, draws nothing, or has no end.
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
    """Refuse ratios to what is not known: the engine tells probabilities before the temperature.

    Raises:
        ValueError: `rollouts` is a step ahead, and `sampling` has another temperature than 1.
    """
    if rollouts.ahead and sampling.temperature != 1:
        raise ValueError(
            f"ahead={rollouts.ahead} and temperature={sampling.temperature}: one step ahead a token is "
            "weighed by the probability that the engine tells, which is that at temperature 1: give that, or "
            "leave ahead out"
        )


def check_tokens_at_once(tokens_at_once: int | None, longest: int) -> None:
    """Refuse batches that do not hold one answer.

    Raises:
        ValueError: `tokens_at_once` is no integer, or below the `longest` prompt with its answer.
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
    """Refuse models that do not go together, before any of them is changed.

    Args:
        trained: The model that answers, and a critic, by these names.
        reference: What the model is held to.
        reward: What it learns from.
        tokenizer: That of the model.
        sampling: How the model answers.
        prompts: What is answered.
        rows_at_once: Most answers of a batch.

    Raises:
        ValueError: A model shares parameters with one of `trained` or has another vocabulary; a prompt
            and its answer do not fit into the window of a model that reads them; a critic has no head,
            or a model or reference has one; `tokenizer` has tokens that the model does not know; or
            `rows_at_once` is below 1.
    """
    if type(rows_at_once) is not int or rows_at_once < 1:
        raise ValueError(f"rows_at_once={rows_at_once!r}: give an integer of at least 1")
    config = trained["model"].config
    texts, longest_answer = [each.encoded for each in prompts], most_tokens(sampling)
    if len(tokenizer) > config.vocab_size:  # a model may have more, which round its vocabulary up
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, and the model knows {config.vocab_size}: give the "
            "tokenizer of the model, or resize the model (resize_token_embeddings)"
        )
    owner_of: dict[nn.Parameter, str] = {}
    for name, given in {**trained, "reference": reference, **parts_of(reward)}.items():
        other = given.model if isinstance(given, ModelReward) else given
        if not isinstance(other, nn.Module):
            continue
        # A reference that is trained along holds nobody back, and a reward that changes is no measure.
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
        if not isinstance(given, ModelReward):  # which has a length of its own
            check_readable(texts, other, name=name, most_tokens=longest_answer)


def _check_kind(name: str, model: nn.Module) -> None:
    """Refuse a critic without a value head, and a model or reference that has one in place of its own."""
    kind = type(model.unwrap() if isinstance(model, ModelWrapper) else model).__name__
    if name == "critic" and not has_value_head(model):
        raise ValueError(
            f"the critic is a {kind} without a value head, which gives a number for each token: give what "
            "with_value_head(model) or load_reward_model(folder) returns"
        )
    if name in ("model", "reference") and has_value_head(model):
        raise ValueError(f"the {name} has a value head, and no probabilities: give a causal language model")


def check_reference(model: nn.Module, reference: nn.Module | None, kl_coef: float) -> None:
    """Refuse a reference without a penalty, and a penalty without a reference: see `reference_logprobs`.

    Raises:
        ValueError: `reference` is given and `kl_coef` is 0; or that is above 0, `reference` is None, and
            `model` has no adapters without which it would be one.
    """
    is_missing = kl_coef > 0.0 and reference is None and not has_adapters(model)
    if is_missing or (kl_coef == 0.0 and reference is not None):
        raise ValueError(
            f"kl_coef={kl_coef} and reference={type(reference).__name__}: a reference is what a kl_coef "
            "above 0 holds the model to; give both, or neither. A model with adapters (LoRA of peft, "
            "--lora_rank of the scripts) needs none: without them it is the reference"
        )


def most_tokens(sampling: SamplingParams) -> int:
    """Return the most tokens of an answer."""
    assert sampling.max_tokens is not None, "sampling_of has asked for it"
    return sampling.max_tokens
