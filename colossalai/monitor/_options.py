"""Watchdog options: from a config, from the environment, or the default."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TIMEOUT_VARIABLE = "COLOSSALAI_WATCHDOG_TIMEOUT"
ACTIONS = ("end", "report")
NOTICE_S = 60.0

_SHARE = 0.9  # of the timeout of the process groups: the report comes before their error
_POLLS = 10  # looks until the notice, or the report
_LEAST_POLL_S, _MOST_POLL_S = 0.05, 5.0


@dataclass(frozen=True, kw_only=True)
class WatchdogOptions:
    """Time limits for waits of ranks for one another, and the action at the limit.

    Attributes:
        timeout: Seconds that a collective may take; with `watches_steps`, a section of a step as well.
        action: "end" ends the job after the report, "report" lets it go on.
        folder: Folder of the report.
        watches_steps: Whether steps that do not wait for other ranks are watched.
        notice: Seconds after which a line names waiting and missing ranks; none if the report is earlier.
    """

    timeout: float
    notice: float = NOTICE_S
    action: str = "end"
    folder: str = "."
    watches_steps: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"watchdog.timeout is {self.timeout!r}; it must be a positive number of seconds")
        if not 0 < self.notice < float("inf"):
            raise ValueError(f"watchdog.notice is {self.notice!r}; it must be a positive number of seconds")
        if self.action not in ACTIONS:
            raise ValueError(f"watchdog.action is {self.action!r}; it must be one of {', '.join(ACTIONS)}")

    @property
    def poll_s(self) -> float:
        """Seconds between two looks."""
        soonest = min(self.timeout, self.notice)
        return min(max(soonest / _POLLS, _LEAST_POLL_S), _MOST_POLL_S)

    @property
    def grace_s(self) -> float:
        """Seconds that the others have for an answer."""
        return 2 * self.poll_s + 1.5


def watchdog_options(
    written: Mapping[str, Any] | bool | None, *, group_timeout: float, world_size: int
) -> WatchdogOptions | None:
    """Return the options of a job, None without a watchdog.

    The environment's timeout takes precedence over the config's, since the user who starts a job can adapt
    it.

    Args:
        written: The config's value of `watchdog`; False is off.
        group_timeout: Seconds after which the communication library gives up by itself.
        world_size: Number of ranks; a single rank is watched on request only.

    Raises:
        ValueError: The environment variable or an option is not a positive number of seconds, or `action` is
            unknown.
    """
    options = dict(written) if isinstance(written, Mapping) else {}
    timeout = environment_timeout()
    if timeout is None:
        timeout = options.get("timeout")
    if timeout == 0 or (written is False and timeout is None):
        return None
    options.pop("timeout", None)
    if timeout is not None:
        return WatchdogOptions(timeout=float(timeout), **options)
    if world_size == 1:
        return None
    return WatchdogOptions(timeout=_SHARE * group_timeout, watches_steps=False, **options)


def environment_timeout() -> float | None:
    """Return the timeout of the environment, None without one.

    Raises:
        ValueError: The environment variable is not a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(
            f"the environment variable {TIMEOUT_VARIABLE} is {text!r}; it must be a number of seconds, or 0 "
            "for no watchdog"
        )
    return seconds
