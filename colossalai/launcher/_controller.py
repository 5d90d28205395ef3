"""Controller of a job on several hosts: starts an agent on each, and ends or restarts them all together.

The controller alone decides: agents report and obey, and never wait for one another (order of messages:
[Note: messages of controller and agent] in `_host_agent.py`).

[Note: restarts of a job]
Nothing of a start outlives it: no agent, no store, no port, no rank. So a rank cannot meet leftovers of an
earlier one, which make restarts inside one rendezvous flaky. The script resumes by itself from its last
complete checkpoint.

[Note: deadlines at the end of a job]
A failed rank is found by its agent, which ends its other ranks (`GRACE_S`, then SIGKILL) and reports it.
The controller then makes every other agent end its ranks, with the same grace. An agent that still runs
`_KILL_S` after that is killed with its ssh client; its leftovers, like those of a lost agent, are found by
the mark in their environment and ended by a sweep over a new connection, for at most `_SWEEP_S`. An agent
whose controller is gone ends its ranks by itself ([Note: heartbeats] in `_protocol.py`). So when the command
returns, nothing of the job runs on any host that can be reached.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from colossalai.cluster import LOOPBACK, Host
from colossalai.launcher._failure import (
    JobFailure,
    NodeLoss,
    RankError,
    RankState,
    first_failure,
    signal_name,
)
from colossalai.launcher._job import MAX_DRAIN_SIGNALS, ClusterJob
from colossalai.launcher._output import Screen
from colossalai.launcher._processes import GRACE_S, ending_signals
from colossalai.launcher._protocol import SILENCE_S, RemoteProcess, as_bytes, kill

_KILL_S = 6.0  # time after the grace until a running agent is killed
_SWEEP_S = 10.0  # to reach a host again and end its leftovers
_RETRY_S = 1.0  # between two tries to reach a host that may come back
_LATECOMER_S = 8.0  # wait for a lost host, in a job that can run with fewer
_ERROR_LINES = 20  # of ssh's and the agent's stderr in a report


@dataclass(frozen=True)
class LaunchRefusedError(Exception):
    """The job cannot be started, and would not be the next time."""

    reason: str


class Stage(IntEnum):
    """Progress of an agent; it never decreases."""

    STARTING = 0
    HELLO = 1
    READY = 2
    LISTENING = 3
    STARTED = 4
    DONE = 5
    GONE = 6  # ended, refused or lost


_STAGE_OF = {
    "hello": Stage.HELLO,
    "ready": Stage.READY,
    "listening": Stage.LISTENING,
    "started": Stage.STARTED,
    "done": Stage.DONE,
}


class AgentHandle(RemoteProcess):
    """The controller's view of an agent: its stage and its messages.

    Args:
        host: The machine.
        command: Starts the agent there, with messages on stdin and stdout.
        variables: The first line for its stdin.
        screen: Destination of its ranks' lines.
        on_change: Called when there is news.
    """

    def __init__(
        self, host: Host, command: list[str], variables: bytes, screen: Screen, on_change: Callable[[], None]
    ) -> None:
        super().__init__(command, variables)
        self.host, self._screen, self._on_change = host, screen, on_change
        self.stage = Stage.STARTING
        self.port = 0
        self.ranks: list[RankState] = []  # those that had failed when it ended
        self.loss: NodeLoss | None = None
        self.refusal: str | None = None
        self.has_failed = False  # the job cannot go on with it: a rank has failed, it is lost or refuses
        self._has_ended = False

    def mark_lost(self, what: str) -> None:
        """Record that it is lost without a message; the first record counts."""
        self.loss = self.loss or NodeLoss(host=self.host.name, what=what, time=self.last_message_at)
        self.has_failed = True
        self._on_change()

    async def _handle(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "line":
            line = as_bytes(message["text"])
            await self._screen.rank_line(self.host.name, message["rank"], message["stream"], line)
            return
        if kind == "listening":
            self.port = message["port"]
        elif kind == "ready" and message["note"]:
            await self._screen.node_line(self.host.name, message["note"].encode())
        elif kind == "refused":
            self.refusal = message["reason"]
        elif kind == "ended":
            # Times are by the host's clock, which may differ from ours.
            shift = time.time() - message["now"]
            self.ranks = [_read_rank(rank, self.host.name, shift) for rank in message["ranks"]]
        self.has_failed |= kind in ("failed", "refused")  # which rank has failed comes with "ended"
        self._has_ended |= kind in ("ended", "refused")
        self.stage = max(self.stage, _STAGE_OF.get(kind, self.stage))
        self._on_change()

    async def _handle_output(self, line: bytes) -> None:
        await self._screen.node_line(self.host.name, line)

    def _on_silence(self) -> None:
        self.mark_lost(f"nothing was heard of it for {SILENCE_S:g} s: its link or the machine is down")

    def _on_end(self, exit_code: int) -> None:
        if not self._has_ended and self.loss is None:
            self.mark_lost(self._describe_end(exit_code))
        self.stage = Stage.GONE
        self._on_change()

    def _describe_end(self, code: int) -> str:
        """Describe an unexpected end of a process; ssh itself ends with 255."""
        text = "; ".join(line.decode(errors="replace") for line in [*self.errors][-_ERROR_LINES:])
        if self.stage == Stage.STARTING:
            return text or f"its agent could not be started (exit code {code})"
        if code < 0:
            return f"{self._command[0]}, which leads to it, was killed by {signal_name(-code)}"
        if code == 255:
            return text or "its connection has ended"
        if code > 128:
            return f"its agent was killed by {signal_name(code - 128)}"
        return f"its agent has ended with exit code {code}{': ' if text else ''}{text}"


def _read_rank(fields: dict[str, Any], host: str, shift: float) -> RankState:
    error = RankError(**fields["error"]) if fields["error"] else None
    if error is not None:
        error = replace(error, time=error.time + shift)
    return RankState(**{**fields, "host": host, "error": error})


def run_on_hosts(cluster: ClusterJob) -> int:
    """Run a job that was checked to its end and return its exit code, as `launch` does for one machine."""
    return asyncio.run(_Controller(cluster).run())


class _Controller:
    def __init__(self, cluster: ClusterJob) -> None:
        self._cluster = cluster
        self._screen = Screen(cluster.log_dir)
        self._news = asyncio.Event()  # set by every message of an agent, and by signals
        self._agents: list[AgentHandle] = []
        self._stopped_by: signal.Signals | None = None
        self._num_signals = 0  # signals that were passed to rank 0, to end the job by itself
        self._has_started = False  # set once: a host that does not answer later can still return

    async def run(self) -> int:
        """Start the job, again after a failure as long as it may be; return the exit code."""
        loop = asyncio.get_running_loop()
        for name in ending_signals():
            loop.add_signal_handler(signal.Signals[name], self._on_signal, signal.Signals[name])
        # Ctrl-Z is not heeded: a stopped controller sends no heartbeats, and the agents would end the job.
        loop.add_signal_handler(signal.SIGTSTP, lambda: None)
        try:
            for attempt in itertools.count():
                failure = await self._attempt(attempt)
                if self._stopped_by is not None:
                    await self._screen.launcher_line(
                        f"stopped by {self._stopped_by.name}; its processes are ended"
                    )
                    return 128 + self._stopped_by
                if failure is None:
                    return 0
                if attempt == self._cluster.max_restarts or self._num_signals or failure.is_refusal:
                    await self._screen.launcher_line(failure.describe())
                    return failure.first.shell_code
                number = f"restart {attempt + 1} of {self._cluster.max_restarts}"
                await self._screen.launcher_line(f"{failure.first.describe()}; {number}")
            raise AssertionError("the count has no end")
        except LaunchRefusedError as refusal:
            await self._screen.launcher_line(refusal.reason)
            return 1
        finally:
            self._screen.close()

    async def _attempt(self, attempt: int) -> JobFailure | None:
        """Run the job once; return how it failed, or None if it did not, or was stopped."""
        self._agents = []
        try:
            await self._start_agents(attempt)
            if not self._is_over():
                await self._start_ranks()
                self._has_started = True
                # The ranks run. An agent whose own have ended waits for "finish": it may hold the store that
                # those of others still use.
                await self._wait_until(lambda: all(agent.stage == Stage.DONE for agent in self._agents))
            if not self._is_over():
                for agent in self._agents:
                    agent.send("finish")
                await self._wait_until(
                    lambda: all(agent.stage == Stage.GONE for agent in self._agents), GRACE_S
                )
            return await self._end()
        finally:
            await asyncio.gather(*(agent.close() for agent in self._agents))

    async def _start_agents(self, attempt: int) -> None:
        """Start the agents, until there are enough that are ready.

        Raises:
            LaunchRefusedError: Fewer than `min_nodes` are ready when the time that they have is over, or one
                refuses.
        """
        deadline = time.monotonic() + self._cluster.timeout_s
        patience = time.monotonic() + (_LATECOMER_S if self._has_started else 0.0)
        absent = self._cluster.absent if not self._has_started else {}
        missing = [host for host in self._cluster.hosts if host.name not in absent]
        reasons = dict(absent)
        while missing and self._stopped_by is None:
            tried = [self._new_agent(host, attempt) for host in missing]
            await asyncio.gather(*(agent.start() for agent in tried))
            self._agents += tried
            # "ready" is sent when torch is imported, and no agent waits for it at another one; until then an
            # agent that is gone is no trouble, if the job can do without its host.
            await self._wait_until(
                lambda: (
                    all(agent.stage in (Stage.READY, Stage.GONE) for agent in self._agents)
                    or self._is_hopeless()
                ),
                deadline - time.monotonic(),
                ends_on_failure=False,
            )
            too_late = Stage.STARTING if self._is_hopeless() else Stage.READY
            lost = [agent for agent in self._agents if agent.stage < too_late or agent.stage == Stage.GONE]
            reasons = {**absent, **{agent.host.name: _reason(agent) for agent in lost}}
            if any(agent.refusal is not None for agent in lost):
                break
            missing = [agent.host for agent in lost]
            self._agents = [agent for agent in self._agents if agent not in lost]
            await asyncio.gather(*(agent.close() for agent in lost))
            now = time.monotonic()
            is_enough = len(self._agents) >= self._cluster.min_nodes and now >= patience
            if is_enough or now >= deadline or not self._has_started:
                break
            await self._wait_until(lambda: False, _RETRY_S)
        self._agents.sort(key=lambda agent: self._cluster.hosts.index(agent.host))
        if self._stopped_by is not None:
            return
        story = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
        if len(self._agents) < self._cluster.min_nodes or any(agent.refusal for agent in self._agents):
            await self._end(gives_up=True)
            raise LaunchRefusedError(f"not all nodes could be started: {story}")
        if reasons:
            verb = "goes on" if self._has_started else "starts"
            count = f"{len(self._agents)} of {len(self._cluster.hosts)} nodes"
            await self._screen.launcher_line(f"{verb} with {count}; {story}")

    async def _start_ranks(self) -> None:
        """Open the store on the first host, and start the ranks on all.

        Raises:
            LaunchRefusedError: A host did not reach the store within `timeout_s`.
        """
        first = self._agents[0]
        given = self._cluster.master_addr
        if given is not None and first.host == self._cluster.hosts[0]:
            address = given
        else:
            address = first.host.name.rpartition("@")[2] if len(self._agents) > 1 else LOOPBACK
        # The port is chosen where it is held: only when the first agent listens do the others learn of it, so
        # none of them can join a store of an earlier start.
        first.send("listen", address=address, port=self._cluster.job.master_port)
        await self._wait_until(lambda: first.stage >= Stage.LISTENING, self._cluster.timeout_s)
        if self._is_over():
            return
        for node_rank, agent in enumerate(self._agents):
            rendezvous = {
                "master_addr": address,
                "master_port": first.port,
                "node_rank": node_rank,
                "num_nodes": len(self._agents),
            }
            agent.send("go", rendezvous=rendezvous)
        await self._wait_until(
            lambda: all(agent.stage >= Stage.STARTED for agent in self._agents), self._cluster.timeout_s
        )
        late = [agent.host.name for agent in self._agents if agent.stage < Stage.STARTED]
        if late and not self._is_over():
            await self._end(gives_up=True)
            raise LaunchRefusedError(
                f"{', '.join(late)} did not reach {address}:{first.port} within "
                f"{self._cluster.timeout_s:g} s; is it the address of the first node, on a network that all "
                "nodes share?"
            )

    async def _end(self, *, gives_up: bool = False) -> JobFailure | None:
        """End all remaining processes on all hosts; return the failure of the job, if it failed.

        See [Note: deadlines at the end of a job].

        Args:
            gives_up: End agents although none of them has failed.

        Raises:
            LaunchRefusedError: An agent has refused.
        """
        if gives_up or self._is_over():
            signal_to_send = self._stopped_by or signal.SIGTERM
            for agent in self._agents:
                agent.send("stop", signal=int(signal_to_send), grace_s=self._cluster.job.grace_s)
        lost = [agent for agent in self._agents if agent.loss is not None]
        # Lost hosts are swept while the others end: it may take `_SWEEP_S` to find that one is out of reach.
        await asyncio.gather(
            self._wait_until(
                lambda: all(agent.stage == Stage.GONE for agent in self._agents),
                self._cluster.job.grace_s + _KILL_S,
                ends_on_failure=False,
            ),
            *(self._sweep(agent.host) for agent in lost),
        )
        stuck = [agent for agent in self._agents if agent not in lost and agent.stage < Stage.GONE]
        for agent in stuck:
            agent.mark_lost("its agent did not end when asked to, and was killed")
        await asyncio.gather(*(self._sweep(agent.host) for agent in stuck))
        if self._stopped_by is not None:
            return None
        for agent in self._agents:
            if agent.refusal is not None:
                raise LaunchRefusedError(f"{agent.host.name}: {agent.refusal}")
        ranks = [rank for agent in self._agents for rank in agent.ranks]
        losses = [agent.loss for agent in self._agents if agent.loss is not None]
        return first_failure(ranks, losses) if ranks or losses else None

    async def _sweep(self, host: Host) -> None:
        """End the leftovers of a lost or stuck agent on a host, if the host can be reached."""
        process = await asyncio.create_subprocess_exec(
            *self._cluster.sweep_command(host),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            variables = self._cluster.variables(host, is_marked=False)
            await asyncio.wait_for(process.communicate(variables), _SWEEP_S)
        except TimeoutError:
            kill(process)
            await process.wait()

    async def _wait_until(
        self, predicate: Callable[[], bool], timeout_s: float | None = None, *, ends_on_failure: bool = True
    ) -> None:
        """Wait until something is so, or the time is over, or there is trouble, if that is heeded."""

        async def wait() -> None:
            while not predicate() and not (ends_on_failure and self._is_over()):
                await self._news.wait()
                self._news.clear()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            return  # the caller checks the stage

    def _is_over(self) -> bool:
        return self._stopped_by is not None or any(agent.has_failed for agent in self._agents)

    def _is_hopeless(self) -> bool:
        """Say whether the first start cannot succeed: later, a host that is gone may come back."""
        num_gone = len(self._cluster.absent) + sum(agent.stage == Stage.GONE for agent in self._agents)
        return not self._has_started and num_gone > len(self._cluster.hosts) - self._cluster.min_nodes

    def _new_agent(self, host: Host, attempt: int) -> AgentHandle:
        # See [Note: restarts of a job].
        command = self._cluster.agent_command(host, attempt=attempt)
        return AgentHandle(host, command, self._cluster.variables(host), self._screen, self._news.set)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal ends the job with grace; a second one kills it.

        A job that ends by itself gets two signals before: they are passed to rank 0.
        """
        drain_s = self._cluster.job.drain_s
        has_ranks = self._agents and all(agent.stage >= Stage.STARTED for agent in self._agents)
        if drain_s is not None and has_ranks and self._num_signals < MAX_DRAIN_SIGNALS:
            self._num_signals += 1
            self._agents[0].send("ask", signal=int(number))
            if self._num_signals == 1:
                asyncio.get_running_loop().call_later(drain_s, self._stop, number)
            return
        self._stop(number)

    def _stop(self, number: signal.Signals) -> None:
        if self._stopped_by is not None:
            for agent in self._agents:
                agent.send("stop", signal=int(signal.SIGKILL), grace_s=0.0)
        self._stopped_by = self._stopped_by or number
        self._news.set()


def _reason(agent: AgentHandle) -> str:
    if agent.refusal is not None:
        return agent.refusal
    return agent.loss.what if agent.loss is not None else "it does not answer"
