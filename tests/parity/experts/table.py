"""The rows of the parity table about experts, which a part of the data-parallel ranks share.

The gradients of an expert are summed over the ranks that hold the same slice, and divided by the number of
all. The pairs of experts with each other method are run besides (tests/parity/test_pairs.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.tensor import spec_of
from tests.parity.experts.tasks import (
    CUT_BY_HAND,
    OF_A_USER,
    WIDENET,
    moe_layers,
)
from tests.parity.table import MODES, ZERO_3, stages
from tests.parity.tasks import language
from tests.parity.training import Run
from tests.shardformer import models
from tests.tiers import further, in_soak, pairwise

MAX_NORM = 0.2  # of a norm of about 1
TP = {"tensor": MODES["1d"]}
ZERO_1, ZERO_2 = ({"zero": {"stage": stage}} for stage in (1, 2))
UNIFORM = partial(stages, 2, partition="uniform", num_microbatches=2)

Method = tuple[Mapping[str, Any], Callable[[], Plugin] | None]
METHODS: dict[str, Method] = {
    "ddp": ({}, TorchDDPPlugin),
    "ddp view": ({}, partial(TorchDDPPlugin, gradient_as_bucket_view=True)),
    "ddp unused": ({}, partial(TorchDDPPlugin, find_unused_parameters=True)),
    "ddp static": ({}, partial(TorchDDPPlugin, static_graph=True)),
    "recompute": ({"recompute": True}, None),
    "handler": ({"gradient_handler": [{"type": "DataParallelGradientHandler"}]}, None),
    "moe handler": ({"gradient_handler": [{"type": "MoeGradientHandler"}]}, None),
    "zero 1": (ZERO_1, partial(LowLevelZeroPlugin, 1, precision="fp32")),
    "zero 2": (ZERO_2, partial(LowLevelZeroPlugin, 2, precision="fp32")),
    "fsdp": (ZERO_3, TorchFSDPPlugin),
    "pipeline": (UNIFORM(), None),
    "pipeline zero 1": (UNIFORM(zero=1), None),
    "fsdp recompute": ({**ZERO_3, "recompute": True}, None),
}
"""The config of each method, and its plugin if it is run through that door, too."""


def with_experts(config: Mapping[str, Any], ep_size: int = 2) -> dict[str, Any]:
    """Return a config in which ranks share experts."""
    return {**config, "parallel": {"moe": {"size": ep_size}, **config.get("parallel", {})}}


def cut(num_ranks: int, method: str, accumulation: int | None = None, **options: Any) -> Run:
    """Return a run of parameters cut by hand over two ranks, of which each starts with values of its own.

    On two ranks no other one holds the same expert: nothing is summed, and still divided by two.
    """
    config, plugin = METHODS[method]
    if method.startswith("zero"):
        plugin = partial(plugin, max_norm=MAX_NORM)
    return Run(
        task=CUT_BY_HAND,
        num_ranks=num_ranks,
        config=with_experts(config),
        plugin=plugin,
        accumulation=accumulation or num_ranks // 2,
        max_norm=MAX_NORM,
        **options,
    )


class WholeSGD(torch.optim.SGD):
    """An optimizer that gets whole slices from ZeRO, and whose steps on them are those on the whole."""

    elementwise = False
    measures_wholes = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


CUT = [
    cut(4, "handler"),
    *(
        further(cut(num_ranks, method))
        for num_ranks in (2, 4)
        for method in ("ddp view", "zero 1", "zero 2", "fsdp")
    ),
    further(cut(2, "handler")),
    cut(4, "ddp unused", 1),
    cut(4, "ddp static", 1),
    # Each backward of a window synchronizes: earlier means stay as they are.
    *(cut(4, method, syncs_always=True) for method in ("ddp view", "ddp unused", "zero 2")),
    *(further(cut(4, method, syncs_always=True)) for method in ("ddp static", "zero 1", "fsdp")),
    *(further(cut(2, method, 2, syncs_always=True)) for method in ("ddp view", "fsdp", "zero 1", "zero 2")),
    *(further(cut(4, method, 1)) for method in ("pipeline", "pipeline zero 1")),
    # With an optimizer that takes no slices each parameter has one owner of those that hold it.
    Run(
        task=replace(CUT_BY_HAND, optimizer=partial(WholeSGD, lr=0.5, momentum=0.9)),
        num_ranks=4,
        config=with_experts(ZERO_1),
        max_norm=MAX_NORM,
    ),
]


def layers(
    num_ranks: int,
    method: str,
    router: str,
    ep_size: int,
    tp_size: int,
    experts: str,
    skew: str,
    accumulation: int,
) -> Run:
    """Return a run of layers with routers; tensor-parallel ranks share tokens."""
    config, plugin = METHODS[method]
    if tp_size > 1:
        stage = config.get("zero", {}).get("stage", 0)
        sizes = {"tp_size": tp_size, "pp_size": 1, "ep_size": ep_size, "zero_stage": stage}
        plugin = plugin and partial(HybridParallelPlugin, **sizes, precision="fp32")
        config = {**config, "parallel": TP}
    return Run(
        task=moe_layers(router, experts, skew),
        num_ranks=num_ranks,
        config=with_experts(config, ep_size),
        plugin=plugin,
        accumulation=accumulation,
        max_norm=0.3,
    )


def staged(num_ranks: int, schedule: str, router: str, ep_size: int, **config: Any) -> Run:
    """Return a run of layers in a pipeline: auxiliary losses of all stages are in its loss."""
    num_blocks = 4 if schedule in ("interleaved", "zb-v") else 2
    config = {**UNIFORM(schedule=schedule, **config.pop("parallel", {})), **config}
    return Run(
        task=moe_layers(router, "ffn", "none", num_blocks),
        num_ranks=num_ranks,
        config=with_experts(config, ep_size),
        max_norm=0.3,
    )


def widenet(**config: Any) -> Run:
    """Return a run of a WideNet, whose layers share their experts."""
    return Run(task=WIDENET, num_ranks=4, config=with_experts(config), max_norm=0.5)


def compiled(num_ranks: int, task: Any) -> Run:
    """Return a run whose blocks are compiled around experts: what travels is outside of the graphs."""
    return Run(task=task, num_ranks=num_ranks, config=with_experts({"compile": {"backend": "aot_eager"}}))


LAYERS = [
    layers(4, "zero 2", "top2", 4, 1, "any", "none", 2),
    further(layers(4, "fsdp recompute", "top1 capacity", 2, 1, "ffn", "none", 1)),
    layers(4, "ddp", "top3", 2, 2, "tp", "half", 1),
    further(layers(2, "recompute", "top2", 2, 1, "ffn", "none", 2)),
    further(layers(4, "moe handler", "top2 capacity", 2, 2, "ffn", "none", 1)),
    further(layers(4, "ddp", "top1", 2, 1, "ffn", "one", 2)),
    further(layers(4, "zero 1", "top2", 2, 1, "any", "half", 1)),
    further(layers(4, "ddp", "top2", 2, 1, "tp", "none", 1)),
    *(
        further(
            layers(
                4,
                method,
                router,
                ep_size,
                tp_size,
                *(("ffn", "none", 2) if ep_size == 2 else ("any", "none", 1)),
            )
        )
        for router, method, (ep_size, tp_size) in pairwise(
            ("top1", "top2", "top3", "top1 capacity", "top2 capacity"),
            ("ddp", "recompute", "zero 1", "zero 2", "fsdp"),
            ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)),
        )
    ),
    staged(4, "1f1b", "top1 capacity", 2, **ZERO_1, recompute=True),
    further(staged(4, "interleaved", "top3", 2)),
    further(staged(4, "zb-h1", "top2", 2)),
    further(staged(2, "1f1b", "top2", 1)),
    further(staged(4, "zb-v", "top2", 2)),
    further(staged(8, "1f1b", "top2", 2, parallel=TP)),
    further(widenet(**ZERO_1, recompute=True)),
    further(widenet(parallel=TP)),
    further(widenet()),
    compiled(2, moe_layers("top2", "any", "none", 1)),
    further(compiled(2, moe_layers("top2"))),
]


def transformer(build: Callable[[], nn.Module], num_ranks: int, ep_size: int = 2, **config: Any) -> Run:
    """Return a run of a model of transformers, all of whose experts are cut."""
    return Run(
        task=language(build),
        num_ranks=num_ranks,
        config=with_experts(config, ep_size),
        accumulation=config.get("gradient_accumulation", 1),
        max_norm=0.5,
        check=None if "pipeline" in config.get("parallel", {}) else all_experts_are_cut,
    )


def all_experts_are_cut(model: nn.Module) -> None:
    """Check that no rank holds experts whole."""
    for name, param in model.named_parameters():
        spec = spec_of(param)
        assert ".experts." not in name or (spec is not None and "ep" in spec.axes), name


TRANSFORMERS = [
    transformer(models.mixtral_with_lora, 2),
    further(transformer(models.qwen3_moe, 2, gradient_accumulation=2)),
    transformer(models.deepseek_v3, 2, **ZERO_2),
    further(transformer(models.gpt_oss, 2, recompute=True)),
    transformer(models.gpt_oss, 4, parallel=TP),
    transformer(models.glm4_moe, 4, parallel=TP),
    further(transformer(models.qwen3_vl_moe, 4, parallel=TP)),
    further(transformer(models.qwen3_omni_moe, 4, parallel=TP)),
    further(transformer(models.mixtral_of_eight, 4, **UNIFORM(zero=1))),
    # Mixtral beside each other method, Gemini and ZeRO 3 among them: in tests/parity/test_pairs.py.
    further(transformer(models.mixtral_of_eight, 4, 4, **ZERO_1)),
    further(transformer(models.mixtral_of_eight, 4, parallel=TP)),
    further(transformer(models.mixtral_of_eight, 4, **UNIFORM())),
    further(transformer(models.mixtral_with_lora, 4, **ZERO_1)),
    further(transformer(models.qwen3_moe, 4, **ZERO_3)),
    further(transformer(models.deepseek_v3, 4, **ZERO_2)),
    further(
        transformer(models.mixtral_of_eight, 4, gemini={"precision": "fp32", "min_chunk_size_mb": 0.002})
    ),
    further(transformer(models.gpt_oss, 4, **UNIFORM(zero=1))),
    further(transformer(models.mixtral_of_eight, 8, **UNIFORM(**TP))),
    *(
        further(transformer(getattr(models, name), 4, 4))  # by two: in tests/verdicts
        for name in ("mixtral_of_eight", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")
    ),
    further(transformer(models.deepseek_v3, 4, parallel=TP)),
    further(transformer(models.qwen2_moe, 8, parallel=TP, **ZERO_1)),
    in_soak(transformer(models.gpt_oss, 8, parallel=TP, **ZERO_3)),
    further(transformer(models.mixtral_with_lora, 4, **ZERO_3)),
    further(transformer(models.mixtral_with_lora, 4, parallel=TP)),
    further(transformer(models.qwen3_moe, 4, **UNIFORM(schedule="zb-h1"))),
    further(transformer(models.qwen3_moe, 4, parallel=TP)),
    further(compiled(2, language(models.mixtral_of_eight))),
    Run(
        task=OF_A_USER,
        num_ranks=2,
        plugin=partial(HybridParallelPlugin, ep_size=2, zero_stage=1, max_norm=0.5),
        accumulation=2,
        max_norm=0.5,
    ),
]
"""The second rank has experts of a user that no token is sent to."""
