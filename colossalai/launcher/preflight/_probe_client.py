"""Probe client: the questions of the pre-flight checks to one host, and its answers, over ssh.

The probe and its imports of this package are sent as source, and run by the job's own interpreter: so a
host without colossalai, or with another version, is examined by the same code as the others.
"""

import asyncio
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossalai.launcher._environment import READ_VARIABLES, variables_line
from colossalai.launcher._protocol import SILENCE_S, RemoteProcess
from colossalai.launcher._ssh import command_on, is_this_machine
from colossalai.launcher.preflight._findings import Answer

_PACKAGE = Path(__file__).parents[2]
# In the order in which they import each other.
_MODULES = (
    "cluster._ports",
    "launcher._protocol",
    "launcher.preflight._probe_network",
    "launcher.preflight._probe",
)
# Reads one line, a program, and not a byte more: the messages after it are for `ControllerLink`.
_BOOT = "exec(__import__('json').loads(open(0,'rb',0,closefd=False).readline()))"
_PROGRAM = """
import sys, types
for name, source in {sources!r}:
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    exec(compile(source, name, "exec"), module.__dict__)
module.serve()
"""
_END_S = 2.0


class HostLostError(Exception):
    """The command on the host has ended; the arguments are its exit code and its stderr."""


class ProbeClient(RemoteProcess):
    """The probe on one host: started once, queried any number of times, ended.

    Args:
        host: As ssh takes it.
        python: The interpreter there.
        env: Variables that are set for it.
        ssh_port: Port of its sshd; default: from the user's ssh config.
    """

    def __init__(self, host: str, *, python: str, env: Mapping[str, str], ssh_port: int | None) -> None:
        self.host = host
        self.is_local = is_this_machine(host, port=ssh_port)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # by number of the question
        self._num_queries = 0
        self._loss: HostLostError | None = None
        files = {name: _PACKAGE / f"{name.replace('.', '/')}.py" for name in _MODULES}
        sources = [(f"colossalai.{name}", file.read_text()) for name, file in files.items()]
        program = json.dumps(_PROGRAM.format(sources=sources)).encode() + b"\n"
        script = f"{READ_VARIABLES} && exec {shlex.join([python, '-c', _BOOT])}"
        command = command_on(host, ["/bin/sh", "-c", script], port=ssh_port)
        super().__init__(command, variables_line(env) + program)

    async def query(self, question: str, *, timeout_s: float, **arguments: Any) -> Answer:
        """Return the answer; a timeout is an error like those of the host.

        Raises:
            HostGoneError: The command on the host has ended.
        """
        if self._loss is not None:
            raise self._loss
        number, self._num_queries = self._num_queries, self._num_queries + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        began = time.time()
        self.send("ask", id=number, question=question, arguments=arguments)
        try:
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return Answer(error=f"no answer within {timeout_s:g} s")
        finally:
            del self._waiting[number]
        ended = time.time()
        return Answer(
            value=answer.get("answer"),
            error=answer.get("error"),
            midpoint=(began + ended) / 2,
            doubt_s=(ended - began) / 2,
        )

    async def end(self) -> None:
        """End the probe, and whatever it listens on, before this returns: it ends when its stdin does."""
        await self.close(grace_s=_END_S)

    async def _handle(self, message: dict[str, Any]) -> None:
        future = self._waiting.get(message.get("id", -1))  # none, if the answer comes too late
        if future is not None and not future.done():
            future.set_result(message)

    async def _handle_output(self, line: bytes) -> None:
        """Drop a login script's output, and keep stderr in `errors`."""

    def _on_silence(self) -> None:
        self.errors.append(f"nothing was heard of it for {SILENCE_S:g} s".encode())

    def _on_end(self, exit_code: int) -> None:
        self._loss = HostLostError(exit_code, b"\n".join(self.errors).decode(errors="replace"))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._loss)
