"""Chunks train as one process does, through both doors, on models of the zoo and of transformers."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.subjects import zero
from tests.parity.subjects.doors import make_case
from tests.parity.training import whole
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

SMALL = {"precision": "fp32", "min_chunk_size_mb": 0.00003, "search_range_mb": 0, "hidden_dim": 1}
"""Chunks of 31 elements: several, and parameters with one of their own."""


def subject_of(model: nn.Module, optimizer: Any, step: Callable[..., Any]) -> Subject:
    """Name parameters and gradients as the model does, whole; all ranks call both."""
    names = optimizer.param_names
    params = {names[param]: param for param in model.parameters()}

    def gradients() -> dict[str, Tensor]:
        return {names[param]: whole(param, grad) for param, grad in optimizer.masters.whole_grads().items()}

    def parameters() -> dict[str, Tensor]:
        with model.gathered():
            return {name: whole(param, param.detach().clone()) for name, param in params.items()}

    return Subject(step=step, gradients=gradients, parameters=parameters)


def through_booster(
    case: ParityCase, options: dict[str, Any], accumulation: int, model: nn.Module
) -> Subject:
    """The plugin door; all microbatches but the last run under `no_sync`."""
    booster = Booster(plugin=GeminiPlugin(**{**SMALL, **options}, max_norm=case.max_norm or 0.0))
    optimizer = case.build_optimizer(model.parameters())
    model, optimizer, *_ = booster.boost(model, optimizer)

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        parts = list(zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True))
        optimizer.zero_grad()
        for number, part in enumerate(parts, start=1):
            loss = case.compute_loss(model, part) / accumulation
            if number < accumulation:
                with booster.no_sync(model):
                    booster.backward(loss, optimizer)
            else:
                booster.backward(loss, optimizer)
            total += loss.detach()
        optimizer.step()
        return total

    return subject_of(model, optimizer, step)


def gpt() -> nn.Module:
    rates = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)
    return GPT(
        GPTConfig(
            **rates,
            vocab_size=32,
            max_position_embeddings=8,
            hidden_size=16,
            num_layers=2,
            num_attention_heads=4,
        )
    )


def gpt2() -> nn.Module:
    from tests.shardformer import models

    return models.gpt2(vocab_size=32, n_positions=8, n_embd=16, n_head=4)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**rates, **sizes, intermediate_size=32, max_position_embeddings=8))


def loss_of(model: Callable[..., Any], batch: tuple[Tensor, ...]) -> Tensor:
    output = model(batch[0])
    logits = output if isinstance(output, Tensor) else output["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[0].flatten())


def case_of(build: Callable[[], nn.Module], max_norm: float | None = None) -> ParityCase:
    generator = torch.Generator().manual_seed(3)
    return ParityCase(
        build_model=build,
        build_optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
        compute_loss=loss_of,
        batches=[(torch.randint(32, (8, 8), generator=generator),) for _ in range(3)],
        max_norm=max_norm,
    )


def by_booster(name: str, options: dict[str, Any], accumulation: int, max_norm: float | None) -> list[float]:
    colossalai.launch_from_torch({}, verbose=False)
    build = {"gpt": gpt, "gpt2": gpt2, "bert": bert}.get(name)
    case = make_case(max_norm=max_norm) if build is None else case_of(build, max_norm)
    losses = check_parity(case, partial(through_booster, case, options, accumulation))
    gpc.destroy()
    return losses


@pytest.mark.parametrize(
    ("name", "num_ranks", "options", "accumulation", "max_norm"),
    [
        further("net", 1, {}, 2, 0.1),
        ("net", 2, {"recompute": True}, 2, 0.1),
        further("net", 4, {"placement_policy": "auto"}, 1, None),
        further("gpt", 2, {"min_chunk_size_mb": 0.002, "recompute": True}, 2, 0.1),
        further("gpt2", 2, {"min_chunk_size_mb": 0.002}, 2, 0.1),
        further("bert", 4, {"min_chunk_size_mb": 0.002, "recompute": True}, 1, None),
    ],
)
def test_the_plugin_door_is_one_process(
    name: str, num_ranks: int, options: dict[str, Any], accumulation: int, max_norm: float | None
) -> None:
    if name in ("gpt2", "bert"):
        pytest.importorskip("transformers")
    for losses in run_ranks(by_booster, num_ranks, name, options, accumulation, max_norm):
        assert losses[-1] < losses[0]


def by_engine(accumulation: int, max_norm: float) -> list[float]:
    config = {"gemini": SMALL, "gradient_accumulation": accumulation, "clip_grad_norm": max_norm}
    colossalai.launch_from_torch(config, verbose=False)
    case = make_case(max_norm=max_norm or None)
    losses = check_parity(case, partial(zero.through_engine, case, make_subject=subject_of))
    gpc.destroy()
    return losses


@pytest.mark.parametrize(("num_ranks", "accumulation", "max_norm"), [further(2, 4, 0.1), further(4, 1, 0.0)])
def test_the_config_door_is_one_process(num_ranks: int, accumulation: int, max_norm: float) -> None:
    for losses in run_ranks(by_engine, num_ranks, accumulation, max_norm):
        assert losses[-1] < losses[0]


def with_tensor_parallelism() -> list[float]:
    """Two replicas of a GPT whose layers two ranks share."""
    config = {
        "parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}},
        "gemini": {**SMALL, "min_chunk_size_mb": 0.001},
    }
    colossalai.launch_from_torch(config, verbose=False)
    case = case_of(gpt2)
    slices = {"slice_index": int(os.environ["RANK"]) // 2, "num_slices": 2}

    def apply(model: nn.Module) -> Subject:
        optimizer = case.build_optimizer(model.parameters())
        engine, *_ = colossalai.initialize(model, optimizer, None, verbose=False)

        def step(batch: tuple[Tensor, ...]) -> Tensor:
            engine.zero_grad()
            loss = case.compute_loss(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return subject_of(engine.model, engine.optimizer, step)

    losses = check_parity(case, apply, **slices)
    gpc.destroy()
    return losses


def test_with_tensor_parallelism_it_is_one_process() -> None:
    pytest.importorskip("transformers")
    run_ranks(with_tensor_parallelism, 4)
