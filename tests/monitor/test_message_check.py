"""Debug mode compares sends with their receives, whoever comes first, and names one that does not come."""

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.core import global_context as gpc
from tests.harness.clocks import clock_of_file, process
from tests.monitor.hanging import meet, wait_for
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def _launch(timeout=900.0):
    config = {"debug": True, "watchdog": {"timeout": timeout, "action": "report"}}
    colossalai.launch_from_torch(config, verbose=False)
    meet()
    return gpc.get_global_rank()


def _error(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def _wait_for_other_half(tag):
    """Wait until the other rank has come to a message with this tag between the two."""
    wait_for(lambda: any(f"/{tag}/" in key.partition(">")[2] for key in _keys_of_messages()))


def differ_in_one_thing():
    """Each of the two comes late once; the tag keeps the messages apart that could not be sent."""
    rank = _launch()
    found = []
    for late in (0, 1):
        tensor = torch.ones(2, 3 + rank)
        if rank == late:
            _wait_for_other_half(late)
        found.append(_error(lambda t=tensor, tag=late: (dist.send, dist.recv)[rank](t, 1 - rank, tag=tag)))
    tensor = torch.ones(3, dtype=(torch.float32, torch.int32)[rank])
    found.append(_error(lambda: (dist.send, dist.recv)[rank](tensor, 1 - rank, tag=2)))
    dist.barrier()
    return found


def test_both_ends_of_a_message_get_the_differing_values():
    first, second = run_ranks(differ_in_one_thing, 2)
    assert first == second
    shape = "shape is (2, 3) on rank [0], (2, 4) on rank [1]\n  rank 0 at test_message_check.py:"
    assert first[0].startswith(f"ranks do not agree on message #1 from rank 0 to rank 1 of axis dp: {shape}")
    assert "message #1 with tag 1 from rank 0 to rank 1 of axis dp: shape is (2, 3)" in first[1]
    assert (
        "message #1 with tag 2 from rank 0 to rank 1 of axis dp: dtype is float32 on rank [0], int32"
        in first[2]
    )


def has_no_partner(folder, sends):
    process.clock = clock_of_file(folder / "late")
    rank = _launch(timeout=100.0)
    data = torch.zeros(3)
    dist.barrier()
    if rank == 1:
        _wait_for_other_half(5)
        (folder / "late").touch()
        wait_for((folder / "done").exists)
        return ""
    error = _error(lambda: dist.send(data, 1, tag=5) if sends else dist.recv(data, 1, tag=5))
    (folder / "done").touch()
    return error


@pytest.mark.parametrize(
    ("sends", "op", "way", "verb"), [further(False, "recv", "from", "sent"), (True, "send", "to", "received")]
)
def test_a_message_without_its_other_half_is_named(tmp_path, sends, op, way, verb):
    error, _ = run_ranks(has_no_partner, 2, tmp_path, sends)
    lines = error.splitlines()
    assert (
        lines[0] == f"{op} of (3,) #1 with tag 5 {way} rank 1 of axis dp: after 80 s rank 1 has not {verb} it"
    )
    assert lines[1].startswith("  rank 1 was last in barrier #1 of axis dp, at test_message_check.py:")
    assert lines[2].startswith("  rank 0 waits for it, issued at test_message_check.py:")


def goes_on():
    """What is right: both send first, out of order by tag, in a batch, from any rank, objects, many."""
    rank = _launch()
    other = 1 - rank
    got = [torch.zeros(2), torch.zeros(3)]
    works = [dist.isend(torch.full((2,), 1.0), other, tag=7), dist.isend(torch.full((3,), 2.0), other, tag=8)]
    works += [dist.irecv(got[1], other, tag=8), dist.irecv(got[0], other, tag=7)]
    for work in works:
        work.wait()
    batched = torch.zeros(1)
    ops = [dist.P2POp(dist.isend, torch.full((1,), 3.0), other), dist.P2POp(dist.irecv, batched, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    objects = ["x" * 5, {"rank": 0}]
    if rank == 0:
        dist.send_object_list(objects, 1)
        dist.send(torch.full((1,), 4.0), 1)
    else:
        objects = [None, None]
        dist.recv_object_list(objects, 0)
        assert dist.recv(batched.zero_()) == 0
    dist.barrier()
    left = _keys_of_messages()
    gpc.destroy()
    return [part.sum().item() for part in got], batched.item(), objects, left, dist.ProcessGroup.send.__name__


def _keys_of_messages():
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [key for key in store.list_keys() if "/debug/message/" in key]


def test_what_fits_goes_on_and_leaves_nothing_in_the_store():
    first, second = run_ranks(goes_on, 2)
    objects = ["xxxxx", {"rank": 0}]
    assert first == ([2.0, 6.0], 3.0, objects, [], "send")
    assert second == ([2.0, 6.0], 4.0, objects, [], "send")


def differs_from_any_rank():
    rank = _launch()
    if rank == 0:
        return _error(lambda: dist.send(torch.ones(4), 1))
    return _error(lambda: dist.recv(torch.ones(2, 2)))


def test_a_receive_from_any_rank_is_compared_when_its_source_is_known():
    first, second = run_ranks(differs_from_any_rank, 2)
    assert first == second
    assert "shape is (4,) on rank [0], (2, 2) on rank [1]" in first
