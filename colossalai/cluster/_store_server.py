"""Store server: the TCPStore for the rendezvous of ranks, and the addresses of it and gloo on a machine.

torch's store and gloo listen on every interface, or on the interface of the host's name, without
authentication. If all ranks are on one machine, no other machine has to reach them: the store gets a socket
that is bound to the loopback already, and gloo gets its interface.

[Note: one time limit]
torch's client of a store has no time limit: a lookup takes as long as the name server, a server that accepts
and sends nothing blocks it for ever, and at a failure it spends seconds on writing C++ stacks to stderr. So a
joining rank first tests with plain sockets whether a server listens, and torch's client, which then finds
one,
runs in a thread. After a timeout the thread is abandoned: nothing ends a lookup, or a call of compiled code.
"""

import errno
import ipaddress
import os
import platform
import select
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from colossalai._clock import Clock
from colossalai.cluster._ports import GLOO, LOOPBACK
from colossalai.monitor import kernel_and_namespace

_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 2048
_IS_UP, _IS_LOOPBACK = 0x1, 0x8  # flags of an interface


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
        timeout: Timeout of the client.

    Raises:
        DistNetworkError: `port` is taken.
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
    """Return a value shared by exactly the processes with one loopback."""
    kernel, namespace = kernel_and_namespace("net")
    return f"{kernel} {namespace}" if namespace else f"process {os.getpid()} of {platform.node()}"


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


_T = TypeVar("_T")
_PAUSE_S = 0.05  # between two tries: rank 0 may come at any moment
_CLOCK = Clock()
_FIRST_WORD_S = 0.005  # a proxy whose other end is not there yet closes the connection, an sshd greets


def wait_for_name(host: str, port: int, *, deadline: float, clock: Clock = _CLOCK) -> list[Any]:
    """Wait until a name is known, and return its addresses as `socket.getaddrinfo` does.

    Args:
        host: A name or an address.
        port: The port for the addresses.
        deadline: Until when, by `clock`.
        clock: The clock of the wait.

    Raises:
        ConnectionError: `host` is not known by `deadline`; the message has the reason.
    """
    reason = "no time was left to look the name up"
    while (left := deadline - clock.now()) > 0:
        try:
            return within(left, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), clock=clock)
        except TimeoutError:
            reason = f"the name server does not say what {host!r} is"
        except (OSError, UnicodeError) as error:  # names of pods and services may come later than processes
            reason = f"the name {host!r} is not known: {getattr(error, 'strerror', None) or error}"
        _pause(deadline, clock)
    raise ConnectionError(reason)


def wait_for_server(
    host: str, port: int, *, deadline: float, first_word_s: float = _FIRST_WORD_S, clock: Clock = _CLOCK
) -> None:
    """Wait until a server listens at an address that waits for data of its clients, as a store does.

    Args:
        host: Its name or address.
        port: Its port.
        deadline: Until when, by `clock`.
        first_word_s: Seconds in which another program than a store sends or closes.
        clock: The clock of the wait.

    Raises:
        ConnectionError: No server listens at the address by `deadline`; the message has the reason.
    """
    reason = ""
    while True:
        for family, kind, protocol, _, address in wait_for_name(host, port, deadline=deadline, clock=clock):
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.settimeout(max(_PAUSE_S, deadline - clock.now()))
                    trial.connect(address)
                    if not select.select([trial], [], [], first_word_s)[0]:
                        return
                    closes = not trial.recv(1)
                    reason = "it closes the connection" if closes else "it is another program that listens"
            except TimeoutError:
                reason = "the machine does not answer"
            except OSError as error:
                reason = error.strerror or str(error)
        _pause(deadline, clock)
        if clock.now() >= deadline:
            raise ConnectionError(reason)


def within(seconds: float, call: Callable[[], _T], *, clock: Clock = _CLOCK) -> _T:
    """Return the result of a call, if it returns in time.

    Args:
        seconds: Time limit; the thread is then abandoned.
        call: A function that releases Python's lock while it waits.
        clock: The clock of the time limit.

    Raises:
        TimeoutError: `call` has not returned by then.
    """
    answer: Future[_T] = Future()
    has_returned = threading.Event()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        has_returned.set()

    threading.Thread(target=run, daemon=True, name="colossalai-reach").start()
    if not clock.wait(has_returned, max(seconds, 0.0)):
        raise TimeoutError
    return answer.result()


def _pause(deadline: float, clock: Clock) -> None:
    clock.sleep(max(0.0, min(_PAUSE_S, deadline - clock.now())))
