"""`colossalai memory --rlhf`: memory of a rank for all models of PPO under each plan, and the plans that fit.

[Note: capacity of one device]
According to the documents, one device holds a model 10.3 times as large as with PyTorch, and 3.7 times for
fine-tuning with LoRA. Here capacity is the largest published OPT whose bytes, by the formulas of
`runtime.memory`, fit into a device, without activations. The baseline is torch's DDP in float32, with 16 P
for actor and critic and 4 P for reference and reward; it is compared with the plan of the least memory.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from colossalai.cli._memory._shape import read_config
from colossalai.cli._picture import bytes_of, size_text
from colossalai.runtime.memory import (
    STORAGE,
    MemoryPlan,
    RankMemory,
    RlhfMemory,
    RlhfNumbers,
    RlhfSetup,
    device_bytes,
    plans_of,
    rlhf_memory,
    rlhf_numbers,
)

NUM_RANKS = (1, 4, 8)
_PROMPT_AND_ANSWER = 512 + 64  # PPO's defaults
_PROMPTS = 8
_GIB = 2**30
_SHORT = {"reference": "ref.", "rollouts": "engine"}


def _opt(layers: int, heads: int, hidden: int, *, embedding: int | None = None) -> Callable[[], Any]:
    """Return a factory of the config of an OPT, table 1 of 2205.01068."""

    def make() -> Any:
        from transformers import OPTConfig

        return OPTConfig(
            num_hidden_layers=layers,
            num_attention_heads=heads,
            hidden_size=hidden,
            ffn_dim=4 * hidden,
            word_embed_proj_dim=embedding or hidden,
            do_layer_norm_before=embedding is None,
            vocab_size=50272,
            max_position_embeddings=2048,
        )

    return make


def _gpt2(layers: int, heads: int, hidden: int) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import GPT2Config

        return GPT2Config(n_layer=layers, n_head=heads, n_embd=hidden)

    return make


OPT_FAMILY: Mapping[str, Callable[[], Any]] = {
    "opt-125m": _opt(12, 12, 768),
    "opt-350m": _opt(24, 16, 1024, embedding=512),
    "opt-1.3b": _opt(24, 32, 2048),
    "opt-2.7b": _opt(32, 32, 2560),
    "opt-6.7b": _opt(32, 32, 4096),
    "opt-13b": _opt(40, 40, 5120),
    "opt-30b": _opt(48, 56, 7168),
    "opt-66b": _opt(64, 72, 9216),
    "opt-175b": _opt(96, 96, 12288),
}
"""Configs of the published sizes."""

MODELS: Mapping[str, Callable[[], Any]] = {
    **OPT_FAMILY,
    "gpt2-small": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
}


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """Memory of a plan.

    Attributes:
        num_ranks: Number of ranks.
        whole: Memory with all parameters trained.
        adapters: Memory with adapters trained alone.
    """

    num_ranks: int
    whole: RlhfMemory
    adapters: RlhfMemory


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The largest model of a family that fits into one device.

    Attributes:
        torch_model: Largest model with torch's DDP in float32; None: none fits.
        torch_params: Number of its parameters.
        best_model: Largest model with the plan of the least memory; None: none fits.
        best_params: Number of its parameters.
        best_plan: Name of that plan.
    """

    torch_model: str | None
    torch_params: int
    best_model: str | None
    best_params: int
    best_plan: str


def show_rlhf(
    model: str | None,
    *,
    precision: str,
    batch: int | None,
    seq: int | None,
    lora_rank: int,
    memory: str | None,
    as_json: bool,
    explain: bool,
) -> None:
    """Print the memory of a rank under each plan, as a table or as JSON.

    Args:
        model: A name of `MODELS`, or the path of a config.json; None: OPT-1.3B.
        precision: A name of `STORAGE`.
        batch: Number of answers that a rank generates at a time; None: PPO's default batch.
        seq: Number of tokens of a prompt and its answer; None: as many as PPO's defaults allow.
        lora_rank: Rank of the adapters.
        memory: Memory of the device of each rank, with a unit; None: this machine's memory.
        as_json: Whether to print JSON.
        explain: Whether to print the formulas as well.

    Raises:
        ValueError: `model` or `precision` is unknown, or `seq` exceeds the window of the model.
    """
    budget = None if memory is None else bytes_of("--memory", memory)
    name, config = _config_of(model)
    if precision not in STORAGE:
        raise ValueError(f"--precision {precision}: choose one of {', '.join(STORAGE)}")
    window = getattr(config, "max_position_embeddings", None) or _PROMPT_AND_ANSWER
    tokens = min(_PROMPT_AND_ANSWER, window) if seq is None else seq
    if tokens > window:
        raise ValueError(f"--seq {seq}: {name} takes at most {window}")
    setup = RlhfSetup(storage=STORAGE[precision], answers=batch or _PROMPTS, tokens=tokens)
    rows = list(rows_of(config, setup, lora_rank=lora_rank))
    one_device = budget or device_bytes(1)  # See [Note: capacity of one device]
    capacity = capacity_of(one_device, setup, lora_rank=lora_rank)
    if as_json:
        found = _as_dict(name, rows, setup, capacity, budget=budget)
        sys.stdout.write(
            json.dumps(found | {"precision": precision, "lora_rank": lora_rank}, indent=2) + "\n"
        )
        return
    console = Console(highlight=False, markup=False)
    say = partial(console.print, soft_wrap=True)
    say(
        f"{name}: {rlhf_numbers(config).whole_policy:,} parameters, {precision}; {setup.answers} "
        f"answers of a rank at a time, of up to {tokens} tokens with their prompts; adapters of rank "
        f"{lora_rank}"
    )
    console.print(_table(rows, budget))
    where = f"{size_text(budget)} of each rank" if budget else "this machine's memory, divided by its ranks"
    say(f"GiB of a rank. Fits into {where}: all trained (yes), or adapters alone (LoRA).")
    say("Activations, and what communication and the library take, come on top.")
    say(_capacity_text(capacity, one_device))
    if explain:
        _explain(say, rows)


def rows_of(config: Any, setup: RlhfSetup, *, lora_rank: int) -> Iterator[PlanRow]:
    """Yield the memory of each plan over 1, 4 and 8 ranks, without plans that cannot shard the layers."""
    known: dict[int, tuple[RlhfNumbers, RlhfNumbers] | None] = {}
    for num_ranks in NUM_RANKS:
        for plan in plans_of(num_ranks):
            if plan.tp not in known:
                known[plan.tp] = _numbers(config, plan.tp, lora_rank)
            found = known[plan.tp]
            if found is not None:
                yield _row(num_ranks, plan, setup, *found)


def _numbers(config: Any, tp: int, lora_rank: int) -> tuple[RlhfNumbers, RlhfNumbers] | None:
    try:
        return rlhf_numbers(config, tp=tp), rlhf_numbers(config, tp=tp, lora_rank=lora_rank)
    except ValueError:  # heads that tp does not divide, or a model without rules
        if tp == 1:
            raise
        return None


def _row(
    num_ranks: int, plan: MemoryPlan, setup: RlhfSetup, whole: RlhfNumbers, adapters: RlhfNumbers
) -> PlanRow:
    return PlanRow(
        num_ranks=num_ranks,
        whole=rlhf_memory(whole, setup, plan),
        adapters=rlhf_memory(adapters, replace(setup, has_adapters=True), plan),
    )


def capacity_of(memory: int, setup: RlhfSetup, *, lora_rank: int) -> Capacity:
    """Return the largest OPT that fits into one device of `memory` bytes; host memory is unbounded."""
    torch_model, torch_params, best_model, best_params, best_plan = None, 0, None, 0, ""
    plain, *_ = plans_of(1)
    for name, make in OPT_FAMILY.items():
        config = make()
        whole, adapters = rlhf_numbers(config), rlhf_numbers(config, lora_rank=lora_rank)
        rows = [_row(1, plan, setup, whole, adapters) for plan in plans_of(1)]
        if rlhf_memory(whole, replace(setup, storage=STORAGE["fp32"]), plain).num_bytes <= memory:
            torch_model, torch_params = name, whole.whole_policy
        found = {row.whole.plan.name: row.whole.num_bytes for row in rows}
        found |= {f"{row.whole.plan.name}, LoRA": row.adapters.num_bytes for row in rows}
        least = min(found, key=found.__getitem__)
        if found[least] > memory:
            break  # larger models need more
        best_model, best_params, best_plan = name, whole.whole_policy, least
    return Capacity(
        torch_model=torch_model,
        torch_params=torch_params,
        best_model=best_model,
        best_params=best_params,
        best_plan=best_plan,
    )


def _config_of(model: str | None) -> tuple[str, Any]:
    """Return the name and the config of a model.

    Raises:
        ValueError: `model` is neither a known name nor a config of a causal language model.
    """
    name = "opt-1.3b" if model is None else model.lower().replace("_", "-")
    if name in MODELS:
        try:
            return name, MODELS[name]()
        except ModuleNotFoundError as error:
            raise ValueError("models are counted with transformers: pip install transformers") from error
    if model is None or not model.endswith(".json"):
        raise ValueError(
            f"there is no model {model!r} for --rlhf: choose one of {', '.join(MODELS)}, or give the path of "
            "a config.json of Hugging Face transformers"
        )
    if not Path(model).is_file():
        raise ValueError(f"there is no file {model!r}")
    config, _ = read_config(Path(model))
    return Path(model).resolve().parent.name, config


def _table(rows: list[PlanRow], budget: int | None) -> Table:
    table = Table(box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    names = list(rows[0].whole.models)
    for name in (*names, "total", "host", "LoRA"):
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        memory = row.whole
        sizes = [memory.models[name].num_bytes for name in names]
        sizes += [memory.num_bytes, memory.host_bytes, row.adapters.num_bytes]
        table.add_row(
            str(row.num_ranks),
            memory.plan.name,
            *(f"{size / _GIB:.2f}" for size in sizes),
            _fit_text(row, budget or device_bytes(row.num_ranks)),
            end_section=following is not None and following.num_ranks != row.num_ranks,
        )
    return table


def _fit_text(row: PlanRow, budget: int) -> str:
    if row.whole.num_bytes <= budget:
        return "yes"
    return "LoRA" if row.adapters.num_bytes <= budget else "no"


def _capacity_text(capacity: Capacity, memory: int) -> str:
    if capacity.best_model is None:
        return f"No OPT fits into one device of {size_text(memory)}."
    if capacity.torch_model is None:
        plain = "none with torch's DDP in float32"
    else:
        ratio = capacity.best_params / capacity.torch_params
        plain = f"{capacity.torch_model} with torch's DDP in float32: {ratio:.1f} times the parameters"
    return (
        f"Largest OPT of one device of {size_text(memory)}: {capacity.best_model} ({capacity.best_plan}), "
        f"{plain}."
    )


def _explain(say: Callable[..., None], rows: list[PlanRow]) -> None:
    for row in rows:
        for memory, kind in ((row.whole, "all trained"), (row.adapters, "LoRA")):
            say(f"\n{row.num_ranks} ranks, {memory.plan.name}, {kind}: {memory.plan.plugin}")
            for name, held in memory.models.items():
                for place, found in (("", held.device), (" in host memory", held.host)):
                    for each in found:
                        say(f"  {name}: {each.name}{place} = {each.numbers} = {each.num_bytes:,} B")


def _as_dict(
    name: str, rows: list[PlanRow], setup: RlhfSetup, capacity: Capacity, *, budget: int | None
) -> dict[str, Any]:
    plans = []
    for row in rows:
        limit = budget or device_bytes(row.num_ranks)
        for memory, has_adapters in ((row.whole, False), (row.adapters, True)):
            plans.append(
                {
                    "ranks": row.num_ranks,
                    **asdict(memory.plan),
                    "lora": has_adapters,
                    "models": {model: _rank_memory_dict(held) for model, held in memory.models.items()},
                    "bytes": memory.num_bytes,
                    "host_bytes": memory.host_bytes,
                    "fits": memory.num_bytes <= limit,
                }
            )
    return {
        "model": name,
        "answers": setup.answers,
        "tokens": setup.tokens,
        "memory": budget,
        "plans": plans,
        "capacity": asdict(capacity),
    }


def _rank_memory_dict(held: RankMemory) -> dict[str, Any]:
    return {
        "bytes": held.num_bytes,
        "host_bytes": held.host_bytes,
        "rows": [asdict(row) for row in held.device],
        "host_rows": [asdict(row) for row in held.host],
    }
