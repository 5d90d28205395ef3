"""Programs of collectives: drawn by hypothesis, run by ranks, compared with sums written in rank order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from colossalai.communication.shared_memory import empty_in_arena

# torch gave them new names and warns of the old ones.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64,)
BYTES = (torch.bool, torch.float8_e4m3fn)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
OPERATIONS = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_gather_list",
    "all_to_all",
    "uneven",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "message",
)


@dataclass(frozen=True)
class Step:
    """One call of a program.

    Attributes:
        operation: One of `OPERATIONS`.
        group: Which of the program's groups makes it.
        dtype: Of its tensors.
        shape: Of each rank's tensor.
        reduction: One of `REDUCTIONS`.
        root: Any number; modulo the group's size it is a rank of it.
        strided: Whether the tensors have gaps.
        is_async: Whether it is waited for at the end of the program, in an order of each rank's own.
        seed: Of its values.
    """

    operation: str
    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    reduction: str
    root: int
    strided: bool
    is_async: bool
    seed: int


def fits(reduction: str, dtype: torch.dtype) -> bool:
    """Whether such a reduction exists."""
    if reduction in ("BAND", "BOR", "BXOR"):
        return dtype in INTS
    if reduction == "AVG":
        return dtype in FLOATS
    return dtype in (*FLOATS, *INTS)


@st.composite
def steps(draw: st.DrawFn, num_groups: int) -> Step:
    """Draw a call."""
    operation = draw(st.sampled_from(OPERATIONS))
    reduces = operation in ("all_reduce", "reduce", "reduce_scatter")
    dtype = draw(st.sampled_from((*FLOATS, *INTS) if reduces else (*FLOATS, *INTS, *COMPLEX, *BYTES)))
    return Step(
        operation=operation,
        group=draw(st.integers(0, num_groups - 1)),
        dtype=dtype,
        shape=tuple(draw(st.sampled_from(SHAPES))),
        reduction=draw(st.sampled_from([name for name in REDUCTIONS if fits(name, dtype)] or ["SUM"])),
        root=draw(st.integers(0, 7)),
        strided=draw(st.booleans()),
        is_async=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


SHAPES = (
    (),
    (0,),
    (1,),
    (3, 0),
    (7,),
    (5, 3),
    (2, 3, 4),
    (1000,),
    (129, 65),
    (70_001,),
    (9, 33_333),
    (400_000,),
)


@st.composite
def programs(draw: st.DrawFn, most: int = 8) -> tuple[int, list[list[int]], list[Step]]:
    """Draw a number of ranks up to `most`, groups of some of them, and calls of these groups."""
    num_ranks = draw(st.sampled_from([count for count in (1, 2, 3, 4, 8) if count <= most]))
    groups = [list(range(num_ranks))]
    for _ in range(draw(st.integers(0, 3))):
        members = draw(st.permutations(range(num_ranks)))
        groups.append(sorted(members[: draw(st.integers(1, num_ranks))]))  # torch sorts them anyway
    calls = draw(st.lists(steps(len(groups)), min_size=6, max_size=24))
    return num_ranks, groups, calls


def values(step: Step, rank: int, count: int = 1) -> torch.Tensor:
    """Return what a rank of a group gives, `count` times the step's shape along a new first dimension."""
    generator = torch.Generator().manual_seed(1000 * step.seed + 17 * rank + 1)
    shape = (count, *step.shape)
    if step.dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=step.dtype)
    if step.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(step.dtype)
    return torch.randint(0, 5, shape, generator=generator).to(step.dtype)


def reduced(terms: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the reduction of terms, one after the other, in float32 where they are shorter."""
    is_half = terms[0].dtype in (torch.float16, torch.bfloat16)
    total = terms[0].float() if is_half else terms[0].clone()
    for term in terms[1:]:
        other = term.float() if is_half else term
        match reduction:
            case "SUM" | "AVG":
                total = total + other
            case "PRODUCT":
                total = total * other
            case "MIN":
                total = torch.minimum(total, other)
            case "MAX":
                total = torch.maximum(total, other)
            case "BAND":
                total = total & other
            case "BOR":
                total = total | other
            case "BXOR":
                total = total ^ other
    if reduction == "AVG":
        total = total / len(terms)
    return total.to(terms[0].dtype)


def reduced_on_machines(
    terms: Sequence[torch.Tensor], reduction: str, machines: Sequence[int]
) -> torch.Tensor:
    """Return the reduction of the terms on each machine, then of the machines, in the order of first terms.

    Args:
        terms: Of the ranks.
        reduction: One of `REDUCTIONS`.
        machines: Of each rank.
    """
    if len(set(machines)) in (1, len(machines)):
        return reduced(terms, reduction)
    dtype, step = terms[0].dtype, "SUM" if reduction == "AVG" else reduction
    if reduction == "AVG":
        terms = [term.float() if dtype in (torch.float16, torch.bfloat16) else term for term in terms]
    parts = [
        reduced([term for term, place in zip(terms, machines, strict=True) if place == machine], step)
        for machine in dict.fromkeys(machines)
    ]
    total = reduced(parts, step)
    return (total / len(terms) if reduction == "AVG" else total).to(dtype)


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values whose memory has gaps."""
    if tensor.dim() == 0:
        return torch.stack([tensor, tensor])[1]
    wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


def lent(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a copy in memory that the other ranks of a group may read, where there is such memory."""
    flat = empty_in_arena(group, tensor.numel(), tensor.dtype)
    return tensor if flat is None else flat.view(tensor.shape).copy_(tensor)


class Runner:
    """Runs the steps of a program on one rank.

    Args:
        groups: The members of each group, by global rank.
        backend: Of the groups.
        machines: On which machine each global rank runs; default: all on one.
    """

    def __init__(self, groups: Sequence[Sequence[int]], backend: str, machines: Sequence[int] = ()) -> None:
        self.groups = [list(ranks) for ranks in groups]
        self.machines = machines or [0] * len(self.groups[0])
        self.made: list[Any] = [dist.group.WORLD]
        for ranks in self.groups[1:]:
            self.made.append(dist.new_group(ranks, backend=backend))
        self.pending: list[tuple[Any, Any]] = []
        self.wrong: list[str] = []

    def run(self, program: Sequence[Step]) -> list[str]:
        """Run all steps; return what was wrong."""
        for number, step in enumerate(program):
            ranks = self.groups[step.group]
            if dist.get_rank() in ranks:
                self._one(number, step, ranks)
        random.Random(dist.get_rank()).shuffle(self.pending)
        for work, check in self.pending:
            work.wait()
            check()
        return self.wrong

    def _one(self, number: int, step: Step, ranks: list[int]) -> None:  # noqa: C901, PLR0915 - a table
        group, rank, p = self.made[step.group], ranks.index(dist.get_rank()), len(ranks)
        root = step.root % p
        shape = with_gaps if step.strided else (lambda tensor: tensor)
        op = getattr(dist.ReduceOp, step.reduction)
        common = {"group": group, "async_op": step.is_async}
        lends = step.seed >> rank & 1 and not step.strided  # each rank decides for itself
        own = lent(values(step, rank)[0], group) if lends else shape(values(step, rank)[0])
        into = shape(torch.zeros_like(values(step, rank)[0]))
        work = None
        expected: list[tuple[torch.Tensor, torch.Tensor]] = []

        def all_values(count: int = 1) -> list[torch.Tensor]:
            return [values(step, other, count) for other in range(p)]

        def total(terms: Sequence[torch.Tensor]) -> torch.Tensor:
            return reduced_on_machines(terms, step.reduction, [self.machines[other] for other in ranks])

        match step.operation:
            case "all_reduce":
                expected = [(own, total([each[0] for each in all_values()]))]
                work = dist.all_reduce(own, op, **common)
            case "reduce":
                wanted = total([each[0] for each in all_values()]) if rank == root else own.clone()
                expected = [(own, wanted)]
                work = dist.reduce(own, ranks[root], op, **common)
            case "reduce_scatter":
                source = values(step, rank, p)
                expected = [(into, total([each[rank] for each in all_values(p)]))]
                if not step.strided and step.shape:
                    source = lent(source, group) if lends else source
                    expected[0] = (source[rank], expected[0][1]) if step.root % 2 else expected[0]
                    work = scatter_single(expected[0][0], source.flatten(0, 1), op, **common)
                else:
                    work = dist.reduce_scatter(into, [shape(each) for each in source], op, **common)
            case "all_gather":
                output = torch.zeros((p, *step.shape), dtype=step.dtype)
                expected = [(output, torch.stack([each[0] for each in all_values()]))]
                work = gather_single(output, own, **common)
            case "all_gather_list":
                outputs = [shape(torch.zeros_like(own)) for _ in ranks]
                expected = list(zip(outputs, [each[0] for each in all_values()], strict=True))
                work = dist.all_gather(outputs, own, **common)
            case "all_to_all":
                outputs = [shape(torch.zeros_like(own)) for _ in ranks]
                expected = list(zip(outputs, [each[rank] for each in all_values(p)], strict=True))
                work = dist.all_to_all(outputs, [shape(each) for each in values(step, rank, p)], **common)
            case "uneven":
                work = self._uneven(step, rank, p, common, expected)
            case "broadcast":
                expected = [(own, values(step, root)[0])]
                work = dist.broadcast(own, ranks[root], **common)
            case "gather":
                outputs = [shape(torch.zeros_like(own)) for _ in ranks] if rank == root else None
                if outputs:
                    expected = list(zip(outputs, [each[0] for each in all_values()], strict=True))
                work = dist.gather(own, outputs, ranks[root], **common)
            case "scatter":
                sources = [shape(each) for each in values(step, root, p)] if rank == root else None
                expected = [(into, values(step, root, p)[rank])]
                work = dist.scatter(into, sources, ranks[root], **common)
            case "barrier":
                work = dist.barrier(**common)
            case "message":
                self._message(number, step, ranks, own, into)
        self._later(number, step, work, expected)

    def _uneven(self, step: Step, rank: int, p: int, common: Any, expected: list[Any]) -> Any:
        """Rank i sends (i + 2 j) % 4 rows to rank j."""
        rows = [[(i + 2 * j) % 4 for j in range(p)] for i in range(p)]
        width = max(1, len(step.shape) and step.shape[-1])

        def sent(i: int) -> torch.Tensor:
            total = sum(rows[i])
            flat = torch.arange(total * width) % 7 + i
            return flat.view(total, width).to(step.dtype)

        output = torch.zeros((sum(rows[i][rank] for i in range(p)), width), dtype=step.dtype)
        parts = [sent(i).split(rows[i])[rank] for i in range(p)]
        expected.append((output, torch.cat(parts)))
        return dist.all_to_all_single(
            output, sent(rank), [rows[i][rank] for i in range(p)], rows[rank], **common
        )

    def _message(
        self, number: int, step: Step, ranks: list[int], own: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Every rank sends to all others, and receives from them."""
        rank, group = ranks.index(dist.get_rank()), self.made[step.group]
        for other, target in enumerate(ranks):
            if other == rank:
                continue
            place = torch.zeros_like(into) if not step.strided else with_gaps(into)
            self.pending.append((dist.isend(own, target, group=group, tag=number), lambda: None))
            work = dist.irecv(place, target, group=group, tag=number)
            self._later(number, step, work, [(place, values(step, other)[0])])

    def _later(self, number: int, step: Step, work: Any, expected: list[Any]) -> None:
        def check() -> None:
            for found, wanted in expected:
                if not torch.equal(_bits(found), _bits(wanted)):
                    self.wrong.append(f"rank {dist.get_rank()}, step {number}: {step}")

        if work is None:
            check()
        else:
            self.pending.append((work, check))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that NaN is NaN."""
    return torch.cat([tensor.reshape(-1), tensor.reshape(-1)]).view(torch.uint8)


def run_program(groups: list[list[int]], program: list[Step], backend: str = "shared_memory") -> list[str]:
    """Be a rank that runs a program; return what was wrong."""
    dist.init_process_group(backend)
    wrong = Runner(groups, backend).run(program)
    dist.barrier()
    dist.destroy_process_group()
    return wrong
