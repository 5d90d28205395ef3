"""Every pair of methods that the documents call possible trains as one process does.

The table of pairs is made of these runs: what is not refused is here, with a model of the zoo, and where the
tensor mode is "1d" with one of transformers, too.
"""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.runtime import pairs_table
from colossalai.runtime._compatibility import METHODS, REFUSED, are_of_one_kind
from tests.model_zoo.axial import axial_lm
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.dist

VOCAB, SEQ = 32, 8
CONFIGS: dict[str, dict[str, Any]] = {
    "data parallelism": {"parallel": {"data": 2}},
    "tensor 1d": {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    "tensor 2d": {"parallel": {"tensor": {"size": 4, "mode": "2d"}}},
    "tensor 2.5d": {"parallel": {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}}},
    "tensor 3d": {"parallel": {"tensor": {"size": 8, "mode": "3d"}}},
    "tensor dap": {"parallel": {"tensor": {"size": 2, "mode": "dap"}}},
    "sequence ring": {"parallel": {"sequence": {"size": 2}}},
    "sequence ulysses": {"parallel": {"sequence": {"size": 2, "attention": "ulysses"}}},
    "experts": {"parallel": {"data": 2, "moe": {"size": 2}}},
    "pipeline": {
        "parallel": {"pipeline": {"size": 2, "partition": "balanced"}},
        "NUM_MICRO_BATCHES": 2,
    },
    "ZeRO 1": {"parallel": {"data": 2}, "zero": {"stage": 1}},
    "ZeRO 2": {"parallel": {"data": 2}, "zero": {"stage": 2}},
    "ZeRO 3": {"parallel": {"data": 2}, "zero": {"stage": 3}},
    "Gemini": {"parallel": {"data": 2}, "gemini": {"precision": "fp32", "min_chunk_size_mb": 0.002}},
    "mixed precision": {"fp16": {"mode": "bf16"}},
    "recompute": {"recompute": True},
    "accumulation": {"gradient_accumulation": 2},
    "fused loss": {"fused_loss": True},
}
PAIRS = [
    pair
    for pair in itertools.combinations(METHODS, 2)
    if frozenset(pair) not in REFUSED and not are_of_one_kind(*pair)
]


def config_of(pair: tuple[str, str]) -> tuple[dict[str, Any], int]:
    """Return the config of two methods, and how many ranks it takes."""
    config: dict[str, Any] = {"parallel": {}}
    for method in pair:
        own = copy.deepcopy(CONFIGS[method])
        config["parallel"] |= own.pop("parallel", {})
        config |= own
    if "fp16" in config and "gemini" in config:
        del config["gemini"]["precision"]  # one of them says it
    parallel = config["parallel"]
    if set(pair) == {"data parallelism", "experts"}:
        parallel["data"] = 4  # other ranks than those that share the experts
    sizes = (
        parallel.get("data", 1),
        *(parallel.get(name, {}).get("size", 1) for name in ("tensor", "sequence", "pipeline")),
    )
    return config, math.prod(sizes)


def zoo_gpt() -> nn.Module:
    rates = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": SEQ, "hidden_size": 16}
    return GPT(GPTConfig(**rates, **sizes, num_layers=2, num_attention_heads=4))


def gpt2() -> nn.Module:
    from tests.shardformer import models

    return models.gpt2(vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_head=4)


def mixtral() -> nn.Module:
    from tests.shardformer import models

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "head_dim": 4, "intermediate_size": 12}
    return models.mixtral_of_eight(**sizes, num_attention_heads=4)


def shifted_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the next tokens, which the model has computed itself where it was given labels."""
    own = output.get("loss")
    if own is not None:
        return own
    return nn.functional.cross_entropy(output["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = output["logits"] if isinstance(output, dict) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(build: Callable[[], nn.Module], loss: Any, config: dict[str, Any]) -> list[float]:
    """Return the losses of two updates with the same batch."""
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    criterion = GPTLMLoss() if loss is GPTLMLoss else loss
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    replicas, mine = gpc.data_parallel_size, gpc.mesh.axis_rank("dp")
    ids = torch.randint(VOCAB, (32, SEQ), generator=torch.Generator().manual_seed(1)).chunk(replicas)[mine]
    found = []
    for _ in range(2):
        total = torch.zeros(())
        for part in ids.chunk(engine.accumulation_steps):
            engine.zero_grad()
            _, _, part_loss = engine.execute_schedule(iter([(part, part)]), return_output_label=False)
            engine.step()
            total += part_loss.detach().float() / engine.accumulation_steps
        if replicas > 1:
            torch.distributed.all_reduce(total, group=gpc.mesh.group("dp"))
        found.append((total / replicas).item())
    gpc.destroy()
    return found


def train_all(pairs: list[tuple[str, str]], build: Callable[[], nn.Module], loss: Any) -> list[list[float]]:
    """Return the losses of each pair; one start of ranks serves them all."""
    return [train(build, loss, config_of(pair)[0]) for pair in pairs]


def check(pairs: list[tuple[str, str]], num_ranks: int, build: Callable[[], nn.Module], loss: Any) -> None:
    (alone,) = run_ranks(train, 1, build, loss, {})
    for losses in run_ranks(train_all, num_ranks, pairs, build, loss):
        for pair, found in zip(pairs, losses, strict=True):
            tolerance = 0.03 if "mixed precision" in pair else 1e-4  # float32, and bfloat16
            assert found == pytest.approx(alone, rel=tolerance), pair


BY_RANKS = {
    num_ranks: [pair for pair in PAIRS if config_of(pair)[1] == num_ranks] for num_ranks in (1, 2, 4, 8, 16)
}


@pytest.mark.parametrize("num_ranks", [1, 2, further(4), further(8), in_soak(16)])
def test_a_model_of_the_zoo(num_ranks: int) -> None:
    others = {"experts", "tensor dap"}
    pairs = [pair for pair in BY_RANKS[num_ranks] if others.isdisjoint(pair)]
    check(pairs, num_ranks, zoo_gpt, GPTLMLoss)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_model_with_axial_layers(num_ranks: int) -> None:
    pairs = [pair for pair in BY_RANKS[num_ranks] if "tensor dap" in pair]
    check(pairs, num_ranks, partial(axial_lm, VOCAB), GPTLMLoss)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_model_with_experts(num_ranks: int) -> None:
    """One of transformers, which are cut where they have experts."""
    pytest.importorskip("transformers")
    check([pair for pair in BY_RANKS[num_ranks] if "experts" in pair], num_ranks, mixtral, shifted_loss)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_model_of_transformers(num_ranks: int) -> None:
    pytest.importorskip("transformers")
    pairs = [pair for pair in BY_RANKS[num_ranks] if is_for_transformers(pair)]
    check(pairs, num_ranks, gpt2, loss_of)


def is_for_transformers(pair: tuple[str, str]) -> bool:
    """Whether a pair cuts such models; they cannot share sequences, and have a fused loss of their own."""
    others = ("sequence ring", "sequence ulysses", "fused loss", "experts")
    return "tensor 1d" in pair and not set(pair).intersection(others)


@pytest.mark.unit
def test_every_pair_is_run() -> None:
    assert sum(map(len, BY_RANKS.values())) == len(PAIRS) == pairs_in_table()


def pairs_in_table() -> int:
    """Return how many pairs the documents call possible; each stands there twice."""
    return sum(line.count("| yes") for line in pairs_table()) // 2
