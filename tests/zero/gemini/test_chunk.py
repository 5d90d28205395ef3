"""The life of a chunk: every legal move is made, and every other one is refused by name."""

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from colossalai.context import Mesh
from colossalai.tensor import GradientSync
from colossalai.zero._layout import FlatBucket
from colossalai.zero.gemini._chunk import Chunk, ChunkState
from colossalai.zero.gemini._tiers import TierMemory
from colossalai.zero.gemini.planning import Home

pytestmark = pytest.mark.unit


def make_chunk(offload_dir: Path | None = None) -> Chunk:
    axis = Mesh({"dp": 2}, rank=0).axis("dp")
    params = (nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2)))
    layout = FlatBucket(params, (0, 3), ((0, 4), (4, 8)), torch.float32, True, GradientSync(axis, 2))
    tiers = TierMemory(torch.device("cpu"), offload_dir=offload_dir)
    return Chunk(5, layout, names=("a.bias", "a.weight"), section=torch.ones(4), tiers=tiers)


@pytest.mark.parametrize(("num_uses", "state"), [(None, "free"), (0, "hold"), (1, "compute"), (2, "compute")])
@pytest.mark.parametrize(("move", "legal_state"), [("gathered", "free"), ("freed", "hold")])
def test_moves(move: str, legal_state: str, num_uses: int | None, state: str) -> None:
    chunk = make_chunk()
    if num_uses is not None:
        chunk.hold(torch.zeros(8))
        chunk.num_uses = num_uses
    assert chunk.state is ChunkState(state)
    call = partial(chunk.hold, torch.zeros(8)) if move == "gathered" else chunk.free
    if state == legal_state:
        call()
        assert chunk.state is (ChunkState.HOLD if move == "gathered" else ChunkState.FREE)
        return
    with pytest.raises(AssertionError, match=f"chunk 5 .*a.weight.* is {state}, and cannot be {move}"):
        call()


EVENTS = ("hold", "use", "end", "free", "write")


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_a_life(events: list[str]) -> None:
    """Whatever comes, in an order in which it can: writes are seen, once, until the whole is freed."""
    chunk = make_chunk()
    was_written = False
    for event in events:
        is_present = chunk.whole is not None
        match event:
            case "hold" if not is_present:
                chunk.hold(torch.zeros(8))
            case "use" if is_present:
                chunk.num_uses += 1
            case "end" if chunk.num_uses:
                chunk.num_uses -= 1
            case "free" if is_present and not chunk.num_uses:
                chunk.free()
                was_written = False
            case "write" if chunk.whole is not None:
                chunk.whole[1] += 1
                was_written = True
        assert chunk.is_written == was_written
    assert chunk.take_write() == was_written
    assert not chunk.take_write()


def test_what_a_chunk_knows() -> None:
    chunk = make_chunk()
    assert chunk.num_bytes == 32
    assert chunk.is_cut


@pytest.mark.parametrize("states_home", [Home.COMPUTE, Home.DISK])
def test_a_mean_gradient_is_in_the_tier_of_the_states(states_home: Home, tmp_path: Path) -> None:
    chunk = make_chunk(tmp_path)
    chunk.place(Home.COMPUTE, states_home)
    means = [chunk.keep_mean(torch.full((4,), value)) for value in (1.0, 2.0)]
    assert all(chunk.tiers.keep(mean, states_home) is mean for mean in means)
    assert means[1].tolist() == [2.0] * 4
    assert (means[0] is means[1]) == (states_home is Home.DISK)  # on disk in the same place


def test_a_mean_gradient_stays_in_the_only_tier() -> None:
    chunk, mean = make_chunk(), torch.ones(4)
    assert chunk.keep_mean(mean) is mean
