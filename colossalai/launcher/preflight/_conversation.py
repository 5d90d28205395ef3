"""A conversation with the probe on one host, over the ssh client."""

import asyncio
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossalai.launcher._ssh import READ_VARIABLES, command_on, is_this_machine, variables_line
from colossalai.launcher.preflight._findings import Answer

_MARK = "colossalai-probe "
_PACKAGE = Path(__file__).parents[2]
# In the order in which they import each other.
_MODULES = ("cluster._ports", "launcher.preflight._probe_network", "launcher.preflight._probe")
# Reads one line from stdin, the modules, and runs the last of them, which reads the rest.
_BOOT = (
    "import json,sys,types\n"
    "for n,s in json.loads(sys.stdin.buffer.readline()):\n"
    " m=sys.modules[n]=types.ModuleType(n)\n"
    " m.__package__=n.rpartition('.')[0]\n"
    " exec(compile(s,n,'exec'),m.__dict__)\n"
    "m.serve()\n"
)
_STDERR_BYTES = 8192
_END_S = 2.0


class HostGoneError(Exception):
    """The command on the node has ended; the arguments are its exit code and what it wrote to stderr."""


class ProbedHost:
    """The probe on one host: started at once, asked any number of questions, ended.

    Args:
        host: As ssh takes it.
        python: The interpreter there.
        env: Variables that are set for it.
        ssh_port: Where its sshd listens, if not where the user's ssh config says.
    """

    def __init__(self, host: str, *, python: str, env: Mapping[str, str], ssh_port: int | None) -> None:
        script = f"{READ_VARIABLES} && exec {shlex.join([python, '-c', _BOOT])}"
        self.host = host
        self._command = command_on(host, ["/bin/sh", "-c", script], port=ssh_port)
        self._variables = variables_line(env)  # see [Note: variables over stdin] in _ssh
        self.is_local = is_this_machine(host, port=ssh_port)
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._stderr = b""

    async def start(self) -> None:
        """Start the probe; whether it runs is seen when it is asked."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=2**22
        )
        files = {name: _PACKAGE / f"{name.replace('.', '/')}.py" for name in _MODULES}
        sources = [(f"colossalai.{name}", file.read_text()) for name, file in files.items()]
        assert self._process.stdin is not None
        self._process.stdin.write(self._variables)
        self._write(json.dumps(sources))
        self._tasks = [asyncio.create_task(self._read_stderr()), asyncio.create_task(self._read_answers())]

    async def ask(self, question: str, *, timeout_s: float, **arguments: Any) -> Answer:
        """Return the answer; one that does not come in time is an error like those of the node.

        Raises:
            HostGoneError: The command has ended.
        """
        number, self._next_id = self._next_id, self._next_id + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        began = time.time()
        if self._tasks[1].done():
            await self._tasks[1]  # raises
        self._write(json.dumps({"id": number, "question": question, "with": arguments}))
        try:
            answer = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return Answer(error=f"no answer within {timeout_s:g} s")
        finally:
            self._waiting.pop(number, None)
        ended = time.time()
        return Answer(
            value=answer.get("answer"),
            error=answer.get("error"),
            midpoint=(began + ended) / 2,
            doubt_s=(ended - began) / 2,
        )

    async def end(self) -> None:
        """End the probe, and whatever it listens on, before this returns."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the probe sees the end of its input and ends
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _read_answers(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(_MARK):
                answer = json.loads(text[len(_MARK) :])
                if (future := self._waiting.get(answer["id"])) and not future.done():
                    future.set_result(answer)
        await self._tasks[0]
        gone = HostGoneError(await self._process.wait(), self._stderr.decode(errors="replace"))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(gone)
        raise gone

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(_STDERR_BYTES):
            self._stderr = (self._stderr + piece)[-_STDERR_BYTES:]
