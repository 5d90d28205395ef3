"""One client of a server of OpenAI's completions: a request, its stream, and when each part of it came.

It needs the standard library alone. A connection is kept from request to request, as clients do.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

_JSON = "application/json"
# Ids that any vocabulary of bytes or more has, without those that begin or end texts.
_FIRST_ID, _LAST_ID = 20, 199
_WORDS = ("and", "for", "the", "new", "two", "one", "day", "way", "man", "old", "see", "how", "out", "who")


@dataclass(frozen=True)
class Target:
    """A server, and how it takes requests.

    Attributes:
        url: Its address, without `/v1`.
        model: The name that requests ask for.
        api_key: The key; None for none.
        timeout_s: Seconds without a byte after which a request has failed.
        takes_ids: Whether prompts may be token ids; else they are texts.
        extras: Fields of requests beyond OpenAI's that it takes.
        tells_usage: Whether a stream ends with numbers of tokens if asked to.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    takes_ids: bool = True
    extras: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    tells_usage: bool = True


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request that is to be made.

    Attributes:
        number: Its place in the load.
        draws: Numbers in 0..1, one for each token of the prompt.
        max_tokens: Tokens that are asked for.
        due_s: When it is to be sent, in seconds from the beginning; None for at once.
    """

    number: int
    draws: tuple[float, ...]
    max_tokens: int
    due_s: float | None = None

    def body(self, target: Target) -> dict[str, Any]:
        """Return what is sent."""
        ids = [_FIRST_ID + int(draw * (_LAST_ID - _FIRST_ID)) for draw in self.draws]
        text = " ".join(_WORDS[int(draw * len(_WORDS))] for draw in self.draws)
        usage = {"stream_options": {"include_usage": True}} if target.tells_usage else {}
        return {
            "model": target.model,
            "prompt": ids if target.takes_ids else text,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            **usage,
            **target.extras,
        }


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    """What became of a request; times are in seconds from the beginning of the load.

    Attributes:
        number: Of the question.
        began_s: When it was due.
        first_s: When its first token came; None where none did.
        last_s: When its last token came.
        ended_s: When its end was known.
        prompt_tokens: As the server counts them; None where it does not say.
        output_tokens: As the server counts them, else the parts of the stream.
        error: The kind of failure; None for none.
        reason: What was said of it.
    """

    number: int
    began_s: float
    ended_s: float
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None
    reason: str = ""


class LoadRequestFailed(Exception):
    """A request has failed.

    Args:
        kind: In a word, by which failures are counted.
        reason: What was said of it.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


class Client:
    """A connection to a server, opened anew where it was lost.

    Args:
        target: The server.
        origin_s: When the load began, by `time.perf_counter`.
    """

    def __init__(self, target: Target, origin_s: float = 0.0) -> None:
        self.target, self.origin_s = target, origin_s
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: Question) -> RequestOutcome:
        """Make a request, and return what became of it."""
        began = self._now() if question.due_s is None else question.due_s
        seen = _Seen()
        try:
            for data in self._events("/v1/completions", question.body(self.target)):
                seen.take(data, self._now())
            if not seen.is_done:
                raise LoadRequestFailed("cut stream", "the stream ended without [DONE]")
            if seen.first_s is None:
                raise LoadRequestFailed("no tokens", "the stream had no tokens")
        except (LoadRequestFailed, OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            failed = error if isinstance(error, LoadRequestFailed) else _failure_of(error)
            return RequestOutcome(
                number=question.number,
                began_s=began,
                ended_s=self._now(),
                output_tokens=seen.num_parts,
                error=failed.kind,
                reason=failed.reason,
            )
        return RequestOutcome(
            number=question.number,
            began_s=began,
            ended_s=self._now(),
            first_s=seen.first_s,
            last_s=seen.last_s,
            prompt_tokens=seen.usage.get("prompt_tokens"),
            output_tokens=seen.usage.get("completion_tokens", seen.num_parts),
        )

    def get(self, path: str) -> Any:
        """Return the JSON of a page.

        Raises:
            LoadRequestFailed: `path` is not answered with 200.
            OSError: The server cannot be reached.
        """
        answer = self._send("GET", path, None)
        content = answer.read()
        if answer.status != 200:
            raise LoadRequestFailed(str(answer.status), _said(content))
        return json.loads(content)

    def _now(self) -> float:
        return time.perf_counter() - self.origin_s

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the data of a stream of events."""
        answer = self._send("POST", path, json.dumps(body).encode())
        if answer.status != 200:
            raise LoadRequestFailed(str(answer.status), _said(answer.read()))
        while line := answer.readline():
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
        answer.close()  # one of a told length does not know by itself that it has been read

    def _send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        is_kept = self._connection is not None
        if self._connection is None:
            self._connection = _connection(self.target)
        key = self.target.api_key
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        if body is not None:
            headers["Content-Type"] = _JSON
        prefix = urlsplit(self.target.url).path.rstrip("/")
        try:
            self._connection.request(method, prefix + path, body=body, headers=headers)
            return self._connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            self.close()
            if not is_kept:
                raise
            return self._send(method, path, body)  # the server had closed a connection that was kept


@dataclass
class _Seen:
    """What a stream has said so far."""

    first_s: float | None = None
    last_s: float | None = None
    num_parts: int = 0
    is_done: bool = False
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, data: str, now_s: float) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise LoadRequestFailed("error in stream", _said(data.encode()))
        self.usage = event.get("usage") or self.usage
        choices = event.get("choices") or []
        if any(choice.get("text") or choice.get("token_ids") for choice in choices):
            self.num_parts += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        for choice in choices:
            if choice.get("finish_reason") in ("abort", "timeout"):
                raise LoadRequestFailed(choice["finish_reason"], "the server has ended the request")


def find_target(target: Target) -> Target:
    """Return a server as it takes requests, found out by asking it for a token.

    Args:
        target: The server; an empty `model` is asked for.

    Raises:
        ValueError: `target` cannot be reached, has no model, or takes no request.
    """
    client = Client(target)
    try:
        if not target.model:
            listed = client.get("/v1/models")["data"]
            target = replace(target, model=str(listed[0]["id"]))
        ways = [
            replace(target, takes_ids=takes_ids, extras=extras, tells_usage=tells_usage)
            for tells_usage in (True, False)
            for extras in (target.extras, {})
            for takes_ids in (True, False)
        ]
        for way in ways:
            client.target = way
            tried = client.ask(Question(number=0, draws=(0.1, 0.6, 0.3), max_tokens=2))
            if tried.error not in ("400", "422"):  # all else is no matter of fields
                break
    except (
        LoadRequestFailed,
        OSError,
        http.client.HTTPException,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"--serve {target.url}: {_failure_of(error)}") from error
    finally:
        client.close()
    if tried.error not in (None, "no tokens"):
        raise ValueError(f"--serve {target.url}: a first request failed with {tried.error}: {tried.reason}")
    return way


def _connection(target: Target) -> http.client.HTTPConnection:
    parts = urlsplit(target.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=target.timeout_s)


def _failure_of(error: Exception) -> LoadRequestFailed:
    """Return a failure under a kind that says the same of all its like."""
    if isinstance(error, LoadRequestFailed):
        return error
    kinds = {TimeoutError: "timeout", ConnectionRefusedError: "refused", ConnectionError: "connection lost"}
    found = (kind for known, kind in kinds.items() if isinstance(error, known))
    return LoadRequestFailed(next(found, type(error).__name__), str(error) or type(error).__name__)


def _said(content: bytes) -> str:
    """Return the message of an error in OpenAI's form, or what there is instead."""
    try:
        found = json.loads(content)
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return content[:200].decode(errors="replace")
