"""Shared memory backend: ranks of one machine communicate through its memory instead of gloo's sockets.

A torch backend with the name "shared_memory", in Python; see docs/design/shared_memory.md.

| word | meaning |
| --- | --- |
| segment | memory that the ranks of a group map |
| island | the ranks of a group that share a segment, because they share a machine |
| slot | a rank's buffer in the segment for collectives, in two halves that are used alternately |
| part, phase | a chunk of a collective that fits into a slot; a rank's progress on it |
| mailbox | a ring of bytes from one rank to another |
| arena | memory of a process whose tensors the other ranks read in place |
| bell, alarm | futex words on which a rank that waits for messages, or its message thread, sleeps |
"""

from colossalai.communication.shared_memory._machines import empty_in_arena as empty_in_arena
from colossalai.communication.shared_memory._machines import is_within_machine as is_within_machine
from colossalai.communication.shared_memory._machines import make_group as make_group
from colossalai.communication.shared_memory._machines import stamp_next as stamp_next
from colossalai.communication.shared_memory._machines import transport_of as transport_of
from colossalai.communication.shared_memory._watch import WaitOptions as WaitOptions
