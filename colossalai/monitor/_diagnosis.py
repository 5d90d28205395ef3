"""Diagnosis of a hang: the ranks at fault, from the reports of all ranks.

`diagnose` names the late ranks of a wait that has lasted too long. `deadlock` finds, long before any
timeout, the ranks that wait for one another for ever. A meeting with a `patience` requests it, since ranks
at different places are an error there: all ranks of a model go through the same gathers of parameters. It
must never report a deadlock that does not exist, since it ends the job.

[Note: ranks at fault]
The report of a waiting rank names its partners. One of them can have died, or not answer. One can have issued
another collective under the same number of the same group. One can be missing: it is at fault if it is not
waiting itself; otherwise the search continues with its partners. If all of them wait (each for another one),
they have issued their collectives in different orders, and all are named. If all have arrived and nothing
happens, the cause is their connection.

[Note: ranks that can still arrive]
A rank can still arrive at a wait of others as long as nothing blocks its script: it computes, loads, saves,
or does not answer because compiled code holds Python's lock. A rank whose script is blocked can arrive if
every missing partner of that wait can. The ranks that remain when no more follow wait for one another, or for
a rank that has left the job and stored its progress in meetings. A rank that waits for a dead one has an
error of its
own: the connection is lost.

The reports need not be of one moment. A rank records its wait before its progress, and makes no progress
while it is blocked. So if each of several ranks waits for another one of them that has not reached its wait,
none of them can have been the first to continue after its own report.

A rank in a backward can compute while its collectives are pending, or wait for them where Python does not
see it (torch's `DistributedDataParallel` waits in compiled code). It comes to a meeting `after_backwards`
only when they are complete. So there, and only there, such a collective holds it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from colossalai.monitor._calls import (
    MOST_NAMED,
    AxisOf,
    CallRecord,
    describe_ranks,
    minority,
    ranks_by_value,
)
from colossalai.monitor._last_calls import disagreements
from colossalai.monitor._rank_report import RankReport


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The cause of a hang.

    Attributes:
        lines: One for every rank to blame, the most certain first.
        blamed: Those ranks.
        seconds: Seconds that a rank has waited, if not the watchdog's timeout.
    """

    lines: tuple[str, ...]
    blamed: tuple[int, ...] = field(default=())
    seconds: float | None = None


def diagnose(
    reports: dict[int, RankReport], absent: dict[int, str], axis_of: AxisOf = lambda ranks: None
) -> Diagnosis:
    """Find the ranks that a job waits for.

    Args:
        reports: Reports of the ranks.
        absent: State of the ranks without a report: "(host2, pid 77) has died".
        axis_of: Returns the name of the mesh axis along some ranks.
    """
    # See [Note: ranks at fault].
    waits = [(rank, wait) for rank, answer in sorted(reports.items()) for wait in answer.waiting]
    signatures = {rank: items for answer in reports.values() for rank, items in answer.signatures.items()}
    findings = [
        # The calls of others can have killed a rank; the reports of living ranks are more precise.
        *(disagreements(signatures, axis_of) if absent else ()),
        *_absent_ranks(waits, absent),
        *_mismatched_calls(reports, waits),
        *_missing_ranks(reports, waits),
    ]
    if not findings:
        findings = [*_wait_cycle(reports, waits), *_overdue_ranks(reports), *_stalled_calls(waits)][:1]
    lines: list[str] = []
    blamed: list[int] = []
    for ranks, line in findings:
        if line not in lines and not set(ranks) & set(blamed):
            lines.append(line)
            blamed.extend(ranks)
    more = len(lines) - MOST_NAMED
    if more > 0:
        lines[MOST_NAMED:] = [f"and {more} more ranks"]
    return Diagnosis(lines=tuple(lines or ["no rank waits for another one any more"]), blamed=tuple(blamed))


_Waits = list[tuple[int, CallRecord]]
_Finding = tuple[tuple[int, ...], str]


def _absent_ranks(waits: _Waits, absent: dict[int, str]) -> Iterator[_Finding]:
    for rank, how in sorted(absent.items()):
        wait = next((wait for other, wait in waits if rank in wait.partners), None)
        awaited = (
            f"; awaited by {describe_ranks(_waiting_ranks(waits, wait))} in {wait.describe()}" if wait else ""
        )
        yield (rank,), f"rank {rank} {how}{awaited}"


def _mismatched_calls(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
    for _rank, wait in waits:
        entered = {
            rank: call
            for rank in wait.partners
            if rank in reports
            for call in reports[rank].recent.get(wait.channel, [])
            if call.number == wait.number
        }
        ops = {rank: call.op for rank, call in entered.items()}
        shapes = {rank: call.shapes for rank, call in entered.items()}
        if len(set(ops.values())) > 1:
            yield _different_op(reports, wait, ops)
        elif len(set(shapes.values())) > 1 and wait.op in _OF_EQUAL_SHAPES:
            groups = "; ".join(
                f"{describe_ranks(ranks)} with {list(each)}" for each, ranks in ranks_by_value(shapes).items()
            )
            yield minority(shapes), f"{wait.describe()} was entered with different shapes: {groups}"


_OF_EQUAL_SHAPES = (
    *("all_reduce", "broadcast", "reduce", "gather"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
)


def _different_op(reports: dict[int, RankReport], wait: CallRecord, ops: dict[int, str]) -> _Finding:
    usual, others = max(ranks_by_value(ops).items(), key=lambda item: len(item[1]))
    odd = [rank for rank in ops if rank not in others]
    where = f"{wait.where}{f' in {wait.module}' if wait.module else ''}"
    entered = "; ".join(
        f"{_name(reports[rank])} entered {ops[rank]} as #{wait.number} {where}; {reports[rank].activity}"
        for rank in odd
    )
    is_minority = len(odd) < len(others)
    also = "" if is_minority else f"; {reports[others[0]].activity}"
    blamed = odd if is_minority else [*odd, *others]
    return tuple(blamed), f"{entered}; {describe_ranks(others)} entered {usual}{also}"


def _missing_ranks(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
    for _, wait in waits:
        for rank in _late_partners(reports, wait):
            if not any(_is_blocked_by_others(reports, other) for other in reports[rank].waiting):
                verb, what = _missing_action(wait, next(waiter for waiter, held in waits if held is wait))
                yield (rank,), f"{_name(reports[rank])} {verb} {what}; {reports[rank].activity}"


def _missing_action(wait: CallRecord, waiter: int) -> tuple[str, str]:
    """Return the missing action of a partner that a wait needs."""
    if wait.op == "recv":
        return "did not send", f"message #{wait.number} to rank {waiter} {wait.where}"
    if wait.op == "send":
        return "did not receive", f"message #{wait.number} from rank {waiter} {wait.where}"
    return "did not enter", wait.describe()


def _is_blocked_by_others(reports: dict[int, RankReport], wait: CallRecord) -> bool:
    """Whether another rank is at fault for a wait."""
    return bool(_late_partners(reports, wait)) or any(rank not in reports for rank in wait.partners)


def _late_partners(reports: dict[int, RankReport], wait: CallRecord) -> list[int]:
    """Return the answering ranks that have not reached the number of a wait."""
    return [rank for rank in wait.partners if rank in reports and not wait.is_reached(reports[rank].reached)]


def _wait_cycle(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
    late = [(rank, wait) for rank, wait in waits if _late_partners(reports, wait)]
    if late:
        places = [f"rank {rank} waits in {wait.describe()}" for rank, wait in late]
        ranks = tuple(dict.fromkeys(rank for rank, _ in late))
        yield ranks, f"ranks wait for one another: {'; '.join(places[:MOST_NAMED])}"


def _overdue_ranks(reports: dict[int, RankReport]) -> Iterator[_Finding]:
    for rank, answer in sorted(reports.items()):
        if answer.overdue:
            yield (rank,), f"{_name(answer)} {answer.overdue}; {answer.activity}"


def _stalled_calls(waits: _Waits) -> Iterator[_Finding]:
    for _, wait in waits:
        yield (
            (),
            (
                f"all of {describe_ranks(wait.partners)} have entered {wait.describe()}, and it does not "
                "end: look at what lies between them (network, communication library)"
            ),
        )


def _waiting_ranks(waits: _Waits, wait: CallRecord) -> list[int]:
    return [rank for rank, other in waits if other.end == wait.end]


def _name(answer: RankReport) -> str:
    return f"rank {answer.rank} ({answer.host})"


@dataclass(frozen=True)
class DepartedRank:
    """A rank that has left the job.

    Attributes:
        how: For people: "(host2, pid 77) has left the job".
        reached: Its progress by channel of meetings.
    """

    how: str
    reached: Mapping[str, int]


def deadlock(reports: Mapping[int, RankReport], left: Mapping[int, DepartedRank]) -> Diagnosis | None:
    """Find the ranks that wait in vain, if one of them does so in a meeting with a patience.

    Args:
        reports: Reports of the ranks.
        left: Ranks that will never arrive. Any other rank without a report can still arrive.
    """
    if any(
        wait.after_backwards and _is_impatient(wait) for answer in reports.values() for wait in answer.held
    ):
        # See [Note: ranks that can still arrive].
        reports = {
            rank: replace(answer, held=answer.held or answer.in_backward) for rank, answer in reports.items()
        }
    stuck = {rank: reports[rank].held for rank in _blocked_ranks(reports, left)}
    impatient = [(rank, wait) for rank, held in stuck.items() for wait in held if _is_impatient(wait)]
    if not impatient:
        return None
    first = impatient[0][1]
    awaited = {partner for _, wait in impatient for partner in wait.partners}
    gone = {rank: left[rank].how for rank in sorted(left) if rank in awaited}
    places = ranks_by_value({rank: _describe_wait(reports[rank], first.channel) for rank in stuck})
    held = [
        *(f"{describe_ranks(r)} wait{'s' * (len(r) == 1)} in {place}" for place, r in places.items()),
        *(f"rank {rank} {how}" for rank, how in gone.items()),
    ]
    head = f"{first.op} #{first.number} is not the same on all ranks, and cannot end: {'. And '.join(held)}"
    advice = tuple(dict.fromkeys(wait.advice for _, wait in impatient if wait.advice))
    return Diagnosis(lines=(head, *advice), blamed=(*stuck, *gone), seconds=first.patience)


def _describe_wait(answer: RankReport, channel: str) -> str:
    """Describe the wait of a rank, and its last call in a channel if it waits outside of it."""
    wait = answer.held[0]
    last = answer.met.get(channel, "")
    was = f"; it was last in {last}" if last and wait.channel != channel else ""
    return f"{wait.describe()}{was}; {answer.activity}"


def _blocked_ranks(reports: Mapping[int, RankReport], left: Mapping[int, DepartedRank]) -> list[int]:
    # See [Note: ranks that can still arrive].
    stuck = {rank for rank, answer in reports.items() if answer.held}

    def may_end(wait: CallRecord, waiter: int) -> bool:
        others = [partner for partner in wait.partners if partner != waiter]
        if wait.patience is not None and any(
            not wait.is_reached(left[partner].reached) for partner in others if partner in left
        ):
            return False
        return all(partner not in stuck or _has_reached(reports[partner], wait) for partner in others)

    while freed := {rank for rank in stuck if any(may_end(wait, rank) for wait in reports[rank].held)}:
        stuck -= freed
    return sorted(stuck)


def _is_impatient(wait: CallRecord) -> bool:
    return wait.patience is not None and wait.seconds > wait.patience


def _has_reached(answer: RankReport, wait: CallRecord) -> bool:
    """Whether a rank has come to a wait, and not under the same number to something else."""
    is_elsewhere = any(
        other.end == wait.end and other.where != wait.where
        for other in answer.held
        if wait.patience is not None
    )
    return wait.is_reached(answer.reached) and not is_elsewhere
