"""Memory that another thread gives back: it lets go of a bucket some time after all have waited for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 120.0


def settled(look: Callable[[], T], is_settled: Callable[[T], bool], *, collects: bool = True) -> T:
    """Look until it is settled, for some minutes at most; return what was seen last.

    Args:
        look: Function that returns what is seen.
        is_settled: Whether that is settled.
        collects: Whether garbage is collected before each look; without it garbage is seen.
    """
    end = time.monotonic() + LIMIT_S
    while True:
        if collects:
            gc.collect()
        seen = look()
        if is_settled(seen) or time.monotonic() > end:
            return seen
        time.sleep(0.01)
