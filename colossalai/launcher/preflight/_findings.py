"""Findings of the pre-flight checks: a problem on a host and its remedy, one line each."""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class State(enum.Enum):
    """Whether a job can be started in spite of a finding."""

    OK = "ok"
    WARNING = "warning"  # it can, and may disappoint
    FAILED = "FAILED"  # it cannot


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check on one host."""

    host: str
    check: str
    state: State
    what: str  # the result or problem
    todo: str = ""  # the remedy

    @property
    def ok(self) -> bool:
        """A job can be started, as far as this is concerned."""
        return self.state is not State.FAILED

    def describe(self) -> str:
        """Describe it in one line."""
        line = f"{self.host}: {self.check}: {self.what}"
        return f"{line}; {self.todo}" if self.todo else line


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a node to one question."""

    value: Any = None
    error: str | None = None  # why there is no value
    midpoint: float = 0.0  # our clock, half way between question and answer
    doubt_s: float = 0.0  # the answer was given at `midpoint`, more or less so many seconds


Answers = Mapping[str, Answer]  # by host


def fine(host: str, check: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(host=host, check=check, state=State.OK, what=what)


def warning(host: str, check: str, what: str, todo: str) -> Finding:
    """Return a finding that a user should know of and that stops nothing."""
    return Finding(host=host, check=check, state=State.WARNING, what=what, todo=todo)


def failed(host: str, check: str, what: str, todo: str) -> Finding:
    """Return a finding that a job must not be started with."""
    return Finding(host=host, check=check, state=State.FAILED, what=what, todo=todo)


def values_of(answers: Answers) -> dict[str, Any]:
    """Return the values of the hosts that have answered."""
    return {host: answer.value for host, answer in answers.items() if answer.error is None}


def unanswered(check: str, answers: Answers) -> Iterator[Finding]:
    """Yield a finding for each host without an answer."""
    for host, answer in answers.items():
        if answer.error is not None:
            todo = f"log in there and look: ssh {host}"
            yield failed(host, check, f"cannot be found out: {answer.error}", todo)


def prevailing(values: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the value that most hosts have, with the first host that has it; of equals, the first host's."""
    counts = [sum(other == value for other in values.values()) for value in values.values()]
    return list(values.items())[counts.index(max(counts))]
