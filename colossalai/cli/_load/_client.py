"""Client of OpenAI's completions API: a request, its stream, and the arrival times of its parts.

It uses the standard library only. A connection is kept alive between requests.
"""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

_JSON = "application/json"
# Token ids that every vocabulary of at least 256 bytes has, without special tokens.
_FIRST_ID, _LAST_ID = 20, 199
_WORDS = ("and", "for", "the", "new", "two", "one", "day", "way", "man", "old", "see", "how", "out", "who")


@dataclass(frozen=True)
class Target:
    """A server, and the form of its requests.

    Attributes:
        url: Address of the server, without `/v1`.
        model: Model name in requests.
        api_key: API key; None: no key.
        timeout_s: Seconds without a byte after which a request has failed.
        takes_ids: Whether prompts are token ids; otherwise they are texts.
        extras: Additional fields of requests beyond OpenAI's.
        tells_usage: Whether the server supports `include_usage`, the token counts at the end of a stream.
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
    """A request of a load.

    Attributes:
        number: Index of the request in the load.
        draws: Random numbers in 0..1, one per token of the prompt.
        max_tokens: Number of tokens to generate.
        due_s: Time of the request, in seconds from the beginning of the load; None: at once.
    """

    number: int
    draws: tuple[float, ...]
    max_tokens: int
    due_s: float | None = None

    def body(self, target: Target) -> dict[str, Any]:
        """Return the body of the request."""
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
    """Outcome of a request; times are in seconds from the beginning of the load.

    Attributes:
        number: Number of the question.
        began_s: Time at which it was due.
        first_s: Arrival time of its first token; None without tokens.
        last_s: Arrival time of its last token.
        ended_s: Time of its end.
        prompt_tokens: Number of prompt tokens as counted by the server; None if it sends no count.
        output_tokens: Number of output tokens as counted by the server, else the number of stream parts.
        error: Kind of failure; None: success.
        reason: Error message.
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
        kind: Kind of failure, by which failures are counted.
        reason: Error message.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


class Client:
    """A connection to a server, which is reopened after a loss.

    Args:
        target: The server.
        origin_s: Begin of the load by `time.perf_counter`.
    """

    def __init__(self, target: Target, origin_s: float = 0.0) -> None:
        self.target, self.origin_s = target, origin_s
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: Question) -> RequestOutcome:
        """Make a request and return its outcome."""
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
        answer.close()  # a response with Content-Length does not close itself after readline

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
            return self._send(method, path, body)  # the server had closed the kept connection


@dataclass
class _Seen:
    """State of a stream: arrival times, parts and usage so far."""

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
    """Find the form of requests that a server accepts, by test requests.

    Args:
        target: The server; an empty `model` is read from the server.

    Raises:
        ValueError: `target` cannot be reached, has no model, or accepts no request.
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
            if tried.error not in ("400", "422"):  # other errors do not depend on the fields
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
    """Return a failure with a kind that is the same for similar errors."""
    if isinstance(error, LoadRequestFailed):
        return error
    kinds = {TimeoutError: "timeout", ConnectionRefusedError: "refused", ConnectionError: "connection lost"}
    found = (kind for known, kind in kinds.items() if isinstance(error, known))
    return LoadRequestFailed(next(found, type(error).__name__), str(error) or type(error).__name__)


def _said(content: bytes) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of the content."""
    try:
        found = json.loads(content)
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return content[:200].decode(errors="replace")
