"""The lines in which `colossalai run` and its node agents talk, over the two pipes of an ssh connection.

A message is one line of JSON behind a mark that no shell prints: what a login script writes in between is
told apart. Both sides send a beat every `BEAT_S`, and whoever has heard nothing for `SILENCE_S` knows that
the other side is gone: an open connection alone says nothing when a link is dead.
"""

import json
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from typing import Any

BEAT_S = 2.0
SILENCE_S = 12.0  # long enough for a machine that swaps; with the grace of ending, well below 30 s

Message = dict[str, Any]

_MARK = b"\x1e"


def encode(kind: str, **fields: Any) -> bytes:
    """Return the line of a message."""
    return _MARK + json.dumps({"kind": kind, **fields}).encode("ascii") + b"\n"


def decode(line: bytes) -> Message | None:
    """Return the message of a line, or None if it is something else."""
    if not line.startswith(_MARK):
        return None
    try:
        return json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None  # cut off in the middle, by an end


def as_text(data: bytes) -> str:
    """Return bytes as text that JSON can carry; no byte is lost."""
    return data.decode("utf-8", errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    """Undo `as_text`."""
    return text.encode("utf-8", errors="surrogateescape")


_CHUNK = 1 << 16


class ControllerLink:
    """Messages to and from the controller, and the news that it is gone.

    Args:
        on_stop: Called in a thread of its own with a message "stop"; called at most once with each.
        on_loss: Called in a thread of its own when the connection ends or nothing comes for `SILENCE_S`.
    """

    def __init__(self, *, on_stop: Callable[[Message], None], on_loss: Callable[[], None]) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._on_stop, self._on_loss = on_stop, on_loss
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        for loop in (self._listen, self._beat):
            threading.Thread(target=loop, daemon=True, name=f"controller-link{loop.__name__}").start()

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; if the controller is gone, the listening thread deals with that."""
        data = encode(kind, **fields)
        with self._send_lock:
            while data:
                try:
                    data = data[os.write(self._out, data) :]
                except OSError:
                    return

    def expect(self, *kinds: str) -> Message:
        """Wait for the next message, which is one of `kinds`."""
        message = self._inbox.get()
        assert message["kind"] in kinds, f"{message['kind']} came instead of {kinds}"
        return message

    def _listen(self) -> None:
        """Read, and never write: a write blocks when the link is dead."""
        rest, heard = b"", time.monotonic()
        while time.monotonic() - heard < SILENCE_S:
            if not select.select([self._in], [], [], 1.0)[0]:
                continue
            chunk = os.read(self._in, _CHUNK)
            if not chunk:
                break
            heard = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for message in filter(None, map(decode, lines)):
                if message["kind"] == "stop":
                    threading.Thread(target=self._on_stop, args=(message,), daemon=True).start()
                elif message["kind"] != "beat":
                    self._inbox.put(message)
        self._on_loss()  # without a word: stdout and stderr led to the controller, too

    def _beat(self) -> None:
        while True:
            self.send("beat")
            time.sleep(BEAT_S)
