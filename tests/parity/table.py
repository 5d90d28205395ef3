"""The parity table: runs under parallel methods, alone and beside each other, that equal one process.

Rows by section; a row outside of `further` and `in_soak` belongs to `make test`. Each possible pair of
methods is run besides (test_pairs.py).
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.context import ParallelMode, get_current_mode
from tests.parity.tasks import (
    DEEP_NET,
    NET,
    RING,
    UNEVEN_VOCAB,
    fused,
    fused_gpt,
    language,
    layer_net,
    masked_zoo,
    zoo,
)
from tests.parity.training import Run
from tests.shardformer.models import gpt2_of_four_blocks
from tests.tiers import further, in_soak

MODES: dict[str, dict[str, Any]] = {
    "1d": {"size": 2, "mode": "1d"},
    "1d-4": {"size": 4, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d-1": {"size": 4, "mode": "2.5d", "depth": 1},
    "2.5d": {"size": 8, "mode": "2.5d", "depth": 2},
    "3d": {"size": 8, "mode": "3d"},
}


def size_of(mode: str | None) -> int:
    """Return how many ranks share a layer in a mode; None for no mode."""
    return MODES[mode]["size"] if mode else 1


def layers(mode: str, data: int, accumulation: int, tied: bool, cuts_vocabulary: bool, **config: Any) -> Run:
    """Return a run of layers in a tensor mode."""
    return Run(
        task=layer_net(tied=tied, cuts_vocabulary=cuts_vocabulary),
        num_ranks=size_of(mode) * data,
        config={"parallel": {"data": data, "tensor": MODES[mode]}, **config},
        accumulation=accumulation,
        max_norm=None if tied else 0.3,  # clipping hides gradients that are a multiple of the right ones
    )


def transformer(
    name: str,
    mode: str,
    data: int = 1,
    vocab: int = 16,
    cuts_vocabulary: bool = True,
    num_layers: int = 1,
    **config: Any,
) -> Run:
    """Return a run of a transformer of the zoo in a tensor mode."""
    return Run(
        task=zoo(name, vocab=vocab, cuts_vocabulary=cuts_vocabulary, num_layers=num_layers),
        num_ranks=size_of(mode) * data,
        config={"parallel": {"data": data, "tensor": MODES[mode]}, **config},
        max_norm=0.3 if data > 1 else None,
    )


EVERY_MODE = ("1d", "2d", "2.5d", "3d")
ZERO_3 = {"zero": {"stage": 3}}
UNEVEN = 13  # a vocabulary that no number of ranks divides

TENSOR = [
    layers("1d", 1, 1, True, True),
    layers("1d", 2, 2, True, True),
    layers("1d-4", 1, 1, False, False),
    layers("2d", 1, 2, True, True),
    layers("3d", 1, 2, True, True),
    layers("1d", 2, 1, True, True, **ZERO_3),
    further(layers("2d", 2, 1, True, True, **ZERO_3)),
    *(
        further(layers(mode, 1, 1, tied, cuts_vocabulary))
        for mode in ("1d", "1d-4", "2d", "2.5d", "3d")
        for tied in (True, False)
        for cuts_vocabulary in (True, False)
        if (mode, tied, cuts_vocabulary) not in (("1d", True, True), ("1d-4", False, False))
    ),
    further(layers("1d", 2, 1, True, True)),
    further(layers("2d", 2, 1, True, True)),
    further(layers("2.5d", 1, 2, True, True)),
    # Whole models; all three stack the same block.
    transformer("gpt", "1d", num_layers=2),
    transformer("gpt", "2d", num_layers=2),
    transformer("gpt", "1d", vocab=UNEVEN),
    transformer("bert", "1d"),
    transformer("vit", "1d"),
    further(transformer("vit", "2d")),
    further(transformer("gpt", "2.5d", vocab=UNEVEN)),
    in_soak(transformer("gpt", "3d", vocab=UNEVEN)),
    further(transformer("gpt", "2d", cuts_vocabulary=False)),
    further(transformer("gpt", "1d", 2)),
    in_soak(transformer("gpt", "2.5d", num_layers=2)),
    further(transformer("gpt", "3d", num_layers=2)),
    further(transformer("gpt", "2d", vocab=UNEVEN)),
    further(transformer("gpt", "1d-4", cuts_vocabulary=False)),
    further(transformer("gpt", "2d", 2)),
    *(further(transformer("bert", mode, vocab=UNEVEN)) for mode in EVERY_MODE[:2]),
    *(in_soak(transformer("bert", mode, vocab=UNEVEN)) for mode in EVERY_MODE[2:]),
    *(further(transformer("bert", mode)) for mode in EVERY_MODE[1:]),
    *(further(transformer("vit", mode)) for mode in EVERY_MODE[2:]),
    *(further(transformer("vit", mode, 2)) for mode in ("1d", "2d")),
    further(transformer("gpt", "1d", 2, UNEVEN, **ZERO_3)),
]


NUM_MICROBATCHES = 4


def stages(
    size: int,
    schedule: str = "1f1b",
    *,
    partition: str = "balanced",
    num_microbatches: int = NUM_MICROBATCHES,
    zero: int = 0,
    **parallel: Any,
) -> dict[str, Any]:
    """Return a config of a pipeline."""
    pipeline = {"size": size, "schedule": schedule, "partition": partition}
    config = {"parallel": {"pipeline": pipeline, **parallel}, "NUM_MICRO_BATCHES": num_microbatches}
    config |= {"NUM_CHUNKS": 2} if schedule == "interleaved" else {}
    return config | ({"zero": {"stage": zero}} if zero else {})


def in_stages(size: int, schedule: str, accumulation: int, max_norm: float | None) -> Run:
    """Return a run of plain layers in a pipeline."""
    return Run(
        task=DEEP_NET,
        num_ranks=size,
        config=stages(size, schedule),
        accumulation=accumulation,
        max_norm=max_norm,
    )


def by_hybrid(schedule: str, **options: Any) -> Run:
    """Return a run of plain layers in a pipeline of two stages, by two replicas, at the plugin door."""
    options = {"pp_size": 2, "schedule": schedule, "num_microbatches": 4, "max_norm": 0.1, **options}
    plugin = partial(HybridParallelPlugin, **options)
    return Run(task=DEEP_NET, num_ranks=4, plugin=plugin, max_norm=0.1)


def hybrid(name: str, mode: str | None, schedule: str, size: int, data: int) -> Run:
    """Return a run of a transformer, with a block for each chunk, in a pipeline and a tensor mode."""
    num_layers = size * (2 if schedule in ("interleaved", "zb-v") else 1)
    parallel = {"tensor": MODES[mode]} if mode else {}
    return Run(
        task=zoo(name, num_layers=num_layers, num_samples=16 * data),
        num_ranks=size_of(mode) * size * data,
        config=stages(size, schedule, partition="uniform", num_microbatches=2, **parallel),
        max_norm=0.3,
    )


def of_transformers(schedule: str, *, lazily: bool) -> Run:
    """Return a run of a GPT-2 of transformers, with tied embedding and head, in a pipeline."""
    task = language(gpt2_of_four_blocks, lazily=lazily)
    return Run(task=task, num_ranks=2, config=stages(2, schedule), max_norm=0.5)


PIPELINE = [
    in_stages(2, "gpipe", 1, 0.1),
    in_stages(2, "interleaved", 1, 0.1),
    in_stages(2, "1f1b", 2, None),
    in_stages(2, "zb-v", 2, None),
    in_stages(4, "zb-h1", 1, 0.1),
    *(further(in_stages(2, schedule, 1, 0.1)) for schedule in ("1f1b", "zb-h1", "zb-v")),
    *(further(in_stages(4, schedule, 1, 0.1)) for schedule in ("gpipe", "1f1b", "interleaved", "zb-v")),
    by_hybrid("interleaved", num_model_chunks=2),
    further(by_hybrid("1f1b")),
    further(by_hybrid("zb-v")),
    hybrid("gpt", "2.5d-1", "1f1b", 2, 1),
    further(hybrid("gpt", "1d", "interleaved", 2, 1)),
    further(hybrid("gpt", None, "1f1b", 2, 2)),
    further(hybrid("bert", "1d", "1f1b", 2, 1)),
    further(hybrid("vit", "2d", "zb-h1", 2, 1)),
    further(hybrid("gpt", "1d", "1f1b", 2, 1)),
    further(hybrid("gpt", "1d", "zb-h1", 2, 2)),
    further(hybrid("gpt", "1d", "zb-v", 2, 1)),
    further(hybrid("gpt", "1d", "gpipe", 4, 1)),
    further(hybrid("gpt", "1d", "interleaved", 2, 2)),
    in_soak(hybrid("gpt", "2d", "1f1b", 2, 1)),
    further(hybrid("gpt", "2d", "zb-v", 2, 1)),
    further(hybrid("vit", "1d", "1f1b", 2, 2)),
    # A stage keeps the states of its parameters that are there before the first step.
    Run(
        task=replace(DEEP_NET, optimizer=partial(torch.optim.Adagrad, lr=0.05)),
        num_ranks=2,
        plugin=partial(HybridParallelPlugin, pp_size=2, num_microbatches=4),
    ),
    # Models that were never written for a pipeline.
    of_transformers("1f1b", lazily=True),
    further(of_transformers("zb-v", lazily=False)),
]


REPLICAS: dict[str, tuple[dict[str, Any], Any]] = {
    "ddp": ({}, TorchDDPPlugin),
    "fsdp": (ZERO_3, TorchFSDPPlugin),
}
"""The config, and the plugin."""


def replicas(num_ranks: int, accumulation: int, max_norm: float | None, method: str) -> Run:
    """Return a run of replicas, whole or in slices, by both doors."""
    config, plugin = REPLICAS[method]
    return Run(
        task=NET,
        num_ranks=num_ranks,
        config=config,
        plugin=plugin,
        accumulation=accumulation,
        max_norm=max_norm,
    )


def zero(num_ranks: int, stage: int, accumulation: int, max_norm: float | None) -> Run:
    """Return a run of ZeRO 1 or 2 by the config door."""
    config = {"zero": {"stage": stage}}
    return Run(task=NET, num_ranks=num_ranks, config=config, accumulation=accumulation, max_norm=max_norm)


def zero_by_plugin(num_ranks: int, stage: int, accumulation: int, overlap: bool) -> Run:
    """Return a run of ZeRO 1 or 2 in several buckets, one of them for a large parameter."""
    options = {"precision": "fp32", "max_norm": 0.1, "reduce_bucket_size_in_m": 0.0002}
    plugin = partial(LowLevelZeroPlugin, stage, overlap_communication=overlap, **options)
    return Run(task=NET, num_ranks=num_ranks, plugin=plugin, accumulation=accumulation, max_norm=0.1)


def zero_and_tensor(mode: str, stage: int, num_stages: int) -> Run:
    """Return a run of ZeRO over two replicas of a GPT in a tensor mode, which stages share or not."""
    config: dict[str, Any] = {"parallel": {"tensor": MODES[mode]}, "zero": {"stage": stage}}
    if num_stages > 1:
        options = {"partition": "uniform", "num_microbatches": 2, "zero": stage}
        config = stages(num_stages, **options, tensor=MODES[mode])
    return Run(
        task=zoo("gpt", num_layers=num_stages, num_samples=32),
        num_ranks=size_of(mode) * 2 * num_stages,
        config=config,
        max_norm=0.3,
    )


ZERO = [
    *(zero(num_ranks, stage, 4, 0.1) for num_ranks, stage in ((2, 1), (4, 2))),
    *(further(zero(num_ranks, stage, 1, None)) for num_ranks in (2, 4) for stage in (1, 2)),
    *(further(zero(num_ranks, stage, 4, 0.1)) for num_ranks, stage in ((2, 2), (4, 1))),
    zero_by_plugin(2, 2, 4, True),
    zero_by_plugin(4, 1, 4, True),
    zero_by_plugin(2, 1, 2, False),
    zero_by_plugin(2, 2, 2, False),
    further(zero_by_plugin(2, 1, 1, True)),
    further(zero_by_plugin(4, 2, 1, True)),
    Run(task=DEEP_NET, num_ranks=4, config=stages(2, zero=1), accumulation=2, max_norm=0.1),
    further(Run(task=DEEP_NET, num_ranks=4, config=stages(2, zero=1), max_norm=0.1)),
    further(Run(task=DEEP_NET, num_ranks=4, config=stages(2, "zb-v", zero=1), max_norm=0.1)),
    by_hybrid("1f1b", zero_stage=1, num_microbatches=2),
    *(replicas(2, 1, None, method) for method in REPLICAS),
    *(replicas(2, 4, 0.5, method) for method in REPLICAS),
    *(
        further(replicas(num_ranks, accumulation, max_norm, method))
        for num_ranks, accumulation, max_norm in ((4, 2, None), (2, 2, None), (2, 1, 0.5), (4, 4, 0.5))
        for method in REPLICAS
    ),
    zero_and_tensor("1d", 2, 1),
    further(zero_and_tensor("1d", 1, 2)),
    further(zero_and_tensor("2d", 1, 1)),
    further(zero_and_tensor("1d", 1, 1)),
    further(zero_and_tensor("2d", 2, 1)),
    further(zero_and_tensor("2.5d", 1, 1)),
    further(zero_and_tensor("3d", 2, 1)),
]


HANDLERS = {"gradient_handler": [{"type": "SequenceParallelGradientHandler"}]}


def _draws_by_rank(model: Any) -> None:
    """Ranks hold different tokens: dropout draws masks of its own on each of them."""
    assert get_current_mode() == ParallelMode.TENSOR


def in_sequence_mode(
    name: str, method: str, size: int, data: int, accumulation: int = 1, max_norm: float | None = None
) -> Run:
    """Return a run in the tensor mode "sequence", by both doors where the method has a plugin.

    Args:
        name: A transformer of the zoo, or "ring" for a model that calls the attention itself.
        method: How replicas are kept equal: "ddp", "fsdp" or "handler".
        size: How many ranks share a sequence.
        data: How many replicas there are.
        accumulation: See `Run`.
        max_norm: See `Run`.
    """
    more, plugin = {
        "ddp": ({}, TorchDDPPlugin),
        "fsdp": (ZERO_3, TorchFSDPPlugin),
        "handler": (HANDLERS, None),
    }[method]
    return Run(
        task=RING if name == "ring" else masked_zoo(name),
        num_ranks=size * data,
        check=_draws_by_rank,
        config={"parallel": {"tensor": {"size": size, "mode": "sequence"}}, **more},
        plugin=plugin,
        accumulation=accumulation,
        max_norm=max_norm,
    )


def shared(
    attention: str,
    num_ranks: int,
    *,
    name: str = "gpt",
    size: int = 2,
    mode: str | None = None,
    num_stages: int = 1,
    zero: int = 0,
    has_handler: bool = False,
    by_plugin: bool = False,
) -> Run:
    """Return a run in which ranks share sequences along an axis of their own; what is left holds replicas."""
    if by_plugin:
        options: dict[str, Any] = {"sp_size": size, "sequence_attention": attention, "tp_size": size_of(mode)}
        options |= {"pp_size": num_stages, "zero_stage": zero, "max_norm": 0.3}
        options |= {"num_microbatches": 2} if num_stages > 1 else {}
        how: dict[str, Any] = {"plugin": partial(HybridParallelPlugin, **options)}
    else:
        parallel = {"sequence": {"size": size, "attention": attention}}
        parallel |= {"tensor": MODES[mode]} if mode else {}
        config: dict[str, Any] = {"parallel": parallel}
        if num_stages > 1:
            config = stages(num_stages, partition="uniform", num_microbatches=2, **parallel)
        config |= {"zero": {"stage": zero}} if zero else {}
        how = {"config": config | (HANDLERS if has_handler else {})}
    return Run(task=masked_zoo(name), num_ranks=num_ranks, max_norm=0.3, **how)


def beside_one_other(attention: str) -> list[Run]:
    """Return runs on four ranks of which each has a method or a door of its own."""
    return [
        shared(attention, 4, mode="1d", name="bert", by_plugin=True),
        shared(attention, 4, zero=2),
        shared(attention, 4, has_handler=True, mode="1d"),
        shared(attention, 4, num_stages=2),
    ]


def further_beside_one_other(attention: str) -> list[Run]:
    """Return others on four ranks."""
    return [
        shared(attention, 4),  # and two replicas
        shared(attention, 4, zero=1, by_plugin=True),
        shared(attention, 4, mode="1d"),
        shared(attention, 4, zero=1, mode="1d"),
    ]


def beside_several_others(attention: str) -> list[Run]:
    """Return runs on eight ranks."""
    return [
        shared(attention, 8, mode="2d"),
        shared(attention, 8, mode="2.5d-1", name="bert"),
        shared(attention, 8, mode="1d", zero=2),
        shared(attention, 8, mode="1d", zero=3),
        shared(attention, 8, mode="1d", zero=3, by_plugin=True),
        shared(attention, 8, mode="1d", num_stages=2, zero=1, by_plugin=True),
        shared(attention, 8, mode="1d", num_stages=2, name="bert"),
    ]


def sequences_in_stages(num_ranks: int, *, by_plugin: bool) -> Run:
    """Return a run of cut sequences, in the mode "sequence", in a pipeline of two stages."""
    if by_plugin:
        options = {"tp_size": 2, "pp_size": 2, "sequence_parallel": True, "num_microbatches": 2}
        how: dict[str, Any] = {"plugin": partial(HybridParallelPlugin, max_norm=0.3, **options)}
    else:
        tensor = {"size": 2, "mode": "sequence"}
        how = {"config": stages(2, partition="uniform", num_microbatches=2, tensor=tensor)}
    return Run(task=masked_zoo("gpt", 8), num_ranks=num_ranks, max_norm=0.3, **how)


def ring_and_zero(stage: int, size: int) -> Run:
    """Return a run in which slices run along the ranks that share a sequence, too: they hold the same."""
    config = {"parallel": {"tensor": {"size": size, "mode": "sequence"}}, "zero": {"stage": stage}}
    return Run(task=RING, num_ranks=4, config=config, max_norm=0.3)


SEQUENCE = [
    in_sequence_mode("bert", "ddp", 2, 1),
    in_sequence_mode("bert", "handler", 2, 2, max_norm=0.3),
    further(in_sequence_mode("gpt", "ddp", 4, 1)),
    further(in_sequence_mode("gpt", "ddp", 2, 2, 2, 0.3)),
    further(in_sequence_mode("gpt", "ddp", 2, 1)),
    further(in_sequence_mode("bert", "ddp", 4, 1)),
    further(in_sequence_mode("gpt", "ddp", 2, 2, max_norm=0.3)),
    further(in_sequence_mode("bert", "ddp", 2, 2, max_norm=0.3)),
    further(in_sequence_mode("gpt", "fsdp", 2, 2, max_norm=0.3)),
    *(
        further(in_sequence_mode("ring", method, size, data, 1, max_norm))
        for method in ("ddp", "handler", "fsdp")
        for size, data, max_norm in ((2, 1, None), (2, 2, 0.3), (4, 1, None))
    ),
    ring_and_zero(1, 2),
    further(ring_and_zero(2, 4)),
    sequences_in_stages(4, by_plugin=True),
    further(sequences_in_stages(8, by_plugin=False)),
    # Along an axis of their own.
    shared("ulysses", 2),
    shared("ring", 2),
    further(shared("ulysses", 2, name="bert")),
    *beside_one_other("ulysses"),
    *map(further, beside_one_other("ring")),
    *map(further, further_beside_one_other("ulysses")),
    *map(further, further_beside_one_other("ring")),
    *(further(shared("ulysses", 4, size=4, name=name)) for name in ("gpt", "bert")),
    *map(further, beside_several_others("ring")[::2]),
    *map(further, beside_several_others("ulysses")[1::2]),
    *map(in_soak, beside_several_others("ring")[1::2]),
    *map(in_soak, beside_several_others("ulysses")[::2]),
]


def in_chunks(num_ranks: int, **config: Any) -> Run:
    """Return a run of a language model whose loss is in chunks; each pair in float32: in test_pairs.py."""
    config = {"fused_loss": True, **config}
    task = fused(fused_gpt, UNEVEN_VOCAB, is_rebuilt=True)
    return Run(task=task, num_ranks=num_ranks, config=config, max_norm=0.5)


TENSOR_1D = {"tensor": MODES["1d"]}
FUSED_LOSS = [
    in_chunks(2, parallel=TENSOR_1D, recompute=True),
    in_chunks(2, **stages(2)),
    further(in_chunks(2, gradient_accumulation=2)),
    *(further(in_chunks(2, zero={"stage": stage})) for stage in (1, 2, 3)),
    further(in_chunks(2, parallel={"sequence": {"size": 2}})),
    further(in_chunks(2, **stages(2, "zb-h1"))),
    further(in_chunks(4, **stages(2, **TENSOR_1D))),
    further(in_chunks(4, parallel=TENSOR_1D, zero={"stage": 3})),
]

SGD = partial(torch.optim.SGD, lr=0.5)
CLIPPED_ELEMENTS = [
    Run(
        task=replace(layer_net(tied=False, cuts_vocabulary=True), optimizer=SGD),
        num_ranks=2,
        config={"parallel": TENSOR_1D},
        clip_value=0.01,
    ),
    Run(task=replace(DEEP_NET, optimizer=SGD), num_ranks=2, config=stages(2), clip_value=0.05),
]

SECTIONS = {
    "tensor": TENSOR,
    "pipeline": PIPELINE,
    "zero": ZERO,
    "sequence": SEQUENCE,
    "fused loss": FUSED_LOSS,
    "clipped elements": CLIPPED_ELEMENTS,
}
