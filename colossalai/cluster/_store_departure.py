"""Departure: every rank records in the store that it leaves, and the rank with the store leaves last.

[Note: departure of the store's rank]
The store is needed after the launch: groups are made over it when their members first need them, and Gemini
numbers models there, so a rank can need it after its last collective with rank 0. If rank 0 serves the store
(launched by hand, by SLURM, by OpenMPI), its end would remove the store: "failed to recv, got 0 bytes" on
innocent ranks. So rank 0 waits at its end until each rank has left or has died. It detects the death of
processes of its own machine only, and a rank can continue for long without the job, or hang. Hence the
deadline, which is the launch's. If the launcher serves the store there is no departure; no rank waits while
an error is being raised.

Rank 0 keeps its process groups only for the first seconds of that: a rank with a collective that rank 0 does
not issue has to get a closed connection, not silence.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from colossalai._clock import Clock
from colossalai.logging import get_dist_logger
from colossalai.monitor import PeerProcess

_GROUPS_S = 5.0  # for ranks that are about to end, too; after it the groups of rank 0 go
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


# See [Note: departure of the store's rank].
@dataclass(frozen=True, kw_only=True)
class StoreDeparture:
    """The end of a job whose store ends with rank 0, as far as the other ranks depend on this one.

    Attributes:
        store: The store of the job.
        rank: Global rank of this process.
        world_size: Number of ranks.
        timeout: Seconds that rank 0 waits for the other ranks.
        clock: The clock of its wait.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout: float
    clock: Clock = field(default_factory=Clock)

    def announce(self) -> None:
        """Write where this process is found; before the ranks have met."""
        self.store.set(f"process/{self.rank}", PeerProcess.current().to_json())

    def leave(self) -> None:
        """Record that this rank does not need the store any more; called before its groups end.

        Rank 0 waits some seconds for the others.
        """
        with suppress(RuntimeError):  # of the store, which has gone already: no rank waits at it
            self.store.set(f"left/{self.rank}", "")
            self._wait(min(_GROUPS_S, self.timeout))

    def keep_store(self) -> None:
        """Wait for the others, if the store ends with this rank; called after its groups have ended.

        The missing ranks are logged, and again those missing at the deadline.
        """
        if not (missing := self._wait(0.0)):
            return
        log = get_dist_logger()
        log.info(
            f"rank 0 has come to its end and waits for {_ranks(missing)}, which may still need its store; "
            f"{self.timeout:g} s at most"
        )
        if missing := self._wait(self.timeout):
            log.warning(
                f"rank 0 has waited for {self.timeout:g} s at its end for {_ranks(missing)}, which have "
                "neither ended the job nor died: it leaves now, and the store with it"
            )

    def _wait(self, seconds: float) -> list[int]:
        """Wait until each rank has left or has died; return those that are missing after some seconds."""
        is_failing = sys.exc_info()[0] is not None or getattr(sys, "last_type", None) is not None
        if self.rank != 0 or is_failing:
            return []
        begun, pause, here = self.clock.now(), _FIRST_PAUSE_S, PeerProcess.current()
        while (missing := self._missing(here)) and self.clock.now() - begun < seconds:
            self.clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return missing

    def _missing(self, here: PeerProcess) -> list[int]:
        """Return the ranks that have not left and, as far as one sees from here, live."""
        missing = [rank for rank in range(self.world_size) if not self.store.check([f"left/{rank}"])]
        found = zip(missing, self.store.multi_get([f"process/{rank}" for rank in missing]), strict=True)
        peers = {rank: PeerProcess.from_json(text) for rank, text in found}
        dead = {rank for rank, peer in peers.items() if peer.place == here.place and peer.has_died()}
        return [rank for rank in missing if rank not in dead]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
