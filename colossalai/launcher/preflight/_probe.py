"""Probe of the pre-flight checks: the program that answers questions about its host.

It is sent there as source and run by the interpreter of the job (`_probe_client.py`), so that a host without
colossalai, or with another one, is examined by the same code as the others. Hence only the standard library
and `psutil`, which the package needs anyway, and nothing newer than Python 3.8. A question is a message `ask`
of the agents' protocol (`_protocol.py`), with a number, a name and arguments; the answer is a message
`answer`.
"""

# [Note: one thread per question]
# A file system that does not answer blocks its caller for ever, and signals have no effect; a name server or
# a driver can do the same. Each question therefore has a thread of its own, and a hang loses only its own
# answer. No code waits for these threads: when the connection ends, because the client has all answers or is
# gone, the process ends at once.

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

# By their full names: a module taken from the package would have the node import the package, if it has one.
from colossalai.cluster._ports import free_port, port_holder, port_is_free
from colossalai.launcher._protocol import ControllerLink
from colossalai.launcher.preflight._probe_network import (
    all_reduce,
    close,
    exchange,
    interfaces,
    listen,
    lookups,
)

_VERSION = re.compile(r"^__version__[^=\n]*=\s*['\"]([^'\"]+)", re.MULTILINE)
_PRIVILEGED = "ports below 1024 are for privileged users"


def serve() -> None:
    """Answer questions until the controller has ended the connection, or is gone."""
    # See [Note: one thread per question]: the link calls `answer` in one for each.
    link = ControllerLink({"ask": lambda query: answer(query, link)}, on_loss=lambda: os._exit(0))
    link.start()
    threading.Event().wait()


def answer(query: dict[str, Any], link: ControllerLink) -> None:
    """Send the answer to one question."""
    reply: dict[str, Any] = {"id": query["id"]}
    try:
        reply["answer"] = QUESTIONS[query["question"]](**query["arguments"])
    except BaseException as error:  # whatever it is: the asker shows it
        reply["error"] = f"{type(error).__name__}: {error}"
    link.send("answer", **reply)


def interpreter() -> dict[str, object]:
    """Return the version of Python and the name that the machine has for itself."""
    return {"python": platform.python_version(), "hostname": socket.gethostname()}


def packages(*, distributions: list[str], first_path: str) -> dict[str, str | None]:
    """Return the version of each package, None where it is not found; nothing is imported.

    Args:
        distributions: The packages.
        first_path: The first entry of the job's `sys.path`.
    """
    sys.path[0] = first_path
    return {name: _package_version(name) for name in distributions}


def _package_version(name: str) -> str | None:
    """Return the version that an import would give: the file next to the code, otherwise the metadata."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    for file in ("_version.py", "version.py"):
        path = os.path.join(os.path.dirname(spec.origin), file)
        if os.path.exists(path):
            with open(path) as text:
                found = _VERSION.search(text.read())
            if found:
                return found.group(1)
    return importlib.metadata.version(name)


def directory(*, path: str) -> dict[str, object]:
    """Return whether a directory exists, and whether this user can write to it."""
    return {"exists": os.path.isdir(path), "is_writable": os.access(path, os.W_OK | os.X_OK)}


def script(*, path: str) -> dict[str, object]:
    """Return the SHA-256 and the age of a file, or the reason why this user cannot read it."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        return {"error": error.strerror}
    return {"sha256": digest, "modified": os.path.getmtime(path)}


def module(*, name: str, first_path: str) -> dict[str, object]:
    """Return the path of the top-level package of a module; None if it is not found."""
    sys.path[0] = first_path
    spec = importlib.util.find_spec(name.partition(".")[0])
    return {"origin": None if spec is None else spec.origin or "a namespace package"}


def resolve(*, name: str) -> dict[str, object]:
    """Return the addresses of a name, and the line of /etc/hosts that has it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return {"addresses": [], "error": error.strerror, "hosts_line": None}
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return {"addresses": addresses, "hosts_line": _hosts_line(name)}


def _hosts_line(name: str) -> str | None:
    try:
        with open("/etc/hosts") as lines:
            for number, line in enumerate(lines, start=1):
                if name in line.partition("#")[0].split()[1:]:
                    return f"line {number} of /etc/hosts, {' '.join(line.split())!r}"
    except OSError:
        pass
    return None


def clock() -> float:
    """Return the time, in seconds since 1970."""
    return time.time()


def memory() -> dict[str, int]:
    """Return the memory that new processes can have, and all, in bytes; a container's limit counts."""
    import psutil

    now = psutil.virtual_memory()
    available, total = now.available, now.total
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            limit_bytes, used_bytes = int(limit.read()), int(used.read())
    except (OSError, ValueError):  # no such limit
        return {"available": available, "total": total}
    return {"available": min(available, limit_bytes - used_bytes), "total": min(total, limit_bytes)}


def disk(*, path: str) -> dict[str, int]:
    """Return free bytes by folder: working directory, temporary files, shared memory."""
    folders = [path, tempfile.gettempdir(), "/dev/shm"]
    return {folder: shutil.disk_usage(folder).free for folder in folders if os.path.isdir(folder)}


def devices() -> list[dict[str, object]]:
    """Return name, and free and total bytes, of each accelerator that its vendor's tool lists."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if listed.returncode != 0:
        raise OSError(f"nvidia-smi ends with {listed.returncode}: {listed.stdout.strip()}")
    return parse_devices(listed.stdout)


def parse_devices(text: str) -> list[dict[str, object]]:
    """Read lines of "name, free MiB, total MiB"; memory that a device does not report is None."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in text.splitlines() if line.strip()]
    return [
        {"name": name, "free": _mebibytes(free), "total": _mebibytes(total)} for name, free, total in rows
    ]


def _mebibytes(text: str) -> int | None:
    return int(text) * 2**20 if text.isdigit() else None


def port(*, number: int) -> dict[str, object]:
    """Return whether a port can be listened on, and its owner if not; a free one for number 0."""
    if number == 0:
        return {"port": free_port(), "is_free": True}
    try:
        if port_is_free(number):
            return {"port": number, "is_free": True}
    except PermissionError:
        return {"port": number, "is_free": False, "why": _PRIVILEGED, "pid": None, "other": free_port()}
    holder = port_holder(number)
    why = holder.describe() if holder else f"port {number} is held by a process that this user may not see"
    pid = holder.pid if holder else None
    return {"port": number, "is_free": False, "why": why, "pid": pid, "other": free_port()}


QUESTIONS: dict[str, Any] = {
    "interpreter": interpreter,
    "packages": packages,
    "directory": directory,
    "script": script,
    "module": module,
    "resolve": resolve,
    "clock": clock,
    "memory": memory,
    "disk": disk,
    "devices": devices,
    "port": port,
    "interfaces": interfaces,
    "lookups": lookups,
    "listen": listen,
    "exchange": exchange,
    "close": close,
    "all_reduce": all_reduce,
}
