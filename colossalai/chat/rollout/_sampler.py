"""Samplers: answers with log-probabilities, by a model in this process or by parts on several ranks."""

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
        token_ids: Its tokens, including the end token or stop token.
        logprobs: Log-probabilities under the engine's model, before the temperature.
        text: Its text, without the stop.
        is_cut: Whether it was truncated at the maximum length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    is_cut: bool


class Sampler(ABC):
    """Abstract: generates answers to prompts."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """Return the answers to each prompt."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Drop cached results of earlier weights."""

    def close(self) -> None:  # noqa: B027 - an engine in this process ends with its last reference
        """Free the resources."""


class LocalSampler(Sampler):
    """A sampler with the package's engine.

    Args:
        model: An unsharded causal language model, which still belongs to the caller.
        tokenizer: Its tokenizer.
        options: Options of the engine.

    Raises:
        ValueError: `model` cannot be served.
    """

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        self._model = model
        self._llm = LLM(model, tokenizer=tokenizer, **options)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See the base class. The model is in evaluation mode meanwhile, without dropout."""
        with evaluation_mode(self._model):
            found = self._llm.generate(
                [list(each) for each in prompts], [replace(each, logprobs=0) for each in params]
            )
        return [_rollouts_of(output.outputs) for output in found]

    def weights_changed(self) -> None:
        """See the base class; also for writes that the engine does not detect, such as `param.data`."""
        self._llm.weights_changed()


class PartsSampler(Sampler):
    """A sampler with an engine on several ranks; every method is collective over them.

    Args:
        part: This rank's part of the model.
        tokenizer: The tokenizer of the model.
        mesh: The ranks; those along the axes `pp` and `tp` share an engine.
        options: Options of the engine.

    Raises:
        ValueError: `part` cannot be served.
    """

    def __init__(self, part: nn.Module, tokenizer: Any, mesh: Mesh, **options: Any) -> None:
        self._part = part
        self._engine = CollectiveEngine(part, tokenizer, EngineOptions(**options), mesh=mesh)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """See the base class. The part is in evaluation mode meanwhile, without dropout."""
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
