"""ssh command lines for other hosts, and the meaning of the ssh client's messages.

The system's own client is used with the user's configuration (aliases, keys, agents, jump hosts).
"""

import re
import shlex
import socket
from collections.abc import Sequence

CONNECT_S = 10  # until an unreachable host is given up
ALIVE_S = 5  # between two questions of ssh's own whether the other side is there
ALIVE_COUNT = 3  # questions without an answer after which ssh ends; without this it hangs when a link dies

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def ssh_command(host: str, argv: Sequence[str], *, port: int | None = None) -> list[str]:
    """Return the command that runs `argv` on `host`, word by word as given, with any characters.

    ssh asks no question (BatchMode): a host that wants a password fails at once.

    Args:
        host: As ssh takes it: a name, an address, "user@name", or an alias of the user's ssh config.
        argv: The words of the command; the remote shell sees each of them quoted.
        port: Port of sshd; default: from the user's ssh config.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_S,
        "ServerAliveInterval": ALIVE_S,
        "ServerAliveCountMax": ALIVE_COUNT,
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    if port is not None:
        words += ["-p", str(port)]
    return ["ssh", "-T", *words, "--", host, shlex.join(argv)]


def is_this_machine(host: str, *, port: int | None = None) -> bool:
    """Return whether `host` certainly is this machine, so that no ssh is needed.

    It is if it is this machine's own name. "localhost" is, too, unless an ssh port is given: then it may be
    the near end of a tunnel. Of an alias or an address nothing is sure: ssh reads the user's ssh config.
    """
    own = socket.gethostname()
    return host in (own, own.partition(".")[0]) or (host in _LOOPBACK and port is None)


def command_on(host: str, argv: Sequence[str], *, port: int | None = None) -> list[str]:
    """Return the command that runs `argv` on `host`: over ssh, or as it is where `host` is this machine."""
    return list(argv) if is_this_machine(host, port=port) else ssh_command(host, argv, port=port)


# Message of the client, its meaning, and the remedy; the first match counts.
_CLIENT = (
    (
        r"Could not resolve hostname|Name or service not known|No address associated",
        "this machine does not know the name {host}",
        "mend the name, or add it to /etc/hosts, to the DNS or to ~/.ssh/config",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its ssh host key is not the one that this machine knows: it is newly installed, or another machine",
        "if that is expected: ssh-keygen -R {host}, then ssh {host} once by hand",
    ),
    (
        r"Host key verification failed|host key is known for",
        "its ssh host key is not known here",
        "log in once by hand, compare the fingerprint and accept it: ssh {host}",
    ),
    (
        r"Too many authentication failures",
        "it refuses to log in: the ssh agent offered too many keys before the right one",
        "name the key in ~/.ssh/config: IdentityFile FILE and IdentitiesOnly yes for Host {host}",
    ),
    (
        r"Permission denied",
        "it refuses to log in without a password",
        "install your key there: ssh-copy-id {host} (and ssh-add, if the key has a passphrase)",
    ),
    (
        r"Connection refused",
        "the machine answers, but nothing listens on its ssh port",
        "start sshd there, or give its port: --ssh-port",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it cannot be reached",
        "see whether it is on and on this network, or leave it out: --exclude {host}",
    ),
    (
        r"kex_exchange_identification|Connection (closed|reset)|banner exchange",
        "its sshd takes the connection and ends it",
        "look for MaxStartups, AllowUsers and full disks in the log of sshd on {host}",
    ),
)


def explain_ssh(host: str, exit_code: int, stderr: str) -> tuple[str, str, str]:
    """Explain why the command on a host has ended before it began.

    Args:
        host: Its name.
        exit_code: 255 if ssh failed; else the remote shell's.
        stderr: Its stderr.

    Returns:
        The check that failed ("ssh" or "interpreter"), the problem, and the remedy.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {exit_code}, without a word"
    if exit_code < 0:  # we have killed the client
        return "ssh", last, f"see whether its network is well: ssh {host} true"
    if exit_code in (126, 127):
        todo = "start from an interpreter that all hosts have under the same path"
        return "interpreter", f"cannot run the interpreter of this job: {last}", todo
    if exit_code == 255:
        for pattern, what, todo in _CLIENT:
            if re.search(pattern, stderr):
                message = next(line for line in lines if re.search(pattern, line))
                return "ssh", f"{what.format(host=host)} ({message})", todo.format(host=host)
        return "ssh", f"ssh has ended: {last}", f"try it by hand: ssh {host} true"
    return "interpreter", f"the interpreter of this job ends at once: {last}", f"try it by hand: ssh {host}"
