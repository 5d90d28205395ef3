"""Ports for jobs of tests, each reserved for one job as long as that runs.

A port that was probed and closed is free for others: another test process on this machine probes it, too,
and both jobs get it. So a port is reserved by a name in the kernel (an abstract Unix socket, which ends
with its last holder and leaves no file behind), then probed. Such names belong to a network namespace, as
ports do.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# Below the range from which the kernel gives ports to outgoing connections (32768 to 60999).
PORTS = range(20000, 32000)


class PortReservation:
    """A port that no other job of tests gets until `close`.

    Args:
        candidates: Ports to try, one after the other; random ones of `PORTS` if not given.

    Raises:
        RuntimeError: All candidates are reserved or in use.
    """

    def __init__(self, candidates: Iterator[int] | None = None) -> None:
        source = random.SystemRandom()
        for port in candidates or (source.choice(PORTS) for _ in range(10_000)):
            holder = socket.socket(socket.AF_UNIX)
            try:
                holder.bind(f"\0colossalai-tests-port-{port}")
                with socket.socket() as probe:
                    probe.bind(("", port))
            except OSError:
                holder.close()
                continue
            self.port, self._holder = port, holder
            return
        raise RuntimeError("no port is free: all candidates are reserved or in use")

    def close(self) -> None:
        """Give the port back."""
        self._holder.close()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for the duration of the block."""
    reservation = PortReservation()
    try:
        yield reservation.port
    finally:
        reservation.close()
