"""Bytes that a rank holds in RLHF: actor, critic, reference, reward model, and the engine for rollouts.

With P parameters of a rank, some of them cut over N ranks by the stage of ZeRO, and bytes w, g, m, s of a
parameter, its gradient, its float32 master and its optimizer states:

    actor, critic     (w + g + m + s) P, cut by stage as in "ZeRO" (1910.02054); with adapters (LoRA) P counts
                      the adapters, and the F parameters that they adapt add w F
    reference         w F, cut as the actor; none if it is the actor with its adapters off
    reward            w F, whole on each rank
    rollouts          keys and values, 2 layers heads size e (s + 64) b for b answers of s tokens at a time;
                      and w F for the engine's own copy if a rank does not hold the whole actor

With states in host memory (`offload`) a device holds, for ZeRO 1 and 2, parameters and gradients; for Gemini
the two chunks that are used at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from colossalai.runtime.memory._counts import ParamNumbers, RlhfNumbers
from colossalai.runtime.memory._formulas import (
    Row,
    Storage,
    cache_row,
    float32_grads_row,
    frozen_row,
    gathered_row,
    state_rows,
)

ON_HOST = ("master weights", "optimizer states")
"""Rows of ZeRO 1 and 2 in host memory with `cpu_offload`."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Distribution of models over ranks.

    Attributes:
        name: Name in a table.
        plugin: The plugin as a user writes it, without a precision.
        dp: Number of data-parallel ranks.
        tp: Number of ranks that share each layer.
        zero: Stage of ZeRO; 3 is Gemini.
        offload: Whether states are in host memory; under Gemini also parameters and gradients.
    """

    name: str
    plugin: str
    dp: int
    tp: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    offload: bool = False

    def written(self, precision: str) -> str:
        """Return the plugin as a user writes it; plugins of ZeRO have their own precision."""
        has_own = self.plugin.startswith(("LowLevelZero", "Gemini"))
        return self.plugin.replace(")", f", precision={precision!r})") if has_own else self.plugin


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a rank.

    Attributes:
        device: Rows of its device.
        host: Rows of host memory.
    """

    device: tuple[Row, ...] = ()
    host: tuple[Row, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(row.num_bytes for row in self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(row.num_bytes for row in self.host)


@dataclass(frozen=True, kw_only=True)
class RlhfMemory:
    """Memory of a rank for all models under a plan.

    Attributes:
        plan: The plan.
        models: Memory by the names "actor", "critic", "reference", "reward" and "rollouts".
    """

    plan: MemoryPlan
    models: Mapping[str, RankMemory]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(held.num_bytes for held in self.models.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(held.host_bytes for held in self.models.values())


@dataclass(frozen=True, kw_only=True)
class RlhfSetup:
    """Models and settings of a training.

    Attributes:
        storage: Storage of the precision.
        models: The models of the job, of "actor", "critic", "reference", "reward" and "rollouts".
        answers: Number of answers that a rank generates at a time.
        tokens: Number of tokens of a prompt and its answer.
        has_adapters: Whether only adapters are trained; the reference is then the actor without them.
    """

    storage: Storage
    models: tuple[str, ...] = ("actor", "critic", "reference", "reward", "rollouts")
    answers: int = 8
    tokens: int = 576
    has_adapters: bool = False


def plans_of(num_ranks: int) -> Iterator[MemoryPlan]:
    """Yield the plans for a number of ranks, in ascending order of communication."""
    zero, gemini = "LowLevelZeroPlugin(stage={})", "GeminiPlugin(placement_policy={!r})"
    on_host = zero.format("2, cpu_offload=True")
    yield MemoryPlan(name="DDP", plugin="TorchDDPPlugin()", dp=num_ranks)
    if num_ranks > 1:
        yield MemoryPlan(name="ZeRO-1", plugin=zero.format(1), dp=num_ranks, zero=1)
        yield MemoryPlan(name="ZeRO-2", plugin=zero.format(2), dp=num_ranks, zero=2)
        yield MemoryPlan(name="Gemini", plugin=gemini.format("auto"), dp=num_ranks, zero=3)
    for tp in sorted({2, num_ranks} if num_ranks > 1 else ()):
        plugin = f"HybridParallelPlugin(tp_size={tp}"
        dp = num_ranks // tp
        yield MemoryPlan(name=f"tp {tp}", plugin=plugin + ")", dp=dp, tp=tp)
        if dp > 1:
            plugin += ", zero_stage=1)"
            yield MemoryPlan(name=f"tp {tp}, ZeRO-1", plugin=plugin, dp=dp, tp=tp, zero=1)
    yield MemoryPlan(name="ZeRO-2, host", plugin=on_host, dp=num_ranks, zero=2, offload=True)
    yield MemoryPlan(name="Gemini, host", plugin=gemini.format("cpu"), dp=num_ranks, zero=3, offload=True)


def rlhf_memory(numbers: RlhfNumbers, setup: RlhfSetup, plan: MemoryPlan) -> RlhfMemory:
    """Return the memory of a rank for the models of RLHF.

    Args:
        numbers: Numbers of a rank's parameters, for the `tp` of `plan`, with or without adapters.
        setup: Models and settings of the training.
        plan: Distribution over the ranks.
    """
    found = {
        "actor": training_memory(numbers.policy, setup.storage, plan),
        "critic": training_memory(numbers.value, setup.storage, plan),
        "reference": _frozen_memory(numbers.policy.as_frozen(), setup.storage, plan),
        "reward": RankMemory(device=(_whole_row(numbers.whole_value, setup.storage),)),
        "rollouts": _rollout_memory(numbers, setup, plan),
    }
    if setup.has_adapters:
        found["reference"] = RankMemory()
    return RlhfMemory(plan=plan, models={name: found[name] for name in setup.models})


def training_memory(numbers: ParamNumbers, storage: Storage, plan: MemoryPlan) -> RankMemory:
    """Return the memory of a rank for a trained model."""
    rows = state_rows(numbers.trained, storage, dp=plan.dp, zero=plan.zero)
    if storage.master and plan.zero == 0:
        rows.insert(2, float32_grads_row(numbers.trained, is_copied=plan.dp > 1))
    if numbers.frozen:
        rows.insert(0, frozen_row(numbers.frozen, storage, dp=plan.dp, zero=plan.zero))
    return _place_rows(rows, numbers, storage, plan)


def rollout_bytes(per_token: int, *, itemsize: int, answers: int, tokens: int) -> int:
    """Return the bytes of the cache of an engine.

    Args:
        per_token: Elements of keys and values of a token.
        itemsize: Bytes of an element.
        answers: Number of answers at a time.
        tokens: Largest number of tokens of a prompt and its answer.
    """
    return cache_row(per_token, itemsize=itemsize, answers=answers, tokens=tokens).num_bytes


def _frozen_memory(numbers: ParamNumbers, storage: Storage, plan: MemoryPlan) -> RankMemory:
    return _place_rows(
        [frozen_row(numbers.frozen, storage, dp=plan.dp, zero=plan.zero)], numbers, storage, plan
    )


def _place_rows(rows: list[Row], numbers: ParamNumbers, storage: Storage, plan: MemoryPlan) -> RankMemory:
    """Return rows by device and host memory."""
    chunks = (gathered_row(numbers.in_two_chunks, storage),) if plan.zero == 3 and _moves_chunks(plan) else ()
    if not plan.offload:
        return RankMemory(device=(*rows, *chunks))
    stays = [row for row in rows if plan.zero < 3 and row.name not in ON_HOST]
    return RankMemory(device=(*stays, *chunks), host=tuple(row for row in rows if row not in stays))


def _moves_chunks(plan: MemoryPlan) -> bool:
    """Return whether chunks are gathered or moved; those of a single rank are its own memory."""
    return plan.dp > 1 or plan.offload


def _whole_row(num_params: int, storage: Storage) -> Row:
    return frozen_row(num_params, storage, dp=1, zero=0)


def _rollout_memory(numbers: RlhfNumbers, setup: RlhfSetup, plan: MemoryPlan) -> RankMemory:
    itemsize = setup.storage.weight
    cache = cache_row(numbers.cached_per_token, itemsize=itemsize, answers=setup.answers, tokens=setup.tokens)
    shares = plan.zero < 3 and plan.tp == 1
    return RankMemory(device=(cache,) if shares else (cache, _whole_row(numbers.whole_policy, setup.storage)))
