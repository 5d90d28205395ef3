"""TCP ports and network interfaces: free ports, owners of ports, interfaces selected by a variable.

A port that is free now can be taken a moment later. So these functions are for selection and error messages;
code that needs certainty binds the port and handles the refusal.

The pre-flight checks send this file to other machines (see `_probe.py`): no import of ours at the top, and
nothing that is newer than Python 3.8.
"""

from __future__ import annotations

import datetime
import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # the user's selection of interfaces


@dataclass(frozen=True)
class PortHolder:
    """The process that holds a port."""

    port: int
    pid: int
    name: str
    cmdline: str
    user: str
    since: datetime.datetime  # when the process started

    def describe(self) -> str:
        """Describe the owner of the port in one sentence."""
        return (
            f"port {self.port} is held by {self.name} (pid {self.pid}, user {self.user}, "
            f"running since {self.since:%Y-%m-%d %H:%M:%S}): {self.cmdline}"
        )


def free_port() -> int:
    """Return a TCP port that nothing on this machine uses at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def port_is_free(port: int, host: str = "") -> bool:
    """Return whether a server could listen on `port` now.

    Args:
        port: From 1 to 65535.
        host: The address to listen on; all addresses of the machine if not given.

    Raises:
        ValueError: The port is out of range, or the host is not an address of this machine.
        PermissionError: The system lets only privileged users listen on this port.
    """
    if not 1 <= port <= 65535:
        raise ValueError(f"port={port} is not a TCP port; use a number from 1 to 65535")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As servers do: connections of a server that has just ended do not block its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            if isinstance(error, PermissionError):
                raise
            raise ValueError(f"host={host!r} is not an IPv4 address of this machine: {error}") from error
    return True


def holder_of(port: int) -> str:
    """Describe the owner of a taken port in one sentence."""
    holder = port_holder(port)
    return holder.describe() if holder else f"port {port} is held by a process that this user may not see"


def port_holder(port: int) -> PortHolder | None:
    """Return the process that owns `port`, None if there is none or it is not visible.

    Processes of other users are visible to a privileged user only.
    """
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    holders = [c for c in connections if c.pid is not None and c.laddr and c.laddr.port == port]
    # A listener is the likely one; but the near end of an open connection blocks its port, too.
    for connection in sorted(holders, key=lambda c: c.status != psutil.CONN_LISTEN):
        try:
            process = psutil.Process(connection.pid)
            with process.oneshot():
                return PortHolder(
                    port=port,
                    pid=process.pid,
                    name=process.name(),
                    cmdline=" ".join(process.cmdline()),
                    user=process.username(),
                    since=datetime.datetime.fromtimestamp(process.create_time()),
                )
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended in this moment, or is not ours to look at
    return None


def chosen_interfaces(variable: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that a variable with this value chooses, in the order of its preference."""
    if variable == GLOO:
        return [name for name in value.split(",") if name in interfaces]
    is_excluding = value.startswith("^")
    value = value.removeprefix("^")
    is_exact = value.startswith("=")
    wanted = [word for word in value.removeprefix("=").split(",") if word]
    matching = [
        name
        for word in wanted
        for name in interfaces
        if name == word or (not is_exact and name.startswith(word))
    ]
    if is_excluding:
        return [name for name in interfaces if name not in matching]
    return list(dict.fromkeys(matching))
