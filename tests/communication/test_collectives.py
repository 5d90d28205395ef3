"""Collectives along axes, forward and backward, and what they send."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import colossalai
from colossalai import communication
from colossalai.communication import ledger
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

CONJUGATES = {
    "gather_forward_scatter_backward": ("all_gather", "reduce_scatter"),
    "gather_forward_split_backward": ("all_gather", None),
    "split_forward_gather_backward": (None, "all_gather"),
    "scatter_forward_gather_backward": ("reduce_scatter", "all_gather"),
    "reduce_forward_copy_backward": ("all_reduce", None),
    "copy_forward_reduce_backward": (None, "all_reduce"),
}
SHARES = {"all_gather": 1.0, "reduce_scatter": 0.5, "all_reduce": 1.0}  # of the bytes given, with two ranks


def values(rank, shape):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def expected(name, inputs, dim, rank):
    """What each rank gets, from what all ranks put in."""
    if name.startswith("gather"):
        return torch.cat(inputs, dim)
    if name.startswith("split"):
        return inputs[rank].chunk(len(inputs), dim)[rank]
    total = torch.stack(inputs).sum(0)
    if name.startswith("scatter"):
        return total.chunk(len(inputs), dim)[rank]
    return total if name.startswith("reduce") else inputs[rank]


def all_conjugates():
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 4, "mode": "2d"}}}, verbose=False)
    for name, dim in itertools.product(CONJUGATES, (0, 1, -2)):
        both_directions(name, dim)


def both_directions(name, dim):
    axis = gpc.mesh.axis("col")
    mates = axis.ranks
    x = values(gpc.get_global_rank(), (4, 6, 2)).requires_grad_()
    arguments = (axis,) if "reduce_" in name or "_reduce" in name else (axis, dim)
    with ledger() as forward:
        y = getattr(communication, name)(x, *arguments)
    grads = [values(10 + rank, tuple(y.shape)) for rank in mates]
    with ledger() as backward:
        y.backward(grads[axis.rank])
    inputs = [values(rank, (4, 6, 2)) for rank in mates]
    torch.testing.assert_close(y.detach(), expected(name, inputs, dim, axis.rank))
    torch.testing.assert_close(x.grad, expected(name.split("_")[2], grads, dim, axis.rank))
    sent = [
        (book.entries[0].op, book.num_bytes()) if book.entries else (None, 0.0)
        for book in (forward, backward)
    ]
    given = [x.nbytes, y.nbytes]
    for (op, num_bytes), wanted, size in zip(sent, CONJUGATES[name], given, strict=True):
        assert op == wanted
        assert num_bytes == (0.0 if wanted is None else SHARES[wanted] * size)


def test_conjugates():
    run_ranks(all_conjugates, 4)


def exchanged_slices():
    colossalai.launch_from_torch({}, verbose=False)
    axis = gpc.axis(ParallelMode.GLOBAL)
    for split_dim, gather_dim in ((0, 1), (1, 0), (2, -2), (-3, 2)):
        whole = values(0, (6, 3, 9))
        mine = whole.chunk(3, gather_dim)[axis.rank].clone().requires_grad_()
        grad = values(1, (6, 3, 9))
        with ledger() as book:
            y = communication.all_to_all_forward_all_to_all_backward(
                mine, axis, split_dim=split_dim, gather_dim=gather_dim
            )
            y.backward(grad.chunk(3, split_dim)[axis.rank])
        assert torch.equal(y, whole.chunk(3, split_dim)[axis.rank])
        assert torch.equal(mine.grad, grad.chunk(3, gather_dim)[axis.rank])
        assert (book.count("all_to_all"), book.count()) == (2, 2)
        assert book.num_bytes("all_to_all", "global") == pytest.approx(2 * mine.nbytes * 2 / 3)
    alone = gpc.axis(ParallelMode.TENSOR)
    assert communication.all_to_all_forward_all_to_all_backward(y, alone, split_dim=0, gather_dim=1) is y


def test_slices_are_exchanged_and_their_gradients_go_back():
    run_ranks(exchanged_slices, 3)


def conjugates_in_flight():
    """Forms with `_async` return what the others do, and overlap in both directions."""
    colossalai.launch_from_torch({}, verbose=False)
    axis = gpc.axis(ParallelMode.GLOBAL)
    forms = {
        "all_to_all_forward_all_to_all_backward": [
            {"split_dim": i, "gather_dim": j} for i, j in ((0, 1), (1, 0), (-1, 1), (1, -3))
        ],
        "gather_forward_scatter_backward": [{"dim": 0}, {"dim": 1}, {"dim": -1}],
    }
    for name, options in ((name, options) for name, each in forms.items() for options in each):
        x = values(axis.rank, (3, 6, 9)).transpose(0, 1).requires_grad_()
        wanted = getattr(communication, name)(x, axis, **options)
        grad = values(10 + axis.rank, tuple(wanted.shape))
        with ledger() as plain:
            (wanted_grad,) = torch.autograd.grad(wanted, x, grad)
        with ledger() as forward:
            in_flight = getattr(communication, f"{name}_async")(2 * x, axis, **options)
        assert forward.count() == 1
        assert forward.num_bytes() > 0
        log = []
        between = _Logged.apply(x.sum(), log)
        found = in_flight.wait()
        assert in_flight.wait() is found  # a second wait is free
        assert torch.equal(found, 2 * wanted)
        assert found.stride() == wanted.stride()
        for _ in range(2):  # a graph that is retained
            with ledger() as backward:
                log[:] = [backward]
                grads = torch.autograd.grad(
                    (found, between), x, (grad, torch.ones_like(between)), retain_graph=True
                )
            assert log[1:] == [1], "the conjugate is in flight while earlier operations have their backward"
            assert torch.equal(grads[0], 2 * wanted_grad + 1)
            assert [(e.op, e.num_bytes) for e in backward.entries] == [
                (e.op, e.num_bytes) for e in plain.entries
            ]
    alone = communication.gather_forward_scatter_backward_async(x, gpc.axis(ParallelMode.TENSOR), 0)
    assert alone.wait() is x
    exchange = communication.all_to_all_forward_all_to_all_backward_async
    result = exchange(x, axis, split_dim=0, gather_dim=1).wait()
    result += 1  # in place, as that of the blocking form
    # A start does not wait for the other ranks.
    store = dist.distributed_c10d._get_default_store()
    if axis.rank > 0:
        store.wait(["rank 0 has started"])
    in_flight = exchange(x, axis, split_dim=0, gather_dim=1)
    if axis.rank == 0:
        store.set("rank 0 has started", "")
    assert torch.equal(in_flight.wait() + 1, result)
    # Without a wait, as after an error, nothing keeps the graph.
    gc.disable()
    log = _Probe()
    in_flight = communication.gather_forward_scatter_backward_async(_Logged.apply(x, log), axis, 0)
    probe = weakref.ref(log)
    del log, in_flight
    assert probe() is None
    gc.enable()


class _Probe(list):
    """A list with weak references."""


class _Logged(torch.autograd.Function):
    """The identity; its backward appends the number of operations in the ledger at the head of a log."""

    @staticmethod
    def forward(ctx, x, log):
        ctx.log = log
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.log[0].count())
        return grad, None


def test_conjugates_in_flight():
    run_ranks(conjugates_in_flight, 3)


def fake_tensors():
    """Shared memory refuses a tensor without memory, as in the trace of a model that communicates."""
    colossalai.launch_from_torch({}, verbose=False, backend="shared_memory")
    with FakeTensorMode():
        x = torch.ones(2)
        with pytest.raises(ValueError, match="a FakeTensor has no memory to send"):
            communication.all_gather(x, 0, ParallelMode.GLOBAL)


def test_fake_tensors_are_refused():
    run_ranks(fake_tensors, 2)


def plain_collectives():
    colossalai.launch_from_torch({}, verbose=False)
    rank, mode = gpc.get_global_rank(), ParallelMode.GLOBAL
    x = torch.full((2,), float(rank))
    assert communication.ring_forward(x, mode).tolist() == [float((rank - 1) % 3)] * 2
    assert communication.broadcast(x.clone(), 2, mode).tolist() == [2.0, 2.0]
    reduced = communication.reduce(x, 1, mode)
    assert rank != 1 or reduced.tolist() == [3.0, 3.0]
    assert x.tolist() == [float(rank)] * 2
    with ledger() as outer:
        communication.all_reduce(x, mode)
        with ledger() as inner:
            communication.all_gather(x, 0, mode)
    assert (outer.count(), inner.count()) == (2, 1)
    assert outer.num_bytes("all_reduce") == pytest.approx(8 * 2 * 2 / 3)
    assert outer.num_bytes("all_gather", axis="global") == 8 * 2
    assert outer.num_bytes(axis="tp") == 0


def test_plain_collectives():
    run_ranks(plain_collectives, 3)


def alone():
    colossalai.launch_from_torch({}, verbose=False)
    x = torch.ones(2)
    with ledger() as book:
        for name in ("all_gather", "reduce_scatter"):
            assert getattr(communication, name)(x, 0, ParallelMode.DATA) is x
        assert communication.all_reduce(x, ParallelMode.DATA) is x
    assert book.entries == []


def test_one_rank_sends_nothing():
    run_ranks(alone, 1)


def forms_of_every_collective():
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    rank, mode, alone = gpc.get_global_rank(), ParallelMode.TENSOR, ParallelMode.DATA
    x = values(rank, (4, 2))
    calls = {
        "all_gather": (0, mode),
        "reduce_scatter": (0, mode),
        "all_reduce": (mode,),
        "broadcast": (1, mode),
        "reduce": (1, mode),
    }
    for name, arguments in calls.items():
        collective = getattr(communication, name)
        expected = collective(x.clone(), *arguments)
        for timed in (False, True):
            with ledger(timed=timed) as book:
                found, work = collective(x.clone(), *arguments, async_op=True)
                work.wait()
            assert [entry.op for entry in book.entries] == [name]
            if name != "reduce" or rank == 1:
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
        kept, work = collective(x, *arguments[:-1], alone, async_op=True)
        work.wait()
        assert kept is x
        assert work.is_completed()
    largest = torch.maximum(values(0, (4, 2)), values(1, (4, 2)))
    assert torch.equal(communication.reduce_scatter(x, 0, mode, dist.ReduceOp.MAX), largest.chunk(2)[rank])
    greatest, work = communication.reduce(x, 1, mode, dist.ReduceOp.MAX, True)
    work.wait()
    assert rank == 0 or torch.equal(greatest, largest)


def test_collectives_in_the_background():
    run_ranks(forms_of_every_collective, 2)
