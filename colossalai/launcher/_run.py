"""Run options: from the words of `colossalai run` to a job on this machine, or on several."""

import os
import shlex
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colossalai.cluster import (
    Host,
    allocated_hosts,
    expand_nodelist,
    parse_hosts,
    read_hostfile,
    select_hosts,
)
from colossalai.launcher._environment import (
    forwarded_environment,
    given_variables,
    package_path,
    withheld_names,
)
from colossalai.launcher._job import ClusterJob, Job, check_cluster_job, check_job
from colossalai.launcher._processes import GRACE_S, ignored_sigint_note
from colossalai.launcher._ssh import is_this_machine
from colossalai.launcher.preflight import PreflightRequest, preflight

_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options as they are written; see `colossalai run --help`."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False
    num_procs: int | None = None
    bind: bool | None = None
    host_list: str | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    master_addr: str | None = None
    master_port: int = 0
    nnodes: str | None = None
    max_restarts: int | None = None
    timeout: float | None = None
    env: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    log_dir: str | None = None
    ssh_port: int | None = None
    extra_launch_args: str | None = None
    drain_s: float | None = None
    grace_s: float = GRACE_S
    dry_run: bool = False
    preflight: bool = True


def run(options: RunOptions) -> int:
    """Run the job of the options and return its exit code.

    Raises:
        ValueError: An option is out of range, contradicts another one or needs hosts, or the script or a host
            cannot be found.
    """
    options = _with_overrides(_with_extra_args(options))
    hosts = find_hosts(options, os.environ)
    job = Job(
        target=options.target,
        args=options.args,
        is_module=options.is_module,
        num_procs=options.num_procs,
        bind=options.bind,
        master_port=options.master_port,
        drain_s=options.drain_s,
        grace_s=options.grace_s,
    )
    # On another machine the port is the agent's to check.
    check_job(job if len(hosts) < 2 else replace(job, master_port=0))
    if not hosts and not _needs_a_controller(options):
        return _run_here(job, options)
    cluster = _cluster_job(options, job, hosts or (Host(socket.gethostname()),))
    check_cluster_job(cluster)
    if options.dry_run:
        print(cluster.describe_commands())
        return 0
    _print_note(ignored_sigint_note())
    if names := withheld_names(os.environ, options.env):
        kept = f"{', '.join(names)} {'stays' if len(names) == 1 else 'stay'} on this machine"
        _print_note(f"{kept} (a name like a secret's; --env NAME sends it)")
    if options.preflight and not all(is_this_machine(host.name) for host in cluster.hosts):
        report = preflight(_request(cluster))
        for finding in (*report.warnings, *report.failures):
            print(finding.describe(), file=sys.stderr)
        if not report.is_fit:
            _print_note("nothing was started; --no-preflight starts it as it is")
            return 1
        cluster = replace(cluster, interfaces=report.interfaces, absent=report.absent)
    from colossalai.launcher._controller import run_on_hosts

    return run_on_hosts(cluster)


def find_hosts(options: RunOptions, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the job; none where it is just this machine.

    Raises:
        ValueError: The host options contradict one another or name no host, or a batch system has started
            this very command several times.
    """
    if options.host_list is not None and options.hostfile is not None:
        raise ValueError("--host and --hostfile are alternatives; use one of them")
    if options.host_list is not None:
        hosts = parse_hosts(options.host_list)
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile)
    else:
        hosts = allocated_hosts(environment)
        if hosts and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise ValueError(
                "srun has started colossalai run several times; start it once, in the batch script without "
                "srun: it uses all nodes of the allocation"
            )
        if len(hosts) == 1 and is_this_machine(hosts[0].name) and hosts[0].slots is None:
            hosts = ()
    if not hosts:
        _refuse_without_hosts(options)
        return ()
    return select_hosts(
        hosts,
        include=expand_nodelist(options.include or ""),
        exclude=expand_nodelist(options.exclude or ""),
    )


def _refuse_without_hosts(options: RunOptions) -> None:
    for option, value in (
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--ssh-port", options.ssh_port),
        ("--nnodes", options.nnodes if options.nnodes != "1" else None),
    ):
        if value is not None:
            raise ValueError(
                f"{option} {value} is about several machines; name them with --host or --hostfile"
            )


def _needs_a_controller(options: RunOptions) -> bool:
    """Return whether the options of a job on this machine require a controller."""
    asked = (options.master_addr, options.log_dir, options.max_restarts or None, options.timeout)
    return any(value is not None for value in asked)


def _run_here(job: Job, options: RunOptions) -> int:
    given = package_path(os.environ) | given_variables(options.env, os.environ)
    if options.dry_run:
        count = "one process per accelerator, or one" if job.num_procs is None else f"{job.num_procs} times"
        words = [*(["-m"] if job.is_module else []), job.target, *job.args]
        print(f"# on this machine, {count}\n{shlex.join([sys.executable, *words])}")
        return 0
    _print_note(ignored_sigint_note())
    from colossalai.launcher._agent import launch

    os.environ.update(given)
    return launch(job)


def _print_note(text: str) -> None:
    if text:
        print(f"colossalai run: {text}", file=sys.stderr)


def _cluster_job(options: RunOptions, job: Job, hosts: tuple[Host, ...]) -> ClusterJob:
    min_nodes, max_nodes = _read_nnodes(options.nnodes, len(hosts))
    max_restarts = max_nodes - min_nodes if options.max_restarts is None else options.max_restarts
    return ClusterJob(
        job=job,
        hosts=hosts[:max_nodes],
        run_id=uuid.uuid4().hex[:12],
        min_nodes=min_nodes,
        master_addr=options.master_addr,
        ssh_port=options.ssh_port,
        env=forwarded_environment(os.environ, options.env),
        timeout_s=_TIMEOUT_S if options.timeout is None else options.timeout,
        max_restarts=max_restarts,
        log_dir=None if options.log_dir is None else Path(options.log_dir),
    )


def _request(cluster: ClusterJob) -> PreflightRequest:
    target = cluster.job.target
    is_folder = not cluster.job.is_module and os.path.isdir(target)
    return PreflightRequest(
        hosts=cluster.hosts,
        min_hosts=cluster.min_nodes,
        master_addr=cluster.master_addr,
        master_port=cluster.job.master_port,
        num_procs=cluster.job.num_procs,
        script=os.path.join(target, "__main__.py") if is_folder else target,
        is_module=cluster.job.is_module,
        env=cluster.env,
        ssh_port=cluster.ssh_port,
    )


def _read_nnodes(text: str | None, num_hosts: int) -> tuple[int, int]:
    if text is None:
        return num_hosts, num_hosts
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise ValueError(f"--nnodes {text!r} is neither a number nor MIN:MAX")
    min_nodes, max_nodes = int(low), int(high or low)
    if not 1 <= min_nodes <= max_nodes <= num_hosts:
        raise ValueError(
            f"--nnodes {text} does not fit the hosts: from 1 to {num_hosts}, MIN:MAX or one number"
        )
    return min_nodes, max_nodes


def _with_overrides(options: RunOptions) -> RunOptions:
    """Let the values of --set go to every rank in the variable that `launch` reads."""
    if not options.overrides:
        return options
    from colossalai.context import OVERRIDES_VARIABLE, join_overrides

    return replace(options, env=(*options.env, f"{OVERRIDES_VARIABLE}={join_overrides(options.overrides)}"))


def _with_extra_args(options: RunOptions) -> RunOptions:
    """Read "a=1,b" of --extra_launch_args into the options of the same meaning."""
    for word in filter(None, (options.extra_launch_args or "").split(",")):
        name, _, value = word.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if name == "standalone":
            if options.host_list is not None or options.hostfile is not None:
                raise ValueError(
                    "--extra_launch_args standalone is for one machine; leave out the hosts or it"
                )
            options = replace(options, host_list=socket.gethostname())  # also within an allocation
        elif name in ("max_restarts", "nproc_per_node"):
            if not value.isdecimal():
                raise ValueError(f"--extra_launch_args {name}={value!r} is not a number")
            field = "num_procs" if name == "nproc_per_node" else name
            options = _replaced(options, field, int(value))
        elif name in ("nnodes", "log_dir"):
            options = _replaced(options, name, value)
        else:
            raise ValueError(
                f"--extra_launch_args {name!r} is not known here; use max_restarts, nnodes, nproc_per_node, "
                "log_dir or standalone"
            )
    return options


def _replaced(options: RunOptions, field: str, value: int | str) -> RunOptions:
    changes: dict[str, Any] = {field: value}
    return replace(options, **changes)
