"""Model of the slots' protocol: every order in which processors may let stores and loads take effect.

The programs are the package's, as `recorded.py` writes them down.

What is assumed of the machine: an operation is performed when all see it (a store) or when it has got its
value (a load), and all see one memory. It may be performed before others that stand before it in its rank's
program, unless `keeps_order` forbids it. So a late store is one in a store buffer, which x86-64 drains in the
order of the program and the weak machine in any; an early load is one that was reordered or guessed. A rank
sees its own stores. A line of 64 bytes stands for whatever is written in one piece; a message is its header
and one line or more. A line holds the number of the part that wrote it, and each load has to find the part
that its rank reads.

All orders are tried, but for those that differ from one that is tried by swaps of operations that commute:
fences and counters, which only grow (what they have allowed stays allowed), and loads (stores) of a line of
which no other rank has a store (a load) left. Each line has one writer, whose stores to it keep their order,
so the set of operations that were performed says what memory holds: it is the state.

Falling asleep and waking are a second, smaller model (`Wait`), of one word and two ranks.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest

from colossalai.communication.shared_memory import _layout
from colossalai.communication.shared_memory._counters import is_behind
from colossalai.communication.shared_memory._layout import NUM_HEADERS, START
from colossalai.communication.shared_memory._slots import _PHASES, DONE, REDUCED, WRITTEN
from tests.communication.shared_memory.recorded import BEFORE, KINDS, LENT, Op, record

X86, WEAK = "x86-64", "weak"
DONE_BEFORE = START + _PHASES * BEFORE + DONE  # where the counters are at first


def keeps_order(first: Op, second: Op, machine: str) -> bool:
    """Whether two operations of a rank are performed in the order of its program."""
    if "fence" in (first.kind, second.kind) or first.word == second.word:
        return True
    stores = [op.kind in ("store", "set") for op in (first, second)]
    if machine == X86:
        return stores != [True, False]  # a store waits in its buffer while later loads are performed
    return first.kind == "wait" and stores[1]  # no store is made on a guess


class Orders:
    """All orders in which operations may be performed; a set of them is a number, with a bit for each.

    Args:
        programs: Of the ranks.
        machine: Which one performs them; on x86-64, the package has no fences.
        start: What the counters are at first.
        every: Whether to try even those orders that differ by swaps of operations that commute.
    """

    def __init__(self, programs: Sequence[Sequence[Op]], machine: str, start: int, every: bool) -> None:
        self._start = start
        self._every = every
        self._ops: list[Op] = []
        self._ranks: list[int] = []  # the operations of each
        self._needs: list[int] = []  # those that come before each operation
        self._is_gate: list[bool] = []  # whether all that follow in the program need it
        self._stores: dict[int | str, list[tuple[int, int]]] = {}  # of a word: bit and value, the last first
        for program in programs:
            self._add([op for op in program if machine == WEAK or op.kind != "fence"], machine)
        touching: dict[tuple[int | str, str], int] = {}
        for i, op in enumerate(self._ops):
            touching[op.word, op.kind] = touching.get((op.word, op.kind), 0) | 1 << i
        opposite = {
            "load": "store",
            "store": "load",
        }  # none is of the same rank: a rank's own loads are left out
        self._clashes = [touching.get((op.word, opposite.get(op.kind, "")), 0) for op in self._ops]

    def _add(self, program: Sequence[Op], machine: str) -> None:
        base = len(self._ops)
        self._ranks.append((1 << len(program)) - 1 << base)
        for n, op in enumerate(program):
            before = [i for i in range(n) if keeps_order(program[i], op, machine)]
            self._needs.append(sum(1 << base + i for i in before))
            if op.kind in ("store", "set"):
                self._stores.setdefault(op.word, []).insert(0, (1 << base + n, op.value))
        after = [sum(need >> i & 1 for need in self._needs[base:]) for i in range(base, base + len(program))]
        self._is_gate += [count == len(program) - 1 - n for n, count in enumerate(after)]
        self._ops += program

    def fault(self) -> str:
        """Return an order in which a load finds another part or a rank waits for ever, or nothing."""
        came_from = {0: (0, -1)}
        stack = [0]
        while stack:
            done = stack.pop()
            ready = list(self._ready(done))
            end = "" if ready or done == sum(self._ranks) else "all wait"
            for i in ready:
                if self._ops[i].kind == "load" and self._held(i, done) != self._ops[i].value:
                    end = f"{self._ops[i]} finds {self._held(i, done)}"
            if end:
                return "\n".join([*self._path(done, came_from), end])
            commuting = [i for i in ready if not (self._every or self._clashes[i] & ~done)]
            for i in commuting[:1] or ready:
                if (after := done | 1 << i) not in came_from:
                    came_from[after] = done, i
                    stack.append(after)
        return ""

    def _ready(self, done: int) -> Iterator[int]:
        """Give the operations that may be performed next."""
        for of_rank in self._ranks:
            left = of_rank & ~done
            while left:
                i = (left & -left).bit_length() - 1
                op = self._ops[i]
                if not self._needs[i] & ~done and (
                    op.kind != "wait" or not is_behind(self._held(i, done), op.value)
                ):
                    yield i
                left = 0 if self._is_gate[i] else left & (left - 1)

    def _held(self, i: int, done: int) -> int:
        """Return what memory holds where an operation looks."""
        stores = self._stores.get(self._ops[i].word, ())
        return next((value for bit, value in stores if bit & done), self._start)

    def _path(self, done: int, came_from: dict[int, tuple[int, int]]) -> list[str]:
        path = []
        while done:
            done, i = came_from[done]
            path.append(str(self._ops[i]))
        return path[::-1]


def explore(
    programs: Sequence[Sequence[Op]], machine: str, start: int = DONE_BEFORE, every: bool = False
) -> str:
    """Return an order that fails, or nothing; the arguments are as in `Orders`."""
    return Orders(programs, machine, start, every).fault()


def without(programs: Sequence[Sequence[Op]], is_left_out: Callable[[Op], bool]) -> list[list[Op]]:
    """Return the programs without some operations."""
    return [[op for op in program if not is_left_out(op)] for program in programs]


def done_first(program: Sequence[Op]) -> list[Op]:
    """Return a program that says DONE after a fence, but before the loads that it stands for."""
    changed: list[Op] = []
    for op in program:
        if op.kind == "set" and op.phase == DONE:
            num_loads = next(n for n in range(len(changed)) if changed[~n].kind not in ("load", "fence"))
            at = len(changed) - num_loads
            changed[at:at] = [Op(op.rank, "fence", "writer"), op]
        else:
            changed.append(op)
    return changed


def mixes(num_ranks: int, count: int) -> Iterator[list[tuple[str, int]]]:
    """Give each collective three times, and three of them by chance, some times."""
    draw = random.Random(num_ranks)
    yield from ([(kind, 0)] * 3 for kind in KINDS)
    for _ in range(count):
        yield [(draw.choice(KINDS), draw.randrange(num_ranks)) for _ in range(3)]


@pytest.mark.unit
@pytest.mark.parametrize("machine", [X86, WEAK])
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 20), (3, 5)])
def test_all_orders_read_whole_messages_of_their_part(num_ranks: int, count: int, machine: str) -> None:
    for calls in mixes(num_ranks, count):
        assert not explore(record(num_ranks, calls), machine), calls


@pytest.mark.unit
@pytest.mark.parametrize("machine", [X86, WEAK])
def test_a_new_group(machine: str) -> None:
    calls = [("broadcast", 0), ("gather", 1), ("all_reduce", 0)]
    assert not explore(record(2, calls, before=0), machine, start=START)


@pytest.mark.unit
def test_what_is_recorded() -> None:
    def said(kind: str, rank: int) -> list[int]:
        return [op.phase for op in record(2, [(kind, 0)])[rank] if op.kind == "set"]

    assert said("all_reduce", 1) == [WRITTEN, DONE]
    assert said("all_reduce in two phases", 1) == [WRITTEN, REDUCED, DONE]
    assert said("broadcast", 0) == said("broadcast", 1) == [DONE]
    assert all(op.is_of_part_before for op in record(2, [("broadcast", 0)])[0] if op.kind == "wait")


@pytest.mark.unit
@pytest.mark.parametrize("side", ["neither", "writer", "reader"])
@pytest.mark.parametrize("kind", ["broadcast", "gather"])
def test_nothing_is_missed_by_leaving_out_what_commutes(kind: str, side: str) -> None:
    programs = without(record(2, [(kind, 0)] * 3), lambda op: op.word == side)
    for machine in (X86, WEAK):
        assert bool(explore(programs, machine)) == bool(explore(programs, machine, every=True))


@pytest.mark.unit
def test_a_rank_that_is_never_done_is_waited_for() -> None:
    programs = without(record(2, [("broadcast", 0)] * 3), lambda op: op.kind == "set" and op.rank == 1)
    assert explore(programs, WEAK).endswith("all wait")


@pytest.mark.unit
@pytest.mark.parametrize("side", ["writer", "reader"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_fence_is_needed(kind: str, side: str) -> None:
    programs = without(record(2, [(kind, 0)] * 3), lambda op: op.word == side)
    assert "finds" in explore(programs, WEAK)
    assert not explore(programs, X86)


@pytest.mark.unit
@pytest.mark.parametrize("machine", [X86, WEAK])
@pytest.mark.parametrize("kind", ["reduce", "broadcast", "gather", "scatter"])
def test_what_keeps_a_rank_from_overwriting(kind: str, machine: str) -> None:
    """Where all wait for all in each part, that alone keeps them together: these are the others."""
    programs = record(2, [(kind, 0)] * 3)
    assert "finds" in explore(without(programs, lambda op: op.is_of_part_before), machine)
    assert "finds" in explore([done_first(program) for program in programs], machine)


@pytest.mark.unit
@pytest.mark.parametrize("machine", [X86, WEAK])
@pytest.mark.parametrize("kind", LENT)
def test_what_keeps_a_rank_from_writing_into_what_others_read(kind: str, machine: str) -> None:
    """See [Note: access to lent operands]: the wait for all at the end of a call that lends."""
    programs = record(2, [(kind, 0)] * 3)
    is_end = [
        [op.kind == "wait" and op.phase == DONE and not op.is_of_part_before for op in program]
        for program in programs
    ]
    assert all(sum(each) == 3 for each in is_end)
    hasty = [
        [op for op, end in zip(program, each, strict=True) if not end]
        for program, each in zip(programs, is_end, strict=True)
    ]
    assert "finds" in explore(hasty, machine)


@pytest.mark.unit
@pytest.mark.parametrize("machine", [X86, WEAK])
def test_a_sum_is_not_written_before_its_terms_are_read(machine: str) -> None:
    programs = record(2, [("lent all_reduce in two phases", 0)] * 2)
    assert "finds" in explore(
        without(programs, lambda op: op.kind == "wait" and op.phase == REDUCED), machine
    )


@pytest.mark.unit
@pytest.mark.parametrize("num_headers", [2, 3, NUM_HEADERS])
def test_late_comparison_needs_four_headers(num_headers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layout, "NUM_HEADERS", num_headers)
    found = [explore(record(2, [("broadcast", 0)] * 4), machine) for machine in (X86, WEAK)]
    assert all("finds" in order for order in found) == any(found) == (num_headers < NUM_HEADERS)


class Wait(NamedTuple):
    """One rank that waits for a counter, and one that sets it twice."""

    counter: int = 0
    buffer: tuple[int, ...] = ()  # stores of the counter that nobody sees yet
    flag: bool = False  # somebody sleeps
    is_flag_late: bool = False  # its store is still in the waiting rank's buffer
    step: int = 0  # of the rank that sets
    state: str = "looks"  # of the rank that waits
    seen: int = 0


def next_waits(now: Wait, steps: Sequence[str], *, asks: bool, is_kernel_ordered: bool) -> Iterator[Wait]:
    """Give what may come next; the comparison before sleeping is one step with falling asleep."""
    if now.buffer:
        yield now._replace(counter=now.buffer[0], buffer=now.buffer[1:])
    if now.is_flag_late:
        yield now._replace(flag=True, is_flag_late=False)
    if now.state == "looks":
        state = "has come" if now.counter == DONE else "calls"
        yield now._replace(seen=now.counter, state=state, is_flag_late=asks and not now.flag)
    elif now.state == "calls" and not now.is_flag_late:
        yield now._replace(state="sleeps" if now.counter == now.seen else "looks")
    if now.step < len(steps):
        step, after = steps[now.step], now._replace(step=now.step + 1)
        if step == "ask":
            yield after if now.flag else after._replace(step=now.step + 2)
        elif step == "wake" and not (is_kernel_ordered and now.buffer):
            yield after._replace(state="looks" if now.state == "sleeps" else now.state)
        elif step == "fence" and not now.buffer:
            yield after
        elif step.isdigit():
            yield after._replace(buffer=(*now.buffer, int(step)))


def sleeps_for_ever(*steps: str, is_kernel_ordered: bool = True) -> bool:
    """Whether some order of a rank's steps, at each of two stores, and the other's leaves that one asleep."""
    program = [str(WRITTEN), *steps, str(DONE), *steps]
    found, stack = {Wait()}, [Wait()]
    while stack:
        now = stack.pop()
        after = set(next_waits(now, program, asks="ask" in steps, is_kernel_ordered=is_kernel_ordered))
        if not after and now.state != "has come":
            return True
        stack.extend(after - found)
        found |= after
    return False


@pytest.mark.unit
def test_who_sets_a_counter_always_wakes() -> None:
    assert not sleeps_for_ever("wake")
    assert sleeps_for_ever("wake", is_kernel_ordered=False)
    assert sleeps_for_ever("ask", "wake")  # its load is before its store, on x86-64 as well
    assert not sleeps_for_ever("fence", "ask", "wake")
    assert sleeps_for_ever()
