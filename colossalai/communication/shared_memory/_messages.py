"""Point-to-point messages through mailboxes in shared memory.

A mailbox is a ring of bytes for one sender and one receiver, with a counter of the bytes written and one of
the bytes read. A message is a header (tag and length) and its bytes, padded to whole cache lines; a message
larger than the mailbox is sent in pieces, as the receiver makes room. A receiver reads messages in order of
arrival and matches them by sender and tag. A message without a matching receive is kept in a separate buffer,
so that it does not block later ones.

[Note: progress of messages]
`isend` writes as much of a message to the mailbox as fits; the rest stays in the sender's queue. `irecv`
reads the bytes that have arrived. Later, every thread that waits for a message moves all messages as far as
possible, and sleeps on the rank's *bell*, which the other ranks ring at every step. Possibly no thread waits:
the sender computes and its mailbox is full, or the receiver has posted an `irecv` and is in a collective. For
these cases a message thread of each rank sleeps on its *alarm*. The alarm is rung by a sender whose message
does not fit into the mailbox, then and when it has written the rest, and by a receiver that has made room in
a mailbox whose sender has set its mark. A sender sets the mark, executes an atomic operation (the alarm), and
checks the mailbox once more; a receiver reads the mark after an atomic operation (the bell). So either the
sender sees the room, or the receiver sees the mark.
"""

import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from colossalai.communication.shared_memory._counters import LINE, SLICE_S, Counters
from colossalai.communication.shared_memory._layout import SegmentLayout
from colossalai.communication.shared_memory._matching import IncomingMessage, Matching, PostedReceive
from colossalai.communication.shared_memory._segment import NoMemoryError, Segment, copy_bytes
from colossalai.communication.shared_memory._watch import WaitLimit, Watch
from colossalai.communication.shared_memory._work import SharedWork, check_process
from colossalai.monitor import lost_ranks

_HEADER = struct.Struct("<qQ")  # tag, length
_PIECE = 256 << 10  # bytes that are copied before the counter is updated
_TURN = 1 << 20  # bytes that a thread moves before it releases the lock
_LEAST_MAILBOX = 64 << 10

# Indices of words in a sender's control line, after the counter.
_MARK, _CAPACITY = 1, 2


@dataclass(eq=False)
class _Outgoing:
    work: "MessageWork"
    tag: int
    data: torch.Tensor  # contiguous; kept until it is sent
    num_sent: int = -1  # -1: the header is not sent either


@dataclass
class _Outbox:
    written: int = 0
    capacity: int = 0
    queue: deque[_Outgoing] = field(default_factory=deque)
    is_marked: bool = False


@dataclass
class _Inbox:
    read: int = 0
    current: IncomingMessage | None = None


class MessageWork(SharedWork):
    """Work of a send or a receive.

    Args:
        messages: Messages of the group.
        tensor: Tensor of the message.
        peer: Index of the other rank; None for any.
        describe: Returns the name of the message.
        then: Called after the arrival of the message.
    """

    def __init__(
        self,
        messages: "Messages",
        tensor: torch.Tensor,
        peer: int | None,
        describe: Callable[[], str],
        then: Callable[[], object] | None = None,
    ) -> None:
        super().__init__([tensor])
        self._then = then
        self._messages = messages
        self._peer = peer
        self.describe = describe
        self._pid = os.getpid()
        self.source = -1 if peer is None else peer

    def is_completed(self) -> bool:
        """Whether the message is complete; moves all messages as far as possible."""
        if not self._is_done and self._pid == os.getpid():
            self._messages.move()
        return self._is_done

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the work and release its waiting threads."""
        if self._then is not None and error is None:
            self._then()
        super().finish(error)

    def source_rank(self) -> int:
        """Return the group rank of the sender."""
        return self.source

    _source_rank = source_rank  # used by `dist.recv` without a source

    def _finish_waiting(self, timeout: float | None) -> None:
        check_process(self._pid)
        self._messages.wait_for(self, self._peer, timeout)


class Messages:
    """The messages of one rank in a group.

    Args:
        segment: Segment of the group.
        layout: Layout of the segment.
        rank: Index of this rank in the segment.
        bells: Words on which waiting threads sleep, by rank.
        alarms: Words on which the message threads sleep, by rank.
        controls: Counters of the mailboxes.
        watch: Watch of the group, which ends waits.
        timeout: Time limit of the waits for other ranks, in seconds.
        may_reserve: Returns whether so many bytes more may be reserved.
        poll_s: Seconds between two polls of the message thread without an alarm.
    """

    def __init__(
        self,
        segment: Segment,
        layout: SegmentLayout,
        rank: int,
        *,
        bells: Counters,
        alarms: Counters,
        controls: Counters,
        watch: Watch,
        timeout: float,
        may_reserve: Callable[[int], bool],
        poll_s: float,
    ) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._bells, self._alarms, self._controls = bells, alarms, controls
        self._watch = watch
        self._timeout = timeout
        self._may_reserve = may_reserve
        self._poll_s = poll_s
        self._out = {other: _Outbox() for other in range(layout.num_ranks) if other != rank}
        self._in = {other: _Inbox() for other in range(layout.num_ranks) if other != rank}
        self._matching = Matching(tuple(self._in))
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._message_thread: threading.Thread | None = None
        self._is_stopped = False
        self._num_waiting = 0
        self._next_check = 0.0
        self.num_reserved = 0

    def send(self, data: torch.Tensor, target: int, tag: int, describe: Callable[[], str]) -> SharedWork:
        """Start to send a contiguous tensor to a rank.

        Raises:
            DistBackendError: The other rank has ended, or some rank has given up.
            NoMemoryError: The machine has no memory for a mailbox.
        """
        self._check(target, describe)
        work = MessageWork(self, data, target, describe)
        with self._sending:
            self._open_mailbox(target)
            self._out[target].queue.append(_Outgoing(work, tag, data))
            self._push(target)
        # The rest is written as the receiver makes room, also if this rank computes.
        if not work._is_done:
            self._start_message_thread()
        return work

    def receive(
        self,
        data: torch.Tensor,
        source: int | None,
        tag: int,
        describe: Callable[[], str],
        then: Callable[[], object] | None = None,
    ) -> SharedWork:
        """Start to receive a contiguous tensor from a rank, or from any; `then` is called on arrival.

        Raises:
            DistBackendError: Some rank has given up.
        """
        self._watch.check()
        work = MessageWork(self, data, source, describe, then)
        posted = PostedReceive(work, source, tag, data, describe)
        with self._receiving:
            # Under the lock: no message can arrive between the search and the queueing of the receive.
            kept = self._matching.post(posted)
            if kept is None:
                for other in self._in if source is None else (source,):
                    self._pull(other)
            elif kept.has_arrived:
                self._deliver(kept, posted)
        if not work._is_done:
            self._start_message_thread()
        return work

    def wait_for(self, work: MessageWork, peer: int | None, timeout: float | None) -> None:
        """Move messages until one is complete.

        Raises:
            DistBackendError: The other rank has ended, some rank has given up, or the time limit is over.
        """
        others = set(self._in) if peer is None else {peer}
        wait_limit = WaitLimit(
            self._watch,
            lambda: self._awaited(work, others),
            describe=work.describe,
            timeout=self._timeout if timeout is None else timeout,
            is_for_any=peer is None,
        )
        self._num_waiting += 1
        try:
            while not work._is_done:
                # Before the move: a message that arrives later changes the bell, so the sleep ends at once.
                seen = self._bells.value(self._rank)
                if not self.move() and not work._is_done:
                    wait_limit.check()
                    self._bells.wait_for_change(self._rank, seen, SLICE_S)
        except dist.DistBackendError as error:
            if timeout is None or not wait_limit.is_over:  # otherwise only this caller's limit is over
                self._watch.give_up(str(error), self._bells)
            raise
        finally:
            self._num_waiting -= 1

    def _awaited(self, work: MessageWork, others: set[int]) -> set[int]:
        """Return the ranks that a message waits for, after reading everything that they have sent."""
        with self._receiving:
            for source in others:
                while self._pull(source):
                    pass
        return set() if work._is_done else others

    def _check(self, target: int, describe: Callable[[], str]) -> None:
        """Check every `SLICE_S` that the target is alive: sends that fit into the mailbox would not fail."""
        self._watch.check()
        now = self._watch.clock.now()
        if now < self._next_check:
            return
        self._next_check = now + SLICE_S
        departed_ranks = self._watch.departed_ranks()
        if target in departed_ranks | self._watch.ended_ranks():
            ranks = [self._watch.ranks[target]]
            error = dist.DistBackendError(
                lost_ranks(ranks, describe(), have_ended=target not in departed_ranks)
            )
            self._watch.give_up(str(error), self._bells)
            raise error

    def move(self) -> bool:
        """Move all messages as far as possible without a wait; return whether anything was moved."""
        moved = 0
        if self._sending.acquire(blocking=False):
            try:
                for target, outbox in self._out.items():
                    if outbox.queue:
                        moved += self._push(target)
            finally:
                self._sending.release()
        if self._receiving.acquire(blocking=False):
            try:
                for source in self._in:
                    moved += self._pull(source)
            finally:
                self._receiving.release()
        return moved > 0

    def stop(self, timeout: float) -> None:
        """End the message thread of this rank."""
        self._is_stopped = True
        if self._message_thread is not None:
            # Wakes the thread, which then sees `_is_stopped`.
            self._alarms.ring(self._rank)
            if self._message_thread is not threading.current_thread():
                self._message_thread.join(timeout)
            self._message_thread = None

    # Sending, under `_sending`.

    def _open_mailbox(self, target: int) -> None:
        """Reserve the mailbox to a rank, as large as memory allows, and publish its size."""
        outbox = self._out[target]
        size = 0 if outbox.capacity else self._layout.mailbox_size
        while size >= min(_LEAST_MAILBOX, self._layout.mailbox_size):
            if self._may_reserve(size):
                with suppress(NoMemoryError):
                    self._segment.reserve(self._layout.mailbox(self._rank, target), size)
                    outbox.capacity = size
                    self.num_reserved += size
                    # Before the first bytes, whose counter orders it: a receiver never sees capacity 0.
                    self._segment.words[self._line(self._rank, target) + _CAPACITY] = size
                    return
            size //= 2
        if not outbox.capacity:
            raise NoMemoryError(
                f"no {_LEAST_MAILBOX >> 10} KiB of shared memory for messages to "
                f"rank {self._watch.ranks[target]}: raise COLOSSALAI_SHARED_MEMORY, or use backend='gloo'"
            )

    def _push(self, target: int) -> int:
        """Write queued messages to the mailbox to a rank, as far as they fit; return the number of bytes."""
        outbox = self._out[target]
        moved = 0
        while outbox.queue and moved < _TURN:
            step = self._push_piece(target, outbox)
            moved += step
            if not step and not self._mark(target, outbox):
                return moved
        if not outbox.queue and outbox.is_marked:
            # A late alarm is harmless: the message thread finds nothing to move.
            self._segment.words[self._line(self._rank, target) + _MARK] = 0
            outbox.is_marked = False
            # The last bytes had room: the message thread of the receiver has read those before, and sleeps.
            self._alarms.ring(target)
        return moved

    def _push_piece(self, target: int, outbox: _Outbox) -> int:
        """Write the next header or piece; return the number of bytes written to the mailbox."""
        message, room = outbox.queue[0], self._room(target, outbox)
        if room < LINE:
            return 0
        base = self._segment.address + self._layout.mailbox(self._rank, target)
        if message.num_sent < 0:
            place = self._layout.mailbox(self._rank, target) + outbox.written % outbox.capacity
            self._segment.write(place, _HEADER.pack(message.tag, message.data.nbytes))
            message.num_sent, step = 0, LINE
            size = min(room - LINE, message.data.nbytes, _PIECE)  # sent with the header
        else:
            size, step = min(room, message.data.nbytes - message.num_sent, _PIECE), 0
        if size:
            position = (outbox.written + step) % outbox.capacity
            source = message.data.data_ptr() + message.num_sent
            whole = min(size, outbox.capacity - position)
            copy_bytes(base + position, source, whole)
            copy_bytes(base, source + whole, size - whole)
            message.num_sent += size
            step += _padded(size)
        outbox.written = (outbox.written + step) & (2**32 - 1)
        # Publishes header and bytes, then wakes the receiver.
        self._controls.set(self._line_of_sender(self._rank, target), outbox.written)
        self._bells.ring(target)
        if message.num_sent == message.data.nbytes:
            outbox.queue.popleft()
            # The mailbox has all bytes: the caller can free or overwrite its tensor.
            self._finish(message.work)
        return step

    def _room(self, target: int, outbox: _Outbox) -> int:
        read = self._controls.value(self._line_of_receiver(self._rank, target))
        # The receiver has read these bytes before it set the counter: they can be overwritten.
        self._controls.fence()
        return outbox.capacity - ((outbox.written - read) & (2**32 - 1))

    def _mark(self, target: int, outbox: _Outbox) -> bool:
        """Set the mark that this rank waits for room; return whether there is room now."""
        if not outbox.is_marked:
            self._segment.words[self._line(self._rank, target) + _MARK] = 1
            outbox.is_marked = True
        # An atomic operation between the mark and the second check; see [Note: progress of messages].
        self._alarms.ring(target)
        return self._room(target, outbox) >= LINE

    # Receiving, under `_receiving`.

    def _pull(self, source: int) -> int:
        """Read the bytes in the mailbox from a rank; return their number."""
        moved = 0
        while moved < _TURN and (step := self._pull_piece(source)):
            moved += step
        return moved

    def _pull_piece(self, source: int) -> int:
        """Read the next header or piece; return the number of bytes read from the mailbox."""
        inbox, line = self._in[source], self._line_of_sender(source, self._rank)
        written = self._controls.value(line)
        there = (written - inbox.read) & (2**32 - 1)
        if not there:
            return 0
        # The counter before the capacity, header and bytes.
        self._controls.fence()
        capacity = self._segment.words[self._line(source, self._rank) + _CAPACITY]
        mailbox = self._layout.mailbox(source, self._rank)
        step = 0
        if inbox.current is None:
            header = self._segment.read(mailbox + inbox.read % capacity, _HEADER.size)
            inbox.current = self._matching.expect(source, *_HEADER.unpack(header))
            step, there = LINE, there - LINE
        message = inbox.current
        size = min(there, message.length - message.num_arrived, _PIECE)
        if size:
            base = self._segment.address + mailbox
            position = (inbox.read + step) % capacity
            target = message.data.data_ptr() + message.num_arrived
            whole = min(size, capacity - position)
            copy_bytes(target, base + position, whole)
            copy_bytes(target + whole, base, size - whole)
            message.num_arrived += size
            step += _padded(size)
        inbox.read = (inbox.read + step) & (2**32 - 1)
        # After the copy: the sender can overwrite these bytes.
        self._controls.set(self._line_of_receiver(source, self._rank), inbox.read)
        self._bells.ring(source)  # an atomic operation: the mark is read after it
        if self._segment.words[self._line(source, self._rank) + _MARK]:
            # The sender waits for room, possibly in its message thread only.
            self._alarms.ring(source)
        if message.has_arrived:
            inbox.current = None
            receiver = self._matching.complete(source, message)
            if receiver is not None:
                self._deliver(message, receiver)
        return step

    def _deliver(self, message: IncomingMessage, posted: PostedReceive) -> None:
        error = None
        if message.length > posted.data.nbytes:
            error = dist.DistBackendError(
                f"{posted.describe()}: the message has {message.length} bytes, and the tensor for it "
                f"{posted.data.nbytes}"
            )
        elif message.data is not posted.data:
            copy_bytes(posted.data.data_ptr(), message.data.data_ptr(), message.length)
        work = posted.work
        assert isinstance(work, MessageWork), "only those are posted"
        work.source = -1 if posted.found is None else posted.found
        self._finish(work, error)

    def _finish(self, work: "MessageWork", error: Exception | None = None) -> None:
        work.finish(error)
        if self._num_waiting > (threading.current_thread() is not self._message_thread):
            self._bells.ring(self._rank)  # another thread can be waiting for this message

    # The message thread; see [Note: progress of messages].

    def _start_message_thread(self) -> None:
        if self._message_thread is None and not self._is_stopped:
            self._message_thread = threading.Thread(
                target=self._run_message_thread, name="colossalai-messages", daemon=True
            )
            self._message_thread.start()

    def _run_message_thread(self) -> None:
        while not self._is_stopped:
            # Before the moves, so that an alarm during them ends the sleep below at once.
            seen = self._alarms.value(self._rank)
            with torch.inference_mode():
                while self.move():
                    pass
            if not self._is_stopped:
                self._alarms.wait_for_change(self._rank, seen, self._poll_s, spins=False)

    # Indices of control lines.

    def _line_of_sender(self, sender: int, receiver: int) -> int:
        return 2 * (sender * self._layout.num_ranks + receiver)

    def _line_of_receiver(self, sender: int, receiver: int) -> int:
        return 2 * (sender * self._layout.num_ranks + receiver) + 1

    def _line(self, sender: int, receiver: int) -> int:
        """Return the index of the sender's first word in the segment."""
        return self._layout.controls // 4 + self._line_of_sender(sender, receiver) * (LINE // 4)


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE
