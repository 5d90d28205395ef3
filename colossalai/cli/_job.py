"""What `colossalai run` is asked to do, and whether it can be done."""

import importlib.machinery
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from colossalai.cluster import port_is_free
from colossalai.cluster._ports import holder_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run on this machine."""

    target: str  # the path of a script, or the name of a module
    args: tuple[str, ...] = ()
    is_module: bool = False
    num_procs: int | None = None  # one per accelerator, or one
    master_port: int = 0  # 0: any free one


def check_job(job: Job) -> None:
    """Refuse what cannot be started, before anything is.

    Raises:
        ValueError: It starts no process, there is no such script or module, or the port cannot be used.
    """
    if job.num_procs is not None and job.num_procs < 1:
        raise ValueError(f"--nproc_per_node {job.num_procs} would start no process; use 1 or more")
    _check_target(job)
    if job.master_port != 0:
        _check_port(job.master_port)


def port_taken(port: int) -> str:
    """Say who holds the port and what to do."""
    return f"{holder_of(port)}; use another --master_port, or none to have a free one picked"


def _check_target(job: Job) -> None:
    if job.target.startswith("\N{EN DASH}"):
        raise ValueError(f"{job.target!r} starts with a typographic dash; options start with two hyphens: --")
    if job.is_module:
        package = job.target.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
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
