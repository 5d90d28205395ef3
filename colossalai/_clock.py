"""Clock: the time functions of waits and deadlines, as one argument that a test can replace."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """Time functions for waits and their deadlines; the defaults are those of this machine.

    Attributes:
        now: Returns seconds, monotonic.
        sleep: Waits for a number of seconds.
        wait: Waits for an event, at most a number of seconds; returns whether the event is set.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait
