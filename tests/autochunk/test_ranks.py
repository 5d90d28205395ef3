"""Chunked models with tensor parallelism: each rank chunks its slice."""

import copy

import pytest
import torch

import colossalai
from colossalai.autochunk import autochunk
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.autochunk.models import random
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def chunk_a_slice() -> dict[str, object]:
    """Chunk a block of a GPT in tensor mode 1D, and compare with the block."""
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    torch.manual_seed(0)
    config = GPTConfig(hidden_size=32, num_layers=1, num_attention_heads=4, vocab_size=40)
    block = GPT(config).double().eval().blocks[0]
    torch.manual_seed(1)
    x = random(2, 64, 32)
    twin = copy.deepcopy(block)
    chunked = autochunk(block, x, memory_ratio=0.85)
    with torch.no_grad():
        error = (chunked(x) - twin(x)).abs().max().item()
    with pytest.raises(ValueError, match="a backward of their own"):
        chunked(x)
    targets = [str(node.target) for node in chunked.graph.nodes]
    return {
        "error": error,
        "regions": [(each.last, each.size, each.extent) for each in chunked.plan.regions],
        "collectives": sum("all_reduce" in each for each in targets),
    }


def test_tensor_parallelism() -> None:
    """The same result, with the collectives of the block in the same order, outside of the loops."""
    first, second = run_ranks(chunk_a_slice, 2)
    assert first == second
    assert first["error"] < 1e-12
    assert first["regions"]
    assert first["collectives"] == 2
