"""Visit: one HTTP request from its first byte to its line in the log, and what is known of it in between."""

import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Literal

from starlette.requests import HTTPConnection
from starlette.types import Scope

Outcome = Literal["finished", "aborted", "rejected", "failed"]
"""How a request that generates ended: with its answer; by its client, or with the server; not taken; by an
error after it had been taken."""

GENERATING: Mapping[str, str] = {
    "/generate": "gen",
    "/generate/stream": "gen",
    "/generation": "gen",
    "/v1/completions": "cmpl",
    "/v1/chat/completions": "chatcmpl",
}
"""Routes that ask the engine, with what the names of their requests begin with."""

MOST_LOGGED = 2000
"""Characters of a prompt in the log."""

_KEY = "colossalai.visit"  # of the scope: ASGI leaves names with a dot to applications


class Visit:
    """What is known of a request; the routes fill it, the gate reads it at the end.

    Args:
        scope: The request, in ASGI's form.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.is_generating = self.path in GENERATING and self.method == "POST"
        self.request_id = f"{GENERATING[self.path] if self.is_generating else 'req'}-{uuid.uuid4().hex}"
        self.began_at = time.monotonic()
        self.first_token_at: float | None = None
        self.last_token_at = self.began_at
        self.model: str | None = None  # only names that are served: a label of metrics
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.most_tokens = 0  # of the longest of the answers, which are made at the same time
        self.status: int | None = None
        self.outcome: Outcome | None = None  # where the status does not say it
        self.error: str | None = None
        self.has_left = False  # the client, before or after its answer
        self.prompts: list[object] = []  # for the log, where they are asked for
        self.on_end = ExitStack()  # is closed by the gate, however the request ends
        scope[_KEY] = self

    @staticmethod
    def of(request: HTTPConnection) -> "Visit":
        """Return the visit that a request belongs to."""
        visit = request.scope[_KEY]
        assert isinstance(visit, Visit)
        return visit

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began_at

    def end(self) -> Outcome:
        """Return how it ended."""
        if self.outcome is not None:
            return self.outcome
        if self.status is None:
            return "failed"
        if self.status < 400:
            return "finished"
        return "failed" if self.status == 500 else "rejected"

    def line(self, outcome: Outcome) -> str:
        """Return its line in the log: name, route, status, outcome, tokens, seconds."""
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
