"""Whether anything moves: what has been pending, or what section lasts, for how long.

[Note: time that does not count]
A process may be stopped, its machine may sleep or be overloaded. Between two looks at most twice the time
counts that was meant to lie between them: a rank that was not running has not been waiting.
"""

import time
from dataclasses import dataclass

from colossalai.cluster._watchdog_records import MessageRecord, progress
from colossalai.cluster._watchdog_sections import innermost_sections, meetings


@dataclass
class _Wait:
    mark: object  # as long as this is the same, nothing has moved
    seconds: float = 0.0


class Progress:
    """How long this rank has waited for the same things.

    Args:
        record: Its messages.
        watches_sections: Whether a section that waits for nobody counts, too.
    """

    def __init__(self, record: MessageRecord, *, watches_sections: bool) -> None:
        self._record = record
        self._watches_sections = watches_sections
        self._last_look = time.monotonic()
        self._before = progress()  # of an earlier job in this process
        self._waits: dict[str, _Wait] = {}
        self._forgiven: dict[str, object] = {}

    def overdue(self, timeout: float, *, look_s: float) -> str:
        """Say what has not moved for `timeout` seconds; empty if everything has.

        Args:
            timeout: Seconds.
            look_s: Seconds that are meant to lie between two looks.
        """
        now = time.monotonic()
        elapsed = min(now - self._last_look, 2 * look_s)  # see [Note: time that does not count]
        self._last_look = now
        waits = {}
        for name, mark in self._marks().items():
            wait = self._waits.get(name)
            if wait is None or wait.mark != mark:
                wait = _Wait(mark)
            else:
                wait.seconds += elapsed
            waits[name] = wait
        self._waits = waits
        late = [
            name for name, wait in waits.items() if wait.seconds > timeout and not self._is_forgiven(name)
        ]
        return f"has been in {late[0]} for more than {timeout:g} s" if late else ""

    def forgive(self) -> None:
        """Raise no second alarm for what has not moved up to now."""
        self._forgiven = {name: wait.mark for name, wait in self._waits.items()}

    def _is_forgiven(self, name: str) -> bool:
        return name in self._forgiven and self._forgiven[name] == self._waits[name].mark

    def _marks(self) -> dict[str, object]:
        """Return what this rank waits for, with something that changes when it moves."""
        marks: dict[str, object] = {}
        for group, (issued, completed) in progress().items():
            if issued > completed and self._before.get(group) != (issued, completed):
                marks[f"a collective (of group {group})"] = completed
        for message in self._record.messages():
            marks.setdefault(f"a {message.op} ({message.channel})", message.number)
        for section in innermost_sections():
            if self._watches_sections or section.is_wait:
                marks[section.name] = (section.thread, section.start)
        for thread, item in meetings().items():
            marks[f"a step of {item.name}"] = (thread, item.number)
        return marks
