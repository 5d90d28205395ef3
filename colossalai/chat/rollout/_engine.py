"""Rollout engine: answers with log-probabilities, by the current weights of a model in training.

Call `sync` after a step of the optimizer. If a rank has the whole model, the engine reads the parameters
themselves and drops cached results of earlier values; otherwise it copies the new values. An answer is
trained on as the tokens that were drawn, never decoded and tokenized again: that would sometimes give other
tokens and other log-probabilities.
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
    """Placement and schedule of rollouts.

    Attributes:
        placement: "local", or "ray": in a process of Ray, see `RolloutEngine`.
        resources: Resources of that process, by the names of Ray's options.
        ahead: 1: the answers of a step are drawn during the previous step, by a copy of the weights from
            before that step. Ratios are relative to the probabilities of the draws. Steps that save a
            training state are not overlapped. 0: answers are drawn by the current weights.
        kv_memory: Size of the cache on each rank in bytes. Default: enough for all concurrent answers.
        tp_size: Number of tensor parallel ranks of an engine.
        pp_size: Number of pipeline stages of an engine. If `tp_size * pp_size` is above 1, that many adjacent
            ranks share an engine, each with a part of it: for models that do not fit on one rank.

    Raises:
        ValueError: An attribute is out of range.
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
                "several ranks communicates, and so does the concurrent step: leave one out"
            )


def _check(placement: str, resources: Mapping[str, Any], kv_memory: float | None) -> None:
    if placement not in ("local", "ray"):
        raise ValueError(f"placement is {placement!r}; it must be 'local' or 'ray'")
    if resources and placement != "ray":
        raise ValueError(f"resources={dict(resources)} are those of an actor: give placement='ray', too")
    if (
        kv_memory is not None and kv_memory <= 1
    ):  # a fraction of the free memory would differ between ranks and runs
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
    """An engine with the parameters of a model in training.

    Args:
        model: The model, boosted or not, with any parallel methods, with adapters (LoRA) or without. Each
            rank has its own engine for its own prompts, with all parameters: those of `model` under DDP and
            ZeRO 1 and 2, else a copy; or shares one with adjacent ranks, see `tp_size`. Collective over the
            job.
        tokenizer: The tokenizer of the model.
        max_length: Maximum number of tokens of a prompt and its answer.
        max_running: Maximum number of concurrent answers.
        placement: "ray": the engine has its own weights in a process of Ray, on a machine chosen by Ray. Ray
            must be running.
        resources: Resources of that process, by the names of Ray's options, such as `{"num_gpus": 1}`.
        has_copy: Whether it always has its own weights, which change with `sync` only.
        tp_size: Number of tensor parallel ranks of an engine, adjacent in the job.
        pp_size: Number of pipeline stages of an engine. If `tp_size * pp_size` ranks share one, `generate` is
            collective over them, and each has a part of the copy; or of the model itself, if that is sharded
            over `tp_size` tensor ranks only.
        options: Further options of the engine.

    Attributes:
        version: Number of calls of `sync`.
        cache_bytes: Size of the cache of keys and values.
        copy_bytes: Size of its own parameters; 0 if it reads those in training.
        num_ranks: Number of ranks that share it.

    Raises:
        ValueError: `model` cannot be served, `tp_size` and `pp_size` do not divide the ranks of the job or
            cannot share the layers, or `placement` is "ray" and Ray is not running.
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
            # Caches are sharded like layers, so the memory is for the answers of all these ranks.
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
        """Return the answers to each prompt.

        Collective over the ranks that share the engine, which call it the same number of times, each with its
        own prompts or none. The model is in evaluation mode meanwhile, without dropout.

        Args:
            prompts: Prompts as tokens.
            params: Sampling parameters of each prompt.

        Raises:
            ValueError: A prompt cannot be served; raised on all ranks that share the engine.
            RuntimeError: The model computes a NaN, or the engine has failed; raised on all these ranks.
        """
        return self._sampler.generate(prompts, params)

    def sync(self) -> None:
        """Use the current parameters from now on; collective over the job.

        Cached results of earlier values are dropped. An engine with its own weights receives them tensor by
        tensor: the peak memory is one extra tensor, and a rank receives each missing byte once.
        """
        self._weights.refresh()
        self.version += 1
        self._sampler.weights_changed()

    def close(self) -> None:
        """End the actor of Ray, if there is one."""
        self._sampler.close()


def _mesh_of_engines(tp_size: int, pp_size: int) -> Mesh:
    """Divide the ranks of the job into engines of `pp_size` stages of `tp_size` ranks each.

    Raises:
        ValueError: `tp_size * pp_size` does not divide the ranks of the job.
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
