"""A server within a time limit: is somebody there, and does a call end in time?

[Note: one time limit]
torch's client of a store keeps no limit: it looks the name up as long as the name server takes, it waits for
ever for a server that accepts and says nothing, and where it gives up it spends seconds on writing C++ stacks
to stderr. So whoever joins looks first, by plain sockets, whether somebody listens there yet, and torch's
client, which then finds a server, runs in a thread. A thread that is given up is left behind: nothing ends a
lookup, or a call of compiled code.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_PAUSE_S = 0.05  # between two tries: rank 0 may come at any moment
_FIRST_WORD_S = 0.005  # a proxy whose other end is not there yet closes the connection, an sshd greets


def wait_for_name(host: str, port: int, *, deadline: float) -> list[Any]:
    """Wait until a name is known, and return its addresses as `socket.getaddrinfo` does.

    Args:
        host: A name or an address.
        port: The port for the addresses.
        deadline: Until when, by `time.monotonic`.

    Raises:
        ConnectionError: The name is not known by then; the message says why.
    """
    reason = "no time was left to look the name up"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return within(left, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except TimeoutError:
            reason = f"the name server does not say what {host!r} is"
        except (OSError, UnicodeError) as error:  # names of pods and services may come later than processes
            reason = f"the name {host!r} is not known: {getattr(error, 'strerror', None) or error}"
        _pause(deadline)
    raise ConnectionError(reason)


def wait_for_server(host: str, port: int, *, deadline: float) -> None:
    """Wait until something listens at an address that waits for its clients to speak, as a store does.

    Args:
        host: Its name or address.
        port: Its port.
        deadline: Until when, by `time.monotonic`.

    Raises:
        ConnectionError: Nothing does by then; the message says why.
    """
    reason = ""
    while True:
        for family, kind, protocol, _, address in wait_for_name(host, port, deadline=deadline):
            try:
                with socket.socket(family, kind, protocol) as trial:
                    trial.settimeout(max(_PAUSE_S, deadline - time.monotonic()))
                    trial.connect(address)
                    if not select.select([trial], [], [], _FIRST_WORD_S)[0]:
                        return
                    closes = not trial.recv(1)
                    reason = "it closes the connection" if closes else "it is another program that listens"
            except TimeoutError:
                reason = "the machine does not answer"
            except OSError as error:
                reason = error.strerror or str(error)
        _pause(deadline)
        if time.monotonic() >= deadline:
            raise ConnectionError(reason)


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Return what a call returns, if it does so in time.

    Args:
        seconds: How long it may take; its thread is left behind then.
        call: Takes no lock of Python's while it waits.

    Raises:
        TimeoutError: It has not returned.
    """
    answer: Future[_T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="colossalai-reach").start()
    return answer.result(max(seconds, 0.0))


def _pause(deadline: float) -> None:
    time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))
