"""Host lists: those of the command line, of host files, and of the allocation of a batch system.

A host is written `name`, `name:4` or, in a file, also `name slots=4`; everywhere a name may be a bracket
expression of SLURM, `node[1-3,7]`. A file that names bare hosts several times, as $PBS_NODEFILE does, has
one slot per line.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_HOSTS = 100_000  # of one bracket expression: a typing error must not fill the memory
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NAME = re.compile(r"(?:[\w.-]+@)?[A-Za-z0-9_:][\w.:%-]*")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True)
class Host:
    """One machine of a job."""

    name: str  # as ssh takes it
    slots: int | None = None  # processes; None if not given

    def __str__(self) -> str:
        """Return it as a host list has it."""
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_hosts(text: str, *, what: str = "--host") -> tuple[Host, ...]:
    """Read a list such as "host1,host2:4,node[1-3]".

    Args:
        text: The list.
        what: Its origin, for the error.

    Raises:
        ValueError: `text` is empty, a part of it is not a host, or a host is in it twice.
    """
    words = [word.strip() for word in _OUTER_COMMA.split(text)]
    try:
        hosts = [host for word in words if word for host in _hosts_of(word)]
        if not hosts:
            raise ValueError("it names no host; write for example host1,host2")
        _refuse_repeated(hosts)
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}") from error
    return tuple(hosts)


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a file with a host in each line: "name", "name:4" or "name slots=4"; "#" starts a comment.

    Raises:
        ValueError: The file cannot be read or names no host, or a line is wrong; the error names the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the host file {str(path)!r}: {error}") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, start=1):
        try:
            hosts += _hosts_of_line(line)
            _refuse_repeated(host for host in hosts if host.slots is not None)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not hosts:
        raise ValueError(f"{path} names no host; write one in each line: host1, host1:4 or host1 slots=4")
    return _count_lines(hosts, path)


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Return the names of SLURM's "gpu[01-03,7],login" in their order: gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        ValueError: A bracket is not closed, or holds other words than numbers and ranges.
    """
    return tuple(name for word in _OUTER_COMMA.split(text) if word.strip() for name in _expand(word.strip()))


def select_hosts(
    hosts: Sequence[Host], *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Host, ...]:
    """Return the hosts that are in `include`, or all but those in `exclude`, in their order.

    Raises:
        ValueError: `include` and `exclude` are both given, a name is not among `hosts`, or none is left.
    """
    if include and exclude:
        raise ValueError("--include and --exclude are alternatives; use one of them")
    known = [host.name for host in hosts]
    option, names = ("--include", include) if include else ("--exclude", exclude)
    for name in names:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, which is not among the hosts {', '.join(known)}")
    chosen = tuple(host for host in hosts if (host.name in names) == bool(include))
    if not chosen:
        raise ValueError(f"--exclude {','.join(exclude)} leaves no host of {', '.join(known)}")
    return chosen


def allocated_hosts(environment: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Return the hosts that SLURM or PBS has given to this job; none outside of an allocation.

    Raises:
        ValueError: The batch system's list cannot be read.
    """
    for variable in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environment.get(variable):
            return parse_hosts(environment[variable], what=f"${variable}")
    if environment.get("PBS_NODEFILE"):
        return read_hostfile(environment["PBS_NODEFILE"])
    return ()


def _hosts_of_line(line: str) -> list[Host]:
    words = line.partition("#")[0].split()
    if not words:
        return []
    hosts = [host for word in _OUTER_COMMA.split(words[0]) if word for host in _hosts_of(word)]
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key != "slots":
            raise ValueError(f"{word!r} is not understood; a line is: name, name:4 or name slots=4")
        if any(host.slots is not None for host in hosts):
            raise ValueError("the number of slots is given twice")
        hosts = [Host(host.name, _slots(value)) for host in hosts]
    return hosts


def _hosts_of(word: str) -> list[Host]:
    """Read one word: a name or a bracket expression, with ":slots" or without."""
    name, colon, number = word.rpartition(":")
    if not colon or ":" in name:  # several colons: an IPv6 address
        name, slots = word, None
    else:
        slots = _slots(number)
    return [Host(expanded, slots) for expanded in _expand(name)]


def _slots(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"slots={text!r} is not a number of processes; use 1 or more")
    return int(text)


def _expand(word: str) -> list[str]:
    brackets = _BRACKETS.search(word)
    if brackets is None:
        # A name that starts with "-" would be an option of ssh.
        if not _NAME.fullmatch(word):
            raise ValueError(f"{word!r} is not the name of a host; write for example node1 or node[1-3,7]")
        return [word]
    before, after = word[: brackets.start()], word[brackets.end() :]
    names = [f"{before}{number}{after}" for number in _numbers(brackets[1], word)]
    return [name for partial in names for name in _expand(partial)]  # there may be a second bracket


def _numbers(text: str, word: str) -> list[str]:
    """Return the numbers of "01-03,7" as they are written: 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} in {word!r} is neither a number nor a range such as 1-3")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MAX_HOSTS:
            raise ValueError(f"the range {part!r} in {word!r} is empty or has over {_MAX_HOSTS} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _refuse_repeated(hosts: Iterable[Host]) -> None:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise ValueError(
                f"the host {name!r} is named {count} times; to start several processes: {name}:{count}"
            )


def _count_lines(hosts: Sequence[Host], path: Path) -> tuple[Host, ...]:
    """Turn a name that is repeated in bare lines into one host with as many slots."""
    lines = Counter(host.name for host in hosts)
    if len(lines) == len(hosts):
        return tuple(hosts)
    if any(host.slots is not None for host in hosts):
        repeated = next(name for name, count in lines.items() if count > 1)
        raise ValueError(
            f"{path} names {repeated!r} in several lines and has numbers of slots as well; "
            "a host is repeated, or it has a number of slots, not both in one file"
        )
    return tuple(Host(name, count) for name, count in lines.items())
