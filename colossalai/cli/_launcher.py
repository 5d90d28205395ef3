"""The launcher: one agent of torch's elastic launcher, which starts the ranks and watches them.

torch's agent gives the ranks their environment and starts each in a session of its own. `LocalAgent` adds
what a user at a terminal needs: it knows which rank failed first, and it ends the whole tree of processes
within seconds. See docs/design/cluster.md.
"""

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossalai.cli import _worker
from colossalai.cli._failure import JobFailure, RankState, find_failure, read_error
from colossalai.cli._job import Job, port_taken
from colossalai.cli._processes import adopt_orphans, end_descendants, exit_code_of, signals_to_heed

GRACE_S = 3.0  # from asking a process to end to killing it
_POLL_S = 0.1
_HOST = "127.0.0.1"


def launch(job: Job) -> int:
    """Run a job that was checked to its end and return its exit code.

    It is 0 if all ranks ended with 0; else the first failing rank's, where death by signal N is 128 + N; and
    128 + N also if this process was asked to stop with signal N.

    Raises:
        ValueError: The port was taken.
    """
    num_procs = job.num_procs or torch.accelerator.device_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_procs)))
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(signals_to_heed()))
    adopt_orphans()
    # torch's agent logs what we say better; to a handler that does nothing, or Python would print it.
    elastic_logger = logging.getLogger("torch.distributed.elastic")
    elastic_logger.addHandler(logging.NullHandler())
    elastic_logger.propagate = False
    store = _listen(job.master_port)
    with tempfile.TemporaryDirectory(prefix="colossalai_run_") as folder:
        agent = LocalAgent(_worker_spec(job, num_procs=num_procs, port=store.port), Path(folder))
        try:
            agent.run()
        except SignalException as stop:
            if agent.failure is None:
                name = signal.Signals(stop.sigval).name
                sys.stderr.write(f"colossalai run: stopped by {name}; its processes are ended\n")
                return 128 + stop.sigval
    if agent.failure is None:
        return 0
    sys.stderr.write(f"\ncolossalai run: {agent.failure.describe()}\n")
    return agent.failure.first.shell_code


class LocalAgent(LocalElasticAgent):
    """torch's agent, which also finds the first failing rank, and leaves no process behind.

    Args:
        spec: What to run, as torch's agent takes it.
        folder: Where the ranks leave their errors.
    """

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(folder)))
        self.failure: JobFailure | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks, end them all if one has failed, and leave only the good end to torch.

        torch would name some failed rank, and wait 30 seconds for the others to end.
        """
        ranks = self._look_at_ranks(worker_group)
        if all(rank.exit_code == 0 for rank in ranks):
            return super()._monitor_workers(worker_group)
        self.failure = find_failure(ranks, now=time.time(), patience_s=GRACE_S)
        if self.failure is None:
            return RunResult(state=WorkerState.HEALTHY)
        end_descendants(signal.SIGTERM, grace_s=GRACE_S)
        return RunResult(state=WorkerState.FAILED)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End all processes, unless the job succeeded: then what it left running is meant to run."""
        if self.get_worker_group().state != WorkerState.SUCCEEDED:
            end_descendants(death_sig, grace_s=GRACE_S)
        super()._shutdown(death_sig, timeout)

    def _look_at_ranks(self, worker_group: WorkerGroup) -> list[RankState]:
        assert self._pcontext is not None
        return [
            RankState(
                global_rank=worker.global_rank,
                pid=worker.id,
                exit_code=exit_code_of(worker.id),
                error=read_error(Path(self._pcontext.error_files[worker.local_rank])),
            )
            for worker in worker_group.workers
        ]


def _listen(port: int) -> TCPStore:
    """Open the store through which the ranks will find each other; port 0 is any free one."""
    try:
        return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise ValueError(f"cannot listen on port {port}: {port_taken(port)}") from error


def _worker_spec(job: Job, *, num_procs: int, port: int) -> WorkerSpec:
    kind = "module" if job.is_module else "script"
    # torch's agent fills "${local_rank}" into arguments; "$$" is its spelling of "$".
    target, *args = (argument.replace("$", "$$") for argument in (job.target, *job.args))
    # "static" is what one machine needs: its store is the one of `_listen`, which allows several users of its
    # port within a process, and the ranks get this port as MASTER_PORT.
    rendezvous = RendezvousParameters(
        backend="static",
        endpoint=f"{_HOST}:{port}",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        rank=0,
    )
    return WorkerSpec(
        role="default",
        local_world_size=num_procs,
        entrypoint=sys.executable,
        args=(_worker.__file__, str(os.getpid()), kind, target, *args),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=_POLL_S,
        master_addr=_HOST,
        master_port=port,
        local_addr=_HOST,
    )
