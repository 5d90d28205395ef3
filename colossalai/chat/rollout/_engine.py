"""Rollout engine: answers with log-probabilities, by the weights that a model in training has.

A step of the optimizer is followed by `sync`. Where a rank holds the whole model, the engine reads the very
parameters, and forgets what it has computed with the earlier ones; else it takes over the new ones.
Tokens go in and tokens come out: an answer is trained on as it was drawn, never decoded and encoded again,
which would give other tokens here and there, and other log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from colossalai.chat.rollout._sampler import LocalSampler, Rollout, Sampler
from colossalai.chat.rollout._weights import (
    CopiedWeights,
    EngineWeights,
    SharedWeights,
    config_of,
    is_whole,
)
from colossalai.inference import SamplingParams
from colossalai.runtime import ModelWrapper
from colossalai.runtime.memory import cached_per_token, rollout_bytes


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Where and when answers are drawn.

    Attributes:
        placement: "local", or "ray": in a process of Ray, see `RolloutEngine`.
        resources: What that process needs, by the names of Ray's options.
        ahead: 1: the answers that a step learns from are drawn while the step before it is made, by a copy of
            the weights from before that. Ratios are those to the probabilities with which tokens were drawn.
            A step behind which a training state is saved is waited for. 0: answers are drawn by the model
            that learns from them.
        kv_memory: Bytes of the cache; None: enough for all answers that are made at a time.

    Raises:
        ValueError: An attribute is out of its range.
    """

    placement: Literal["local", "ray"] = "local"
    resources: Mapping[str, Any] = field(default_factory=dict)
    ahead: Literal[0, 1] = 0
    kv_memory: float | None = None

    def __post_init__(self) -> None:
        _check(self.placement, self.resources, self.kv_memory)
        if self.ahead not in (0, 1):
            raise ValueError(f"ahead={self.ahead!r}: give 0 or 1 step")


def _check(placement: str, resources: Mapping[str, Any], kv_memory: float | None) -> None:
    if placement not in ("local", "ray"):
        raise ValueError(f"placement is {placement!r}; it must be 'local' or 'ray'")
    if resources and placement != "ray":
        raise ValueError(f"resources={dict(resources)} are those of an actor: give placement='ray', too")
    if (
        kv_memory is not None and kv_memory <= 1
    ):  # a fraction would be of what happens to be free, on each rank
        raise ValueError(f"kv_memory={kv_memory}: give bytes, or leave it out")


class RolloutEngine:
    """An engine that answers with the parameters of a model that is being trained.

    Args:
        model: The model, boosted or not, under any methods, with adapters (LoRA) or without. Each rank has an
            engine of its own, for its own prompts, with all parameters: those of `model` under DDP and
            ZeRO 1 and 2, else a copy. The ranks of the job make it together.
        tokenizer: That of the model.
        max_length: Most tokens of a prompt and its answer.
        max_running: Most answers that are made at a time.
        placement: "ray": the engine is in a process of Ray, on whatever machine that chooses, with weights of
            its own. Ray has to be running.
        resources: What that process needs, by the names of Ray's options, as `{"num_gpus": 1}`.
        has_copy: Whether it has weights of its own in any case, which change with `sync` alone.
        options: Further ones, by the names of the engine's options.

    Attributes:
        version: How often `sync` was called.
        cache_bytes: What keys and values may take.
        copy_bytes: What parameters of its own take: 0 where it reads those in training.

    Raises:
        ValueError: `model` is none that can be served, or `placement` is "ray" and Ray is not running.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_length: int,
        max_running: int = 64,
        placement: Literal["local", "ray"] = "local",
        resources: Mapping[str, Any] = MappingProxyType({}),
        has_copy: bool = False,
        **options: Any,
    ) -> None:
        memory = options.pop("kv_memory", None)
        _check(placement, resources, memory)
        raw: Any = model.unwrap() if isinstance(model, ModelWrapper) else model
        config, dtype = config_of(raw), next(raw.parameters()).dtype
        if memory is None:
            memory = rollout_bytes(
                cached_per_token(config), itemsize=dtype.itemsize, answers=max_running, tokens=max_length
            )
        options |= {"kv_memory": float(memory), "max_length": max_length, "max_running": max_running}
        self.cache_bytes, self.copy_bytes = int(memory), 0
        self._sampler: Sampler
        self._weights: EngineWeights
        if placement == "ray":
            from colossalai.chat.rollout._ray import RaySampler, RayWeights

            self._sampler = RaySampler(config, dtype, tokenizer, resources=resources, **options)
            self._weights = RayWeights(raw, self._sampler)
        elif is_whole(raw) and not has_copy:
            self._sampler = LocalSampler(raw, tokenizer, **options)
            self._weights = SharedWeights()
        else:
            copied = CopiedWeights(raw)
            self._sampler, self._weights = LocalSampler(copied.model, tokenizer, **options), copied
            self.copy_bytes = sum(param.nbytes for param in copied.model.parameters())
        self.version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """Return for each prompt as many answers as its parameters say.

        No other rank takes part. The model is in evaluation mode meanwhile: dropout draws nothing.

        Args:
            prompts: Tokens.
            params: How each is answered.

        Raises:
            ValueError: A prompt can never be answered.
        """
        return self._sampler.generate(prompts, params)

    def sync(self) -> None:
        """Answer with the parameters as they are now; every rank of the job calls it.

        Nothing that was computed with the earlier ones is used. Where the engine has weights of its own they
        are handed over tensor by tensor: in memory is one of them beside, and a rank receives each byte that
        it does not hold once.
        """
        self._weights.refresh()
        self.version += 1
        self._sampler.weights_changed()

    def close(self) -> None:
        """End what it has started; an actor of Ray, that is."""
        self._sampler.close()
