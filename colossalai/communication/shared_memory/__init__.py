"""Shared memory: ranks of one machine communicate through its memory instead of gloo's sockets.

A torch backend of the name "shared_memory", in Python; see docs/design/shared_memory.md.

| word | what it is |
| --- | --- |
| segment | memory that the ranks of a group map |
| island | the ranks of a group that share a segment, because they share a machine |
| slot | the part of a segment in which a rank gives data to collectives, in two halves used by turns |
| part, phase | what passes through a slot at once; how far a rank has come with it |
| mailbox | a ring of bytes from one rank to another |
| arena | memory of a process in which the others read its tensors where they lie |
| bell, alarm | words at which a rank that waits for messages, or its thread for them, sleeps |
"""

from colossalai.communication.shared_memory._machines import empty_to_lend as empty_to_lend
from colossalai.communication.shared_memory._machines import how_ranks_talk as how_ranks_talk
from colossalai.communication.shared_memory._machines import is_within_machine as is_within_machine
from colossalai.communication.shared_memory._machines import make_group as make_group
from colossalai.communication.shared_memory._machines import stamp_next as stamp_next
