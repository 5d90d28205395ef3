"""Layout of a group's segment: offsets of the counters, headers, slots and mailboxes of its ranks.

| part | for each | holds |
| --- | --- | --- |
| token | segment | random bytes that identify it |
| broken | segment | one word: whether some rank has given up |
| progress | rank | its counter of parts and phases |
| bell | rank | a word that other ranks increment after a write to or a read from one of its mailboxes |
| alarm | rank | the same, for events that need the message thread if no call of the rank is waiting |
| error texts | rank | its error message, after it has given up |
| stamp texts | rank | description of its last stamp |
| headers | rank, 4 times | headers of its present part and of the parts before |
| controls | pair of ranks | written and read counters of its mailbox |
| slots | rank, two halves | its data for collectives |
| mailboxes | pair of ranks | messages from one to the other |

The first parts, up to the controls, are reserved when the segment is made. Slots and mailboxes are address
space; each rank reserves its slot and the mailboxes for its messages, as far as it needs them.
"""

from dataclasses import dataclass
from functools import cached_property

from colossalai.communication.shared_memory._counters import LINE
from colossalai.communication.shared_memory._segment import PAGE

FIRST_ROOM = 16 << 10  # initial bytes of a half of a slot
MOST_ROOM = 2 << 20  # largest half of a slot; more would not stay in a core's cache
NUM_HEADERS = 4  # a reader of the header of a part is two parts behind at most
HEADER = LINE
START = 2**32 - 256  # first value of the progress counters, which so wrap early in every run
TEXT_SIZE = 8 * LINE  # bytes of an error message, and of the description of a stamp

_MOST_MAILBOX = 4 << 20
_MOST_MAILBOXES = 4 << 30  # address space of all mailboxes together


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets in the segment of a number of ranks, in bytes.

    Attributes:
        num_ranks: Number of ranks that share the segment.
    """

    num_ranks: int

    broken = LINE  # after the token

    @property
    def progress(self) -> int:
        """Offset of the progress counters."""
        return 2 * LINE

    @property
    def bells(self) -> int:
        """Offset of the bells."""
        return self.progress + LINE * self.num_ranks

    @property
    def alarms(self) -> int:
        """Offset of the alarms."""
        return self.bells + LINE * self.num_ranks

    def error_text(self, rank: int) -> int:
        """Offset of a rank's error message."""
        return self.alarms + LINE * self.num_ranks + TEXT_SIZE * rank

    def stamp_text(self, rank: int) -> int:
        """Offset of the description of a rank's last stamp."""
        return self.error_text(self.num_ranks) + TEXT_SIZE * rank

    def header(self, rank: int, part: int) -> int:
        """Offset of the header of a rank's part."""
        return self.stamp_text(self.num_ranks) + HEADER * (NUM_HEADERS * rank + part % NUM_HEADERS)

    @property
    def controls(self) -> int:
        """Offset of the mailboxes' counters: two lines per pair, by sender and receiver."""
        return self.header(self.num_ranks, 0)

    @cached_property
    def first(self) -> int:
        """Bytes that are reserved when the segment is made."""
        return _up(self.controls + 2 * LINE * self.num_ranks**2, PAGE)

    def slot(self, rank: int, half: int = 0) -> int:
        """Offset of one of the two halves of a rank's slot."""
        return self.first + MOST_ROOM * (2 * rank + half)

    @cached_property
    def mailbox_size(self) -> int:
        """Bytes of a mailbox, a power of two."""
        size = _MOST_MAILBOX
        while size * self.num_ranks**2 > _MOST_MAILBOXES and size > FIRST_ROOM:
            size //= 2
        return size

    def mailbox(self, sender: int, receiver: int) -> int:
        """Offset of the mailbox of a pair."""
        return self.slot(self.num_ranks) + self.mailbox_size * (sender * self.num_ranks + receiver)

    @cached_property
    def size(self) -> int:
        """Size of the segment."""
        return _up(self.mailbox(self.num_ranks, 0), PAGE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
