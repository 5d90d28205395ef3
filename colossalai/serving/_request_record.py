"""Request record: one HTTP request, from its first byte to its log line."""

import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

from starlette.requests import HTTPConnection
from starlette.types import Scope

Outcome = Literal["finished", "aborted", "rejected", "failed"]
"""Outcome of a generating request: finished with its answer; aborted by its client or the shutdown; rejected;
or failed after it was accepted."""

GENERATING: Mapping[str, str] = {
    "/generate": "gen",
    "/generate/stream": "gen",
    "/generation": "gen",
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
}
"""Routes that generate, and the prefixes of their request ids."""

MOST_LOGGED = 2000
"""Maximum number of characters of a logged prompt."""

_KEY = "colossalai.request_record"  # in the scope: ASGI reserves names with a dot for applications


class RequestRecord:
    """Record of a request. The routes fill it, and the gate reads it at the end.

    Args:
        scope: ASGI scope of the request.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.is_generating = self.path in GENERATING and self.method == "POST"
        self.request_id = f"{GENERATING[self.path] if self.is_generating else 'req'}-{uuid.uuid4().hex}"
        self.began_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at = self.began_at
        self.model: str | None = None  # served names only: a label of metrics
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.most_tokens = 0  # of the longest answer; the answers of a call are generated concurrently
        self.status: int | None = None
        self.outcome: Outcome | None = None  # None: derived from the status
        self.error: str | None = None
        self.has_left = False  # whether the client has disconnected, before or after its answer
        self.prompts: list[object] = []  # for the log, with `log_prompts`
        self.on_end = ExitStack()  # closed by the gate at the end of the request
        scope[_KEY] = self

    @staticmethod
    def of(request: HTTPConnection) -> "RequestRecord":
        """Return the record of a request."""
        record = request.scope[_KEY]
        assert isinstance(record, RequestRecord)
        return record

    @property
    def age_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.began_at

    def end(self) -> Outcome:
        """Return the outcome of the request."""
        if self.outcome is not None:
            return self.outcome
        if self.status is None:
            return "failed"
        if self.status < 400:
            return "finished"
        return "failed" if self.status == 500 else "rejected"

    def line(self, outcome: Outcome) -> str:
        """Return the log line: id, route, status, outcome, tokens, seconds."""
        parts = [self.request_id, self.method, ascii(self.path)[1:-1], str(self.status or "-"), outcome]
        if self.is_generating:
            first = "-" if self.first_token_at is None else f"{self.first_token_at - self.began_at:.3f}s"
            parts += [
                f"model={self.model or '-'}",
                f"prompt={self.prompt_tokens}",
                f"cached={self.cached_tokens}",
                f"generated={self.generated_tokens}",
                f"first={first}",
            ]
        parts.append(f"total={self.age_s:.3f}s")
        if self.error is not None:
            parts.append(f"error={self.error!a}")
        parts += [f"asked={ascii(prompt)[:MOST_LOGGED]}" for prompt in self.prompts]
        return " ".join(parts)
