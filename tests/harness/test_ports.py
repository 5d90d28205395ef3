"""Ports of jobs: one that is reserved or in use is given to no other job."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.harness.ports import PORTS, PortReservation, reserved_port
from tests.ranks import ROOT

pytestmark = pytest.mark.unit


def test_a_reserved_port_is_free_to_bind_and_reserved_for_others() -> None:
    with reserved_port() as port:
        assert port in PORTS
        with socket.create_server(("127.0.0.1", port)):
            pass
        with pytest.raises(RuntimeError, match="no port is free"):
            PortReservation(iter([port]))
        code = f"from tests.harness.ports import PortReservation as P; P(iter([{port}]))"
        other = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "no port is free" in other.stderr
    PortReservation(iter([port])).close()


def test_a_port_in_use_is_not_reserved() -> None:
    with reserved_port() as port, socket.create_server(("127.0.0.1", port)):
        pass
    with reserved_port() as other, reserved_port() as port, socket.create_server(("", other)):
        reservation = PortReservation(iter([other, port, *PORTS]))
        assert reservation.port not in (other, port)
        reservation.close()
