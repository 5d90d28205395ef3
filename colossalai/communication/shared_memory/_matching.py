"""Matching: which message belongs to which receive, by sender and tag, in the order in which both come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from colossalai.communication.shared_memory._work import SharedWork


@dataclass(eq=False)
class IncomingMessage:
    """A message on its way into this process, or kept there.

    Attributes:
        tag: By which it is matched.
        length: In bytes.
        data: Where its bytes go.
        num_arrived: How many have come.
        receiver: Who has asked for it; None as long as nobody has.
    """

    tag: int
    length: int
    data: torch.Tensor
    num_arrived: int = 0
    receiver: "PostedReceive | None" = None

    @property
    def has_arrived(self) -> bool:
        """Whether all of it has come."""
        return self.num_arrived == self.length


@dataclass(eq=False)
class PostedReceive:
    """A receive that waits for a message.

    Attributes:
        work: What its caller has.
        source: The index of the rank; None for any.
        tag: Of the message.
        data: A contiguous tensor for it.
        doing: What is the message called?
        found: The rank that has sent it, once that is known.
    """

    work: SharedWork
    source: int | None
    tag: int
    data: torch.Tensor
    doing: Callable[[], str]
    found: int | None = None


class Matching:
    """The receives of a rank that wait for messages, and the messages that wait for receives.

    Args:
        others: The indices of the ranks that may send.
    """

    def __init__(self, others: Sequence[int]) -> None:
        self._posted: list[PostedReceive] = []
        self._kept: dict[int, list[IncomingMessage]] = {other: [] for other in others}

    def post(self, posted: PostedReceive) -> IncomingMessage | None:
        """Take a receive: return the oldest kept message that fits it, else remember it and return None."""
        for source in self._kept if posted.source is None else (posted.source,):
            for message in self._kept[source]:
                if message.tag == posted.tag and message.receiver is None:
                    message.receiver, posted.found = posted, source
                    if message.has_arrived:
                        self._kept[source].remove(message)
                    return message
        self._posted.append(posted)
        return None

    def expect(self, source: int, tag: int, length: int) -> IncomingMessage:
        """Return where a message goes whose header has come: to who has asked for it, or to be kept.

        One that is longer than the tensor for it goes to memory of its own, to be refused when it is there.
        """
        for posted in self._posted:
            if posted.source in (None, source) and posted.tag == tag:
                self._posted.remove(posted)
                posted.found = source
                fits = length <= posted.data.nbytes
                return IncomingMessage(tag, length, posted.data if fits else _spare(length), receiver=posted)
        arriving = IncomingMessage(tag, length, _spare(length))
        self._kept[source].append(arriving)
        return arriving

    def complete(self, source: int, message: IncomingMessage) -> PostedReceive | None:
        """Note that all of a message has come; return the receive that it belongs to, if it is known."""
        if message.receiver is not None and message in self._kept[source]:
            self._kept[source].remove(message)
        return message.receiver


def _spare(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device="cpu")
