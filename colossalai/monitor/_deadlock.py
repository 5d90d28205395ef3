"""Deadlock: which ranks wait for one another for ever, from the reports of all; long before any timeout.

A meeting with a `patience` asks for it, where to be at another place is an error by itself: all ranks of a
model go through the same gathers of parameters. It must not be found where there is none, as the job ends.

[Note: who may still come]
A rank may still come to where others wait as long as its script is held by nobody: it computes, loads, saves,
or says nothing because compiled code holds Python's lock. A rank whose script is held may come if every
partner that is missing there may. Those that are left when no more follow wait for one another, or for a rank
that has left the job, and has left word how far it had come in meetings. Whoever waits for a rank that has
died has an error of its own: the connection is lost.

The reports need not be of one moment. A rank tells what holds it before it tells how far it has come, and
it gets no further while it is held. So if of several ranks each lacks another one of them that has not
reached its wait, none of them can have been the first to go on after its own report.

A rank in a backward may be computing beside its collectives, or wait for them where nobody sees it (torch's
`DistributedDataParallel` waits in compiled code). It comes to a meeting `after_backwards` only when they are
complete. So there, and only there, such a collective holds it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from colossalai.monitor._calls import CallRecord, ranks_in_words
from colossalai.monitor._diagnosis import Diagnosis
from colossalai.monitor._rank_report import RankReport


@dataclass(frozen=True)
class Left:
    """A rank that has left the job.

    Attributes:
        how: For people: "(host2, pid 77) has left the job".
        reached: How far it had come, by the channel of meetings.
    """

    how: str
    reached: Mapping[str, int]


def deadlock(reports: Mapping[int, RankReport], left: Mapping[int, Left]) -> Diagnosis | None:
    """Say which ranks wait in vain, if one of them does so in a meeting that asks for it.

    Args:
        reports: What the ranks say.
        left: Those that will never come. Any other rank that says nothing may still come.
    """
    if any(
        wait.after_backwards and _is_impatient(wait) for answer in reports.values() for wait in answer.held
    ):
        # See [Note: who may still come].
        reports = {
            rank: replace(answer, held=answer.held or answer.in_backward) for rank, answer in reports.items()
        }
    stuck = {rank: reports[rank].held for rank in _stuck(reports, left)}
    impatient = [(rank, wait) for rank, held in stuck.items() for wait in held if _is_impatient(wait)]
    if not impatient:
        return None
    first = impatient[0][1]
    awaited = {partner for _, wait in impatient for partner in wait.partners}
    gone = {rank: left[rank].how for rank in sorted(left) if rank in awaited}
    places: dict[str, list[int]] = {}
    for rank in stuck:
        places.setdefault(_place(reports[rank], first.channel), []).append(rank)
    told = [
        *(f"{ranks_in_words(r)} wait{'s' * (len(r) == 1)} in {place}" for place, r in places.items()),
        *(f"rank {rank} {how}" for rank, how in gone.items()),
    ]
    head = f"{first.op} #{first.number} is not the same on all ranks, and cannot end: {'. And '.join(told)}"
    advice = tuple(dict.fromkeys(wait.advice for _, wait in impatient if wait.advice))
    return Diagnosis(lines=(head, *advice), blamed=(*stuck, *gone), seconds=first.patience)


def _place(answer: RankReport, channel: str) -> str:
    """Say where a rank waits, and if that is not in a channel, where in that it was last."""
    wait = answer.held[0]
    last = answer.met.get(channel, "")
    was = f"; it was last in {last}" if last and wait.channel != channel else ""
    return f"{wait.describe()}{was}; {answer.activity}"


def _stuck(reports: Mapping[int, RankReport], left: Mapping[int, Left]) -> list[int]:
    # See [Note: who may still come].
    stuck = {rank for rank, answer in reports.items() if answer.held}

    def may_end(wait: CallRecord, waiter: int) -> bool:
        others = [partner for partner in wait.partners if partner != waiter]
        if wait.patience is not None and any(
            left[partner].reached.get(wait.channel, 0) < wait.number for partner in others if partner in left
        ):
            return False
        return all(partner not in stuck or _has_come(reports[partner], wait) for partner in others)

    while freed := {rank for rank in stuck if any(may_end(wait, rank) for wait in reports[rank].held)}:
        stuck -= freed
    return sorted(stuck)


def _is_impatient(wait: CallRecord) -> bool:
    return wait.patience is not None and wait.seconds > wait.patience


def _has_come(answer: RankReport, wait: CallRecord) -> bool:
    """Whether a rank has come to a wait, and not under the same number to something else."""
    is_elsewhere = any(
        other.end == wait.end and other.where != wait.where
        for other in answer.held
        if wait.patience is not None
    )
    return answer.reached.get(wait.channel, 0) >= wait.number and not is_elsewhere
