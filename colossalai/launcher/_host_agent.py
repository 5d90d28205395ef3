"""Host agent: the program that the controller starts over ssh on each host of a job.

    python -m colossalai.launcher._host_agent --run-id ID ... -- TARGET ARGS...

[Note: messages of controller and agent]
    agent:      hello          it runs; with its name
    agent:      ready          torch is imported; with the binding of ranks to cores
    controller: listen         to the first node: open the store
    agent:      listening      with the port
    controller: go             with the participating hosts and the store's address
    agent:      started, line  the ranks run; a line of their output
    agent:      done           its ranks have ended well; those of others can still run
    controller: finish         all ranks have ended well
    agent:      failed         a rank has failed; its ranks are being ended
    controller: stop           end the ranks in any state
    agent:      ended          no process remains; with the ranks that had failed
    agent:      refused        the job cannot be started, with the reason
and heartbeats in both directions (see [Note: heartbeats] in `_protocol.py`).
"""

import argparse
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from colossalai.launcher._cleanup import (
    MARK_VARIABLE,
    JobFolder,
    remove_abandoned_folders,
    sweep,
)
from colossalai.launcher._job import Job
from colossalai.launcher._processes import GRACE_S, end_descendants, ending_signals
from colossalai.launcher._protocol import ControllerLink, as_text

if TYPE_CHECKING:
    from colossalai.cluster import Binding
    from colossalai.launcher._agent import LocalAgent, Rendezvous
    from colossalai.launcher._failure import NodeLoss, RankState


class HostAgent:
    """One host's part of a job, from its start to its end.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.job = Job(
            target=options.target,
            args=tuple(options.args),
            is_module=options.module,
            num_procs=options.nproc_per_node,
            bind=options.bind,
        )
        self.options = options
        self.agent: LocalAgent | None = None
        self.ending = threading.Lock()  # its holder ends the ranks, whose states are not read meanwhile
        remove_abandoned_folders()
        self.folder = JobFolder("node")  # before the link: its threads may end this process at once
        self.link = ControllerLink({"stop": self._stop, "ask": self._pass_signal}, on_loss=self._on_link_loss)

    def run(self) -> None:
        """Execute the controller's messages until the end of the job."""
        self.link.start()
        self.link.send("hello", pid=os.getpid(), host=socket.gethostname())
        if mark := os.environ.get(MARK_VARIABLE):
            sweep(mark)  # processes of an earlier start of this job, whose link was lost
        _agent = _import_agent()
        binding = _agent.prepare(self.job)
        self.link.send("ready", num_procs=binding.num_ranks, note=binding.note)
        store = None
        message = self.link.expect("listen", "go")
        if message["kind"] == "listen":
            store = _agent.listen(message["address"], message["port"])
            self.link.send("listening", port=store.port)
            message = self.link.expect("go")
        rendezvous = _agent.Rendezvous(
            run_id=self.options.run_id,
            attempt=self.options.attempt,
            max_restarts=self.options.max_restarts,
            timeout_s=self.options.timeout,
            **message["rendezvous"],
        )
        self._run_ranks(rendezvous, binding)
        del store  # it was held for the ranks, to their end

    def _run_ranks(self, rendezvous: "Rendezvous", binding: "Binding") -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        from colossalai.launcher._agent import ControlledAgent, worker_spec
        from colossalai.launcher._worker_pipes import WorkerPipes

        pipes = WorkerPipes(self.folder.path, self._send_line)
        spec = worker_spec(self.job, rendezvous, binding)
        self.agent = agent = ControlledAgent(
            spec, pipes, link=self.link, ending=self.ending, attempt=rendezvous.attempt
        )
        try:
            agent.run()
        except SignalException as stop:
            pipes.drain()
            self.link.send("refused", reason=f"its agent was stopped by {signal.Signals(stop.sigval).name}")
            return
        pipes.drain()
        self._send_end([] if agent.failure is None else [agent.failure.first, *agent.failure.later])

    def _send_end(self, failed: Sequence["RankState | NodeLoss"]) -> None:
        """Report that no process remains; `now` lets the controller convert times to its clock."""
        self.link.send("ended", ranks=[asdict(rank) for rank in failed], now=time.time())

    def _send_line(self, global_rank: int, stream: str, line: bytes) -> None:
        self.link.send("line", rank=global_rank, stream=stream, text=as_text(line))

    def _stop(self, message: dict[str, Any]) -> None:
        """End everything, and this process; a second time, without any grace."""
        if not self.ending.acquire(blocking=message["grace_s"] > 0):
            end_descendants(signal.SIGKILL, grace_s=0.0)
            return
        if self.agent is not None and self.agent.failure is not None:
            self.ending.release()
            return  # the main thread has just ended them, and reports it
        ranks = [] if self.agent is None else [rank for rank in self.agent.rank_states() if rank.has_failed]
        end_descendants(signal.Signals(message["signal"]), grace_s=message["grace_s"])
        self._send_end(ranks)
        self._exit(0)

    def _pass_signal(self, message: dict[str, Any]) -> None:
        """Send a signal to the first rank, which ends the job by itself."""
        if self.agent is not None:
            self.agent.signal_first_rank(message["signal"])

    def _on_link_loss(self) -> None:
        """The controller is gone: end everything, without a word to it, which might never get through."""
        if self.ending.acquire(timeout=3 * GRACE_S):
            end_descendants(signal.SIGTERM, grace_s=GRACE_S)
        self._exit(1)

    def _exit(self, code: int) -> None:
        """End the process now, in any state of the main thread."""
        self.folder.remove()
        os._exit(code)


def _import_agent() -> ModuleType:
    """Import torch, while the link is already watched.

    Its store warns of each peer that has an address and no name, as on many clusters; without a level set by
    the user, its log level is errors. The level is read at the import; the ranks do not inherit it.
    """
    is_ours = "TORCH_CPP_LOG_LEVEL" not in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from colossalai.launcher import _agent

    if is_ours:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    return _agent


class StopSignal(BaseException):
    """A signal ends this process before it has started a rank."""


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise StopSignal(f"its agent was stopped by {signal.Signals(number).name}")


def main() -> None:
    """Be the agent."""
    parser = argparse.ArgumentParser(prog="colossalai.launcher._host_agent", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--bind", action=argparse.BooleanOptionalAction)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("target")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for name in ending_signals():  # as long as there is no agent of torch's, which has its own way
        signal.signal(signal.Signals[name], _raise_stop)
    host_agent = HostAgent(options)
    try:
        host_agent.run()
    except (ValueError, StopSignal) as reason:
        host_agent.link.send("refused", reason=str(reason))
    except Exception:
        host_agent.link.send("refused", reason=traceback.format_exc())
    host_agent.folder.remove()
    sys.stderr.flush()
    os._exit(0)  # no thread of torch's, and no lock of ours, holds it back


if __name__ == "__main__":
    main()
