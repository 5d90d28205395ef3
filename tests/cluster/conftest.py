"""The hosts that the tests of a file share."""

from collections.abc import Iterator

import pytest

from tests.cluster.network import Network, make_network


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts: host1, host2 and host3."""
    hosts = make_network(3)
    yield hosts
    hosts.close()
