"""Waiting time of a rank: the time spent in `wait` of all work that torch.distributed starts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist


@dataclass
class Waiting:
    """A sum of waiting times.

    Attributes:
        seconds: The sum so far.
    """

    seconds: float = 0.0


@contextmanager
def timed_waits() -> Iterator[Waiting]:
    """Count the waiting time of all threads within the block.

    This is the time that the host is blocked: all of it with gloo, almost none with a backend that puts
    messages into the queue of a device.
    """
    waiting = Waiting()
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any) -> bool:
        start = time.perf_counter()
        try:
            return original(work, *args)
        finally:
            waiting.seconds += time.perf_counter() - start

    with mock.patch.object(dist.Work, "wait", wait):
        yield waiting
