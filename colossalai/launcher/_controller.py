"""The controller of a job on several nodes: starts an agent on each, and ends or restarts them all together.

[Note: a restart is a new start]
Nothing of a start outlives it: no agent, no store, no port, no rank. So a rank cannot meet anything that an
earlier one has left behind, which is what makes restarts inside one rendezvous flaky. The script finds its
way back by itself, from its last complete checkpoint.
"""

import asyncio
import itertools
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from colossalai.cluster import Host
from colossalai.launcher._agent_handle import AgentHandle, Stage
from colossalai.launcher._cleanup import GRACE_S
from colossalai.launcher._failure import JobFailure, blame
from colossalai.launcher._job import ClusterJob
from colossalai.launcher._output import Screen
from colossalai.launcher._processes import signals_to_heed

LOOPBACK = "127.0.0.1"
_KILL_S = 6.0  # beyond the grace, until an agent that does not end is killed
_SWEEP_S = 10.0
_RETRY_S = 1.0  # between two tries to reach a node that may come back
_LATECOMER_S = 8.0  # how long a job that can do with fewer nodes waits for one that is lost


@dataclass(frozen=True)
class Refusal(Exception):
    """The job cannot be started, and would not be the next time."""

    reason: str


def run_on_nodes(cluster: ClusterJob) -> int:
    """Run a job that was checked to its end and return its exit code, as `launch` does for one machine."""
    return asyncio.run(_Head(cluster).run())


class _Head:
    def __init__(self, cluster: ClusterJob) -> None:
        self._cluster = cluster
        self._screen = Screen(cluster.log_dir)
        self._news = asyncio.Event()
        self._nodes: list[AgentHandle] = []
        self._stopped_by: signal.Signals | None = None
        self._has_started = False  # once: from then on a node that does not answer may be one that returns

    async def run(self) -> int:
        """Start the job, again after a failure as long as it may be; return the exit code."""
        loop = asyncio.get_running_loop()
        for name in signals_to_heed():
            loop.add_signal_handler(signal.Signals[name], self._on_signal, signal.Signals[name])
        loop.add_signal_handler(
            signal.SIGTSTP, lambda: None
        )  # a stopped controller does not beat: the job would end
        try:
            for attempt in itertools.count():
                failure = await self._attempt(attempt)
                if self._stopped_by is not None:
                    await self._screen.say(f"stopped by {self._stopped_by.name}; its processes are ended")
                    return 128 + self._stopped_by
                if failure is None:
                    return 0
                if attempt == self._cluster.max_restarts:
                    await self._screen.say(failure.describe())
                    return failure.first.shell_code
                number = f"restart {attempt + 1} of {self._cluster.max_restarts}"
                await self._screen.say(f"{failure.first.describe()}; {number}")
            raise AssertionError("the count has no end")
        except Refusal as refusal:
            await self._screen.say(refusal.reason)
            return 1
        finally:
            self._screen.close()

    async def _attempt(self, attempt: int) -> JobFailure | None:
        """Run the job once; return how it failed, or None if it did not, or was stopped."""
        self._nodes = []
        try:
            await self._gather(attempt)
            if not self._is_over():
                await self._go(attempt)
                self._has_started = True
                await self._until(lambda: all(node.stage == Stage.DONE for node in self._nodes))
            if not self._is_over():
                for node in self._nodes:
                    node.send("finish")
                await self._until(lambda: all(node.stage == Stage.GONE for node in self._nodes), GRACE_S)
            return await self._end()
        finally:
            await asyncio.gather(*(node.close() for node in self._nodes))

    async def _gather(self, attempt: int) -> None:
        """Start the agents, until there are enough that are ready.

        Raises:
            Refusal: There are not, within the time that they have.
        """
        deadline = time.monotonic() + self._cluster.timeout_s
        patience = time.monotonic() + (_LATECOMER_S if self._has_started else 0.0)
        absent = self._cluster.absent if not self._has_started else {}
        missing = [host for host in self._cluster.hosts if host.name not in absent]
        reasons = dict(absent)
        while missing and self._stopped_by is None:
            tried = [self._new_node(host, attempt) for host in missing]
            await asyncio.gather(*(node.start() for node in tried))
            self._nodes += tried
            await self._until(
                lambda: (
                    all(node.stage in (Stage.READY, Stage.GONE) for node in self._nodes)
                    or self._is_hopeless()
                ),
                deadline - time.monotonic(),
                heeds_trouble=False,
            )
            too_late = Stage.STARTING if self._is_hopeless() else Stage.READY
            lost = [node for node in self._nodes if node.stage < too_late or node.stage == Stage.GONE]
            reasons = {**absent, **{node.host.name: _reason(node) for node in lost}}
            if any(node.refusal is not None for node in lost):
                break
            missing = [node.host for node in lost]
            self._nodes = [node for node in self._nodes if node not in lost]
            await asyncio.gather(*(node.close() for node in lost))
            now = time.monotonic()
            is_enough = len(self._nodes) >= self._cluster.min_nodes and now >= patience
            if is_enough or now >= deadline or not self._has_started:
                break
            await self._pause(_RETRY_S)
        self._nodes.sort(key=lambda node: self._cluster.hosts.index(node.host))
        if self._stopped_by is not None:
            return
        story = "; ".join(f"{host}: {reason}" for host, reason in reasons.items())
        if len(self._nodes) < self._cluster.min_nodes or any(node.refusal for node in self._nodes):
            await self._end(gives_up=True)
            raise Refusal(f"not all nodes could be started: {story}")
        if reasons:
            verb = "goes on" if self._has_started else "starts"
            count = f"{len(self._nodes)} of {len(self._cluster.hosts)} nodes"
            await self._screen.say(f"{verb} with {count}; {story}")

    async def _go(self, attempt: int) -> None:
        """Open the store on the first node, and start the ranks on all."""
        first = self._nodes[0]
        given = self._cluster.master_addr
        if given is not None and first.host == self._cluster.hosts[0]:
            address = given
        else:
            address = first.host.name.rpartition("@")[2] if len(self._nodes) > 1 else LOOPBACK
        first.send("listen", address=address, port=self._cluster.job.master_port)
        await self._until(lambda: first.stage >= Stage.LISTENING, self._cluster.timeout_s)
        if self._is_over():
            return
        for node_rank, node in enumerate(self._nodes):
            place = {
                "master_addr": address,
                "master_port": first.port,
                "node_rank": node_rank,
                "num_nodes": len(self._nodes),
            }
            node.send("go", place=place)
        await self._until(
            lambda: all(node.stage >= Stage.STARTED for node in self._nodes), self._cluster.timeout_s
        )
        late = [node.host.name for node in self._nodes if node.stage < Stage.STARTED]
        if late and not self._is_over():
            await self._end(gives_up=True)
            raise Refusal(
                f"{', '.join(late)} did not reach {address}:{first.port} within "
                f"{self._cluster.timeout_s:g} s; is it the address of the first node, on a network that all "
                "nodes share?"
            )

    async def _end(self, *, gives_up: bool = False) -> JobFailure | None:
        """End what still runs, everywhere; return how the job failed, unless it did not or was stopped.

        Args:
            gives_up: End the nodes though nothing is wrong with any of them.

        Raises:
            Refusal: A node has refused.
        """
        if gives_up or self._is_over():
            signal_to_send = self._stopped_by or signal.SIGTERM
            for node in self._nodes:
                node.send("stop", signal=int(signal_to_send), grace_s=GRACE_S)
        lost = [node for node in self._nodes if node.loss is not None]
        await asyncio.gather(
            self._until(
                lambda: all(node.stage == Stage.GONE for node in self._nodes),
                GRACE_S + _KILL_S,
                heeds_trouble=False,
            ),
            *(self._sweep(node.host) for node in lost),
        )
        stuck = [node for node in self._nodes if node not in lost and node.stage < Stage.GONE]
        for node in stuck:
            node.give_up()
        await asyncio.gather(*(self._sweep(node.host) for node in stuck))
        if self._stopped_by is not None:
            return None
        for node in self._nodes:
            if node.refusal is not None:
                raise Refusal(f"{node.host.name}: {node.refusal}")
        ranks = [rank for node in self._nodes for rank in node.ranks]
        losses = [node.loss for node in self._nodes if node.loss is not None]
        return blame(ranks, losses) if ranks or losses else None

    async def _sweep(self, host: Host) -> None:
        """End what an agent that is gone or stuck has left on a host, if the host can be reached."""
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
            process.kill()
            await process.wait()

    async def _until(
        self, is_so: Callable[[], bool], timeout_s: float | None = None, *, heeds_trouble: bool = True
    ) -> None:
        """Wait until something is so, or the time is over, or there is trouble, if that is heeded."""

        async def wait() -> None:
            while not is_so() and not (heeds_trouble and self._is_over()):
                await self._news.wait()
                self._news.clear()

        try:
            await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            return  # the caller looks at what has become of it

    def _is_over(self) -> bool:
        return self._stopped_by is not None or any(node.is_in_trouble for node in self._nodes)

    def _is_hopeless(self) -> bool:
        """Say whether the first start cannot succeed: later, a host that is gone may come back."""
        num_gone = len(self._cluster.absent) + sum(node.stage == Stage.GONE for node in self._nodes)
        return not self._has_started and num_gone > len(self._cluster.hosts) - self._cluster.min_nodes

    def _new_node(self, host: Host, attempt: int) -> AgentHandle:
        command = self._cluster.agent_command(host, attempt=attempt)
        return AgentHandle(host, command, self._cluster.variables(host), self._screen, self._news.set)

    async def _pause(self, seconds: float) -> None:
        await self._until(lambda: False, seconds)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first signal ends the job with grace; a second one kills it."""
        if self._stopped_by is not None:
            for node in self._nodes:
                node.send("stop", signal=int(signal.SIGKILL), grace_s=0.0)
        self._stopped_by = self._stopped_by or number
        self._news.set()


def _reason(node: AgentHandle) -> str:
    if node.refusal is not None:
        return node.refusal
    return node.loss.what if node.loss is not None else "it does not answer"
