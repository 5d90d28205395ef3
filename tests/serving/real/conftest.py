"""The real engine behind the server: in a process of its own, or in this one, where its blocks are seen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from colossalai.inference import (
    LLM,
    EngineOptions,
    ModelInfo,
    ThreadedEngine,
    engine_of_ranks,
    load_tokenizer,
)
from colossalai.serving import Server, ServerOptions
from tests.serving.conftest import wait_until
from tests.serving.fake import LIMIT_S, totals
from tests.serving.served_folder import ServedFolder, save_tiny, serve_folder
from tests.tiers import further

KEY = "swordfish-on-a-stick-82"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("real") / "tiny")


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    """What the server's answers are compared with."""
    return LLM(str(folder), kv_memory=2**22)


@pytest.fixture(scope="session")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedFolder]:
    """`colossalai serve` with a key, for all tests of a session that only ask."""
    place = tmp_path_factory.mktemp("served")
    (place / "key.txt").write_text(KEY)
    words = ("--port", "0", "--kv-memory", "32MiB", "--api-key-file", str(place / "key.txt"))
    command = serve_folder(place / "run", str(folder), *words, key=KEY)
    try:
        yield command.wait_until_ready()
    finally:
        command.command.end()


@dataclass
class Reached:
    """A server that asks for `KEY`, and what it has logged so far."""

    port: int
    log: Callable[[], str]


@pytest.fixture(params=["in this process", further("colossalai serve")])
def reached(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Reached:
    """The model behind a server."""
    if request.param == "colossalai serve":
        served: ServedFolder = request.getfixturevalue("served")
        return Reached(served.port, lambda: served.log)
    site: RealSite = request.getfixturevalue("site")(options={"api_key": KEY})
    return Reached(site.server.port, lambda: capfd.readouterr().err)


@dataclass
class RealSite:
    """A served engine in this process, and a client of it."""

    engine: Any
    service: ThreadedEngine
    server: Server
    client: httpx.Client

    def outcomes(self) -> dict[str, float]:
        """Return the counters once they add up."""
        found: dict[str, float] = {}

        def add_up() -> bool:
            found.update(totals(self.client.get("/metrics").text))
            return found["received"] == sum(found[name] for name in found if name != "received")

        wait_until(add_up)
        return found

    def is_empty(self) -> bool:
        """Return whether the engine works for nobody and holds nothing for anybody."""
        scheduler = self.engine.scheduler
        return not (
            self.engine.has_work
            or scheduler.running
            or scheduler.waiting
            or scheduler.pool.num_used
            or self.service._num_waiting
        )


@pytest.fixture
def site(folder: Path) -> Iterator[Callable[..., RealSite]]:
    """Return a function that serves the model; keywords of `EngineOptions`, and `options` for the server."""
    with ExitStack() as ends:

        def begin(*, options: dict[str, Any] | None = None, **engine: Any) -> RealSite:
            settings = EngineOptions(**{"kv_memory": 2**22, **engine})
            made = engine_of_ranks(
                str(folder), settings, mesh=None, tokenizer=load_tokenizer(str(folder), None)
            )
            assert made is not None
            limits = made.limits
            info = ModelInfo(
                name="tiny", max_length=limits.max_length, vocab_size=limits.vocab_size, created=1_700_000_000
            )
            service = ThreadedEngine(made, info)
            thread = threading.Thread(target=service.run, daemon=True)
            thread.start()
            ends.callback(thread.join, LIMIT_S)
            ends.callback(service.stop)
            server = Server(service, ServerOptions(**{"port": 0, **(options or {})}))
            server.start()
            ends.callback(server.stop, 0.0)
            client = httpx.Client(base_url=server.url, timeout=LIMIT_S, verify=False, trust_env=False)
            ends.callback(client.close)
            return RealSite(made, service, server, client)

        yield begin
