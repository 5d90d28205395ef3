"""Wait timer: seconds without progress of this rank's collectives, messages and sections.

[Note: excluded time]
A process can be stopped, its machine suspended or overloaded. Between two looks at most twice their planned
distance counts: a rank that was not running has not been waiting.
"""

import time
from dataclasses import dataclass

from colossalai._clock import Clock
from colossalai.monitor._flight_recorder import progress
from colossalai.monitor._last_calls import MessageRecord
from colossalai.monitor._sections import innermost_sections, is_wait_expected, meeting, meetings


@dataclass
class _Wait:
    mark: object  # as long as this is the same, nothing has moved
    seconds: float = 0.0
    seconds_at_notice: float = 0.0  # when reports of all ranks were last requested


class WaitTimer:
    """Timer of this rank's waits.

    Args:
        record: Its messages.
        watches_sections: Whether sections without a wait for other ranks count, too.
        clock: The clock of the looks.
    """

    def __init__(self, record: MessageRecord, *, watches_sections: bool, clock: Clock) -> None:
        self._record = record
        self._watches_sections = watches_sections
        self._clock = clock
        self._last_update = clock.now()
        self._at_start = progress()  # collectives of an earlier job in this process
        self._waits: dict[str, _Wait] = {}
        self._forgiven: dict[str, object] = {}
        self._noticed: dict[str, object] = {}
        self._steps: set[str] = set()  # names of sections without a wait for other ranks

    def look(self, poll_s: float) -> None:
        """Update the times from the present calls and sections.

        Args:
            poll_s: Planned seconds between two looks.
        """
        now = self._clock.now()
        elapsed = min(now - self._last_update, 2 * poll_s)  # see [Note: excluded time]
        self._last_update = now
        waits = {}
        for name, mark in self._marks().items():
            wait = self._waits.get(name)
            if wait is None or wait.mark != mark:
                wait = _Wait(mark)
            else:
                wait.seconds += elapsed
            waits[name] = wait
        for thread, item in meetings().items():  # their patience is short, and a look may be late
            wait = waits.get(_name(item))
            if wait is not None and not wait.seconds and wait.mark == (thread, item.number):
                wait.seconds = min(time.monotonic() - item.start, elapsed)
        self._waits = waits

    def overdue(self, timeout: float) -> str:
        """Describe a wait without progress for `timeout` seconds at the last look; empty without one."""
        late = self._late(timeout, self._forgiven)
        return f"has been in {late[0]} for more than {timeout:g} s" if late else ""

    def slow(self, seconds: float) -> str:
        """Describe a wait of this length that no notice has mentioned.

        A long step does not count, nor does an `expected_wait`.
        """
        if is_wait_expected():
            return ""
        late = [name for name in self._late(seconds, self._noticed) if name not in self._steps]
        return f"has been in {late[0]} for more than {seconds:g} s" if late else ""

    def is_impatient(self) -> bool:
        """Return whether a meeting's patience is over since the last reports of the others."""
        return any(
            item.patience is not None
            and (wait := self._waits.get(_name(item))) is not None
            and wait.mark == (thread, item.number) != self._forgiven.get(_name(item))
            and wait.seconds - wait.seconds_at_notice > item.patience
            for thread, item in meetings().items()
        )

    def forgive(self) -> None:
        """Exclude the present waits from further alarms."""
        self._forgiven = self._pending()

    def mark_noticed(self) -> None:
        """Exclude the present waits from further notices."""
        self._noticed = self._pending()
        for wait in self._waits.values():
            wait.seconds_at_notice = wait.seconds

    def _pending(self) -> dict[str, object]:
        return {name: wait.mark for name, wait in self._waits.items()}

    def _late(self, seconds: float, known: dict[str, object]) -> list[str]:
        return [
            name
            for name, wait in self._waits.items()
            if wait.seconds > seconds and not (name in known and known[name] == wait.mark)
        ]

    def _marks(self) -> dict[str, object]:
        """Return the waits of this rank, with a value that changes with their progress."""
        marks: dict[str, object] = {}
        for group, (issued, completed) in progress().items():
            if issued > completed and self._at_start.get(group) != (issued, completed):
                marks[f"a collective (of group {group})"] = completed
        for message in self._record.messages():
            marks.setdefault(f"a {message.op} ({message.channel})", message.number)
        sections = innermost_sections()
        self._steps = {section.name for section in sections if not section.is_wait}
        for section in sections:
            if self._watches_sections or section.is_wait:
                marks[section.name] = (section.thread, section.start)
        for thread, item in meetings().items():
            marks[_name(item)] = (thread, item.number)
        return marks


def _name(item: meeting) -> str:
    return f"a {item.op} of {item.name}"
