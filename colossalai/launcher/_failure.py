"""Failure of a job: the first failing rank, and its report.

[Note: the first failure]
When one rank ends, its peers fail soon after with "connection closed" and the like. The rules:
- A rank killed by a signal is the cause, since the launcher has sent none at this point.
- SIGABRT is the exception: compiled code aborts itself, mostly because a peer is gone or sends
  unexpected data. It leaves no error, and the errors of its peers, which explain it, follow: they are
  awaited.
- Otherwise the rank with the oldest error. A rank records the time at which its error is raised, which can
  be long before its end.
- A lost node ends its ranks, and ranks of other nodes then raise: it is the cause, unless a rank of another
  node was killed or has an error that is older by more than the time of a message.
"""

import json
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from colossalai.launcher._worker import write_error

REFUSED = 2
"""Exit code of a rank that refuses its task, for example a wrong option."""

_MESSAGE_S = 1.0  # delay of the report of a lost node; errors of its peers can arrive before it


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The uncaught error that a rank recorded (see `_worker.WorkerErrorHook`)."""

    message: str  # one line: "ValueError: ..."
    traceback: str  # empty for a sys.exit
    time: float  # seconds since the epoch
    exit_code: int
    is_refusal: bool = False  # a sentence for the user, without a traceback


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank as the launcher sees it at one moment."""

    global_rank: int
    pid: int
    exit_code: int | None  # -N for death by signal N, None while it runs
    error: RankError | None
    host: str = ""  # empty on one machine
    ended_at: float | None = None  # when its end was first seen, in seconds since the epoch

    @property
    def has_failed(self) -> bool:
        """It ended badly, or is about to."""
        return self.exit_code not in (None, 0) or (self.exit_code is None and self.error is not None)

    @property
    def was_killed(self) -> bool:
        """It was ended by a signal, and not by its own error."""
        return self._signal > 0 and self.error is None

    @property
    def shell_code(self) -> int:
        """The exit code of a failed rank as a shell would give it."""
        if self.exit_code is not None and self.exit_code > 0:
            return self.exit_code
        return 128 + self._signal if self.error is None else self.error.exit_code

    @property
    def _signal(self) -> int:
        """The signal that ended it, or 0."""
        return max(0, -(self.exit_code or 0))

    def describe(self) -> str:
        """Describe its end in one line."""
        place = f" on {self.host}" if self.host else ""
        name = f"rank {self.global_rank}{place} (pid {self.pid})"
        if self.was_killed:
            return f"{name} was killed by {signal_name(self._signal)}"
        if self.error is None:
            return f"{name} ended with exit code {self.exit_code} and left no Python error"
        return f"{name} failed with exit code {self.shell_code}: {self.error.message}"


@dataclass(frozen=True, kw_only=True)
class NodeLoss:
    """A node that is gone without a word: its agent or ssh client was killed, or its link is dead."""

    host: str
    what: str
    time: float  # time of its last message, in seconds since the epoch
    shell_code: int = 1

    def describe(self) -> str:
        """Describe it in one line."""
        return f"{self.host} is lost: {self.what}"


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """The first rank or node that failed, and those that failed after it."""

    first: RankState | NodeLoss
    later: tuple[RankState | NodeLoss, ...]

    @property
    def is_refusal(self) -> bool:
        """Whether the job was refused: a restart would fail in the same way."""
        error = self.first.error if isinstance(self.first, RankState) else None
        return error is not None and error.is_refusal

    def describe(self) -> str:
        """Describe the first failing rank with its traceback, and each of the others in one line.

        A refusal is its sentence only: it is the same on all ranks.
        """
        if isinstance(self.first, RankState) and self.first.error is not None and self.is_refusal:
            return self.first.error.message
        lines = [self.first.describe()]
        if isinstance(self.first, RankState):
            if self.first.was_killed and self.first.exit_code == -signal.SIGKILL:
                lines[0] += " (if nobody sent it, the machine ran out of memory)"
            if self.first.error is not None and self.first.error.traceback:
                lines += ["", self.first.error.traceback.rstrip()]
        if self.later:
            lines += ["", "after it:", *(f"  {one.describe()}" for one in self.later)]
        return "\n".join(lines)


def find_failure(ranks: list[RankState], *, now: float, patience_s: float) -> JobFailure | None:
    """Return the failure of the job, or None if all ranks are well.

    Args:
        ranks: All ranks; none of them has been sent a signal by us.
        now: Seconds since the epoch.
        patience_s: Time for a rank with an error to end (to close files, to write logs), and for the
            peers of an aborted rank to report their errors.
    """
    failed = sorted((rank for rank in ranks if rank.has_failed), key=_failure_order)
    have_ended = all(rank.exit_code is not None for rank in ranks)
    if not failed or not (have_ended or any(_is_certain(rank, now - patience_s) for rank in failed)):
        return None
    return JobFailure(first=failed[0], later=tuple(failed[1:]))


def first_failure(ranks: list[RankState], losses: list[NodeLoss]) -> JobFailure:
    """Return the failure of a job on several nodes, in which a rank has failed or a node was lost."""
    failed = sorted((rank for rank in ranks if rank.has_failed), key=_failure_order)
    lost = sorted(losses, key=lambda loss: loss.time)
    rank_is_first = bool(failed) and (
        not lost or _is_cause(failed[0]) or _error_time(failed[0]) < lost[0].time - _MESSAGE_S
    )
    first, *later = cast(
        "list[RankState | NodeLoss]", [*failed, *lost] if rank_is_first else [*lost, *failed]
    )
    return JobFailure(first=first, later=tuple(later))


def read_error(path: Path) -> RankError | None:
    """Read the recorded error of a rank; None without one."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (FileNotFoundError, json.JSONDecodeError):
        return None  # no error; or torch's own `record`, which a script may use, is just writing it
    extra = message["extraInfo"]
    return RankError(
        message=message["message"],
        traceback=extra["py_callstack"],
        time=float(extra.get("time", extra["timestamp"])),  # `record` has whole seconds only
        exit_code=extra.get("exit_code", 1),
        is_refusal=extra.get("is_refusal", False),
    )


def refuse(error: ValueError) -> NoReturn:
    """End this rank, for what it was asked to do cannot be done: the launcher shows the sentence alone.

    Args:
        error: The refusal.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not file:
        raise error
    write_error(file, str(error), "", exit_code=REFUSED, is_refusal=True)
    sys.exit(REFUSED)


def _is_certain(rank: RankState, long_ago: float) -> bool:
    """Whether no pending report can contain an earlier failure, or a better explanation of it."""
    if rank.exit_code == -signal.SIGABRT and rank.error is None:
        return rank.ended_at is None or rank.ended_at < long_ago
    return rank.exit_code is not None or (rank.error is not None and rank.error.time < long_ago)


def _failure_order(rank: RankState) -> tuple[bool, float]:
    """See [Note: the first failure]."""
    return (not _is_cause(rank), _error_time(rank))


def _is_cause(rank: RankState) -> bool:
    return rank.was_killed and rank.exit_code != -signal.SIGABRT


def _error_time(rank: RankState) -> float:
    return math.inf if rank.error is None else rank.error.time


def signal_name(number: int) -> str:
    """Return "SIGTERM", or "signal 41" for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
