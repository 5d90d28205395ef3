"""Tests that mostly wait, run at the same time, each on hosts of its own.

A test of this kind is a function of a `Site`, decorated with `side_by_side`. The first one starts all that
were chosen, of all files, a few at a time; each then waits for its own and fails as it has failed. The names
of these files follow one another in the alphabet, so that no other test runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launcher.hosts.launch import Launch, launch
from tests.launcher.hosts.network import Network, skip_without_hosts

_AT_ONCE = 4

Body = Callable[["Site"], None]
Running = dict[Body, Future[None]]


class Site:
    """Two hosts, host1 and host2, and a folder; what was started there is ended with it.

    Args:
        network: The hosts.
        folder: Where jobs run.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder
        self._launches: list[Launch] = []

    def start(self, script: str, *args: str, hosts: str = "host1,host2") -> Launch:
        """Start a job on the hosts, without the checks before."""
        words = ("--no-preflight", "--host", hosts, *args, "job.py")
        self._launches.append(launch(self.network, self.folder, *words, script=script))
        return self._launches[-1]

    def start_driver(self, driver: str, script: str) -> Launch:
        """Start a program on host1 that starts the job."""
        self._launches.append(launch(self.network, self.folder, script=script, driver=driver))
        return self._launches[-1]

    def end(self) -> None:
        """End what runs, and the hosts."""
        for each in self._launches:
            each.end()
        self.network.close()


def side_by_side(body: Body) -> Callable[[Running], None]:
    """Make a test of a function that wants hosts of its own."""

    def test(running: Running) -> None:
        running[body].result()

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    test.body = body  # type: ignore[attr-defined]
    return test


def run_chosen(request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> Iterator[Running]:
    """Start the tests of this kind that were chosen; for a fixture of the session."""
    skip_without_hosts()
    functions = [getattr(item, "function", None) for item in request.session.items]
    bodies: list[Body] = [function.body for function in functions if hasattr(function, "body")]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="site") as pool:
        try:
            yield {body: pool.submit(_run, body, folders.mktemp(body.__name__[:30])) for body in bodies}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run(body: Body, folder: Path) -> None:
    site = Site(Network(2), folder)
    try:
        body(site)
    finally:
        site.end()
