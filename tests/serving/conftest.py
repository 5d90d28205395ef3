"""Engines and servers of a test, all ended after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from colossalai.serving import Server, ServerOptions
from tests.serving.fake import LIMIT_S, FakeService, make_tokenizer, totals


@dataclass
class Site:
    """A served engine and a client of it."""

    service: FakeService
    server: Server
    client: httpx.Client

    @property
    def url(self) -> str:
        return self.server.url

    def outcomes(self) -> dict[str, float]:
        """Return the counters once they add up: a request is counted after its last byte."""
        found: dict[str, float] = {}

        def add_up() -> bool:
            found.update(totals(self.client.get("/metrics").text))
            return found["received"] == sum(found[name] for name in found if name != "received")

        wait_until(add_up)
        return found


def wait_until(what: Callable[[], bool]) -> None:
    """Ask again and again until it is so."""
    import time

    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def description() -> dict[str, Any]:
    """Return what a server without options has described, once there was one: making it is half a start."""
    return {}


@pytest.fixture
def start(tokenizer: Any, description: dict[str, Any]) -> Iterator[Callable[..., Site]]:
    """Return a function that serves an engine; keywords of `FakeService`, and `options` for the server."""
    with ExitStack() as ends:

        def begin(*, options: dict[str, Any] | None = None, **engine: Any) -> Site:
            service = FakeService(**{"tokenizer": tokenizer, **engine})
            ends.callback(service.stop)
            given = {"port": 0, **(options or {})}
            server = Server(service, ServerOptions(**given))
            if description and not options:
                server._app.openapi_schema = description
            server.start()
            ends.callback(server.stop, 0.0)
            if not options:
                description.update(server._app.openapi())
            key, is_https = given.get("api_key"), "ssl_certfile" in given
            client = httpx.Client(
                base_url=server.url,
                timeout=LIMIT_S,
                verify=is_https,  # reading all certificates takes longer than a request
                headers={"authorization": f"Bearer {key}"} if key else {},
                trust_env=False,
            )
            ends.callback(client.close)
            ends.callback(service.release)
            return Site(service, server, client)

        yield begin


@pytest.fixture
def site(start: Callable[..., Site]) -> Site:
    return start()
