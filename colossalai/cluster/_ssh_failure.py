"""Why a node was not reached: the words of the ssh client and of the remote shell, made plain."""

import re

# What the client says, what it means, and what to do; the first that fits counts.
_CLIENT = (
    (
        r"Could not resolve hostname",
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
        r"Name or service not known|No address associated",
        "this machine does not know the name {host}",
        "mend the name, or add it to /etc/hosts, to the DNS or to ~/.ssh/config",
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


def explain_ssh(host: str, exit_code: int, words: str) -> tuple[str, str, str]:
    """Explain why the command on a host has ended before it began.

    Args:
        host: Its name.
        exit_code: 255 if ssh failed; else the remote shell's.
        words: What came on stderr.

    Returns:
        The check that failed ("ssh" or "interpreter"), what is wrong, and what to do.
    """
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {exit_code}, without a word"
    if exit_code in (126, 127):
        todo = "start from an interpreter that all hosts have under the same path"
        return "interpreter", f"cannot run the interpreter of this job: {last}", todo
    if exit_code == 255:
        for pattern, what, todo in _CLIENT:
            if re.search(pattern, words):
                said = next(line for line in lines if re.search(pattern, line))
                return "ssh", f"{what.format(host=host)} ({said})", todo.format(host=host)
        return "ssh", f"ssh has ended: {last}", f"try it by hand: ssh {host} true"
    return "interpreter", f"the interpreter of this job ends at once: {last}", f"try it by hand: ssh {host}"
