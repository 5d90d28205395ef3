"""SegmentLayout of a group's segment: where counters, headers, slots and mailboxes of its ranks lie.

| part | for each | holds |
| --- | --- | --- |
| token | segment | what it is known by |
| broken | segment | one word: whether some rank has given up |
| progress | rank | its counter of parts and phases |
| bell | rank | a word that others add to when something has come for it, or has been taken from it |
| alarm | rank | the same, for what must be seen to even if no call of the rank is waiting |
| words | rank | why it has given up |
| meanings | rank | what the stamp of its last call with a stamp means |
| headers | rank, 4 times | what its present call is, and the calls of the parts before |
| controls | pair of ranks | how far its mailbox was written and read |
| slots | rank, two halves | what it gives to collectives |
| mailboxes | pair of ranks | what one sends to the other |

The first parts, up to the controls, are reserved when the segment is made. Slots and mailboxes are address
space; each rank reserves its own ones as far as it writes to them.
"""

from dataclasses import dataclass
from functools import cached_property

from colossalai.communication.shared_memory._counters import LINE
from colossalai.communication.shared_memory._segment import PAGE

FIRST_ROOM = 16 << 10  # bytes of a half that every group has
MOST_ROOM = 2 << 20  # and that a group of large tensors comes to; more would not stay in a core's cache
NUM_HEADERS = 4  # who looks at the header of a part is two parts behind at most
HEADER = LINE
START = 2**32 - 256  # of the progress counters, which so wrap in every run, and soon
WORDS = 8 * LINE  # bytes for why a rank has given up, and for what a stamp means

_MOST_MAILBOX = 4 << 20
_MOST_MAILBOXES = 4 << 30  # address space of all mailboxes together


@dataclass(frozen=True)
class SegmentLayout:
    """Where everything lies in the segment of a number of ranks; all places are in bytes.

    Attributes:
        num_ranks: How many ranks share it.
    """

    num_ranks: int

    broken = LINE  # after the token

    @property
    def progress(self) -> int:
        """The first of the progress counters."""
        return 2 * LINE

    @property
    def bells(self) -> int:
        """The first of the bells."""
        return self.progress + LINE * self.num_ranks

    @property
    def alarms(self) -> int:
        """The first of the alarms."""
        return self.bells + LINE * self.num_ranks

    def words(self, rank: int) -> int:
        """Where a rank says why it has given up."""
        return self.alarms + LINE * self.num_ranks + WORDS * rank

    def meaning(self, rank: int) -> int:
        """Where a rank says what the stamp of its present call means."""
        return self.words(self.num_ranks) + WORDS * rank

    def header(self, rank: int, part: int) -> int:
        """The header of a rank's part."""
        return self.meaning(self.num_ranks) + HEADER * (NUM_HEADERS * rank + part % NUM_HEADERS)

    @property
    def controls(self) -> int:
        """The first of the mailboxes' counters: two lines for each pair, by sender and receiver."""
        return self.header(self.num_ranks, 0)

    @cached_property
    def first(self) -> int:
        """How much is reserved when the segment is made."""
        return _up(self.controls + 2 * LINE * self.num_ranks**2, PAGE)

    def slot(self, rank: int, half: int = 0) -> int:
        """One of the two halves of a rank's slot."""
        return self.first + MOST_ROOM * (2 * rank + half)

    @cached_property
    def mailbox_size(self) -> int:
        """Bytes of a mailbox, a power of two."""
        size = _MOST_MAILBOX
        while size * self.num_ranks**2 > _MOST_MAILBOXES and size > FIRST_ROOM:
            size //= 2
        return size

    def mailbox(self, sender: int, receiver: int) -> int:
        """The mailbox of a pair."""
        return self.slot(self.num_ranks) + self.mailbox_size * (sender * self.num_ranks + receiver)

    @cached_property
    def size(self) -> int:
        """Of the whole segment."""
        return _up(self.mailbox(self.num_ranks, 0), PAGE)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
