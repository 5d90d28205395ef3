"""The parity table of transformers: rows whose models are cut, alone and beside other methods.

Each family on two ranks, without other methods: in tests/verdicts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from colossalai.tensor import spec_of
from tests.parity.table import MODES, ZERO_3, stages
from tests.parity.tasks import fused, language
from tests.parity.training import Run
from tests.shardformer.models import (
    VOCAB,
    apertus,
    bert,
    bloom,
    cohere,
    doge,
    gated_t5,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt2_of_four_blocks,
    gpt_neox,
    llama,
    olmo2,
    phi,
    phi3,
    qwen3,
    vit,
    wide_opt,
)
from tests.tiers import further
from tests.zero.training import Warm

Build = Callable[[], nn.Module]
ADAMW = partial(torch.optim.AdamW, lr=0.01)
PATCHES = ("embeddings", "classifier")


def transformer(
    build: Build,
    num_ranks: int,
    *uncut: str,
    mode: str = "1d",
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    **config: Any,
) -> Run:
    """Return a run of a model whose layers tensor-parallel ranks share.

    Args:
        build: Returns the model.
        num_ranks: How many ranks there are.
        uncut: Words in the names of the matrices that are whole on every rank; all others must be cut.
        mode: Key of `MODES`.
        optimizer: Makes the optimizer of parameters.
        config: The rest of the config.
    """
    return Run(
        task=language(build, optimizer=optimizer),
        num_ranks=num_ranks,
        config={**config, "parallel": {"tensor": MODES[mode], **config.get("parallel", {})}},
        max_norm=0.5,
        check=partial(_check_cuts, uncut),
    )


def _check_cuts(uncut: tuple[str, ...], model: Any) -> None:
    matrices = {name: param for name, param in model.unwrap().named_parameters() if param.dim() > 1}
    whole = [name for name, param in matrices.items() if spec_of(param) is None]
    assert not [name for name in whole if not any(word in name for word in uncut)]


def in_stages(build: Build, schedule: str) -> Run:
    """Return a run of a model in a pipeline of two stages, whose layers two ranks share."""
    return transformer(build, 4, "wpe", "embeddings", "predictions", **stages(2, schedule))


AGAIN = {"recompute": True}

TRANSFORMERS = [
    transformer(gpt2, 2, "wpe", **AGAIN),
    further(transformer(gpt2, 4, "wpe", zero={"stage": 2})),
    further(transformer(gpt2, 4, "wpe", **ZERO_3)),
    # Each rank has the slices of the states that belong to its parameters, also of a padded vocabulary.
    transformer(gpt2, 2, "wpe", optimizer=Warm),
    further(transformer(llama, 4, **ZERO_3)),
    further(transformer(wide_opt, 4, "embed_positions", mode="1d-4")),
    further(transformer(vit, 4, *PATCHES, mode="1d-4")),
    *(further(transformer(build, 4, mode="1d-4")) for build in (gated_t5, bloom, gpt_neox, phi)),
    further(transformer(bloom, 2, **AGAIN)),
    further(transformer(bloom, 4, **ZERO_3)),
    # By the plans of the models:
    further(transformer(qwen3, 4)),
    transformer(qwen3, 2, **AGAIN),
    further(transformer(qwen3, 4, **ZERO_3)),
    *(
        further(transformer(build, 4, mode="1d-4"))
        for build in (qwen3, gemma, gemma2, gemma3, phi3, olmo2, glm4)
    ),
    # By rules for what plans leave out inside a cut region:
    *(further(transformer(build, 4, "embed_tokens", mode="1d-4")) for build in (apertus, doge)),
    further(transformer(cohere, 4, mode="1d-4")),
    in_stages(gemma3, "zb-h1"),  # of a plan; the embedding and the head are tied
    further(in_stages(gpt2_of_four_blocks, "zb-v")),
    *(further(in_stages(build, "1f1b")) for build in (gpt2, bert, gemma3, bloom, phi)),
    *(further(in_stages(build, "zb-h1")) for build in (llama, gpt_neox)),
]


def with_fused_loss(build: Build, num_ranks: int, accumulation: int = 1, **config: Any) -> Run:
    """Return a run of a causal model whose loss is in chunks; the twin's is over whole logits."""
    return Run(
        task=fused(build, VOCAB),
        num_ranks=num_ranks,
        config={"fused_loss": True, **config},
        accumulation=accumulation,
        max_norm=0.5,
    )


CUT = {"parallel": {"tensor": MODES["1d"]}}
FUSED_LOSS = [
    with_fused_loss(gpt2, 2, **CUT, **AGAIN),
    with_fused_loss(gpt2, 2, **stages(2)),
    with_fused_loss(gemma, 2, **CUT),  # by a plan
    further(with_fused_loss(llama, 2, **CUT, **AGAIN)),
    further(with_fused_loss(llama, 2, **stages(2))),
    *(
        further(run)
        for build in (gpt2, llama)
        for run in (
            with_fused_loss(build, 2, accumulation=2),
            with_fused_loss(build, 2, zero={"stage": 1}),
            with_fused_loss(build, 2, **ZERO_3),
        )
    ),
    further(with_fused_loss(gpt2, 4, **stages(2, "zb-h1", tensor=MODES["1d"]))),
    further(with_fused_loss(gpt2, 4, **CUT, **ZERO_3)),
]
