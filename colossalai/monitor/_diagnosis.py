"""Diagnosis of a hang: from the reports of all ranks to those that are to blame.

[Note: who is to blame]
A rank that waits names its partners. One of them may have died, or does not answer. One may have gone another
way: it has issued another collective under the same number of the same group. One may not have come: then it
is to blame if it is not itself waiting; if it is, it waits for others, and the search goes on with those. If
all of them wait (each for another one), they have issued their collectives in different orders, and all are
named. And where everybody has come and nothing happens, it is what lies between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from colossalai.monitor._calls import AxisOf, CallRecord, minority, ranks_by_value, ranks_in_words
from colossalai.monitor._last_calls import disagreements
from colossalai.monitor._rank_report import RankReport

_NUM_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What a hang comes from.

    Attributes:
        lines: One for every rank to blame, the most certain first.
        blamed: Those ranks.
        seconds: How long somebody has waited for it, if not for the watchdog's timeout.
    """

    lines: tuple[str, ...]
    blamed: tuple[int, ...] = field(default=())
    seconds: float | None = None


def diagnose(
    reports: dict[int, RankReport], absent: dict[int, str], axis_of: AxisOf = lambda ranks: None
) -> Diagnosis:
    """Say which ranks a job waits for.

    Args:
        reports: What the ranks say.
        absent: How it is with those that say nothing: "(host2, pid 77) has died".
        axis_of: What is the mesh axis along some ranks?
    """
    # See [Note: who is to blame].
    waits = [(rank, wait) for rank, answer in sorted(reports.items()) for wait in answer.waiting]
    signatures = {rank: items for answer in reports.values() for rank, items in answer.signatures.items()}
    findings = [
        # A rank may have died of what others have called; of those that live, their reports say more.
        *(disagreements(signatures, axis_of) if absent else ()),
        *_absent(waits, absent),
        *_gone_another_way(reports, waits),
        *_not_come(reports, waits),
    ]
    if not findings:
        findings = [*_waiting_in_a_ring(reports, waits), *_too_long(reports), *_all_there(waits)][:1]
    lines: list[str] = []
    blamed: list[int] = []
    for ranks, line in findings:
        if line not in lines and not set(ranks) & set(blamed):
            lines.append(line)
            blamed.extend(ranks)
    more = len(lines) - _NUM_NAMED
    if more > 0:
        lines[_NUM_NAMED:] = [f"and {more} more ranks"]
    return Diagnosis(lines=tuple(lines or ["no rank waits for another one any more"]), blamed=tuple(blamed))


_Waits = list[tuple[int, CallRecord]]
_Finding = tuple[tuple[int, ...], str]


def _absent(waits: _Waits, absent: dict[int, str]) -> Iterator[_Finding]:
    for rank, how in sorted(absent.items()):
        wait = next((wait for other, wait in waits if rank in wait.partners), None)
        awaited = (
            f"; awaited by {ranks_in_words(_waiting_in(waits, wait))} in {wait.describe()}" if wait else ""
        )
        yield (rank,), f"rank {rank} {how}{awaited}"


def _gone_another_way(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
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
            yield _other_op(reports, wait, ops)
        elif len(set(shapes.values())) > 1 and wait.op in _OF_EQUAL_SHAPES:
            groups = "; ".join(
                f"{ranks_in_words(ranks)} with {list(each)}" for each, ranks in ranks_by_value(shapes).items()
            )
            yield minority(shapes), f"{wait.describe()} was entered with different shapes: {groups}"


_OF_EQUAL_SHAPES = (
    *("all_reduce", "broadcast", "reduce", "gather"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
)


def _other_op(reports: dict[int, RankReport], wait: CallRecord, ops: dict[int, str]) -> _Finding:
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
    return tuple(blamed), f"{entered}; {ranks_in_words(others)} entered {usual}{also}"


def _not_come(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
    for _, wait in waits:
        for rank in _missing_in(reports, wait):
            if not any(_is_held_up(reports, other) for other in reports[rank].waiting):
                verb, what = _duty(wait, next(waiter for waiter, held in waits if held is wait))
                yield (rank,), f"{_name(reports[rank])} {verb} {what}; {reports[rank].activity}"


def _duty(wait: CallRecord, waiter: int) -> tuple[str, str]:
    """Return what a partner has not done for a wait to end."""
    if wait.op == "recv":
        return "did not send", f"message #{wait.number} to rank {waiter} {wait.where}"
    if wait.op == "send":
        return "did not receive", f"message #{wait.number} from rank {waiter} {wait.where}"
    return "did not enter", wait.describe()


def _is_held_up(reports: dict[int, RankReport], wait: CallRecord) -> bool:
    """Whether somebody else is to blame for a wait."""
    return bool(_missing_in(reports, wait)) or any(rank not in reports for rank in wait.partners)


def _missing_in(reports: dict[int, RankReport], wait: CallRecord) -> list[int]:
    """Return the ranks that have not reached what a wait needs, of those that answer."""
    return [
        rank
        for rank in wait.partners
        if rank in reports and reports[rank].reached.get(wait.channel, 0) < wait.number
    ]


def _waiting_in_a_ring(reports: dict[int, RankReport], waits: _Waits) -> Iterator[_Finding]:
    if any(_missing_in(reports, wait) for _, wait in waits):
        told = [
            f"rank {rank} waits in {wait.describe()}" for rank, wait in waits if _missing_in(reports, wait)
        ]
        ranks = tuple(dict.fromkeys(rank for rank, wait in waits if _missing_in(reports, wait)))
        yield ranks, f"ranks wait for one another: {'; '.join(told[:_NUM_NAMED])}"


def _too_long(reports: dict[int, RankReport]) -> Iterator[_Finding]:
    for rank, answer in sorted(reports.items()):
        if answer.overdue:
            yield (rank,), f"{_name(answer)} {answer.overdue}; {answer.activity}"


def _all_there(waits: _Waits) -> Iterator[_Finding]:
    for _, wait in waits:
        yield (
            (),
            (
                f"all of {ranks_in_words(wait.partners)} have entered {wait.describe()}, and it does not "
                "end: look at what lies between them (network, communication library)"
            ),
        )


def _waiting_in(waits: _Waits, wait: CallRecord) -> list[int]:
    return [rank for rank, other in waits if other.end == wait.end]


def _name(answer: RankReport) -> str:
    return f"rank {answer.rank} ({answer.host})"
