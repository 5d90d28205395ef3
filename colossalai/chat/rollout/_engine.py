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

from colossalai.chat.rollout._sampler import LocalSampler, PartsSampler, Rollout, Sampler
from colossalai.chat.rollout._weights import (
    CopiedWeights,
    EngineWeights,
    SharedWeights,
    config_of,
    is_cut_alike,
    is_whole,
    served_module,
)
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
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
        kv_memory: Bytes of the cache on each rank; None: enough for all answers that are made at a time.
        tp_size: Number of ranks that share each layer of an engine.
        pp_size: Number of stages of an engine. With `tp_size * pp_size` above 1 that many neighbouring ranks
            share an engine, each with a part of it: for models that no rank can hold.

    Raises:
        ValueError: An attribute is out of its range.
    """

    placement: Literal["local", "ray"] = "local"
    resources: Mapping[str, Any] = field(default_factory=dict)
    ahead: Literal[0, 1] = 0
    kv_memory: float | None = None
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        _check(self.placement, self.resources, self.kv_memory)
        _check_ranks(self.tp_size, self.pp_size, self.placement)
        if self.ahead not in (0, 1):
            raise ValueError(f"ahead={self.ahead!r}: give 0 or 1 step")
        if self.ahead and self.tp_size * self.pp_size > 1:
            raise ValueError(
                f"ahead={self.ahead} and tp_size={self.tp_size}, pp_size={self.pp_size}: an engine of "
                "several ranks communicates, and so does the step that it would run beside: leave one out"
            )


def _check(placement: str, resources: Mapping[str, Any], kv_memory: float | None) -> None:
    if placement not in ("local", "ray"):
        raise ValueError(f"placement is {placement!r}; it must be 'local' or 'ray'")
    if resources and placement != "ray":
        raise ValueError(f"resources={dict(resources)} are those of an actor: give placement='ray', too")
    if (
        kv_memory is not None and kv_memory <= 1
    ):  # a fraction would be of what happens to be free, on each rank
        raise ValueError(f"kv_memory={kv_memory}: give bytes, or leave it out")


def _check_ranks(tp_size: int, pp_size: int, placement: str) -> None:
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size!r}; it must be an integer of at least 1")
    if tp_size * pp_size > 1 and placement == "ray":
        raise ValueError(
            f"tp_size={tp_size}, pp_size={pp_size} and placement='ray': an actor has a whole model: leave "
            "one of them out"
        )


class RolloutEngine:
    """An engine that answers with the parameters of a model that is being trained.

    Args:
        model: The model, boosted or not, under any methods, with adapters (LoRA) or without. Each rank has an
            engine of its own, for its own prompts, with all parameters: those of `model` under DDP and
            ZeRO 1 and 2, else a copy; or shares one with its neighbours, see `tp_size`. The ranks of the job
            make it together.
        tokenizer: That of the model.
        max_length: Most tokens of a prompt and its answer.
        max_running: Most answers that are made at a time.
        placement: "ray": the engine is in a process of Ray, on whatever machine that chooses, with weights of
            its own. Ray has to be running.
        resources: What that process needs, by the names of Ray's options, as `{"num_gpus": 1}`.
        has_copy: Whether it has weights of its own in any case, which change with `sync` alone.
        tp_size: Number of ranks that share each layer of an engine, neighbours in the job.
        pp_size: Number of stages of an engine. Where `tp_size * pp_size` ranks share one, `generate` is
            collective over them, and each has a part of the copy; of the model itself where that is cut over
            `tp_size` tensor ranks alone.
        options: Further ones, by the names of the engine's options.

    Attributes:
        version: How often `sync` was called.
        cache_bytes: What keys and values may take.
        copy_bytes: What parameters of its own take: 0 where it reads those in training.
        num_ranks: Number of ranks that share it.

    Raises:
        ValueError: `model` is none that can be served, `tp_size` and `pp_size` do not divide the ranks of the
            job or cannot share the layers, or `placement` is "ray" and Ray is not running.
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
        tp_size: int = 1,
        pp_size: int = 1,
        **options: Any,
    ) -> None:
        memory = options.pop("kv_memory", None)
        _check(placement, resources, memory)
        _check_ranks(tp_size, pp_size, placement)
        self.num_ranks = tp_size * pp_size
        raw: Any = model.unwrap() if isinstance(model, ModelWrapper) else model
        config, dtype = config_of(raw), next(raw.parameters()).dtype
        inner = served_module(raw)
        if memory is None:
            memory = rollout_bytes(
                cached_per_token(config), itemsize=dtype.itemsize, answers=max_running, tokens=max_length
            )
        options |= {"kv_memory": float(memory), "max_length": max_length, "max_running": max_running}
        self.cache_bytes = int(memory)
        self._sampler: Sampler
        self._weights: EngineWeights = SharedWeights()
        if placement == "ray":
            from colossalai.chat.rollout._ray import RaySampler, RayWeights

            self._sampler = RaySampler(config, dtype, tokenizer, resources=resources, **options)
            self._weights = RayWeights(raw, self._sampler)
        elif self.num_ranks > 1:
            # Caches are cut over the ranks as layers are, so that the memory is for the answers of all.
            options["max_running"] *= self.num_ranks
            mesh = _mesh_of_engines(tp_size, pp_size)
            if has_copy or not is_cut_alike(raw, mesh):
                self._weights = copied = CopiedWeights(raw, mesh)
                inner = copied.part
            self._sampler = PartsSampler(inner, tokenizer, mesh, **options)
        else:
            if has_copy or not is_whole(raw):
                self._weights = copied = CopiedWeights(raw)
                inner = copied.part
            self._sampler = LocalSampler(inner, tokenizer, **options)
        self.copy_bytes = self._weights.num_bytes
        self.version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Rollout]]:
        """Return for each prompt as many answers as its parameters say.

        No other rank takes part but those that share the engine, which call it as often, each with its own
        prompts or none. The model is in evaluation mode meanwhile: dropout draws nothing.

        Args:
            prompts: Tokens.
            params: How each is answered.

        Raises:
            ValueError: A prompt can never be answered; on all ranks that share the engine.
            RuntimeError: The model computes a NaN, or the engine has failed; on all these ranks.
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


def _mesh_of_engines(tp_size: int, pp_size: int) -> Mesh:
    """Return the ranks of the job as engines of `pp_size` stages of `tp_size` ranks each.

    Raises:
        ValueError: The product of both does not divide the ranks of the job.
    """
    job = gpc.mesh
    engines, rest = divmod(job.world_size, tp_size * pp_size)
    if rest:
        raise ValueError(
            f"tp_size={tp_size} and pp_size={pp_size}: engines of {tp_size * pp_size} ranks, of which the "
            f"job has {job.world_size}: give sizes whose product divides them"
        )
    mesh = Mesh(
        {"dp": engines, "pp": pp_size, "tp": tp_size},
        rank=job.rank,
        device_type=job.device_type,
        order=job.order,
    )
    mesh.take_groups_of(job)
    return mesh
