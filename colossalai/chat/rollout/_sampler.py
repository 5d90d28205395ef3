"""Sampler: draws answers with their log-probabilities from a model that lies whole in this process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from colossalai.inference import LLM, SamplingParams
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
    """Abstract: what answers prompts; no other rank takes part."""

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
        return [
            [
                Rollout(
                    token_ids=answer.token_ids,
                    logprobs=tuple(each.logprob for each in answer.logprobs or ()),
                    text=answer.text,
                    is_cut=answer.finish_reason == "length",
                )
                for answer in output.outputs
            ]
            for output in found
        ]

    def weights_changed(self) -> None:
        """See the base class; heard of are also writes where the engine does not look, as `param.data`."""
        self._llm.weights_changed()
