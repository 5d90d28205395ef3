"""Calls that do not fit: at the same place of a group, a message and its buffer, what cannot be reduced."""

import itertools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from colossalai.communication.shared_memory._calls import OPERATIONS
from tests.communication.shared_memory.programs import gather_single
from tests.communication.shared_memory.ranks_that_end import error_of, group
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist
P, N = 3, 12
AT_ONCE_S = 1.0
ODD = 1  # the rank that calls something else

scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
    found = []
    with group(path):
        for most, odd, *_ in map(PAIRS.__getitem__, places):
            pg = dist.new_group()
            dist.barrier(pg)
            operation, arguments = odd if dist.get_rank() == ODD else most
            begun = time.monotonic()
            kind, text, _ = error_of(partial(call, pg, operation, **arguments))
            number = 1
            while not text and number < 3:
                kind, text, _ = error_of(partial(dist.barrier, pg))
                number += 1
            again = error_of(partial(dist.barrier, pg))[1]
            found.append((kind, text, again, number, time.monotonic() - begun))
            dist.destroy_process_group(pg)
    return found


@pytest.mark.parametrize("places", [first_pairs(), further(list(range(len(PAIRS))))], ids=["first", "all"])
def test_pairs_of_calls_that_do_not_fit_are_named_on_all_ranks(tmp_path, places):
    told = run_ranks(make_calls_that_do_not_fit, P, tmp_path / "pairs", places)
    wrong = []
    for number, (most, odd, what, value, other) in enumerate(map(PAIRS.__getitem__, places)):
        for rank, found in enumerate(told):
            kind, text, again, calls, seconds = found[number]
            is_kind = kind in ("DisagreementError", "DistBackendError")
            # Which ranks are listed depends on who has come by then; the odd one and another are.
            is_said = all(
                word in text for word in (f"{what} is ", f"{other} on rank [{ODD}]", f"{value} on rank")
            )
            if not is_kind or not is_said or not again or calls > 3 or seconds > AT_ONCE_S:
                wrong.append(f"{most} and {odd} on rank {rank}: {found[number]}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:40])


def be_late_to_a_call_that_does_not_fit(path):
    """Rank 2 comes when ranks 0 and 1 have found that they do not agree; who is wrong shows by it alone."""
    with group(path) as rank:
        dist.barrier()
        if rank == 2:
            time.sleep(0.1)
        return error_of(lambda: dist.all_reduce(torch.ones(2000 if rank == ODD else 1000)))[1]


def test_the_late_ranks_are_listed_as_well(tmp_path):
    for text in run_ranks(be_late_to_a_call_that_does_not_fit, P, tmp_path / "late"):
        assert "number of elements is 1000 on ranks [0, 2], 2000 on rank [1]" in text


def add_sparse_tensors_of_two_shapes(path):
    with group(path) as rank:
        shape = (4, 3) if rank == 0 else (3, 4)
        return error_of(lambda: dist.all_reduce(torch.ones(shape).to_sparse()))[:2]


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

        return error_of(exchange)[:2]


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
            found += [error_of(one)[:2] for one in calls] if rank == 0 else []
        if rank == 0:
            found += [
                error_of(partial(dist.all_to_all_single, torch.ones(3), torch.ones(3)))[:2],
                error_of(partial(dist.all_gather, [torch.ones(2)], torch.ones(2)))[:2],
                error_of(partial(dist.all_reduce, torch.ones(2, device="meta")))[:2],
                error_of(partial(dist.broadcast, torch.ones(2).to_sparse(), 0))[:2],
                error_of(partial(dist.all_reduce, torch.ones(2).to_sparse(), op.MAX))[:2],
                error_of(partial(dist.all_reduce, torch.ones(2).to_sparse() * 1j))[:2],
                error_of(partial(dist.all_reduce, torch.eye(2).to_sparse_csr()))[:2],
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
