"""The hosts that the tests of a file share, and SLURM on them."""

from collections.abc import Iterator

import pytest

from tests.launcher.hosts.network import Network, make_network
from tests.launcher.hosts.side_by_side import Running, run_chosen
from tests.launcher.hosts.slurm import Slurm
from tests.launcher.hosts.slurm import reason_to_skip as reason_against_slurm


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts: host1, host2 and host3."""
    hosts = make_network(3)
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def slurm(network: Network) -> Slurm:
    """SLURM on host1 and host2; it ends with the hosts."""
    if reason := reason_against_slurm():
        pytest.skip(reason)
    return Slurm(network)


@pytest.fixture(scope="session")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The tests that run side by side."""
    yield from run_chosen(request, tmp_path_factory)
