"""Agent of one host: torch's elastic agent, which starts the ranks, watches them and ends them.

torch's agent gives the ranks their environment and starts each in a session of its own. `LocalAgent` adds
the diagnosis of the first failing rank, and the end of the whole process tree within seconds. See
docs/design/launcher.md.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossalai.cluster import LOOPBACK, Binding, bind_ranks, serve_store
from colossalai.launcher import _worker
from colossalai.launcher._cleanup import JobFolder, remove_abandoned_folders
from colossalai.launcher._failure import JobFailure, RankState, find_failure, read_error
from colossalai.launcher._job import MAX_DRAIN_SIGNALS, Job, port_taken
from colossalai.launcher._processes import (
    GRACE_S,
    PEER_ERRORS_S,
    adopt_orphans,
    end_descendants,
    ending_signals,
    exit_code_of,
)
from colossalai.launcher._protocol import ControllerLink
from colossalai.launcher._worker_pipes import WorkerPipes

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address of a job's store, and the index of this host."""

    run_id: str
    master_addr: str
    master_port: int
    node_rank: int = 0
    num_nodes: int = 1
    attempt: int = 0  # number of earlier starts of the job
    max_restarts: int = 0
    timeout_s: float = 600.0  # for the agents to meet


def launch(job: Job) -> int:
    """Run a checked job to its end and return its exit code.

    The code is 0 if all ranks ended with 0, otherwise the first failing rank's (128 + N after signal N),
    and 128 + N if signal N stopped this process.

    Raises:
        ValueError: The port of the job has been taken since it was checked.
    """
    binding = prepare(job)
    if binding.note:
        sys.stderr.write(f"colossalai run: {binding.note}\n")
    store = listen(LOOPBACK, job.master_port)
    rendezvous = Rendezvous(run_id=uuid.uuid4().hex, master_addr=LOOPBACK, master_port=store.port)
    remove_abandoned_folders()
    folder = JobFolder("run")
    try:
        logs = DefaultLogsSpecs(log_dir=str(folder.path))
        agent = LocalAgent(
            worker_spec(job, rendezvous, binding),
            logs,
            drain_s=job.drain_s,
            grace_s=job.grace_s,
            peer_errors_s=job.peer_errors_s,
        )
        agent.run()
    except SignalException as stop:
        if agent.failure is None:
            name = signal.Signals(stop.sigval).name
            sys.stderr.write(f"colossalai run: stopped by {name}; its processes are ended\n")
            return 128 + stop.sigval
    finally:
        folder.remove()
    if agent.failure is None:
        return 0
    sys.stderr.write(f"\ncolossalai run: {agent.failure.describe()}\n")
    return agent.failure.first.shell_code


def prepare(job: Job) -> Binding:
    """Make this process fit to be an agent, and return how many ranks it starts, and on which CPUs."""
    num_devices = torch.accelerator.device_count()
    # Which CPUs are near to which accelerator is not known here, so there the user decides.
    binding = bind_ranks(
        job.num_procs or num_devices or 1,
        is_asked=False if num_devices and job.bind is None else job.bind,
        environment=os.environ,
        allowed=os.sched_getaffinity(0),
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(binding.num_threads))
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(ending_signals()))
    adopt_orphans()
    # Our reports replace those of torch's agent. A null handler keeps Python from printing them.
    elastic_logger = logging.getLogger("torch.distributed.elastic")
    elastic_logger.addHandler(logging.NullHandler())
    elastic_logger.propagate = False
    return binding


class LocalAgent(LocalElasticAgent):
    """torch's agent, which also finds the first failing rank, and leaves no process behind.

    Args:
        spec: The ranks to run, as torch's agent takes them.
        logs: Destination of the ranks' output and errors.
        drain_s: Seconds that rank 0 has to end the job well after a signal; None: a signal ends all ranks.
        grace_s: Seconds from the first signal to the ranks until they are killed.
        peer_errors_s: Seconds that the peers of a killed rank have to report their errors.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        *,
        drain_s: float | None = None,
        grace_s: float = GRACE_S,
        peer_errors_s: float = PEER_ERRORS_S,
    ) -> None:
        super().__init__(spec, logs)
        self.failure: JobFailure | None = None
        self._drain_s, self._grace_s, self._peer_errors_s = drain_s, grace_s, peer_errors_s
        self._drain: tuple[signal.Signals, float] | None = None  # its signal, and its deadline
        self._num_signals = 0
        self._ended_at: dict[int, float] = {}  # by pid

    def rank_states(self) -> list[RankState]:
        """Return how the ranks are; there are none before they are started, or once they have succeeded."""
        if self._pcontext is None or self._worker_group.state == WorkerState.SUCCEEDED:
            return []
        ranks = []
        for worker in self._worker_group.workers:
            pid = self._pcontext.pids()[worker.local_rank]
            exit_code = exit_code_of(pid)
            ended_at = None if exit_code is None else self._ended_at.setdefault(pid, time.time())
            error = read_error(Path(self._pcontext.error_files[worker.local_rank]))
            ranks.append(
                RankState(
                    global_rank=worker.global_rank,
                    pid=pid,
                    exit_code=exit_code,
                    error=error,
                    ended_at=ended_at,
                )
            )
        return ranks

    def on_failure(self) -> None:
        """Called when a failure is found, before the ranks are ended."""

    def signal_first_rank(self, number: int) -> None:
        """Send a signal to this host's first rank, which ends the job by itself, if it is there."""
        if self._pcontext is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pcontext.pids()[0], number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        if self._drain_s is not None:  # torch's agent has just set handlers that end all ranks at once
            for name in ending_signals():
                signal.signal(signal.Signals[name], self._on_signal)
        return pids

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Let rank 0 end the job; a third signal ends all ranks."""
        assert self._drain_s is not None
        self._num_signals += 1
        if self._num_signals > MAX_DRAIN_SIGNALS:
            raise SignalException("asked again", signal.Signals(number))
        self._drain = self._drain or (signal.Signals(number), time.monotonic() + self._drain_s)
        self.signal_first_rank(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks, end them all if one has failed, and leave only the good end to torch.

        torch would name some failed rank, and wait 30 seconds for the others to end.
        """
        ranks = self.rank_states()
        if self._drain is not None and not all(rank.exit_code == 0 for rank in ranks):
            asked_by, end = self._drain
            if time.monotonic() > end or any(rank.exit_code == -asked_by for rank in ranks):
                raise SignalException("the job has not ended well by itself", asked_by)
        if all(rank.exit_code == 0 for rank in ranks):
            result: RunResult = super()._monitor_workers(worker_group)
            return result
        self.failure = find_failure(ranks, now=time.time(), patience_s=GRACE_S)
        if self.failure is None:
            return RunResult(state=WorkerState.HEALTHY)
        self._wait_for_peer_errors(self.failure)
        self.on_failure()
        self._remaining_restarts = 0  # restarts are made by the process that started this agent
        end_descendants(signal.SIGTERM, grace_s=self._grace_s)
        return RunResult(state=WorkerState.FAILED)

    def _wait_for_peer_errors(self, failure: JobFailure) -> None:
        """Wait briefly for the errors of a killed rank's peers, before all ranks are ended."""
        if not (isinstance(failure.first, RankState) and failure.first.was_killed):
            return
        deadline = time.monotonic() + self._peer_errors_s
        while time.monotonic() < deadline:
            ranks = self.rank_states()
            self.failure = find_failure(ranks, now=time.time(), patience_s=GRACE_S)
            if all(rank.exit_code is not None or rank.error is not None for rank in ranks):
                return
            time.sleep(_POLL_S)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End all processes, unless the job succeeded: its background processes then keep running."""
        if self.get_worker_group().state != WorkerState.SUCCEEDED:
            end_descendants(death_sig, grace_s=self._grace_s)
        super()._shutdown(death_sig, timeout)


def listen(address: str, port: int) -> TCPStore:
    """Open the store through which the ranks will find each other.

    Args:
        address: An address or a name of this machine; the loopback, where all ranks are on it.
        port: 0 is any free one.

    Raises:
        ValueError: `port` is taken.
    """
    try:
        return serve_store(address, port)
    except DistNetworkError as error:
        raise ValueError(f"cannot listen on port {port}: {port_taken(port)}") from error


def worker_spec(job: Job, rendezvous: Rendezvous, binding: Binding) -> WorkerSpec:
    """Return torch's description of the ranks of this machine's agent."""
    kind = "module" if job.is_module else "script"
    # torch's agent fills "${local_rank}" into arguments; "$$" is its spelling of "$".
    target, *args = (argument.replace("$", "$$") for argument in (job.target, *job.args))
    # A known list of machines needs "static": it uses the store of `listen`, which allows several
    # users of its port within a process, and the ranks get this port as MASTER_PORT.
    parameters = RendezvousParameters(
        backend="static",
        endpoint=f"{rendezvous.master_addr}:{rendezvous.master_port}",
        run_id=rendezvous.run_id,
        min_nodes=rendezvous.num_nodes,
        max_nodes=rendezvous.num_nodes,
        rank=rendezvous.node_rank,
        timeout=int(rendezvous.timeout_s),
    )
    return WorkerSpec(
        role="default",
        local_world_size=binding.num_ranks,
        entrypoint=sys.executable,
        args=(_worker.__file__, str(os.getpid()), binding.as_word, kind, target, *args),
        rdzv_handler=get_rendezvous_handler(parameters),
        max_restarts=rendezvous.max_restarts,
        monitor_interval=_POLL_S,
        master_addr=rendezvous.master_addr,
        master_port=rendezvous.master_port,
        local_addr=rendezvous.master_addr if rendezvous.node_rank == 0 else None,
    )


class ControlledAgent(LocalAgent):
    """An agent that reports its ranks to the controller, whose message replaces the store's exit barrier.

    Args:
        spec: The ranks to run.
        pipes: Destination of the ranks' output.
        link: The connection to the controller.
        ending: Held while the ranks are being ended: their exit codes are not evaluated then.
        attempt: Number of earlier starts of the job; TORCHELASTIC_RESTART_COUNT of a script.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        pipes: WorkerPipes,
        *,
        link: ControllerLink,
        ending: threading.Lock,
        attempt: int,
    ) -> None:
        super().__init__(spec, pipes)
        self._link, self._ending = link, ending
        self._remaining_restarts = spec.max_restarts - attempt

    def on_failure(self) -> None:
        """Tell the controller before the ranks are ended: the other nodes are to look at theirs now."""
        assert self.failure is not None
        self._link.send("failed")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._ending:
            pids: dict[int, Any] = super()._start_workers(worker_group)
        ranks = {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
        self._link.send("started", pids=ranks)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._ending:
            result: RunResult = super()._monitor_workers(worker_group)
            return result

    def _exit_barrier(self) -> None:
        self._link.send("done")
        self._link.expect("finish")
