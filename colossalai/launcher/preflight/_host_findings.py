"""Host findings: versions, files, clocks, memory and devices, judged from the answers of all hosts.

Every function takes the answers to one question and returns a finding for every queried host, without
connecting to it.
"""

import datetime
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from colossalai.launcher.preflight._findings import (
    Answers,
    Finding,
    failed,
    fine,
    prevailing,
    unanswered,
    values_of,
    warning,
)

_MIB, _GIB = 2**20, 2**30
# A rank that has imported torch and the package holds about this much before it has a model.
_RANK_BYTES = _GIB // 2
_DISK_BYTES = 64 * _MIB  # below it not even logs fit
_DISK_WARNING_BYTES = _GIB  # below it hardly a checkpoint fits
_SHM_WARNING_BYTES = 128 * _MIB  # containers often have 64 MiB; data loader workers die of it
# torch's elastic rendezvous takes a node for dead that has not been heard of for 15 s by the other's clock.
_SKEW_FAILED_S = 10.0
_SKEW_WARNING_S = 1.0  # above it time stamps of logs, and thus the first failure, cannot be compared


def check_versions(interpreters: Answers, packages: Answers, python: str) -> Iterator[Finding]:
    """Check that Python, torch and colossalai are those that most hosts have."""
    yield from unanswered("versions", packages)
    pythons, known = values_of(interpreters), values_of(packages)
    if not known:
        return
    versions = {host: {"Python": pythons[host]["python"], **known[host]} for host in known}
    names = list(next(iter(versions.values())))
    for host, have in versions.items():
        problems = []
        for name in names:
            by_host = {other: each[name] for other, each in versions.items() if each[name] is not None}
            source, wanted = prevailing(by_host) if by_host else ("", None)
            if have[name] is None:
                which = f" {wanted}" if wanted else ""
                todo = f"install {name}{which} for {python} there"
                problems.append(failed(host, "versions", f"{name} is not installed", todo))
            elif have[name] != wanted:
                what = f"{name} is {have[name]}, {source} has {wanted}"
                problems.append(failed(host, "versions", what, f"install {name} {wanted} there"))
        listed = ", ".join(f"{name} {version}" for name, version in have.items())
        yield from problems or [fine(host, "versions", listed)]


def check_directory(answers: Answers, path: str) -> Iterator[Finding]:
    """Check that the working directory is there."""
    yield from unanswered("directory", answers)
    for host, found in values_of(answers).items():
        if not found["exists"]:
            todo = "create it there, or start from a directory that all hosts have"
            yield failed(host, "directory", f"there is no directory {path}", todo)
        elif not found["is_writable"]:
            todo = f"chmod or chown it there, if the job writes into it: ssh {host} ls -ld {path}"
            yield warning(host, "directory", f"this user may not write into {path}", todo)
        else:
            yield fine(host, "directory", path)


def check_script(answers: Answers, path: str, own: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Check that the script exists, with the same content as on this machine.

    Args:
        answers: The answers of the hosts.
        path: The script.
        own: The same answer for this machine; None if it has no such file. Then most hosts decide.
    """
    yield from unanswered("script", answers)
    found = values_of(answers)
    readable = {host: each["sha256"] for host, each in found.items() if "error" not in each}
    source, wanted = (
        ("this machine", own["sha256"]) if own else prevailing(readable) if readable else ("", "")
    )
    for host, script in found.items():
        copy = f"copy it there: scp {path} {host}:{path}"
        if "error" in script:
            yield failed(host, "script", f"cannot read {path}: {script['error']}", copy)
        elif script["sha256"] != wanted:
            written = datetime.datetime.fromtimestamp(script["modified"])
            what = f"{path} is not the one that {source} has (it was written {written:%Y-%m-%d %H:%M:%S})"
            yield failed(host, "script", what, copy)
        else:
            yield fine(host, "script", f"{path}, SHA-256 {wanted[:12]}")


def check_module(answers: Answers, name: str) -> Iterator[Finding]:
    """Check that the package of the module is found."""
    yield from unanswered("script", answers)
    for host, found in values_of(answers).items():
        if found["origin"] is None:
            package = name.partition(".")[0]
            todo = "install it there, copy its folder, or set PYTHONPATH"
            yield failed(host, "script", f"there is no module {package}", todo)
        else:
            yield fine(host, "script", f"{name} from {found['origin']}")


def check_clock(answers: Answers) -> Iterator[Finding]:
    """Check that the clocks agree, with the middle one of three or more, else with the first host's."""
    yield from unanswered("clock", answers)
    offsets = {
        host: answer.value - answer.midpoint for host, answer in answers.items() if answer.error is None
    }
    if not offsets:
        return
    first, first_offset = next(iter(offsets.items()))
    is_many = len(offsets) > 2
    middle = statistics.median(offsets.values()) if is_many else first_offset
    others = "those of the other hosts" if is_many else f"that of {first}"
    doubts = {host: answers[host].doubt_s for host in offsets}
    for host, offset in offsets.items():
        skew = offset - middle
        surely = abs(skew) - doubts[host] - (0.0 if host == first else doubts[first])
        what = f"the clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} {others}"
        todo = f"synchronize it: ssh {host} chronyc makestep (or ntpdate, timedatectl set-ntp true)"
        if surely > _SKEW_FAILED_S:
            yield failed(host, "clock", what, todo)
        elif surely > _SKEW_WARNING_S:
            yield warning(host, "clock", what, todo)
        else:
            yield fine(host, "clock", f"the same within {max(_SKEW_WARNING_S / 10, doubts[host]):.1f} s")


def check_memory(answers: Answers, num_procs: Mapping[str, int]) -> Iterator[Finding]:
    """Check that the ranks of each host can at least start."""
    yield from unanswered("memory", answers)
    for host, memory in values_of(answers).items():
        needed = num_procs[host] * _RANK_BYTES
        state = f"{memory['available'] / _GIB:.1f} of {memory['total'] / _GIB:.1f} GiB are free"
        if memory["available"] < needed:
            what = f"{state}, {num_procs[host]} ranks need {needed / _GIB:.1f} GiB before they have a model"
            yield failed(host, "memory", what, f"see what holds it: ssh {host} ps aux --sort=-rss")
        else:
            yield fine(host, "memory", state)


def check_disk(answers: Answers) -> Iterator[Finding]:
    """Check that something can be written."""
    yield from unanswered("disk", answers)
    for host, free in values_of(answers).items():
        problems = []
        for folder, size in free.items():
            what = f"{size / _MIB:.0f} MiB are free in {folder}"
            if folder == "/dev/shm":
                if size < _SHM_WARNING_BYTES:
                    todo = "data loaders with workers need more: docker run --shm-size, or a larger tmpfs"
                    problems.append(warning(host, "disk", what, todo))
            elif size < _DISK_BYTES:
                problems.append(failed(host, "disk", what, f"make room: ssh {host} df -h {folder}"))
            elif size < _DISK_WARNING_BYTES:
                problems.append(warning(host, "disk", what, "that is little for checkpoints: make room"))
        listed = ", ".join(f"{folder} {size / _GIB:.1f} GiB" for folder, size in free.items())
        yield from problems or [fine(host, "disk", f"free: {listed}")]


def check_devices(answers: Answers, num_procs: Mapping[str, int]) -> Iterator[Finding]:
    """Check that all hosts have the same accelerators, enough of them, and with room."""
    yield from unanswered("devices", answers)
    found = values_of(answers)
    if not found:
        return
    kinds = {host: [device["name"] for device in devices] for host, devices in found.items()}
    source, wanted = prevailing(kinds)
    for host, devices in found.items():
        have, listed = len(devices), _list(kinds[host])
        if any(kinds.values()) and have < num_procs[host]:
            todo = f"start no more processes there than it has devices ({host}:{have}), or leave it out"
            yield failed(host, "devices", f"{listed} for {num_procs[host]} processes", todo)
        elif kinds[host] != wanted:
            what = f"{listed}, while {source} has {_list(wanted)}"
            yield warning(
                host, "devices", what, "the slowest device sets the pace; --exclude leaves a host out"
            )
        elif crowded := [index for index, device in enumerate(devices) if _is_crowded(device)]:
            what = f"device {crowded[0]} has {_room(devices[crowded[0]])}"
            yield warning(host, "devices", what, f"see which process holds it: ssh {host} nvidia-smi")
        else:
            yield fine(host, "devices", listed)


def _is_crowded(device: Mapping[str, Any]) -> bool:
    return device["free"] is not None and device["total"] is not None and device["free"] < device["total"] / 2


def _room(device: Mapping[str, Any]) -> str:
    return f"{device['free'] / _GIB:.0f} of {device['total'] / _GIB:.0f} GiB free"


def _list(names: list[str]) -> str:
    """Write ["A", "A", "B"] as "2 x A, 1 x B"."""
    if not names:
        return "no accelerator"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
