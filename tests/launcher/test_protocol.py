"""What head and agents say to one another, and the ranks' lines on their way."""

import pytest

from colossalai.launcher._protocol import as_bytes, as_text, decode, encode
from colossalai.launcher._worker_pipes import LineBuffer

pytestmark = pytest.mark.unit


def test_a_message_is_one_line_and_keeps_every_byte():
    raw = bytes(range(256))
    line = encode("line", rank=3, text=as_text(raw))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    message = decode(line)
    assert message is not None
    assert (message["kind"], message["rank"], as_bytes(message["text"])) == ("line", 3, raw)


@pytest.mark.parametrize("line", [b"Welcome to node1\n", b'{"kind": "ended"}\n', encode("ended")[:-4], b""])
def test_what_a_login_script_prints_is_no_message(line: bytes):
    assert decode(line) is None


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"10%\r20%", b"\r", b"\nend\n"], [b"10%", b"20%", b"end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"no end"], [b"no end"]),
        ([b"x" * 70_000 + b"\n"], [b"x" * 70_000]),
    ],
)
def test_lines_are_put_together(pieces: list[bytes], lines: list[bytes]):
    buffer = LineBuffer()
    found = [line for piece in pieces for line in buffer.feed(piece)]
    assert found + buffer.flush() == lines


def test_a_line_without_end_does_not_fill_the_memory():
    buffer = LineBuffer()
    found = [line for _ in range(20) for line in buffer.feed(b"x" * 10_000)]
    assert sum(map(len, found + buffer.flush())) == 200_000
    assert all(len(line) == 65_536 for line in found)
    assert len(found) == 3
