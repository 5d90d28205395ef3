"""Models of transformers with experts train under expert parallelism as on one process."""

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
    deepseek_v3,
    gpt_oss,
    language_loss,
    mixtral_of_eight,
    qwen2_moe,
    qwen3_moe,
)
from tests.zero.gemini.test_parity import subject_of as subject_of_chunks

pytest.importorskip("transformers")
pytestmark = pytest.mark.dist


def train(build: Callable[[], nn.Module], config: dict[str, Any], ep_size: int) -> list[float]:
    """Train for three steps; all experts must be cut."""
    parallel = {"moe": {"size": ep_size}, **config.get("parallel", {})}
    config = {"clip_grad_norm": 0.5, **config, "parallel": parallel}
    colossalai.launch_from_torch(config, verbose=False)
    ids = torch.randint(VOCAB, (3, 8, 6), generator=torch.Generator().manual_seed(1))
    case = ParityCase(
        build_model=build,
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: language_loss(model(batch[0]), batch[1]),
        batches=[(part, part.roll(-1, dims=1)) for part in ids],
        max_norm=0.5,
    )

    def apply(model: nn.Module) -> Subject:
        through = (
            zero.through_engine if config.get("zero", {}).get("stage") in (1, 2) else pipeline.through_engine
        )
        if config.get("zero") and "pipeline" in parallel:
            through = zero.through_pipeline
        if "gemini" in config:
            through = partial(zero.through_engine, make_subject=subject_of_chunks)
        subject = through(case, model, language_loss)
        for name, param in model.named_parameters():
            spec = spec_of(param)
            assert (
                ".experts." not in name
                or "pipeline" in parallel
                or (spec is not None and "ep" in spec.dims[0])
            ), name
        return subject

    with nullcontext() if config.get("recompute") else InDouble():
        losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
PIPELINE = {"parallel": {"pipeline": {"size": 2, "partition": "uniform"}}, "NUM_MICRO_BATCHES": 2}
CELLS: list[Any] = [
    (mixtral_of_eight, 2, 2, {}),
    (mixtral_of_eight, 4, 4, {"zero": {"stage": 1}}),
    (mixtral_of_eight, 4, 2, {"parallel": TENSOR}),
    (mixtral_of_eight, 4, 2, PIPELINE),
    (qwen2_moe, 4, 4, {}),
    (qwen3_moe, 2, 2, {"gradient_accumulation": 2}),
    (deepseek_v3, 4, 4, {}),
    (gpt_oss, 4, 2, {"parallel": TENSOR}),
    (gpt_oss, 2, 2, {"recompute": True}),
    (qwen3_moe, 4, 2, {"zero": {"stage": 3}}),
    (deepseek_v3, 4, 2, {"zero": {"stage": 2}}),
    (mixtral_of_eight, 4, 2, {"gemini": {"precision": "fp32", "min_chunk_size_mb": 0.002}}),
    (gpt_oss, 4, 2, {**PIPELINE, "zero": {"stage": 1}}),
    (mixtral_of_eight, 8, 2, {**PIPELINE, "parallel": {**PIPELINE["parallel"], **TENSOR}}),
]


@pytest.mark.parametrize(("build", "num_ranks", "ep_size", "config"), CELLS)
def test_three_steps(
    build: Callable[[], nn.Module], num_ranks: int, ep_size: int, config: dict[str, Any]
) -> None:
    losses = run_ranks(train, num_ranks, build, config, ep_size)
    assert len(set(losses[0])) == 3
