"""Engine on ranks in other processes: the launcher starts them, and this process talks to their first rank.

Requests and deltas are sent over a socket as lines of JSON, so this process needs no process group, no mesh
and no part of the model. A script can have several such engines, or be a rank of its own job.

| line | sender | meaning |
| --- | --- | --- |
| `{"check": request}`, `{"submit": request}`, `{"abort": id}` | this process | calls of the engine |
| `{"checked": null or reason}` | rank 0 | the reply to a check |
| `{"update": [path, in_flight]}` | this process | new weights; waits for the reply |
| `{"updated": null or [kind, message]}` | rank 0 | the reply |
| `{"ready": limits}` | rank 0 | the model is loaded |
| `{"received": delta}`, `{"failed": [id, kind, message]}` | rank 0 | a call of a listener |
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.inference._request import (
    REQUEST_ERRORS,
    Delta,
    EngineStopped,
    Request,
    RequestFailed,
    RequestRefused,
    TokenLogprobs,
    sampling_params_of,
)
from colossalai.inference._service import Listener
from colossalai.inference._threaded import ThreadedEngine
from colossalai.inference.loading import WeightSource

_END_S = 20.0  # for the ranks to end by themselves
_UPDATE_ERRORS = {each.__name__: each for each in (TimeoutError, OSError, ValueError, RequestFailed)}


class RemoteEngine:
    """An engine with ranks in other processes; one thread at a time calls it.

    Args:
        arguments: Arguments of the ranks' program; the address of this process is added.
        num_ranks: Number of ranks.

    Raises:
        ValueError: `arguments` are rejected by the ranks, which have ended; the message is theirs.
    """

    def __init__(self, arguments: dict[str, Any], *, num_ranks: int) -> None:
        self._listeners: dict[str, tuple[Listener, Request, int]] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="colossalai-llm-"))
        self._log = self._folder / "log"
        address = self._folder / "socket"
        with socket.socket(socket.AF_UNIX) as door, self._log.open("wb") as log:
            door.bind(os.fspath(address))
            door.listen(1)
            command = [sys.executable, "-m", "colossalai.cli", "run", "--nproc_per_node", str(num_ranks)]
            command += ["-m", "colossalai.inference", json.dumps({**arguments, "address": str(address)})]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C stops this process only, which may still use the engine
            )
            # Without a close, the ranks end by themselves after this process.
            self._forget = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._connection = self._accept(door)
        self._lines = self._connection.makefile("rb")
        ready = self._next()
        self.max_length: int = ready["ready"]["max_length"]

    def check(self, request: Request) -> None:
        """Check that a request can be served.

        Raises:
            RequestRefused: `request` cannot be served.
        """
        self._send({"check": asdict(request)})
        while "checked" not in (line := self._next()):
            self._take(line)
        if line["checked"] is not None:
            raise RequestRefused(line["checked"])

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; calls of `step` pass its deltas to the listener."""
        self._listeners[request.request_id] = (listener, request, request.params.n)
        self._send({"submit": asdict(request)})

    def abort(self, request_id: str) -> None:
        """End a request; does nothing if it has ended."""
        if request_id in self._listeners:
            self._send({"abort": request_id})

    def step(self) -> bool:
        """Wait for the next call of a listener; return whether a request was in flight."""
        if not self._listeners:
            return False
        self._take(self._next())
        return True

    def update_weights(self, source: WeightSource, *, in_flight: str = "finish") -> None:
        """Replace all values on the ranks; see `InferenceEngine.update_weights`.

        A source in memory is passed through a temporary file.
        """
        path = self._folder / "weights.pt"
        if isinstance(source, str | os.PathLike):
            path = Path(os.path.abspath(source))
        else:
            given = dict(source.state_dict() if isinstance(source, nn.Module) else source)
            torch.save({name: value.detach() for name, value in given.items()}, path)
        try:
            self._send({"update": [str(path), in_flight]})
            while "updated" not in (line := self._next()):
                self._take(line)
        finally:
            (self._folder / "weights.pt").unlink(missing_ok=True)
        if line["updated"] is not None:
            kind, message = line["updated"]
            raise _UPDATE_ERRORS.get(kind, EngineStopped)(message)

    def close(self) -> None:
        """End the ranks."""
        self._connection.close()
        self._lines.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._forget()

    def _accept(self, door: socket.socket) -> socket.socket:
        door.settimeout(0.2)
        while True:
            try:
                return door.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise ValueError(self._failure_message()) from None

    def _take(self, line: dict[str, Any]) -> None:
        if "failed" in line:
            request_id, kind, message = line["failed"]
            self._listeners.pop(request_id)[0](REQUEST_ERRORS.get(kind, EngineStopped)(message))
            return
        delta = _delta_of(line["heard"])
        if delta.request_id not in self._listeners:
            return
        listener, request, num_left = self._listeners[delta.request_id]
        if delta.finish_reason is not None or delta.is_restart:
            num_left = request.params.n if delta.is_restart else num_left - 1
            self._listeners[delta.request_id] = (listener, request, num_left)
            if num_left == 0:
                del self._listeners[delta.request_id]
        listener(delta)

    def _send(self, line: dict[str, Any]) -> None:
        try:
            self._connection.sendall(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise EngineStopped(self._failure_message()) from error

    def _next(self) -> dict[str, Any]:
        line = b""
        with suppress(ConnectionResetError):  # equivalent to end of file
            line = self._lines.readline()
        if not line:
            self._process.wait()
            # Before the first line the ranks have rejected their arguments, after it the engine has failed.
            raise (EngineStopped if hasattr(self, "max_length") else ValueError)(self._failure_message())
        found: dict[str, Any] = json.loads(line)
        return found

    def _failure_message(self) -> str:
        told = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return f"the ranks of the engine have ended:\n{told[-4000:]}"


def serve_connection(engine: ThreadedEngine, connection: socket.socket) -> None:
    """Serve the calls of a `RemoteEngine` until it closes the connection.

    Args:
        engine: The engine of rank 0, run by another thread.
        connection: Connection to the process of the `RemoteEngine`.
    """
    lock = threading.Lock()

    def send(line: dict[str, Any]) -> None:
        with lock:
            connection.sendall(json.dumps(line).encode() + b"\n")

    send({"ready": {"max_length": engine.info.max_length}})
    for line in _lines_of(connection):
        if "abort" in line:
            engine.abort(line["abort"])
            continue
        if "update" in line:
            path, in_flight = line["update"]
            send({"updated": _update(engine, path, in_flight)})
            continue
        request = _request_of(line.get("check") or line["submit"])
        if "check" in line:
            send({"checked": _check_message(engine, request)})
            continue

        def on_delta(received: Delta | BaseException, name: str = request.request_id) -> None:
            failed = [name, type(received).__name__, str(received)]
            send({"heard": asdict(received)} if isinstance(received, Delta) else {"failed": failed})

        try:
            engine.submit(request, on_delta)
        except (RuntimeError, ValueError) as error:
            send({"failed": [request.request_id, type(error).__name__, str(error)]})


def _lines_of(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _check_message(engine: ThreadedEngine, request: Request) -> str | None:
    try:
        engine.check(request)
    except RequestRefused as error:
        return str(error)
    return None


def _update(engine: ThreadedEngine, path: str, in_flight: str) -> list[str] | None:
    try:
        engine.update_weights(path, in_flight=in_flight)
    except Exception as error:  # any error is reported to the other process
        kind = next((name for name, each in _UPDATE_ERRORS.items() if isinstance(error, each)), "")
        return [kind, str(error)]
    return None


def _request_of(fields: dict[str, Any]) -> Request:
    prompt = tuple(fields["prompt_token_ids"])
    return Request(**{**fields, "params": sampling_params_of(fields["params"]), "prompt_token_ids": prompt})


def _delta_of(fields: dict[str, Any]) -> Delta:
    named = {name: _logprobs_of(fields[name]) for name in ("logprobs", "prompt_logprobs")}
    return Delta(**{**fields, **named, "token_ids": tuple(fields["token_ids"])})


def _logprobs_of(found: list[dict[str, Any]] | None) -> tuple[TokenLogprobs, ...] | None:
    if found is None:
        return None
    return tuple(
        TokenLogprobs(**{**each, "top": tuple((token, value) for token, value in each["top"])})
        for each in found
    )
