"""Network probe: the interfaces of a host, and whether data gets from it to the other hosts.

Sent to the node as source, as `_probe.py` is, and under the same restrictions.

What gloo does when a process group is made, plain sockets do here, in milliseconds and without torch: every
node listens at its address on the interface, connects to every other one *from* that address, and both
sides send a payload. All ordered pairs are tried, since a firewall may let connections pass in one direction
only. A greeting of 16 bytes goes first: if it arrives and the payload does not, full packets are lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable

PAYLOAD = bytes(range(256)) * 1024  # 256 KiB: many packets of any size that networks have
_CONNECT_S = 2.0
_LOOKUP_S = 1.0  # the name of an address; more is too long, however long
_SILENCE_S = 2.0  # nothing received for so long: it will not come

_listeners: list[socket.socket] = []


def interfaces(*, toward: str) -> dict[str, object]:
    """Return the network interfaces, and the address from which this node would send to another.

    Args:
        toward: The name or address of the other node.

    Returns:
        `interfaces`: addresses, MTU and state by name; `source`: the address, None where there is no way.
    """
    import psutil

    stats = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        internet = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        state = stats.get(name)
        found[name] = {
            "addresses": [address.partition("%")[0] for address in internet],
            "mtu": state.mtu if state else None,
            "is_up": bool(state and state.isup),
        }
    return {"interfaces": found, "source": _source(toward)}


def _source(toward: str) -> str | None:
    """Return the source address of the system's route; no packet is sent."""
    try:
        family, _, _, _, end = socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(end)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def lookups(
    *, addresses: list[str], limit_s: float = _LOOKUP_S, now: Callable[[], float] = time.monotonic
) -> dict[str, float | None]:
    """Return how many seconds it takes to find the name of each address; None where it takes too long.

    torch's store looks up the name of each peer that it accepts, and waits. It listens on IPv6, where an
    IPv4 peer has the mapped form of its address, which most hosts files lack: it then queries a name server.
    A lookup cannot be broken off; one that takes too long goes on in its thread, which nothing waits for.

    Args:
        addresses: IPv4 addresses.
        limit_s: Seconds from which on a lookup takes too long.
        now: Returns the time of a lookup's beginning or end, in seconds.
    """
    seconds: dict[str, float | None] = dict.fromkeys(addresses)

    def one(address: str) -> None:
        began = now()
        with contextlib.suppress(OSError):  # it has no name: torch goes on, too
            socket.getnameinfo((mapped(address), 0, 0, 0), 0)
        seconds[address] = now() - began

    threads = [threading.Thread(target=one, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(seconds)


def mapped(address: str) -> str:
    """Return an IPv4 address as a socket of IPv6 has it."""
    return "::ffff:" + address


def listen(*, address: str, port: int, token: str) -> int:
    """Wait for the other nodes, in the background, until `close`.

    Args:
        address: Address to listen on; "" is every address.
        port: Port to listen on; 0 is any free port.
        token: 16 characters that identify the nodes of this check.

    Returns:
        The port.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, backlog=512)
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    else:
        server = socket.create_server(("", port), backlog=512)
    _listeners.append(server)
    threading.Thread(target=_accept, args=(server, token.encode()), daemon=True).start()
    return int(server.getsockname()[1])


def _accept(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        threading.Thread(target=_serve_peer, args=(connection, token), daemon=True).start()


def _serve_peer(connection: socket.socket, token: bytes) -> None:
    with connection:
        connection.settimeout(_SILENCE_S)
        try:
            if _receive(connection, len(token)) != token:
                return  # a stranger
            connection.sendall(token)
            if _receive(connection, len(PAYLOAD)) == PAYLOAD:
                connection.sendall(PAYLOAD)
            # The other side closes first and keeps the port in its own memory for a minute, not we.
            connection.recv(1)
        except OSError:
            pass  # the other side sees it too, and reports


def exchange(
    *, targets: list[tuple[str, int]], source_address: str | None, token: str
) -> list[dict[str, object] | None]:
    """Connect to every target and exchange the payload; all at once.

    Args:
        targets: Address and port of each.
        source_address: The address to connect from; the system's choice without one.
        token: As `listen` has it.

    Returns:
        For each target `stage`, the last thing that was reached ("name", "connect", "greet", "payload" or
        "done"), `error`, and `seconds`.
    """
    results: list[dict[str, object] | None] = [None] * len(targets)

    def one(index: int) -> None:
        began = time.monotonic()
        stage, error = _exchange_with(targets[index], source_address, token.encode())
        results[index] = {"stage": stage, "error": error, "seconds": time.monotonic() - began}

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _exchange_with(
    target: tuple[str, int], source_address: str | None, token: bytes
) -> tuple[str, str | None]:
    """Return the stage that failed, or "done", and the error."""
    stage = "connect"
    try:
        bound = (source_address, 0) if source_address else None
        with socket.create_connection((target[0], target[1]), _CONNECT_S, bound) as connection:
            stage = "greet"
            connection.settimeout(_SILENCE_S)
            connection.sendall(token)
            if _receive(connection, len(token)) != token:
                return stage, "stranger"
            stage = "payload"
            connection.sendall(PAYLOAD)
            if _receive(connection, len(PAYLOAD)) != PAYLOAD:
                return stage, "incomplete"
    except OSError as error:
        return stage, _name_of(error)
    return "done", None


def _name_of(error: OSError) -> str:
    if isinstance(error, socket.timeout):
        return "ETIMEDOUT"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return errno.errorcode.get(error.errno or 0, str(error))


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or fewer where the other side has closed."""
    pieces = []
    while size > 0:
        piece = connection.recv(size)
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def close() -> None:
    """Stop listening."""
    while _listeners:
        server = _listeners.pop()
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts, which a close does not
        server.close()


def all_reduce(*, rank: int, world_size: int, address: str, port: int, interface: str | None) -> float:
    """Add a vector over all nodes with torch and gloo, as a job would; the only check that imports torch.

    Returns:
        Seconds of one all-reduce of a million float32 numbers, the second of two.
    """
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    host = f"[{address}]" if ":" in address else address
    timeout = datetime.timedelta(seconds=20.0)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world_size, timeout=timeout
    )
    expected = world_size * (world_size + 1) / 2
    for _ in range(2):
        vector = torch.full((2**20,), float(rank + 1))
        began = time.monotonic()
        dist.all_reduce(vector)
        seconds = time.monotonic() - began
        if not bool((vector == expected).all()):
            raise ArithmeticError(f"the sum is {float(vector[0])}, it should be {expected}")
    dist.barrier()
    dist.destroy_process_group()
    return seconds
