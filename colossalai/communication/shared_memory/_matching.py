"""Matching of messages and receives, by sender and tag, in the order of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from colossalai.communication.shared_memory._work import SharedWork


@dataclass(eq=False)
class IncomingMessage:
    """A message that is arriving, or that has arrived without a matching receive.

    Attributes:
        tag: Tag of the message.
        length: Length in bytes.
        data: Buffer for its bytes.
        num_arrived: Number of bytes that have arrived.
        receiver: The matching receive; None if there is none yet.
    """

    tag: int
    length: int
    data: torch.Tensor
    num_arrived: int = 0
    receiver: "PostedReceive | None" = None

    @property
    def has_arrived(self) -> bool:
        """Whether all bytes have arrived."""
        return self.num_arrived == self.length


@dataclass(eq=False)
class PostedReceive:
    """A receive that waits for a message.

    Attributes:
        work: Work of the caller.
        source: Index of the sender; None for any.
        tag: Tag of the message.
        data: Contiguous tensor for the message.
        describe: Returns the name of the message.
        found: Index of the actual sender, after the match.
    """

    work: SharedWork
    source: int | None
    tag: int
    data: torch.Tensor
    describe: Callable[[], str]
    found: int | None = None


class Matching:
    """The receives of a rank that wait for messages, and the messages that wait for receives.

    Args:
        others: Indices of the possible senders.
    """

    def __init__(self, others: Sequence[int]) -> None:
        self._posted: list[PostedReceive] = []
        self._unexpected: dict[int, list[IncomingMessage]] = {other: [] for other in others}

    def post(self, posted: PostedReceive) -> IncomingMessage | None:
        """Return the oldest kept message that matches a receive; without one, queue the receive."""
        for source in self._unexpected if posted.source is None else (posted.source,):
            for message in self._unexpected[source]:
                if message.tag == posted.tag and message.receiver is None:
                    message.receiver, posted.found = posted, source
                    if message.has_arrived:
                        self._unexpected[source].remove(message)
                    return message
        self._posted.append(posted)
        return None

    def expect(self, source: int, tag: int, length: int) -> IncomingMessage:
        """Return the message for a header that has arrived, with the matching receive or kept for one.

        A message that is longer than the tensor of its receive gets a new buffer; `Messages` then raises.
        """
        for posted in self._posted:
            if posted.source in (None, source) and posted.tag == tag:
                self._posted.remove(posted)
                posted.found = source
                fits = length <= posted.data.nbytes
                return IncomingMessage(
                    tag, length, posted.data if fits else _new_buffer(length), receiver=posted
                )
        arriving = IncomingMessage(tag, length, _new_buffer(length))
        self._unexpected[source].append(arriving)
        return arriving

    def complete(self, source: int, message: IncomingMessage) -> PostedReceive | None:
        """Complete the arrival of a message; return its receive, if there is one."""
        if message.receiver is not None and message in self._unexpected[source]:
            self._unexpected[source].remove(message)
        return message.receiver


def _new_buffer(length: int) -> torch.Tensor:
    return torch.empty(length, dtype=torch.uint8, device="cpu")
