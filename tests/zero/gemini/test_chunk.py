"""The states of a chunk: every legal move is made, and every other one is refused by name."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colossalai.context import Mesh
from colossalai.tensor import GradientSync
from colossalai.zero._layout import FlatBucket
from colossalai.zero.gemini._chunk import LEGAL_MOVES, Chunk, ChunkState
from colossalai.zero.gemini._tiers import TierMemory

pytestmark = pytest.mark.unit


def make_chunk() -> Chunk:
    axis = Mesh({"dp": 2}, rank=0).axis("dp")
    params = (nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2)))
    layout = FlatBucket(params, (0, 3), ((0, 4), (4, 8)), torch.float32, True, GradientSync(axis, 2))
    return Chunk(
        5, layout, names=("a.bias", "a.weight"), section=torch.ones(4), tiers=TierMemory(torch.device("cpu"))
    )


@pytest.mark.parametrize(("first", "second"), list(itertools.product(ChunkState, repeat=2)))
def test_moves(first: ChunkState, second: ChunkState) -> None:
    chunk = make_chunk()
    chunk.state = first
    if second in LEGAL_MOVES[first]:
        chunk.move(second)
        assert chunk.state is second
        return
    with pytest.raises(AssertionError, match=f"chunk 5 .*weight.* is {first.value}, and .* {second.value}"):
        chunk.move(second, name="a.weight")


EVENTS = ("hold", "use", "end", "gradients", "free", "write")


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_a_life(events: list[str]) -> None:
    """Whatever comes, in an order in which it can: the state fits what is there, and moves are legal."""
    chunk = make_chunk()
    was_written = False
    for event in events:
        is_present = chunk.whole is not None
        match event:
            case "hold" if not is_present:
                chunk.hold(torch.zeros(8))
            case "use" if is_present:
                chunk.begin_use("a.bias")
            case "end" if chunk.num_uses:
                assert chunk.end_use() == was_written
            case "gradients":
                chunk.end_backward()
            case "free" if is_present and not chunk.num_uses:
                chunk.free()
                was_written = False
            case "write" if chunk.whole is not None:
                chunk.whole[1] += 1
                was_written = True
        assert (chunk.whole is None) == (chunk.state is ChunkState.FREE)
        assert (chunk.num_uses > 0) == (chunk.state is ChunkState.COMPUTE)
    assert chunk.take_write() == was_written
    assert not chunk.take_write()


def test_what_a_chunk_knows() -> None:
    chunk = make_chunk()
    assert chunk.num_bytes == 32
    assert chunk.is_cut
    assert chunk.name_of(chunk.layout.params[1]) == "a.weight"
