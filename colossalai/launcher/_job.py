"""Job descriptions: the command of a job on one host or several, and checks before its start."""

import importlib.machinery
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from colossalai.cluster import GLOO, NCCL, Host, holder_of, port_is_free
from colossalai.launcher._cleanup import MARK_VARIABLE
from colossalai.launcher._environment import READ_VARIABLES, is_secret, variables_line
from colossalai.launcher._processes import GRACE_S, PEER_ERRORS_S
from colossalai.launcher._ssh import command_on

MAX_DRAIN_SIGNALS = 2
"""Signals that a job which ends by itself gets: to end, and to hurry."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job on this machine."""

    target: str  # the path of a script, or the name of a module
    args: tuple[str, ...] = ()
    is_module: bool = False
    num_procs: int | None = None  # one per accelerator, or one
    bind: bool | None = None  # None: if it can help and they are not bound already; see `bind_ranks`
    master_port: int = 0  # 0: any free one
    # Seconds that rank 0 has to end the job well after a signal, which it alone gets; a second signal goes to
    # it, too. None: a signal ends all ranks.
    drain_s: float | None = None
    grace_s: float = GRACE_S  # from a signal that ends all ranks until they are killed
    peer_errors_s: float = PEER_ERRORS_S  # for errors of the peers of a killed rank, in a job on one machine


def check_job(job: Job) -> None:
    """Check a job before anything is started.

    Raises:
        ValueError: `num_procs` is below 1, there is no such script or module, or the port cannot be used.
    """
    if job.num_procs is not None and job.num_procs < 1:
        raise ValueError(f"--nproc_per_node {job.num_procs} would start no process; use 1 or more")
    _check_target(job)
    if job.master_port != 0:
        _check_port(job.master_port)


def port_taken(port: int) -> str:
    """Describe the owner of a port, and the remedy."""
    return f"{holder_of(port)}; use another --master_port, or none to have a free one picked"


def _check_target(job: Job) -> None:
    if job.target.startswith("\N{EN DASH}"):
        raise ValueError(f"{job.target!r} starts with a typographic dash; options start with two hyphens: --")
    if job.is_module:
        package = job.target.partition(".")[0]
        here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path])
        # Packages that are installed for editing may be found by a hook of their own only.
        if here is None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"there is no module {package!r} in {os.getcwd()} or among the installed packages"
            )
    elif not Path(job.target).exists():
        raise ValueError(f"there is no script {job.target!r} in {os.getcwd()}")
    elif Path(job.target).is_dir() and not Path(job.target, "__main__.py").exists():
        raise ValueError(
            f"{job.target!r} is a folder without a __main__.py; name the script in it, or -m and a module"
        )


def _check_port(port: int) -> None:
    try:
        is_free = port_is_free(port)
    except PermissionError as error:
        raise ValueError(f"--master_port {port} is for privileged users only; use 1024 or more") from error
    if not is_free:
        raise ValueError(port_taken(port))


_LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A job on several machines, with its policy for lost ones."""

    job: Job
    hosts: tuple[Host, ...]
    run_id: str
    min_nodes: int  # so many must be there; a job goes on with fewer than `hosts` after it has lost some
    master_addr: str | None = None  # the first host's name if not given
    ssh_port: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)  # hosts without a first start, with the reason
    interfaces: Mapping[str, str] = field(default_factory=dict)  # by host: its interface to the others
    timeout_s: float = 120.0  # until all nodes have started
    max_restarts: int = 0
    log_dir: Path | None = None

    def mark(self, host: Host) -> str:
        """Return the value of COLOSSALAI_NODE in the environment of every process of this job on a host."""
        return f"{self.run_id}:{host.name}"

    def agent_command(self, host: Host, *, attempt: int = 0) -> list[str]:
        """Return the command that starts the agent of a node; `variables` go to its stdin first."""
        words = ["--run-id", self.run_id, "--timeout", f"{self.timeout_s:g}"]
        if self.max_restarts:
            words += ["--attempt", str(attempt), "--max-restarts", str(self.max_restarts)]
        num_procs = self.job.num_procs or host.slots
        if num_procs is not None:
            words += ["--nproc-per-node", str(num_procs)]
        words += [] if self.job.bind is None else ["--bind" if self.job.bind else "--no-bind"]
        words += ["--module"] if self.job.is_module else []
        return self._command(host, "_host_agent", *words, "--", self.job.target, *self.job.args)

    def sweep_command(self, host: Host) -> list[str]:
        """Return the command that ends leftovers of this job on a host; see `agent_command`."""
        return self._command(host, "_cleanup", self.mark(host))

    def variables(self, host: Host, *, is_marked: bool = True) -> bytes:
        """Return the line for the stdin of a command on a host.

        See [Note: variables over stdin] in `_environment.py`.

        Args:
            host: The host.
            is_marked: Whether the command is an agent, below which every process has the job's mark.
        """
        env = dict.fromkeys((GLOO, NCCL), self.interfaces.get(host.name, ""))
        env = {name: value for name, value in env.items() if value} | self.env
        return variables_line(env | ({MARK_VARIABLE: self.mark(host)} if is_marked else {}))

    def _command(self, host: Host, module: str, *words: str) -> list[str]:
        """Return the command that runs a module of this package with our interpreter, folder and variables.

        -P keeps the folder of the script from hiding a module that the agent needs. The shell stays, since
        ssh passes on an exit code, but not by which signal its command was killed.
        """
        run = shlex.join([sys.executable, "-P", "-m", f"colossalai.launcher.{module}", *words])
        script = f"cd {shlex.quote(os.getcwd())} && {READ_VARIABLES} && {run}; exit $?"
        return command_on(host.name, ["sh", "-c", script], port=self.ssh_port)

    def describe_commands(self) -> str:
        """Return the output of --dry-run: the command of each node, and its stdin."""
        words = [f"{name}={'...' if is_secret(name) else shlex.quote(v)}" for name, v in self.env.items()]
        commands = [f"# {host.name}\n{shlex.join(self.agent_command(host))}" for host in self.hosts]
        return "\n".join([f"# over stdin: {' '.join(words) or 'no variable'}", *commands])


def check_cluster_job(cluster: ClusterJob) -> None:
    """Check a job on several machines before its start.

    Raises:
        ValueError: The master or a host of several is a loopback, or a number is out of its range.
    """
    address, num_hosts = cluster.master_addr, len(cluster.hosts)
    if num_hosts > 1:
        names = [address] if address is not None else [cluster.hosts[0].name]
        names += [host.name for host in cluster.hosts]
        for name in names:
            if name.startswith(_LOOPBACK):
                raise ValueError(
                    f"{name!r} is another machine on each of the {num_hosts} nodes; give the name or the "
                    "address by which all of them reach it"
                )
    if not 1 <= cluster.min_nodes <= num_hosts:
        raise ValueError(f"--nnodes: {cluster.min_nodes} to {num_hosts} nodes of {num_hosts} hosts")
    if cluster.max_restarts < 0:
        raise ValueError(f"--max-restarts {cluster.max_restarts} is negative; use 0 or more")
    if cluster.timeout_s <= 0:
        raise ValueError(f"--timeout {cluster.timeout_s:g} leaves no time to start; use more than 0 seconds")
    for host in cluster.hosts:
        if host.slots is not None and (cluster.job.num_procs or 0) > host.slots:
            raise ValueError(
                f"--nproc_per_node {cluster.job.num_procs} is more than the {host.slots} slots of {host.name}"
            )
