"""The profile cache: figures of this processor in the user's cache folder, with their spread and dates.

[Note: confirmed figures]
Disturbances of a measurement (a program on the other thread of the core, a lower clock) reduce its figures
for minutes, consistently. So runs of different times are compared. Runs whose GFLOP/s differ by at most 10 %
form a group, with the figures of the first: as long as later runs agree, jobs multiply by the same figures,
and a resumed run gives the same bits. The group with the highest figures is in force, and is confirmed by its
second run. Before that, each start of a job takes another run, at least a minute after the last one. A
confirmed group is measured again when its last run is a week old. It is dropped when its last run is four
weeks old and another group was found.

Unreadable or invalid content of the file is measured again, and if the file cannot be written, nothing is
stored, both without a message.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path

import torch

from colossalai.kernel._probe import Measurement, measure_profile, processor_and_version
from colossalai.kernel._rule import Profile

_TOLERANCE = 0.1  # of the higher of two figures; on a quiet machine runs differ by 0.02 to 0.05
_APART_S = 60.0
_RENEWAL_S = 7 * 86400.0
_OBLIVION_S = 4 * _RENEWAL_S
_MOST_GROUPS = 4
_MOST = 1e6  # of any figure of a profile
_MOST_ENTRIES = 64
_MOST_BYTES = 1 << 18
_NUM_RUNS = 5  # runs of a renewal by the user


@dataclass(frozen=True)
class AgreeingRuns:
    """Runs of the measurement that agree; see [Note: confirmed figures].

    Attributes:
        profile: The figures of one core, of the first run.
        spread: Spread of the latest run; see `Measurement`.
        last: Time of the latest run, in seconds since the epoch.
        num_runs: The number of runs.
    """

    profile: Profile
    spread: float
    last: float
    num_runs: int = 1

    @property
    def is_believed(self) -> bool:
        """Whether two runs agree."""
        return self.num_runs > 1

    def agree_with(self, profile: Profile) -> bool:
        """Return whether a profile has the same GFLOP/s, within the tolerance."""
        own, other = (
            (each.torch_gflops, each.onednn_gflops, float(each.onednn_gflops > 0))
            for each in (self.profile, profile)
        )
        return all(abs(a - b) <= _TOLERANCE * max(a, b) for a, b in zip(own, other, strict=True))


def cache_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the measurements of this user. None: there is no home directory."""
    folder = environment.get("XDG_CACHE_HOME", "")
    try:
        return (
            (Path(folder) if Path(folder).is_absolute() else Path.home() / ".cache")
            / "colossalai"
            / "matmul.json"
        )
    except RuntimeError:
        return None


def measured_profile(
    *,
    file: Path | None = None,
    key: str | None = None,
    measure: Callable[[], Measurement] | None = None,
    clock: Callable[[], float] = time.time,
) -> Profile:
    """Return the speed of both libraries for float32 matrices on this machine.

    Args:
        file: File of the measurements. Default: in the user's cache folder.
        key: The name of the entry there. Default: `processor_and_version()`.
        measure: Measures a core, if the stored figures are missing, not confirmed, or old. Default: in this
            process.
        clock: Returns seconds since the epoch.

    Returns:
        The figures of all threads of this process together.
    """
    file = file or cache_file()
    key = key or processor_and_version()
    kept = {} if file is None else _read(file)
    groups, now = kept.get(key, ()), clock()
    if is_due(groups, now):
        groups = with_run(groups, (measure or measure_profile)(), now)
        if file is not None:
            _write(file, kept, key, groups)
    return of_all_threads(in_force(groups).profile)


@dataclass(frozen=True)
class RenewedProfile:
    """Result of `renew_profile`.

    Attributes:
        key: The processor and the version of torch.
        file: File of the figures. None: it cannot be written.
        found: The runs in force now.
        num_runs: Number of runs.
        earlier: The runs in force before, if any.
    """

    key: str
    file: Path | None
    found: AgreeingRuns
    num_runs: int
    earlier: AgreeingRuns | None


def renew_profile(
    *,
    file: Path | None = None,
    key: str | None = None,
    measure: Callable[[], Measurement] | None = None,
    clock: Callable[[], float] = time.time,
) -> RenewedProfile:
    """Measure several times, and replace the stored figures; for arguments see `measured_profile`."""
    file = file or cache_file()
    key = key or processor_and_version()
    kept = {} if file is None else _read(file)
    groups: Sequence[AgreeingRuns] = ()
    for _ in range(_NUM_RUNS):
        groups = with_run(groups, (measure or measure_profile)(), clock())
    is_written = file is not None and _write(file, kept, key, groups)
    return RenewedProfile(
        key=key,
        file=file if is_written else None,
        found=in_force(groups),
        num_runs=_NUM_RUNS,
        earlier=in_force(kept[key]) if kept.get(key) else None,
    )


def is_due(groups: Sequence[AgreeingRuns], now: float) -> bool:
    """Return whether another run is due; times in the future, of a clock set back, do not count."""
    if not groups:
        return True
    force = in_force(groups)
    is_fresh = force.is_believed and 0 <= now - force.last < _RENEWAL_S
    is_recent = any(0 <= now - group.last < _APART_S for group in groups)
    return not (is_fresh or is_recent)


def with_run(groups: Sequence[AgreeingRuns], run: Measurement, now: float) -> Sequence[AgreeingRuns]:
    """Return the groups with another run, in the first group that it agrees with, fastest first."""
    ordered = sorted(groups, key=_speed, reverse=True)
    agreeing = next((group for group in ordered if group.agree_with(run.profile)), None)
    if agreeing is None:
        joined = AgreeingRuns(_rounded(run.profile), round(run.spread, 4), now)
    else:
        joined = replace(agreeing, spread=round(run.spread, 4), last=now, num_runs=agreeing.num_runs + 1)
    others = [group for group in ordered if group is not agreeing and abs(now - group.last) < _OBLIVION_S]
    return sorted([joined, *others[: _MOST_GROUPS - 1]], key=_speed, reverse=True)


def in_force(groups: Sequence[AgreeingRuns]) -> AgreeingRuns:
    """Return the group with the highest figures."""
    return max(groups, key=_speed)


def of_all_threads(core: Profile) -> Profile:
    """Return the figures of all threads of this process from those of a core."""
    threads = torch.get_num_threads()
    return Profile(
        core.call_us,
        core.torch_gflops * threads,
        core.onednn_gflops * threads,
        turn_ns=core.turn_ns / threads,
        write_ns=core.write_ns / threads,
    )


def _speed(group: AgreeingRuns) -> float:
    return group.profile.torch_gflops + group.profile.onednn_gflops


def _rounded(profile: Profile) -> Profile:
    return Profile(*(round(float(figure), 4) for figure in astuple(profile)))


def _read(file: Path) -> dict[str, Sequence[AgreeingRuns]]:
    """Return the valid entries of a file written by `_write`; empty if it is invalid."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            return {}
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: groups for key, value in content.items() if (groups := _groups(value))}


def _groups(value: object) -> Sequence[AgreeingRuns]:
    """Return the groups of an entry; a list of figures, of earlier versions, is an undated run."""
    if not isinstance(value, list):
        return ()
    if _are_figures(value):
        return [AgreeingRuns(Profile(*value), 0.0, 0.0)]
    if len(value) > _MOST_GROUPS:
        return ()
    groups = [_group(each) for each in value]
    return [] if None in groups else [group for group in groups if group is not None]


def _group(value: object) -> AgreeingRuns | None:
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(AgreeingRuns)}:
        return None
    profile, times, num_runs = value["profile"], (value["spread"], value["last"]), value["num_runs"]
    are_times = all(type(each) is float and 0 <= each < float("inf") for each in times)
    if not (_are_figures(profile) and are_times and type(num_runs) is int and num_runs > 0):
        return None
    return AgreeingRuns(Profile(*profile), *times, num_runs)


def _are_figures(value: object) -> bool:
    """Return whether these are the figures of a profile; the second is a divisor, and thus not 0."""
    if not isinstance(value, list) or len(value) != len(fields(Profile)):
        return False
    return all(type(figure) is float and 0 <= figure <= _MOST for figure in value) and value[1] > 0


def _write(
    file: Path, kept: Mapping[str, Sequence[AgreeingRuns]], key: str, groups: Sequence[AgreeingRuns]
) -> bool:
    """Write the entries, with the given one as the latest; return whether this succeeded."""
    entries = {other: kept[other] for other in kept if other != key} | {key: groups}
    latest = list(entries.items())[-_MOST_ENTRIES:]
    content = {
        name: [asdict(group) | {"profile": list(astuple(group.profile))} for group in of_name]
        for name, of_name in latest
    }
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(content))
        beside.replace(file)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        return False
    return True
