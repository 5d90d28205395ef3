"""CPU binding: assignment of a machine's cores to its ranks, so that no two ranks share a core.

The kernel moves an unbound rank between cores, away from its data in their caches, and can place two ranks on
the two hardware threads of one core while another core is idle. Here each rank gets
whole adjacent cores, and as many threads.

Linux calls a hardware thread a CPU; a core is one CPU, or several siblings that share its arithmetic units.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/cpu")
_OPENMP_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_SHOWN = 8  # ranks whose cores the line at the start shows


@dataclass(frozen=True, order=True)
class Core:
    """A core: its location, and its CPUs."""

    package: int
    node: int  # of memory (NUMA)
    cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """Which CPUs each rank of a machine may use.

    Attributes:
        num_ranks: Ranks of this machine.
        cpus: By local rank; nothing if the ranks may use all.
        num_threads: For each rank. It is the same for all, though some can have a core more: the last bits of
            a sum depend on it, and replicated computations have to agree.
        note: A line for the user, or "".
    """

    num_ranks: int
    cpus: tuple[tuple[int, ...], ...] = ()
    num_threads: int
    note: str = ""

    @property
    def as_word(self) -> str:
        """The argument from which a worker reads its CPUs by its local rank: "0,1;2,3", or "-" for all."""
        return ";".join(",".join(map(str, cpus)) for cpus in self.cpus) or "-"


def bind_ranks(
    num_ranks: int,
    *,
    is_asked: bool | None,
    environment: Mapping[str, str],
    allowed: Collection[int],
    system: Path = _SYSTEM,
) -> Binding:
    """Decide which CPUs the ranks of this machine use.

    Args:
        num_ranks: Ranks of this machine.
        is_asked: False leaves them unbound; True binds them, or gives the reason why not; None binds them if
            the kernel can place them badly (on the hardware threads of one core, or far from their memory),
            there are several and they are not bound already.
        environment: The agent's.
        allowed: The CPUs that the agent may use.
        system: The kernel's folder on CPUs.
    """
    free = Binding(num_ranks=num_ranks, num_threads=max(1, len(allowed) // num_ranks))
    if is_asked is False or (is_asked is None and num_ranks == 1):
        return free
    cores = read_cores(allowed, system)
    places = {(core.package, core.node) for core in cores}
    if is_asked is None and len(places) == 1 and all(len(core.cpus) == 1 for core in cores):
        return free  # no bad placement exists, and with other processes the kernel's placement is better
    if obstacle := _find_obstacle(num_ranks, len(cores), environment, allowed, system):
        note = f"--bind: the ranks are not bound to cores: {obstacle}" if is_asked else ""
        return Binding(num_ranks=num_ranks, num_threads=free.num_threads, note=note)
    shares = deal_out(cores, num_ranks)
    cpus = tuple(tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares)
    num_threads = len(cores) // num_ranks
    threads = environment.get("OMP_NUM_THREADS", str(num_threads))
    shown = [_as_ranges(each) for each in cpus[:_SHOWN]] + ["..."] * (num_ranks > _SHOWN)
    note = (
        f"each rank has cores of its own (CPUs {'; '.join(shown)}) and computes with "
        f"{threads} thread{'s' * (threads != '1')}; --no-bind leaves it to the kernel"
    )
    return Binding(num_ranks=num_ranks, cpus=cpus, num_threads=num_threads, note=note)


def _find_obstacle(
    num_ranks: int, num_cores: int, environment: Mapping[str, str], allowed: Collection[int], system: Path
) -> str:
    """Return the reason why the ranks cannot be bound here, or are bound already; otherwise ""."""
    for name in _OPENMP_PLACES:
        if name in environment:
            return f"{name} is set, and places their threads"
    slurm = environment.get("SLURM_CPU_BIND", "none").split(",")
    if "none" not in slurm:
        return f"SLURM has bound them (SLURM_CPU_BIND={environment['SLURM_CPU_BIND']})"
    online = read_online(system)
    if not online <= {*allowed}:
        return f"this command itself is bound, to {len(allowed)} of {len(online)} CPUs"
    if num_ranks > num_cores:
        return f"there are {num_ranks} for {num_cores} core{'s' * (num_cores != 1)}"
    return ""


def deal_out(cores: Collection[Core], num_ranks: int) -> list[list[Core]]:
    """Deal cores out to ranks: each once, neighbours together, numbers that differ by one at most.

    A rank's cores are consecutive in the order of packages, nodes and CPUs. Which ranks get one core more is
    chosen so that as few as possible have cores of two packages, then of two nodes.

    Args:
        cores: At least `num_ranks`.
        num_ranks: Number of ranks.
    """
    in_order = sorted(cores)
    size, num_larger = divmod(len(in_order), num_ranks)
    # For the ranks so far, by how many of them have one core more: the best ends of their shares, and how
    # many packages and nodes more than one the shares have. The last end follows from the numbers alone, so
    # the best of fewer ranks is part of the best of more.
    best: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {0: ((0, 0), (0,))}
    for rank in range(num_ranks):
        found: dict[int, tuple[tuple[int, int], tuple[int, ...]]] = {}
        for larger, (cost, ends) in best.items():
            for extra in (1, 0):
                if not 0 <= num_larger - larger - extra <= num_ranks - rank - 1:
                    continue  # the others could not make up for it
                share = in_order[ends[-1] : ends[-1] + size + extra]
                packages = len({core.package for core in share}) - 1
                nodes = len({(core.package, core.node) for core in share}) - 1
                candidate = ((cost[0] + packages, cost[1] + nodes), (*ends, ends[-1] + len(share)))
                if larger + extra not in found or candidate[0] < found[larger + extra][0]:
                    found[larger + extra] = candidate
        best = found
    _, ends = best[num_larger]
    return [in_order[start:end] for start, end in pairwise(ends)]


def read_cores(cpus: Collection[int], system: Path = _SYSTEM) -> list[Core]:
    """Return the cores that CPUs belong to; without information of the kernel each CPU is a core.

    Args:
        cpus: The CPUs to use; siblings that are not among them are left out.
        system: The kernel's folder on CPUs.
    """
    places: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for cpu in sorted(cpus):
        topology = system / f"cpu{cpu}" / "topology"
        siblings = tuple(sorted({cpu} | _read_list(topology / "thread_siblings_list")))
        package = min(_read_list(topology / "physical_package_id"), default=0)
        nodes = [name[4:] for name in _names_in(topology.parent) if name.startswith("node")]
        node = min((int(name) for name in nodes if name.isdecimal()), default=0)
        places.setdefault((package, node, siblings), []).append(cpu)
    return [Core(package, node, tuple(own)) for (package, node, _), own in places.items()]


def read_online(system: Path = _SYSTEM) -> set[int]:
    """Return the CPUs that the machine computes with."""
    return _read_list(system / "online") or {*range(os.cpu_count() or 1)}


def _read_list(path: Path) -> set[int]:
    """Return the numbers of a file such as "0-3,8"; none where it cannot be read."""
    try:
        words = path.read_text().strip().split(",")
        bounds = [word.partition("-") for word in words if word]
        return {cpu for low, _, high in bounds for cpu in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()


def _names_in(folder: Path) -> Sequence[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()


def _as_ranges(cpus: Sequence[int]) -> str:
    """Write sorted numbers as the kernel does: "0-3,8"."""
    starts = [cpu for cpu in cpus if cpu - 1 not in cpus]
    ends = [cpu for cpu in cpus if cpu + 1 not in cpus]
    return ",".join(
        f"{low}-{high}" if low < high else f"{low}" for low, high in zip(starts, ends, strict=True)
    )
