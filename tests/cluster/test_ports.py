"""Ports: free ones are free, taken ones name their holder."""

import dataclasses
import datetime
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from colossalai.cluster import PortHolder, free_port, port_holder, port_is_free

pytestmark = pytest.mark.unit


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_a_free_port_can_be_bound():
    port = free_port()
    assert port_is_free(port)
    with socket.socket() as server:
        server.bind(("", port))


def test_a_taken_port_is_not_free_and_names_its_holder(listener: socket.socket):
    port = listener.getsockname()[1]
    assert not port_is_free(port)
    assert not port_is_free(port, "127.0.0.1")
    holder = port_holder(port)
    assert holder is not None
    assert (holder.port, holder.pid) == (port, os.getpid())
    assert holder.since < datetime.datetime.now()
    for part in (str(port), f"pid {os.getpid()}", holder.user, holder.name, str(holder.since.year)):
        assert part in holder.describe()


def test_the_near_end_of_a_connection_holds_its_port_too(listener: socket.socket):
    with socket.create_connection(listener.getsockname()) as client:
        holder = port_holder(client.getsockname()[1])
    assert holder is not None
    assert holder.pid == os.getpid()


def test_nobody_holds_a_free_port():
    assert port_holder(free_port()) is None


def test_a_holder_that_may_not_be_seen_is_none(listener: socket.socket, monkeypatch: pytest.MonkeyPatch):
    import psutil

    def refuse(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refuse)
    assert port_holder(listener.getsockname()[1]) is None


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int):
    with pytest.raises(ValueError, match=rf"port={port} is not a TCP port; use a number from 1 to 65535"):
        port_is_free(port)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ValueError, match=r"host='192\.0\.2\.1' is not an IPv4 address of this machine"):
        port_is_free(free_port(), "192.0.2.1")


def test_a_holder_is_a_value():
    holder = PortHolder(1, 2, "python", f"{sys.executable} train.py", "me", datetime.datetime(2026, 1, 31))
    with pytest.raises(dataclasses.FrozenInstanceError):
        holder.pid = 3  # type: ignore[misc]
    assert holder.describe() == (
        "port 1 is held by python (pid 2, user me, running since 2026-01-31 00:00:00): "
        f"{sys.executable} train.py"
    )
