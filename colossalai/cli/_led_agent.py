"""The agent of a node among several: torch's, as `LocalAgent` has it, with the head as its guide."""

import threading
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec

from colossalai.cli._head_link import HeadLink
from colossalai.cli._launcher import LocalAgent
from colossalai.cli._rank_pipes import RankPipes


class LedAgent(LocalAgent):
    """Tells the head how the ranks are, and waits at the end for its word instead of for a store.

    Args:
        spec: What to run.
        pipes: Where the ranks' output goes.
        link: The way to the head.
        ending: Held by whoever ends the ranks: they are not looked at then, since their ends say nothing.
        attempt: How often the job was started before; a script sees it as TORCHELASTIC_RESTART_COUNT.
    """

    def __init__(
        self, spec: WorkerSpec, pipes: RankPipes, *, link: HeadLink, ending: threading.Lock, attempt: int
    ) -> None:
        super().__init__(spec, pipes)
        self._link, self._ending = link, ending
        self._remaining_restarts = spec.max_restarts - attempt

    def on_failure(self) -> None:
        """Tell the head before the ranks are ended: the other nodes are to look at theirs now."""
        assert self.failure is not None
        self._link.send("failed")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._ending:
            pids = super()._start_workers(worker_group)
        ranks = {worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers}
        self._link.send("started", pids=ranks)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self._ending:
            return super()._monitor_workers(worker_group)

    def _exit_barrier(self) -> None:
        self._link.send("done")
        self._link.expect("finish")
