"""Models of transformers train in tensor parallelism as on one process, alone and with other methods."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.tensor import spec_of
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.subjects import pipeline, zero
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks
from tests.shardformer.models import (
    VOCAB,
    InDouble,
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
    language_loss,
    llama,
    olmo2,
    phi,
    phi3,
    qwen3,
    vit,
    wide_opt,
)
from tests.tiers import further
from tests.turns import each_in_turn, grouped, run_each
from tests.zero.training import Warm

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist

TENSOR = {"size": 2, "mode": "1d"}
BY_FOUR = {"parallel": {"tensor": {"size": 4, "mode": "1d"}}}
PATCHES = ("embeddings", "classifier")


def train(
    build: Callable[[], nn.Module],
    config: dict[str, Any],
    uncut: tuple[str, ...],
    build_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train for three steps; every matrix and vocabulary must be cut, but for those with an `uncut` name."""
    parallel = {"tensor": TENSOR, **config.get("parallel", {})}
    config = {key: value for key, value in config.items() if key != "parallel"}
    colossalai.launch_from_torch({"clip_grad_norm": 0.5, "parallel": parallel, **config}, verbose=False)
    ids = torch.randint(VOCAB, (3, 8, 6), generator=torch.Generator().manual_seed(1))
    case = ParityCase(
        build_model=build,
        build_optimizer=build_optimizer or partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: language_loss(model(batch[0]), batch[1]),
        batches=[(part, part.roll(-1, dims=1)) for part in ids],
        max_norm=0.5,
    )

    def apply(model: nn.Module) -> Subject:
        has_slices = config.get("zero", {}).get("stage") in (1, 2)
        through = zero.through_engine if has_slices else pipeline.through_engine
        subject = through(case, model, language_loss)
        whole = [
            name
            for name, param in model.named_parameters()
            if param.dim() > 1 and spec_of(param) is None and not any(word in name for word in uncut)
        ]
        assert not whole or "pipeline" in parallel, whole  # where parts of the model are elsewhere
        return subject

    with nullcontext() if config.get("recompute") else InDouble():  # which a recomputation does not see
        losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


CELLS: list[Any] = [  # each family on two ranks, without other methods: in tests/verdicts
    (gpt2, 2, {"recompute": True}, ("wpe",)),
    further(gpt2, 4, {"zero": {"stage": 2}}, ("wpe",)),
    further(gpt2, 4, {"zero": {"stage": 3}}, ("wpe",)),
    further(llama, 4, {"zero": {"stage": 3}}, ()),
    further(wide_opt, 4, BY_FOUR, ("embed_positions",)),
    further(gated_t5, 4, BY_FOUR, ()),
    further(bloom, 4, BY_FOUR, ()),
    further(bloom, 2, {"recompute": True}, ()),
    further(bloom, 4, {"zero": {"stage": 3}}, ()),
    further(gpt_neox, 4, BY_FOUR, ()),
    further(phi, 4, BY_FOUR, ()),
    further(vit, 4, BY_FOUR, PATCHES),
    # By the plans of the models:
    further(qwen3, 4, {}, ()),
    (qwen3, 2, {"recompute": True}, ()),
    further(qwen3, 4, BY_FOUR, ()),
    further(qwen3, 4, {"zero": {"stage": 3}}, ()),
    further(gemma, 4, BY_FOUR, ()),
    further(gemma2, 4, BY_FOUR, ()),
    further(gemma3, 4, BY_FOUR, ()),  # and in a pipeline below
    further(phi3, 4, BY_FOUR, ()),
    further(olmo2, 4, BY_FOUR, ()),
    further(glm4, 4, BY_FOUR, ()),
    # By rules for what plans leave out inside a cut region:
    further(apertus, 4, BY_FOUR, ("embed_tokens",)),
    further(cohere, 4, BY_FOUR, ()),
    further(doge, 4, BY_FOUR, ("embed_tokens",)),
]


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, lambda build, num_ranks, *_: num_ranks))
def test_three_steps(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    cells = [(build, config, uncut) for build, _, config, uncut in cells]
    for losses in run_ranks(each_in_turn, num_ranks, train, cells)[0]:
        assert len(set(losses)) == 3


def test_states_before_the_first_step_are_sharded_as_parameters() -> None:
    """Each rank has the slices that belong to its parameters, also of a vocabulary with padding."""
    run_each(2, train, [(gpt2, {}, ("wpe",), Warm)])


IN_A_PIPELINE = [
    further(gpt2, "1f1b"),
    further(gpt2_of_four_blocks, "zb-v"),
    (gemma3, "zb-h1"),  # of a plan; the embedding and the head are tied
    further(llama, "zb-h1"),
    further(bert, "1f1b"),
    further(gemma3, "1f1b"),
    further(bloom, "1f1b"),
    further(gpt_neox, "zb-h1"),
    further(phi, "1f1b"),
]


def train_in_a_pipeline(build: Callable[[], nn.Module], schedule: str) -> list[float]:
    config = {
        "parallel": {"pipeline": {"size": 2, "schedule": schedule, "partition": "balanced"}},
        "NUM_MICRO_BATCHES": 4,
    }
    return train(build, config, ("wpe", "embeddings", "predictions"))


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(IN_A_PIPELINE, lambda *_: 4))
def test_three_steps_in_a_pipeline(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    for losses in run_ranks(each_in_turn, num_ranks, train_in_a_pipeline, cells)[0]:
        assert len(set(losses)) == 3
