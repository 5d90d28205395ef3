"""Chunks train as one process does, through both doors, on models of the zoo and of transformers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.booster.plugin import GeminiPlugin
from tests.parity.tasks import NET, zoo
from tests.parity.training import Batch, Run, Task, check_runs, grouped_runs
from tests.tiers import further

pytestmark = pytest.mark.dist

SMALL: dict[str, Any] = {
    "precision": "fp32",
    "min_chunk_size_mb": 0.00003,
    "search_range_mb": 0,
    "hidden_dim": 1,
}
"""Chunks of 31 elements: several, and parameters with one of their own."""
# Keys have a bias whose gradient is 0 but for rounding; small weights keep it below the eps of Adafactor.
GPT = zoo("gpt", vocab=32, num_samples=8, mlp_ratio=4.0, init_std=0.02)


def gpt2() -> nn.Module:
    from tests.shardformer import models

    return models.gpt2(vocab_size=32, n_positions=8, n_embd=16, n_head=4)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(**rates, **sizes, intermediate_size=32, max_position_embeddings=8))


def of_transformers(build: Callable[[], nn.Module]) -> Task:
    """Return the task of a model of transformers that takes 32 tokens and returns logits."""
    return Task(
        build=build,
        batches=_tokens,
        criterion=_OfLogits,
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
    )


def _tokens() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [(ids, ids) for ids in torch.randint(32, (3, 8, 8), generator=generator)]


class _OfLogits(nn.Module):
    """Cross entropy of the logits among the outputs."""

    def forward(self, output: Any, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())


GPT2, BERT = of_transformers(gpt2), of_transformers(bert)


def in_chunks(
    task: Task, num_ranks: int, accumulation: int = 1, max_norm: float | None = None, **options: Any
) -> Run:
    """Return a run by the plugin door."""
    return Run(
        task=task,
        num_ranks=num_ranks,
        plugin=partial(GeminiPlugin, **{**SMALL, **options}, max_norm=max_norm or 0.0),
        accumulation=accumulation,
        max_norm=max_norm,
    )


def by_config(task: Task, num_ranks: int, config: dict[str, Any], **options: Any) -> Run:
    """Return a run by the config door."""
    return Run(task=task, num_ranks=num_ranks, config={"gemini": SMALL, **config}, **options)


GEMINI = [
    in_chunks(NET, 2, 2, 0.1, recompute=True),
    further(in_chunks(NET, 1, 2, 0.1)),
    further(in_chunks(NET, 4, placement_policy="auto")),
    further(in_chunks(GPT, 2, 2, 0.1, min_chunk_size_mb=0.002, recompute=True)),
    further(by_config(NET, 2, {}, accumulation=4, max_norm=0.1)),
    further(by_config(NET, 4, {})),
]
OF_TRANSFORMERS = [
    further(in_chunks(GPT2, 2, 2, 0.1, min_chunk_size_mb=0.002)),
    further(in_chunks(BERT, 4, min_chunk_size_mb=0.002, recompute=True)),
    # Two replicas, whose layers two ranks share.
    by_config(
        GPT2,
        4,
        {
            "parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}},
            "gemini": {**SMALL, "min_chunk_size_mb": 0.001},
        },
    ),
]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(GEMINI))
def test_chunks_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(OF_TRANSFORMERS))
def test_models_of_transformers_in_chunks_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    pytest.importorskip("transformers")
    check_runs(num_ranks, runs)
