"""Server: uvicorn in a thread of its own, from the open port to the drained end."""

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn

from colossalai.inference import Service
from colossalai.logging import get_dist_logger
from colossalai.serving._app import make_app
from colossalai.serving._options import ServerOptions
from colossalai.serving._streams import ABORT_S

_POLL_S = 0.02
_START_S = 60.0
_CLOSE_S = 5  # for open connections, after the drain


class Server:
    """HTTP server of an engine, in its own thread.

    Use it as a context manager, or call `start` and `stop`; `serve` calls both and waits for SIGTERM in
    between. A server starts once.

    Args:
        service: The engine. It outlives the server.
        options: Options of the server. Default: `ServerOptions()`.
    """

    def __init__(self, service: Service, options: ServerOptions | None = None) -> None:
        self._options = options or ServerOptions()
        self._app = make_app(service, self._options)
        self._stop_asked = threading.Event()
        self._hurry = threading.Event()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._app,
                log_config=None,  # the gate writes the log, one line for each request
                access_log=False,
                log_level="warning",
                server_header=False,
                lifespan="on",
                ws="none",
                timeout_keep_alive=self._options.keep_alive_s,
                timeout_graceful_shutdown=_CLOSE_S,
                ssl_keyfile=self._options.ssl_keyfile,
                ssl_certfile=self._options.ssl_certfile,
            )
        )

    @property
    def port(self) -> int:
        """Port of the listening socket; with `port=0` the port that the system has chosen.

        Raises:
            RuntimeError: The server has not been started.
        """
        if self._socket is None:
            raise RuntimeError("the server has no port before start()")
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """URL of the server."""
        scheme = "http" if self._options.ssl_certfile is None else "https"
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        return f"{scheme}://{host}:{self.port}"

    def start(self) -> None:
        """Open the port, and return once the server accepts requests.

        Raises:
            ValueError: `host` and `port` of the options cannot be bound, or a file for https cannot be read.
            RuntimeError: The server was started before, or did not begin to answer.
        """
        if self._thread is not None:
            raise RuntimeError("the server was started before; make another one")
        check_certificate(self._options)
        self._uvicorn.config.load()
        self._socket = _listen(self._options)
        self._thread = threading.Thread(target=self._run, name="colossalai-serving", daemon=True)
        self._thread.start()
        end = time.monotonic() + _START_S
        while not self._uvicorn.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                self._uvicorn.should_exit = True
                raise RuntimeError("the server did not begin to answer; see the log")
            time.sleep(_POLL_S)
        get_dist_logger("colossalai.serving").info(f"serving on {self.url}")

    def stop(self, drain_s: float | None = None) -> None:
        """Reject new requests, let running ones finish, abort the rest, and close the port.

        Args:
            drain_s: Seconds for running requests. Default: `drain_s` of the options.
        """
        if self._thread is None or self._socket is None:
            return
        seconds = self._options.drain_s if drain_s is None else drain_s
        if self._thread.is_alive() and self._loop is not None and not self._uvicorn.should_exit:
            front = self._app.front
            drained = asyncio.run_coroutine_threadsafe(front.drain(seconds, self._hurry.is_set), self._loop)
            drained.result(seconds + front.abort_s + ABORT_S)
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()

    def ask_to_stop(self) -> None:
        """Make `serve` drain and return; a second call ends the drain. Safe in a thread or signal handler."""
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_asked.set()

    def serve(self) -> None:
        """Start, wait for SIGTERM or SIGINT, drain and return; a second signal ends the drain at once.

        Raises:
            ValueError: The caller is not the main thread, and cannot install signal handlers.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.ask_to_stop()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self.start()
            while not self._stop_asked.wait(1.0):  # in steps, since a signal does not interrupt a lock
                if self._thread is not None and not self._thread.is_alive():
                    raise RuntimeError("the server's thread has ended; see the log")
            self.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(None if error[0] is None else 0.0)

    def _run(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            await self._uvicorn.serve(sockets=[self._socket] if self._socket is not None else None)

        asyncio.run(run())


def check_port(options: ServerOptions) -> None:
    """Check that the port is free, before the model is loaded.

    Raises:
        ValueError: `options` have a host and a port that cannot be bound.
    """
    _listen(options).close()


def check_certificate(options: ServerOptions) -> None:
    """Check the files for https, before the model is loaded.

    Raises:
        ValueError: `options` have a key and a certificate that cannot be read or do not match.
    """
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        files = f"ssl_keyfile={options.ssl_keyfile!r}, ssl_certfile={options.ssl_certfile!r}"
        raise ValueError(f"{files} cannot be used: {error}") from error


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Reserve a free port during the block; servers on this machine can bind it, also repeatedly.

    Args:
        host: Address to bind.
    """
    family, kind, protocol, _, address = _address_of(host, 0)
    with socket.socket(family, kind, protocol) as opened:
        # A bound socket that does not listen reserves the port, and still permits a listener (SO_REUSEADDR).
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        yield opened.getsockname()[1]


def _address_of(host: str, port: int) -> Any:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def _listen(options: ServerOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = _address_of(options.host, options.port)
        # With the protocol's number asyncio recognizes TCP and sets TCP_NODELAY, so that each token is sent
        # without the 40 ms wait for the acknowledgement of the previous one.
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(2048)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        where = f"host={options.host!r}, port={options.port}"
        raise ValueError(f"{where} cannot be listened on: {error}; port=0 takes a free one") from error
    return opened
