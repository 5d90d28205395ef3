"""Chunked models with tensor parallelism: each rank chunks its slice."""

import copy

import pytest
import torch
from torch.export import Dim

import colossalai
from colossalai.autochunk import autochunk
from colossalai.model_zoo.evoformer import Evoformer
from colossalai.model_zoo.gpt import GPT, GPTConfig
from tests.autochunk.models import random
from tests.nn.live_bytes import LiveBytes
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
    dynamic = autochunk(block, x, memory_ratio=0.85, dynamic_shapes=({0: Dim("batch"), 1: Dim("seq")},))
    for each in (x, random(3, 37, 32)):
        with torch.no_grad():
            error = max(error, (dynamic(each) - twin(each)).abs().max().item())
    targets = [str(node.target) for node in chunked.graph.nodes]
    return {
        "error": error,
        "regions": [(each.last, each.size, each.extent) for each in chunked.plan.regions],
        "collectives": sum("all_reduce" in each for each in targets),
    }


def evoformer() -> Evoformer:
    """Return an Evoformer in tensor mode "dap", after a launch."""
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "dap"}}}, verbose=False)
    torch.manual_seed(0)
    sizes = {"msa_heads": 2, "msa_head_dim": 8, "pair_heads": 2, "pair_head_dim": 8, "triangle_dim": 8}
    model = Evoformer(c_m=16, c_z=8, num_blocks=1, **sizes).double().eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def chunk_an_evoformer(is_bfloat16: bool) -> dict[str, object]:
    """Chunk an Evoformer in tensor mode "dap", and compare with the model."""
    model = evoformer()
    msa, pair = random(1, 16, 15, 16), random(1, 15, 15, 8)  # padded to 16 residues
    if is_bfloat16:
        model, msa, pair = model.bfloat16(), msa.bfloat16(), pair.bfloat16()
    chunked = autochunk(model, (msa, pair), memory_ratio=0.4, inplace=True)
    with torch.no_grad():
        expected = model(msa, pair)
        with LiveBytes(msa, pair, *model.parameters()) as live:
            found = chunked(msa, pair)
        error = max((x - y).abs().max().item() for x, y in zip(found, expected, strict=True))
    targets = [str(node.target) for node in chunked.graph.nodes]
    return {
        "error": error,
        "largest": max(each.abs().max().item() for each in expected),
        "peaks": (live.peak, chunked.plan.peak, chunked.plan.memory_budget),
        "regions": [(each.last, each.size, each.extent) for each in chunked.plan.regions],
        "collectives": [each for each in targets if "c10d" in each and "wait" not in each],
    }


def chunk_lengths() -> list[object]:
    """Chunk an Evoformer in tensor mode "dap" for several lengths, and compare with the model."""
    model = evoformer()
    dims = {1: Dim.AUTO, 2: Dim.AUTO}
    example = (random(1, 16, 16, 16), random(1, 16, 16, 8))
    chunked = autochunk(model, example, memory_ratio=0.5, inplace=True, dynamic_shapes=(dims, dims))
    found: list[object] = []
    for sequences, residues in ((16, 16), (8, 14), (16, 12)):
        msa, pair = random(1, sequences, residues, 16), random(1, residues, residues, 8)
        with torch.no_grad():
            results, expected = chunked(msa, pair), model(msa, pair)
        for mine, each in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, each, rtol=1e-10, atol=1e-10)
        plan = chunked.plan_for(msa, pair)
        found.append([(each.last, each.size, each.extent) for each in plan.regions])
    # Other lengths are padded, with operations that the trace lacks.
    with torch.no_grad(), pytest.raises(ValueError, match=r"for msa.shape\[1\] % 2 == 0"):
        chunked(random(1, 9, 16, 16), random(1, 16, 16, 8))
    return found


@pytest.mark.parametrize(
    "is_bfloat16", [False, pytest.param(True, marks=pytest.mark.long)], ids=["float64", "bfloat16"]
)
def test_dynamic_axial_parallelism(is_bfloat16: bool) -> None:
    """Each rank chunks its part, within the budget, and communicates in the same order as the others."""
    first, second = run_ranks(chunk_an_evoformer, 2, is_bfloat16)
    assert first == second
    assert first["error"] < (0.05 if is_bfloat16 else 1e-12) * first["largest"]
    live, peak, budget = first["peaks"]
    assert live == peak <= budget
    assert first["regions"]
    assert len(first["collectives"]) > 5


@pytest.mark.long  # a trace with symbols takes 13 seconds of each rank
def test_lengths() -> None:
    """Each length has a plan within the budget of the example, the same on all ranks."""
    first, second = run_ranks(chunk_lengths, 2)
    assert first == second
    assert all(first)


def test_tensor_parallelism() -> None:
    """The same result, with the collectives of the block in the same order, outside of the loops."""
    first, second = run_ranks(chunk_a_slice, 2)
    assert first == second
    assert first["error"] < 1e-12
    assert first["regions"]
    assert first["collectives"] == 2
