"""Messages arrive whole, in both directions at once; a peer that is gone is named."""

import os

import pytest
import torch

import colossalai
from colossalai.core import global_context as gpc
from colossalai.pipeline.execution._communication import Channel
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist


def channel_of(size):
    colossalai.launch_from_torch({"parallel": {"pipeline": size}}, verbose=False)
    return Channel(gpc.mesh.axis("pp"), device=torch.device("cpu"))


def everybody_to_everybody(size):
    channel = channel_of(size)
    me = channel.axis.rank
    others = [peer for peer in range(size) if peer != me]
    channel.connect((low, high) for low in range(size) for high in range(low + 1, size))
    specs = [((2, 3), torch.float64), ((0,), torch.int64), ((), torch.bool)]
    arriving = {peer: [channel.receive(specs, peer, str) for _ in range(2)] for peer in others}
    sent = []
    for peer in others:
        for number in range(2):
            value = torch.full((3, 2), 10.0 * me + number, dtype=torch.float64).t()  # not contiguous
            empty = torch.zeros(0, dtype=torch.int64)
            sent.append(channel.send([value, empty, torch.tensor(peer > me)], peer, str))
    for peer in others:
        for number, message in enumerate(arriving[peer]):
            value, empty, is_higher = message.wait()
            assert value.tolist() == [[10.0 * peer + number] * 3] * 2
            assert empty.numel() == 0
            assert is_higher.item() == (me > peer)
    for message in sent:
        message.wait()


@pytest.mark.parametrize("size", [2, 4])
def test_both_directions(size):
    run_ranks(everybody_to_everybody, size, size)


def groups_later(size):
    """Later groups of some ranks only still meet: all ranks have made as many groups."""
    channel = channel_of(size)
    channel.connect((rank, rank + 1) for rank in range(size - 1))
    group = gpc.mesh.group_of((0, size - 1)) if channel.axis.rank in (0, size - 1) else None
    total = torch.ones(1)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    return total.item()


def test_groups_made_later_meet():
    assert run_ranks(groups_later, 4, 4) == [2.0, 1.0, 1.0, 2.0]


def peer_dies(when):
    channel = channel_of(2)
    if channel.axis.rank == 1 and when == "connect":
        os._exit(3)
    channel.connect([(0, 1)])
    if channel.axis.rank == 1:
        os._exit(3)
    place = [((2,), torch.float32)]
    channel.receive(place, 1, lambda: "the other {} while this one waited").wait()


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("connect", r"pipeline rank 1 \(rank 1\) is gone while pipeline rank 0 \(rank 0\) connected to it"),
        ("receive", "the other is gone while this one waited"),
    ],
)
def test_a_dead_peer_is_named(when, message):
    with pytest.raises(RanksError, match=message):
        run_ranks(peer_dies, 2, when)
