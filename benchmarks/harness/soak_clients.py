"""Clients of a soak: one process with many clients, each with a connection, and one output line per request.

    python soak_clients.py '{"port": 8020, "requests": 100, "clients": 16, "seed": 0, "name": "0"}'

The seed determines each request of a client: its route, whether it streams, its fault if any, and the moment
of disconnection. The client implements HTTP/1.1, so that it can disconnect at any byte. Each request has
exactly one end: `answered`, `refused` (4xx and 503), `failed` (500), `left` (by this client), `lost`
(anything else, which must not occur).
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LIMIT_S = 300.0
COMMON = "the quick brown fox jumps over the lazy dog, and "
WORDS = ["the", "dog", "fox", "jumps", "quick", "brown", "and", "over", "lazy"]


class StaleConnection(Exception):
    """The server closed an idle connection before it had read anything of a request."""


@dataclass
class Connection:
    """A persistent connection, as far as the server keeps it open."""

    port: int
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    is_used: bool = False

    async def open(self) -> None:
        """Connect, unless the last connection is still open."""
        if self.writer is None or self.writer.is_closing():
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.is_used = False

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self.writer is not None:
            self.writer.close()
            with suppress(OSError):
                await self.writer.wait_closed()
        self.reader = self.writer = None

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        assert self.writer is not None
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Return status and headers of the next answer."""
        assert self.reader is not None
        try:
            text = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if self.is_used and not getattr(error, "partial", b""):
                raise StaleConnection from error
            raise
        first, *lines = text.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers

    async def body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive."""
        assert self.reader is not None
        if "content-length" in headers:
            yield await self.reader.readexactly(int(headers["content-length"]))
            return
        if "transfer-encoding" not in headers:
            yield await self.reader.read()
            return
        while size := int(await self.reader.readline(), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)


@dataclass
class Ask:
    """A request: its bytes, the expected answer, and the moment of disconnection."""

    kind: str
    path: str
    body: bytes
    content_type: str = "application/json"
    is_whole: Callable[[bytes], bool] = lambda _: True
    status: int = 200
    missing: int = 0  # bytes of the body that are never sent
    leaves_after_s: float | None = None
    leaves_after_parts: int | None = None
    raw: bytes | None = field(default=None, repr=False)

    @property
    def data(self) -> bytes:
        """Bytes of the request."""
        if self.raw is not None:
            return self.raw
        head = f"POST {self.path} HTTP/1.1\r\nhost: soak\r\ncontent-type: {self.content_type}\r\n"
        head += f"content-length: {len(self.body)}\r\n\r\n"
        return head.encode() + self.body[: len(self.body) - self.missing]


def _choices_are_whole(count: int) -> Callable[[bytes], bool]:
    def check(body: bytes) -> bool:
        choices = json.loads(body)["choices"]
        return len(choices) == count and all(choice["finish_reason"] for choice in choices)

    return check


def _stream_is_whole(count: int) -> Callable[[bytes], bool]:
    def check(body: bytes) -> bool:
        events = body.decode().strip().split("\n\n")
        if events[-1] != "data: [DONE]":
            return False
        found = [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1]]
        return sum(bool(choice["finish_reason"]) for choices in found for choice in choices) == count

    return check


def sound(random_: random.Random) -> Ask:
    """Return a valid request."""
    text = COMMON + " ".join(random_.choices(WORDS, k=random_.randint(1, 25)))
    drawn: dict[str, Any] = random_.choice(
        [
            {"temperature": 0},
            {"seed": random_.randint(0, 99)},
            {"top_p": 0.9, "top_k": 20},
            {"temperature": 0.5},
        ]
    )
    most = {"max_tokens": random_.randint(1, 40)}
    kind = random_.choice(["generation", "completion", "completion stream", "chat", "chat stream", "several"])
    if kind == "generation":
        drawn.pop("seed", None)
        body = json.dumps({"prompt": text, **drawn, **most}).encode()
        return Ask(kind, "/generation", body, is_whole=lambda found: "text" in json.loads(found))
    stream: dict[str, Any] = {"stream": True} if kind.endswith("stream") else {}
    if kind.startswith("chat"):
        messages = [{"role": "user", "content": text}]
        path, asked, count = "/v1/chat/completions", {"messages": messages, **drawn, **most, **stream}, 1
    else:
        asked, count, path = {"prompt": text, **drawn, **most, **stream}, 1, "/v1/completions"
        if kind == "several":
            both = random_.choice([[text, "a fox"], [[5, 6, 7] * random_.randint(1, 9), [8, 9]]])
            asked |= {"prompt": both, "n": 2, "logprobs": 1}
            count = 4
            stream = random_.choice([{}, {"stream": True}])
            asked |= stream
        elif random_.random() < 0.1:
            asked |= {"response_format": {"type": "regex", "regex": "(the|dog|fox)( [a-z]{2,5}){1,3}"}}
    check = _stream_is_whole(count) if stream else _choices_are_whole(count)
    return Ask(kind, path, json.dumps(asked).encode(), is_whole=check)


_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_WRONG: list[tuple[str, str, bytes, int]] = [
    ("not json", _COMPLETIONS, b'{"prompt": "a"', 400),
    ("not utf-8", _CHAT, b'{"messages": "\xff\xfe"}', 400),
    ("deep", _COMPLETIONS, b'{"prompt":' + b"[" * 5000, 400),
    ("many parts", _COMPLETIONS, b'{"prompt":[' + b"[1]," * 90_000 + b"[1]]}", 400),
    ("unknown field", _COMPLETIONS, b'{"prompt": "a", "max_token": 3}', 400),
    ("tools", _CHAT, b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 400),
    ("no prompt", _COMPLETIONS, b"{}", 400),
    ("empty prompt", "/generation", b'{"prompt": ""}', 400),
    ("n is 0", _COMPLETIONS, b'{"prompt": "a", "n": 0}', 400),
    ("too many answers", _COMPLETIONS, b'{"prompt": "a", "n": 100}', 400),
    ("NaN", _COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    ("no model", _COMPLETIONS, b'{"prompt": "a", "model": "nobody"}', 404),
    ("no token", _COMPLETIONS, b'{"prompt": [999999]}', 400),
    ("too long", _COMPLETIONS, json.dumps({"prompt": "word " * 5000}).encode(), 400),
    ("no expression", _COMPLETIONS, b'{"prompt":"a","response_format":{"type":"regex","regex":"(("}}', 400),
    ("half a character", _COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
    ("too large", "/generation", b'{"prompt": "' + b"a" * (4 * 2**20) + b'"}', 413),
]


def wrong(random_: random.Random) -> Ask:
    """Return a request that the server refuses: a wrong body, a wrong type, or not HTTP."""
    if random_.random() < 0.05:
        return Ask("no http", "", b"", status=400, raw=b"GIMME text\r\n\r\n")
    if random_.random() < 0.05:
        return Ask("no type", _COMPLETIONS, b'{"prompt": "a"}', content_type="text/plain", status=400)
    kind, path, body, status = random_.choice(_WRONG)
    return Ask(kind, path, body, status=status)


def leaving(random_: random.Random) -> Ask:
    """Return a valid request whose client disconnects: in its body, while waiting, or in its stream."""
    ask = sound(random_)
    asked = json.loads(ask.body)
    ask.body = json.dumps({**asked, "max_tokens": 200}).encode()
    way = random_.choice(["body", "wait", "stream"])
    if way == "body":
        ask.missing, ask.leaves_after_s = random_.randint(1, 20), random_.uniform(0, 0.05)
    elif way == "wait" or not asked.get("stream"):
        ask.leaves_after_s = random_.choice([0.0, random_.uniform(0, 0.1), random_.uniform(0, 1)])
    else:
        ask.leaves_after_parts = random_.randint(0, 5)
    ask.kind = f"left {way}"
    return ask


async def run_one(connection: Connection, ask: Ask) -> dict[str, Any]:
    """Send a request and return its end."""
    began = time.monotonic()
    end: dict[str, Any] = {"kind": ask.kind, "status": None, "first_s": None}
    is_sent = False
    try:
        async with asyncio.timeout(LIMIT_S):
            await connection.open()
            with suppress(ConnectionError):  # the server does not have to read a refused body to its end
                await connection.send(ask.data)
            is_sent = True
            try:
                async with asyncio.timeout(ask.leaves_after_s):
                    end |= await _read(connection, ask, began)
            except TimeoutError:
                if ask.leaves_after_s is None:
                    raise
                end["end"] = "left"
    except StaleConnection:
        raise
    except (OSError, EOFError, TimeoutError, ValueError, KeyError) as error:
        end |= {"end": "lost", "error": f"{type(error).__name__}: {error}", "sent": is_sent}
    if end["end"] in ("left", "lost") or end.get("closes"):
        await connection.close()
    connection.is_used = True
    return {**end, "seconds": time.monotonic() - began}


async def _read(connection: Connection, ask: Ask, began: float) -> dict[str, Any]:
    status, headers = await connection.head()
    first_s, parts = time.monotonic() - began, []
    async for part in connection.body(headers):
        parts.append(part)
        if ask.leaves_after_parts is not None and len(parts) > ask.leaves_after_parts:
            return {"end": "left", "status": status, "first_s": first_s}
    body = b"".join(parts)
    found: dict[str, Any] = {"status": status, "first_s": first_s}
    found["closes"] = headers.get("connection", "").lower() == "close"
    if status == 200:
        is_fine = ask.status == 200 and ask.is_whole(body)
    else:
        is_fine = status in (ask.status, 406, 429, 503)
        if ask.raw is None:
            is_fine = is_fine and bool(json.loads(body)["error"]["message"])
    if not is_fine:
        return {
            **found,
            "end": "failed" if status == 500 else "lost",
            "error": body[-300:].decode(errors="replace"),
        }
    return {**found, "end": "answered" if status == 200 else "refused"}


async def run_clients(told: dict[str, Any]) -> None:
    """Run all requests of this process; print one line with the end of each request."""
    random_ = random.Random(told["seed"])
    left = iter(range(told["requests"]))

    async def client() -> None:
        connection = Connection(told["port"])
        for _ in left:
            draw = random_.random()
            ask = (leaving if draw < 0.1 else wrong if draw < 0.2 else sound)(random_)
            end: dict[str, Any] | None = None
            while end is None:
                try:
                    end = await run_one(connection, ask)
                except StaleConnection:  # the server has not read the request: send it again
                    await connection.close()
            print(json.dumps(end), flush=True)
            if end["status"] in (406, 429, 503) and end["end"] == "refused":
                await asyncio.sleep(random_.uniform(0.2, 1.0))  # back off after a refusal
            elif random_.random() < 0.05:
                await asyncio.sleep(random_.uniform(0, 0.2))
        await connection.close()

    await asyncio.gather(*(client() for _ in range(told["clients"])))


if __name__ == "__main__":
    asyncio.run(run_clients(json.loads(sys.argv[1])))
