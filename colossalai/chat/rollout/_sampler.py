"""Samplers: draw answers with their log-probabilities from a model in this process, or in parts on ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from colossalai.context import Mesh
from colossalai.inference import LLM, CollectiveEngine, Completion, EngineOptions, SamplingParams
from colossalai.tensor import evaluation_mode


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """An answer.

    Attributes:
        token_ids: Its tokens; the one that ended it is the last.
        logprobs: The log-probabilities with which the engine's model has them, before any temperature.
        text: The text, without what ended it.
        is_cut: Whether it ended since it was as long as may be.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    is_cut: bool


class Sampler(ABC):
    """Abstract: what answers prompts."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """Return for each prompt as many answers as its parameters say."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Forget what was computed with earlier weights."""

    def close(self) -> None:  # noqa: B027 - an engine in this process ends with its last reference
        """End what was started."""


class LocalSampler(Sampler):
    """A sampler on the package's engine.

    Args:
        model: A causal language model, whole; it goes on belonging to its owner.
        tokenizer: Its tokenizer.
        options: By the names of the engine's options.

    Raises:
        ValueError: `model` is none that can be served.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self._model = model
        self._llm = LLM(model, tokenizer=tokenizer, **options)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See the base class. The model is in evaluation mode meanwhile: dropout draws nothing."""
        with evaluation_mode(self._model):
            found = self._llm.generate(
                [list(each) for each in prompts], [replace(each, logprobs=0) for each in params]
            )
        return [_rollouts_of(output.outputs) for output in found]

    def weights_changed(self) -> None:
        """See the base class; heard of are also writes where the engine does not look, as `param.data`."""
        self._llm.weights_changed()


class PartsSampler(Sampler):
    """A sampler on an engine that several ranks share; every method is collective over them.

    Args:
        part: This rank's part of the model.
        tokenizer: The tokenizer of the model.
        mesh: The ranks: those along the axes `pp` and `tp` share an engine.
        options: By the names of the engine's options.

    Raises:
        ValueError: `part` cannot be served.
    """

    def __init__(self, part: nn.Module, tokenizer: Any, mesh: Mesh, **options: Any) -> None:
        self._part = part
        self._engine = CollectiveEngine(part, tokenizer, EngineOptions(**options), mesh=mesh)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See the base class. The part is in evaluation mode meanwhile: dropout draws nothing."""
        with evaluation_mode(self._part):
            found = self._engine.generate(prompts, [replace(each, logprobs=0) for each in params])
        return [_rollouts_of(answers) for answers in found]

    def weights_changed(self) -> None:
        """See the base class."""
        self._engine.weights_changed()


def _rollouts_of(answers: Sequence[Completion]) -> list[Rollout]:
    return [
        Rollout(
            token_ids=answer.token_ids,
            logprobs=tuple(each.logprob for each in answer.logprobs or ()),
            text=answer.text,
            is_cut=answer.finish_reason == "length",
        )
        for answer in answers
    ]
