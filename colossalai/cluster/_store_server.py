"""Where a job on one machine listens: on its loopback, for its store and for gloo.

torch's store and gloo listen on every interface, or on the one that the host's name leads to, and ask nobody
who connects for a password. Where all ranks are on one machine nobody else has to reach them: the store gets
a socket that is bound to the loopback already, and gloo is told its interface.
"""

import errno
import ipaddress
import os
import platform
import socket
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from colossalai.cluster._socket_interface import GLOO

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 2048
_IS_UP, _IS_LOOPBACK = 0x1, 0x8  # of an interface's flags


def is_loopback(host: str) -> bool:
    """Return whether an address, as it is written, leads no further than this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_store(host: str, port: int, *, timeout: timedelta = _TIMEOUT) -> dist.TCPStore:
    """Open the server of a store, and return a client of it; for several users within the process.

    Args:
        host: An address or a name of this machine; on a loopback address only this machine can reach it.
        port: 0 is any free one.
        timeout: That of the client.

    Raises:
        DistNetworkError: The port is taken.
    """
    listener = _listener(host, port) if is_loopback(host) else None
    if listener is not None:
        port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens; None where the port is taken, if only by this very process's store."""
    address = LOOPBACK if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise dist.DistNetworkError(f"cannot listen at {address}:{port}: {error}") from error
    return listener


def network_of_this_process() -> str:
    """Return what is the same for processes that share a loopback, and for no others."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return f"process {os.getpid()} of {platform.node()}"


def keep_gloo_here(networks: Collection[bytes]) -> bool:
    """Have the gloo groups that are made from now on listen on the loopback, if all ranks share it.

    Args:
        networks: `network_of_this_process` of each rank, as the store gives it.

    Returns:
        Whether the environment was changed for that; the user's own choice of an interface stays.
    """
    name = _loopback_interface()
    if GLOO in os.environ or not name or len(set(networks)) != 1:
        return False
    os.environ[GLOO] = name
    return True


def let_gloo_choose() -> None:
    """Undo `keep_gloo_here`."""
    os.environ.pop(GLOO, None)


def _loopback_interface() -> str:
    for _, name in socket.if_nameindex():
        with suppress(OSError, ValueError):
            flags = int(Path("/sys/class/net", name, "flags").read_text(), 16)
            if flags & _IS_UP and flags & _IS_LOOPBACK:
                return name
    return ""
