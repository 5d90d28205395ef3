"""Blocks with experts are compiled around them: what travels is outside of the graphs."""

from typing import Any

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from tests.parity.subjects import moe
from tests.ranks import run_ranks
from tests.shardformer.models import VOCAB, language_loss, mixtral_of_eight
from tests.tiers import further


def plain_and_compiled(kind: str, num_blocks: int) -> list[list[float]]:
    return [losses(kind, num_blocks, compiled) for compiled in (False, {"backend": "aot_eager"})]


def losses(kind: str, num_blocks: int, compiled: Any) -> list[float]:
    colossalai.launch_from_torch({"parallel": {"moe": 2}, "compile": compiled}, verbose=False)
    torch.manual_seed(0)
    if kind == "mixtral":
        model, criterion = mixtral_of_eight(), language_loss
        batch = (torch.arange(12).reshape(2, 6) % VOCAB,) * 2
    else:
        model, criterion = moe.Net("top2", num_blocks=num_blocks), moe.criterion()
        batch = tuple(part[:4] for part in moe.make_batches(1)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    found = []
    for _ in range(3):
        engine.zero_grad()
        loss = engine.criterion(engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "num_blocks"), [further("mixtral", 2), further("layers", 2), ("layers", 1)])
def test_compiled_blocks_train_as_others_do(kind: str, num_blocks: int) -> None:
    for truth, ours in run_ranks(plain_and_compiled, 2, kind, num_blocks):
        assert ours == pytest.approx(truth, rel=1e-5)
