"""The gate: what every request goes through, whatever its route: its name, the key, its body, its end.

[Note: a client that goes away]
The server tells an application only when it is asked, by `receive`, and an answer that is waited for asks
nothing. So the gate reads the whole body first, hands it on, and then waits for the client's leaving beside
the application: if that comes first, the application is cancelled where it stands, and what it has asked the
engine for is aborted. That is one place for streams and for whole answers, running and queued.

[Note: what a body costs]
JSON is parsed and checked with the interpreter's lock held, so that a thread of its own would be no relief to
others. What costs are lists and objects, not bytes: 10 MiB as one text take 12 ms, as numbers 0.4 s, as lists
of one number 3.6 s. So bodies are bounded (`max_body_bytes`), and one with so many brackets that it can be
no request is refused before it is parsed: prompts of a call are few, and a text with so many brackets has
more tokens than the window.
"""

import asyncio
import traceback

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colossalai.logging import get_dist_logger
from colossalai.serving._auth import check_key, without_key
from colossalai.serving._errors import ApiError
from colossalai.serving._streams import Front
from colossalai.serving._visit import Outcome, Visit

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Are asked every few seconds by machines: their lines are for debugging."""

_MOST_DISCARDED = 1 << 28  # bytes of a body that is too large; what is larger ends with a reset
_MOST_PARTS = 1 << 16
_PARTS_PER_TOKEN = 16  # a token of many brackets


class ClientLeft(Exception):
    """The client has closed the connection before its answer was complete."""


class Gate:
    """An ASGI middleware around all routes.

    Args:
        app: The routes.
        front: The engine, the options and the counts.
    """

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front
        self._log = get_dist_logger("colossalai.serving")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever happens, it ends with one outcome and one line in the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = Visit(scope)
        if visit.method == "HEAD":  # the server sends the headers of a GET, and leaves out the body
            scope = {**scope, "method": "GET"}
        if visit.is_generating:
            self._front.metrics.received()
        outcome: Outcome = "failed"
        try:
            await self._answer(visit, scope, receive, _named(visit, send))
            outcome = visit.end()
        except (ClientLeft, asyncio.CancelledError) as error:
            outcome = "aborted"
            visit.error = "the client has left" if isinstance(error, ClientLeft) else "the server has ended"
            if not isinstance(error, ClientLeft):
                raise
        finally:
            try:
                visit.on_end.close()  # first of all: the engine works for nobody
            finally:
                self._note_the_end(visit, outcome)

    def _note_the_end(self, visit: Visit, outcome: Outcome) -> None:
        self._front.leave(visit)
        if visit.is_generating:
            self._front.metrics.ended(visit, outcome)
        line = without_key(self._front.options, visit.line(outcome))
        (self._log.debug if visit.path in _QUIET_PATHS else self._log.info)(line)

    async def _answer(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._admit(visit, scope, receive)
            await self._run_while_heard(visit, scope, body, receive, send)
        except ApiError as error:
            await error.response(scope, receive, send)
        except ClientLeft:
            raise
        except Exception as error:
            visit.outcome, visit.error = "failed", f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            self._log.error(without_key(self._front.options, f"{visit.request_id} failed\n{text}"))
            if visit.status is None:
                ours = ApiError(500, f"the server failed; its log has the reason under {visit.request_id}")
                await ours.response(scope, receive, send)
            else:
                raise  # the answer has begun: only an end of the connection says that it is not whole

    async def _admit(self, visit: Visit, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request that may go on.

        Raises:
            ApiError: The key is missing or wrong, the server ends, or the body is too large.
            ClientLeft: The client has left before the end of its body.
        """
        headers, limit = Headers(scope=scope), self._front.options.max_body_bytes
        try:
            check_key(self._front.options, visit.path, headers.get("authorization", "").encode("latin-1"))
            if visit.is_generating:
                self._front.enter(visit)
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > limit:
                raise _too_large(limit)
        except ApiError:
            await _discard_body(scope, receive)
            raise
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            size += len(message.get("body", b""))
            if size > limit:
                if message.get("more_body", False):
                    await _discard_body(scope, receive)
                raise _too_large(limit)
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(chunks)
                self._check_parts(body)
                return body

    # See [Note: what a body costs].
    def _check_parts(self, body: bytes) -> None:
        num_parts = body.count(b"[") + body.count(b"{")
        most = _MOST_PARTS + _PARTS_PER_TOKEN * self._front.info.max_length
        if num_parts > most:
            raise ApiError(
                400,
                f"the body has {num_parts} opening brackets; this server takes at most {most}, which no "
                "request that it can answer has",
                code="too_many_parts",
            )

    # See [Note: a client that goes away].
    async def _run_while_heard(
        self, visit: Visit, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        to_read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if not to_read:
                await asyncio.Event().wait()  # whoever asks for more hears nothing: the gate listens
            return to_read.pop()

        if not visit.is_generating:
            await self._app(scope, replay, send)
            return
        answering = asyncio.ensure_future(self._app(scope, replay, send))
        leaving = asyncio.ensure_future(_wait_for_leaving(visit, receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            has_left = not answering.done()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
        if not has_left:
            answering.result()
        elif answering.cancelled() or answering.exception() is None:
            raise ClientLeft
        else:  # what went wrong while it was cancelled is told nobody but the log
            raise ClientLeft from answering.exception()


async def _discard_body(scope: Scope, receive: Receive) -> None:
    """Read what a refused client still sends, where the connection is closed after the answer.

    Bytes that nobody reads reset a connection that is closed, and the client loses the answer with it. On a
    connection that is kept, uvicorn reads them after the answer. A client that asks first, by `Expect`, sends
    nothing that it is not told to.

    Raises:
        ClientLeft: The client has left before the end of its body.
    """
    headers = Headers(scope=scope)
    is_closed = scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()
    size = 0
    while is_closed and "expect" not in headers and size < _MOST_DISCARDED:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if not message.get("more_body", False):
            return
        size += len(message.get("body", b""))


async def _wait_for_leaving(visit: Visit, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    visit.has_left = True


def _named(visit: Visit, send: Send) -> Send:
    """Let the answer say the name of its request, and the visit know its status.

    To a client that has left the server sends without a word, so a stream that was held up by a slow reader
    would seem to have been read to its end.
    """

    async def named(message: Message) -> None:
        if visit.has_left:
            raise ClientLeft
        if message["type"] == "http.response.start":
            visit.status = message["status"]
            name = (b"x-request-id", visit.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        await send(message)
        if message.get("more_body", False):
            await asyncio.sleep(0)  # whoever waits for the client's leaving has heard of it after this

    return named


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, which this server takes at most")
