"""What a rank notes of its collectives, and what its neighbors read of it when it has died."""

import dataclasses
import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossalai.monitor import _last_calls
from colossalai.monitor._calls import CallRecord
from colossalai.monitor._collective_check import CollectiveCheck
from colossalai.monitor._last_calls import (
    MessageRecord,
    NeighborSignatures,
    SignatureRecord,
    disagreements,
)
from tests.harness.clocks import Clock

pytestmark = pytest.mark.mesh


@pytest.fixture
def record():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    noting = SignatureRecord()
    with noting.recording():
        yield noting
    noting.close()
    dist.destroy_process_group()


def last(record, count=1):
    found = sorted(record.read(), key=lambda item: item.number)[-count:]
    return [(item.number, *map(item.properties().get, ("op", "shape", "dtype"))) for item in found]


def test_the_last_calls_are_noted_with_their_numbers(record):
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.int64), 0)
    dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5))
    dist.all_to_all_single(torch.ones(6), torch.ones(6))
    dist.barrier()
    assert last(record, 5) == [
        (1, "all_reduce", [[2, 3]], "float32"),
        (2, "broadcast", [[4]], "int64"),
        (3, "all_gather", [[5]], "float32"),
        (4, "all_to_all_single", None, "float32"),
        (5, "barrier", None, None),
    ]
    assert {item.partners for item in record.read()} == {(0, 1)}
    plain = json.dumps(list(map(dataclasses.asdict, record.read())))
    assert list(map(CallRecord.from_plain, json.loads(plain))) == record.read()


def test_a_call_that_is_refused_has_no_number(record, monkeypatch):
    def refuses(*args):
        raise RuntimeError("no")

    dist.all_reduce(torch.ones(1))
    with SignatureRecordOver(record, refuses), pytest.raises(RuntimeError, match="no"):
        dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(3))
    assert last(record) == [(2, "all_reduce", [[3]], "float32")]


class SignatureRecordOver:
    """Within the block, the wrapper of a record calls something else."""

    def __init__(self, record, original):
        method = _last_calls.METHODS["allreduce"]
        self.wrapper, self.kept = record._recorded(method, original), dist.ProcessGroup.allreduce

    def __enter__(self):
        dist.ProcessGroup.allreduce = self.wrapper

    def __exit__(self, *error):
        dist.ProcessGroup.allreduce = self.kept


def test_afterwards_everything_is_as_it_was(record):
    """Compiled methods that are read off their class and set again would get no `self`."""
    kinds = (dist.ProcessGroup, dist.Work)
    before = [dict(vars(kind)) for kind in kinds]
    noting, messages = SignatureRecord(), MessageRecord()
    check = CollectiveCheck(dist.HashStore(), rank=0, timeout=1.0, axis_of=lambda ranks: None, clock=Clock())
    with noting.recording(), messages.recording(), check.checking():
        assert vars(dist.ProcessGroup)["send"] is not before[0]["send"]
    noting.close()
    assert [dict(vars(kind)) for kind in kinds] == before
    dist.barrier()


def test_shapes_without_end_do_not_fill_the_record(record):
    """Text of new shapes begins anew where the file is full; no note then has another one's text."""
    for size in range(1, 2000):
        dist.all_reduce(torch.empty(size, device="meta"))
        (number, _, shape, _) = last(record)[0]
        assert (number, shape) == (size, [[size]])
    assert len(record._texts) < 1000


def test_what_a_dead_process_has_issued_can_be_read():
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        noting = SignatureRecord()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        with noting.recording():
            os.write(ready[1], str(noting.descriptor).encode())
            os.read(go[0], 1)
            dist.all_reduce(torch.ones(7))
            os.kill(os.getpid(), signal.SIGKILL)
    neighbors = NeighborSignatures()
    neighbors.open(1, pid=pid, descriptor=int(os.read(ready[0], 16)))
    os.write(go[1], b"x")
    os.waitpid(pid, 0)
    for descriptor in (*ready, *go):
        os.close(descriptor)
    (found,) = neighbors.read()[1]
    assert (found.number, found.partners, found.shapes) == (1, (0, 1), ((7,),))
    mine = dataclasses.replace(found, shapes=((8,),))
    ((blamed, line),) = disagreements({0: [mine], 1: [found]}, lambda ranks: "tp")
    assert blamed == (0, 1)
    assert (
        line == "ranks do not agree on all_reduce #1 of axis tp: shape is (8,) on rank [0], (7,) on rank [1]"
    )
    neighbors.close()
