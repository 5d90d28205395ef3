"""Gate: the middleware of every request: its id, API key, body, cancellation and log line.

[Note: disconnected clients]
ASGI reports a disconnect only to a pending `receive`, and an application that computes an answer does not
call it. So the gate reads the whole body first, passes it on, and then awaits both the application and the
disconnect. If the disconnect is first, it cancels the application, and the engine's requests are aborted. One
place handles streams and whole answers, running and queued requests.

[Note: cost of a body]
JSON is parsed and validated under the interpreter's lock, so a thread would not relieve other requests. Lists
and objects are expensive, not bytes: 10 MiB take 12 ms as one string, 0.4 s as numbers, 3.6 s as lists of one
number. So the size of a body is bounded (`max_body_bytes`), and a body with more brackets than any valid
request is rejected before it is parsed: a call has few prompts, and a text with that many brackets has more
tokens than the window.
"""

import asyncio
import traceback

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from colossalai.logging import get_dist_logger
from colossalai.serving._auth import check_key, without_key
from colossalai.serving._errors import ApiError
from colossalai.serving._request_record import Outcome, RequestRecord
from colossalai.serving._streams import Front

_QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that probes request every few seconds: logged at level debug."""

_MOST_DISCARDED = 1 << 28  # bytes read of a body that is too large; a larger one ends with a reset
_MOST_PARTS = 1 << 16
_PARTS_PER_TOKEN = 16  # brackets in one token, at most


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
        """Serve one request; it always ends with one outcome and one line in the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(scope)
        if record.method == "HEAD":  # the server sends the headers of a GET and drops the body
            scope = {**scope, "method": "GET"}
        if record.is_generating:
            self._front.metrics.received()
        outcome: Outcome = "failed"
        try:
            await self._answer(record, scope, receive, _with_request_id(record, send))
            outcome = record.end()
        except (ClientLeft, asyncio.CancelledError) as error:
            outcome = "aborted"
            record.error = "the client has left" if isinstance(error, ClientLeft) else "the server has ended"
            if not isinstance(error, ClientLeft):
                raise
        finally:
            try:
                record.on_end.close()  # first: frees the engine from requests without a client
            finally:
                self._record_end(record, outcome)

    def _record_end(self, record: RequestRecord, outcome: Outcome) -> None:
        self._front.leave(record)
        if record.is_generating:
            self._front.metrics.ended(record, outcome)
        line = without_key(self._front.options, record.line(outcome))
        (self._log.debug if record.path in _QUIET_PATHS else self._log.info)(line)

    async def _answer(self, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._admit(record, scope, receive)
            await self._run_until_disconnect(record, scope, body, receive, send)
        except ApiError as error:
            await error.response(scope, receive, send)
        except ClientLeft:
            raise
        except Exception as error:
            record.outcome, record.error = "failed", f"{type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            self._log.error(without_key(self._front.options, f"{record.request_id} failed\n{text}"))
            if record.status is None:
                ours = ApiError(500, f"the server failed; its log has the reason under {record.request_id}")
                await ours.response(scope, receive, send)
            else:
                raise  # the response has begun: only a closed connection marks it as incomplete

    async def _admit(self, record: RequestRecord, scope: Scope, receive: Receive) -> bytes:
        """Authorize a request and return its body.

        Raises:
            ApiError: The key is missing or wrong, the server ends, or the body is too large.
            ClientLeft: The client has left before the end of its body.
        """
        headers, limit = Headers(scope=scope), self._front.options.max_body_bytes
        try:
            check_key(self._front.options, record.path, headers.get("authorization", "").encode("latin-1"))
            if record.is_generating:
                self._front.enter(record)
            length = headers.get("content-length", "0")
            if length.isdecimal() and int(length) > limit:
                raise _body_size_error(limit)
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
                raise _body_size_error(limit)
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                body = b"".join(chunks)
                self._check_parts(body)
                return body

    # See [Note: cost of a body].
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

    # See [Note: disconnected clients].
    async def _run_until_disconnect(
        self, record: RequestRecord, scope: Scope, body: bytes, receive: Receive, send: Send
    ) -> None:
        to_read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if not to_read:
                await asyncio.Event().wait()  # never set: the gate itself receives the disconnect
            return to_read.pop()

        if not record.is_generating:
            await self._app(scope, replay, send)
            return
        answering = asyncio.ensure_future(self._app(scope, replay, send))
        leaving = asyncio.ensure_future(_wait_for_disconnect(record, receive))
        try:
            # The first of the two to complete; the other one is cancelled and awaited below.
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
        else:  # an error during the cancellation goes to the log only
            raise ClientLeft from answering.exception()


async def _discard_body(scope: Scope, receive: Receive) -> None:
    """Drain the body of a rejected request if the connection is closed after the response.

    Closing a connection with unread bytes resets it, and the client loses the response. On a connection that
    is kept alive, uvicorn reads these bytes after the response. A client that sends `Expect` waits for
    permission before it sends its body.

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


async def _wait_for_disconnect(record: RequestRecord, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    record.has_left = True


def _with_request_id(record: RequestRecord, send: Send) -> Send:
    """Add the request id to the response headers, and add the status to the record.

    To a disconnected client the server discards data silently, so a stream that a slow reader held up would
    seem to be complete.
    """

    async def named(message: Message) -> None:
        if record.has_left:
            raise ClientLeft
        if message["type"] == "http.response.start":
            record.status = message["status"]
            name = (b"x-request-id", record.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        await send(message)
        if message.get("more_body", False):
            await asyncio.sleep(0)  # lets the task that awaits the disconnect run

    return named


def _body_size_error(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes, which this server takes at most")
