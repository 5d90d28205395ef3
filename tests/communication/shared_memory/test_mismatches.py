"""Calls that do not fit: at the same place of a group, a message and its buffer, arguments, reductions."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from colossalai.communication.shared_memory import WaitOptions
from colossalai.communication.shared_memory._calls import OPERATIONS
from tests.communication.shared_memory.programs import gather_single, scatter_single
from tests.communication.shared_memory.ranks_that_end import error_of, group, wait_for_file
from tests.harness.clocks import ReadClock
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist
P, N = 3, 12
ODD = 1  # the rank that calls something else


def call(pg, operation, *, n=N, dtype=torch.float32, op="SUM", root=0):
    """Make a call; the arguments are what all ranks must give alike."""
    ones = torch.ones(n, dtype=dtype)
    parts = [torch.ones(n, dtype=dtype) for _ in range(P)]
    op = getattr(dist.ReduceOp, op)
    at_root = parts if dist.get_rank() == root else None
    match operation:
        case "barrier":
            dist.barrier(pg)
        case "all_reduce" | "all_reduce_sparse":
            dist.all_reduce(ones if operation == "all_reduce" else ones.to_sparse(), op, pg)
        case "reduce":
            dist.reduce(ones, root, op, pg)
        case "reduce_scatter":
            scatter_single(ones, torch.cat(parts), op, pg)
        case "all_gather":
            gather_single(torch.cat(parts), ones, pg)
        case "all_to_all":
            dist.all_to_all(parts, [part.clone() for part in parts], pg)
        case "broadcast":
            dist.broadcast(ones, root, pg)
        case "gather":
            dist.gather(ones, at_root, root, pg)
        case "scatter":
            dist.scatter(ones, at_root, root, pg)


LARGE = 300_000  # elements: through larger slots, in parts
PAIRS = [  # what most ranks call, what one calls, what is said to differ, and the two values
    *(((a, {}), (b, {}), "op", a, b) for a, b in itertools.permutations(OPERATIONS, 2)),
    *(
        ((name, {}), (name, {"n": n}), "number of elements", N, n)
        for name in OPERATIONS
        if name not in ("barrier", "all_to_all")
        for n in (N + 1, LARGE)
    ),
    *(
        ((name, {}), (name, {"dtype": torch.int32}), "dtype", "float32", "int32")
        for name in OPERATIONS
        if name != "barrier"
    ),
    *(
        ((name, {}), (name, {"op": "MAX"}), "reduction", "SUM", "MAX")
        for name in ("all_reduce", "reduce", "reduce_scatter")
    ),
    *(
        ((name, {"root": a}), (name, {"root": b}), "root", f"rank {a} of the group", f"rank {b} of the group")
        for name in ("reduce", "broadcast", "gather", "scatter")
        for a, b in itertools.permutations(range(P), 2)
    ),
]


def first_pairs():
    """Return the places of pairs such that each call is on both sides of each difference that it can have."""
    seen, places = set(), []
    for number, ((most, _), (odd, _), what, *_) in enumerate(PAIRS):
        sides = {("most", most, what), ("odd", odd, what)}
        if not sides <= seen:
            places.append(number)
        seen |= sides
    return places


def make_calls_that_do_not_fit(path, places):
    """Time stands still in each group: a wait that only a time limit ends is a hang."""
    found, waits = [], WaitOptions(clock=ReadClock().clock)
    with group(path):
        for most, odd, *_ in map(PAIRS.__getitem__, places):
            pg = dist.new_group(pg_options=waits)
            dist.barrier(pg)
            operation, arguments = odd if dist.get_rank() == ODD else most
            kind, text = error_of(partial(call, pg, operation, **arguments))
            number = 1
            while not text and number < 3:
                kind, text = error_of(partial(dist.barrier, pg))
                number += 1
            again = error_of(partial(dist.barrier, pg))[1]
            found.append((kind, text, again, number))
            dist.destroy_process_group(pg)
    return found


@pytest.mark.parametrize("places", [first_pairs(), further(list(range(len(PAIRS))))], ids=["first", "all"])
def test_pairs_of_calls_that_do_not_fit_are_named_on_all_ranks(tmp_path, places):
    # The ranks of a wait without an end poll, which can look like progress.
    told = run_ranks(make_calls_that_do_not_fit, P, tmp_path / "pairs", places, timeout=300.0)
    wrong = []
    for number, (most, odd, what, value, other) in enumerate(map(PAIRS.__getitem__, places)):
        for rank, found in enumerate(told):
            kind, text, again, calls = found[number]
            is_kind = kind in ("DisagreementError", "DistBackendError")
            # Which ranks are listed depends on who has come by then; the odd one and another are.
            is_said = all(
                word in text for word in (f"{what} is ", f"{other} on rank [{ODD}]", f"{value} on rank")
            )
            if not is_kind or not is_said or not again or calls > 3:
                wrong.append(f"{most} and {odd} on rank {rank}: {found[number]}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:40])


def be_late_to_a_call_that_does_not_fit(path):
    """Rank 2 comes while ranks 0 and 1, which do not agree, wait for it; who is wrong shows by it alone."""
    clock = ReadClock()
    with group(path, clock=clock.clock) as rank:
        dist.barrier()
        waits = path.with_suffix(f".{rank}")
        clock.after(20, waits.touch)
        if rank == 2:
            for other in range(2):
                wait_for_file(path.with_suffix(f".{other}"))
        _, text = error_of(lambda: dist.all_reduce(torch.ones(2000 if rank == ODD else 1000)))
        waits.touch()  # also if it has not waited
        return text


def test_the_late_ranks_are_listed_as_well(tmp_path):
    for text in run_ranks(be_late_to_a_call_that_does_not_fit, P, tmp_path / "late"):
        assert "number of elements is 1000 on ranks [0, 2], 2000 on rank [1]" in text


def add_sparse_tensors_of_two_shapes(path):
    with group(path) as rank:
        shape = (4, 3) if rank == 0 else (3, 4)
        return error_of(lambda: dist.all_reduce(torch.ones(shape).to_sparse()))


def test_sparse_tensors_of_other_shapes_are_named_on_all_ranks(tmp_path):
    """Both have as many elements, of which some are zero: their headers are alike."""
    mine, theirs = run_ranks(add_sparse_tensors_of_two_shapes, 2, tmp_path / "sparse")
    assert mine[0] == theirs[0] == "ValueError"
    assert "rank 1 of the group has shape [3, 4] with 2 sparse dimensions, and rank 0 [4, 3] with" in mine[1]
    assert (
        "rank 0 of the group has shape [4, 3] with 2 sparse dimensions, and rank 1 [3, 4] with" in theirs[1]
    )


def send_rows_that_nobody_expects(path):
    """Rank 0 sends a row more to rank 1 than that expects, and has itself got what it expects."""
    with group(path) as rank:
        counts = [[1, 2], [1, 1]]
        output, expected = torch.zeros(2, 3), [1, 1]
        source = torch.ones(sum(counts[rank]), 3)

        def exchange():
            dist.all_to_all_single(output, source, expected, counts[rank])
            dist.barrier()

        return error_of(exchange)


def test_an_uneven_exchange_that_does_not_fit_is_named_on_all_ranks(tmp_path):
    mine, theirs = run_ranks(send_rows_that_nobody_expects, 2, tmp_path / "exchange")
    said = "all_to_all: rank 0 of the group sends 24 bytes to rank 1, which expects 12"
    assert theirs[0] == "ValueError"
    assert said in theirs[1]
    assert mine[0] == "DistBackendError"
    assert mine[1].startswith("rank 1 has left all_to_all #2 of group '0': ValueError")
    assert said in mine[1]


def receive_too_much(path):
    with group(path) as rank:
        found = ""
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            found = error_of(lambda: dist.recv(torch.ones(3), 0))[1]
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return found, tensor.item()


def test_a_message_longer_than_its_buffer_is_an_error_of_who_receives(tmp_path):
    mine, theirs = run_ranks(receive_too_much, 2, tmp_path / "message")
    said = "a message from rank 0 of group '0': the message has 20 bytes, and the tensor for it 12"
    assert (mine, theirs) == (("", 2.0), (said, 2.0))


def ask_for_what_does_not_exist(path):
    op, found = dist.ReduceOp, []
    with group(path) as rank:
        for reduction, dtype in REFUSED:
            tensors = [torch.ones(2, dtype=dtype) for _ in range(2)]
            operator = getattr(op, reduction)
            calls = (
                partial(dist.all_reduce, tensors[0], operator),
                partial(dist.all_reduce, tensors[0], operator, async_op=True),
                partial(dist.reduce, tensors[0], 0, operator),
                partial(dist.reduce_scatter, tensors[0], tensors, operator),
            )
            # On one rank: were anything sent, the next call would fail.
            found += [error_of(one) for one in calls] if rank == 0 else []
        if rank == 0:
            found += [
                error_of(partial(dist.all_to_all_single, torch.ones(3), torch.ones(3))),
                error_of(partial(dist.all_gather, [torch.ones(2)], torch.ones(2))),
                error_of(partial(dist.all_reduce, torch.ones(2, device="meta"))),
                error_of(partial(dist.broadcast, torch.ones(2).to_sparse(), 0)),
                error_of(partial(dist.all_reduce, torch.ones(2).to_sparse(), op.MAX)),
                error_of(partial(dist.all_reduce, torch.ones(2).to_sparse() * 1j)),
                error_of(partial(dist.all_reduce, torch.eye(2).to_sparse_csr())),
            ]
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        return found, tensor.tolist()


REFUSED = (
    *((name, dtype) for name in ("BAND", "BOR", "BXOR") for dtype in (torch.float32, torch.complex64)),
    *((name, torch.complex64) for name in ("MIN", "MAX")),
    ("AVG", torch.int64),
    ("SUM", torch.float8_e4m3fn),
)


def test_what_cannot_be_reduced_is_refused_and_the_group_goes_on(tmp_path):
    (found, mine), (_, theirs) = run_ranks(ask_for_what_does_not_exist, 2, tmp_path / "refused")
    assert mine == theirs == [2.0] * 3
    assert len(found) == 4 * len(REFUSED) + 7
    for kind, text in found:
        assert kind == "ValueError", (kind, text)
        assert "\n" not in text
    assert found[0][1] == "ReduceOp.BAND works on integers and bools, not on float32"


ones, zeros = torch.ones, torch.zeros
RANKS = "it has ranks 0 to 1"
SHARED = "elements that share memory"


def options(kind, **values):
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def rooted(kind, root):
    return options(kind, rootRank=root)


def refused(pg):
    """Return each call that is refused, with what the error says."""
    reduce, broadcast = dist.ReduceOptions, dist.BroadcastOptions
    gather, scatter = dist.GatherOptions, dist.ScatterOptions
    one, two, wide = ones(2), [ones(2), ones(2)], ones(1).expand(2)
    calls = []
    for root in (2, -1):
        said = f"rank {root} is not a rank of the group: {RANKS}"
        calls += [
            (lambda root=root: pg.reduce([one], rooted(reduce, root)), f"reduce: the root, {said}"),
            (lambda root=root: pg.broadcast([one], rooted(broadcast, root)), f"broadcast: the root, {said}"),
            (lambda root=root: pg.gather([], [one], rooted(gather, root)), f"gather: the root, {said}"),
            (lambda root=root: pg.scatter([one], [], rooted(scatter, root)), f"scatter: the root, {said}"),
            (lambda root=root: pg.send([one], root, 0), f"send: the destination, {said}"),
            (lambda root=root: pg.recv([one], root, 0), f"recv: the source, {said}"),
        ]
    return [
        *calls,
        (lambda: dist.broadcast(one, 5), "broadcast: the root, rank 5"),
        (lambda: dist.reduce(one, 5), "reduce: the root, rank 5"),
        (lambda: dist.send(one, 5), "send: the destination, rank 5"),
        (lambda: dist.irecv(one, 5), "recv: the source, rank 5"),
        (lambda: pg.send([one], 0, 0), "send: the destination, rank 0, is this rank itself"),
        (lambda: pg.recv([one], 0, 0), "recv: the source, rank 0, is this rank itself"),
        (lambda: dist.send(one, 1, tag=-1), "send: the tag is -1, and must be 0 to 2147483647"),
        (lambda: dist.recv(one, 1, tag=2**70), f"recv: the tag is {2**70}"),
        (lambda: dist.recv(one, tag=-3), "recv: the tag is -3"),
        # As many tensors as there are ranks, or one.
        (lambda: pg.allreduce(two), "all_reduce: 2 tensors, and it takes one: all_reduce_coalesced"),
        (lambda: pg.reduce(two, rooted(reduce, 0)), "reduce: 2 tensors, and it takes one"),
        (lambda: pg.broadcast([], rooted(broadcast, 0)), "broadcast: 0 tensors, and it takes one"),
        (lambda: pg.send(two, 1, 0), "send: 2 tensors, and it takes one"),
        (lambda: pg.recv([], 1, 0), "recv: 0 tensors, and it takes one"),
        (lambda: pg.recv_anysource(two, 0), "recv: 2 tensors, and it takes one"),
        (lambda: pg.gather([two], two, rooted(gather, 0)), "gather: 2 tensors, and it takes one"),
        (lambda: pg.gather([], [one], rooted(gather, 0)), "gather: 0 lists, and the root has one"),
        (lambda: pg.gather([two], [one], rooted(gather, 1)), "gather: 1 lists, and only the root has one"),
        (lambda: pg.gather([two[:1]], [one], rooted(gather, 0)), "gather: 1 tensors for 2 ranks"),
        (lambda: pg.scatter(two, [two], rooted(scatter, 0)), "scatter: 2 tensors, and it takes one"),
        (lambda: pg.scatter([one], [], rooted(scatter, 0)), "scatter: 0 lists, and the root has one"),
        (lambda: pg.scatter([one], [two], rooted(scatter, 1)), "scatter: 1 lists, and only the root has one"),
        (lambda: pg.scatter([one], [[*two, one]], rooted(scatter, 0)), "scatter: 3 tensors for 2 ranks"),
        (lambda: pg.allgather([two], two), "all_gather: 1 outputs for 2 inputs"),
        (lambda: pg.reduce_scatter(two, [two]), "reduce_scatter: 2 outputs for 1 inputs"),
        (
            lambda: pg.reduce_scatter_tensor_coalesced([one], [ones(4), ones(4)]),
            "reduce_scatter: 1 outputs for 2 inputs",
        ),
        (
            lambda: pg.allgather_coalesced([[one], [one], [one]], [one]),
            "all_gather_coalesced: 3 lists of outputs for 2 ranks",
        ),
        (
            lambda: pg.allgather_coalesced([two, two[:1]], two),
            "all_gather_coalesced: lists of [2, 1] outputs for 2 inputs",
        ),
        # Shapes and types.
        (lambda: pg.allgather([[ones(2, 3), ones(6)]], [ones(2, 3)]), "has shape (6,) of torch.float32"),
        (
            lambda: pg.allgather([[one, one.int()]], [one]),
            "has shape (2,) of torch.int32, and the single one",
        ),
        (lambda: pg.gather([[one, ones(1, 2)]], [one], rooted(gather, 0)), "has shape (1, 2)"),
        (lambda: pg.scatter([one], [[one, ones(3)]], rooted(scatter, 0)), "has shape (3,)"),
        (lambda: pg.reduce_scatter([ones(6)], [[ones(6), ones(3, 2)]]), "has shape (3, 2)"),
        (lambda: gather_single(ones(4), one.int()), "one tensor is torch.float32 and the other torch.int32"),
        (lambda: scatter_single(one, ones(3)), "has 3 elements, and must have 2 times the 2"),
        (
            lambda: pg.alltoall(two, [one.int(), one.int()], None),
            "all_to_all: tensors of torch.float32 and torch.int32: all have one type",
        ),
        (
            lambda: pg.alltoall_base(ones(4), ones(4).int(), [], []),
            "all_to_all_single: tensors of torch.float32 and torch.int32: all have one type",
        ),
        # Parts of an exchange.
        (
            lambda: dist.all_to_all_single(zeros(2), ones(3), [1, 1], [2, 1]),
            "all_to_all_single: rank 0 gives itself 8 bytes and has room for 4",
        ),
        (
            lambda: dist.all_to_all_single(zeros(4), ones(2)),
            "all_to_all_single: rank 0 gives itself 4 bytes and has room for 8",
        ),
        (
            lambda: dist.all_to_all(two, [ones(3), one]),
            "all_to_all: rank 0 gives itself 12 bytes and has room for 8",
        ),
        (
            lambda: dist.all_to_all_single(ones(4), ones(4), [5, -1], [5, -1]),
            "output split sizes [5, -1] must be 2 numbers, 0 or more, with the sum 4",
        ),
        (
            lambda: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2.0, 2.0]),
            "input split sizes [2.0, 2.0] must be 2 numbers, 0 or more",
        ),
        (lambda: dist.all_to_all_single(ones(4), ones(4), [4], [4]), "split sizes [4] must be 2 numbers"),
        # Outputs whose elements share memory.
        (lambda: dist.all_reduce(wide), f"a tensor of shape (2,) and strides (0,) has {SHARED}"),
        (lambda: dist.all_reduce(ones(4).as_strided((3, 2), (1, 1))), SHARED),
        (lambda: dist.all_reduce(ones(9).as_strided((2, 2, 2), (3, 2, 1)), async_op=True), SHARED),
        (lambda: dist.reduce(wide, 1), SHARED),
        (lambda: dist.broadcast(wide, 0), SHARED),
        (lambda: dist.gather(one, [wide, one], 0), SHARED),
        (lambda: dist.scatter(wide, two, 0), SHARED),
        (lambda: dist.all_gather([wide, wide], one), SHARED),
        (lambda: gather_single(ones(1).expand(4), one), SHARED),
        (lambda: scatter_single(wide, ones(4)), SHARED),
        (lambda: dist.all_to_all_single(ones(1).expand(4), ones(4)), SHARED),
        (lambda: dist.recv(wide, 1), SHARED),
    ]


def make_calls_that_are_refused(path):
    with group(path) as rank:
        # On one rank: were anything sent, the calls after it would fail.
        found = [(error_of(call), said) for call, said in refused(dist.group.WORLD)] if rank == 0 else []
        tensor = ones(3)
        dist.all_reduce(tensor)
        message = torch.full((2,), float(rank))
        work = dist.isend(message, 1 - rank)
        received = zeros(2)
        dist.recv(received, 1 - rank)
        work.wait()
        return found, tensor.tolist(), received.tolist()


def test_arguments_that_do_not_fit_are_refused_and_the_group_goes_on(tmp_path):
    (found, *mine), (_, *theirs) = run_ranks(make_calls_that_are_refused, 2, tmp_path / "refused")
    assert mine == [[2.0] * 3, [1.0] * 2]
    assert theirs == [[2.0] * 3, [0.0] * 2]
    wrong = [(got, said) for got, said in found if got[0] != "ValueError" or said not in got[1]]
    assert not wrong, "\n".join(map(str, wrong))
