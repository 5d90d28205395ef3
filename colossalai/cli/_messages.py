"""The lines in which `colossalai run` and its node agents talk, over the two pipes of an ssh connection.

A message is one line of JSON behind a mark that no shell prints: what a login script writes in between is
told apart. Both sides send a beat every `BEAT_S`, and whoever has heard nothing for `SILENCE_S` knows that
the other side is gone: an open connection alone says nothing when a link is dead.
"""

import json
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
