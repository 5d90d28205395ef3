"""Arguments of a launch: their checks, the device, the backend, and the variables of launchers."""

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import torch
import torch.distributed as dist

from colossalai.cluster import LOOPBACK, expand_nodelist


def check_arguments(
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str,
    local_rank: int | None,
    seed: int,
    timeout: float,
) -> None:
    """Check the arguments of `launch`.

    Raises:
        ValueError: A number is of the wrong type or out of range, `host` is empty, or `backend` is unknown.
    """
    whole = {"rank": rank, "world_size": world_size, "port": port, "seed": seed}
    if local_rank is not None:
        whole["local_rank"] = local_rank
    for name, value in whole.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            example = f"; write {int(value)}" if isinstance(value, str) and value.isdecimal() else ""
            raise ValueError(f"{name} is {value!r}, a {type(value).__name__}; it must be an int{example}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}: the rank must be from 0 to world_size - 1")
    if local_rank is not None and local_rank < 0:
        raise ValueError(f"local_rank is {local_rank}; it must be 0 or more")
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist: choose one from 1024 to 65535")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
    if not isinstance(host, str) or not host:
        raise ValueError(f"host is {host!r}; it must be the name or the address of the machine of rank 0")
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds")
    _check_backend(backend)


def _check_backend(backend: str) -> None:
    """Require backends that this torch has; "nccl" can be missing, since others replace it."""
    if backend == "auto":
        return
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    there = [name for name in known if name in ("nccl", "fake") or dist.is_backend_available(name)]
    parts = backend.split(",") if isinstance(backend, str) else [""]
    for part in parts:
        name = part.rpartition(":")[2].lower()
        if name not in there:
            why = "torch was built without it" if name in known else "torch has no such library"
            raise ValueError(
                f"backend is {backend!r}: {why}; use one of auto, {', '.join(there)}, or one for each kind "
                "of device: 'cpu:gloo,DEVICE:NAME'"
            )


def local_rank_of(rank: int) -> int:
    """Return the launcher's rank on this machine, else the global one."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return rank


def device_of(local_rank: int) -> torch.device:
    """Return the device of a local rank and make it current; with too few devices, ranks share them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def chosen_backend(requested: str, device: torch.device) -> str:
    """Return an available backend that also communicates tensors in host memory.

    Raises:
        ValueError: `requested` is shared memory, and the ranks compute on devices.
    """
    if "shared_memory" in requested and device.type != "cpu":
        raise ValueError(
            f"backend is {requested!r}, and this job computes on {device.type}: shared memory carries "
            f"tensors in host memory; leave backend out, or write 'cpu:gloo,{device.type}:nccl'"
        )
    if requested not in ("nccl", "auto"):
        return requested
    if device.type == "cpu":
        return "shared_memory"
    return f"cpu:gloo,{device.type}:nccl" if dist.is_nccl_available() else "gloo"


_FIRST_PORT, _NUM_PORTS = 16384, 16384  # below the ephemeral ports of Linux
_ANSWER_S = 2.0
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # MASTER_ADDR alone can be set in a user's .bashrc
_OTHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "launch_from_slurm"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "launch_from_openmpi"),
)
_GIVE = "give host, the machine of rank 0, and port, a free port on it"


@dataclass(frozen=True)
class LaunchPlace:
    """The place of a process in its job; the fields are arguments of `launch`."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int


def torch_place(environment: Mapping[str, str] = os.environ) -> LaunchPlace | None:
    """Return the place from the variables of `colossalai run` or torchrun; None without a launcher.

    Raises:
        ValueError: A variable of a launcher is missing or not a number, or another launcher has started this
            process as one of several.
    """
    starter = "start the script with `colossalai run --nproc_per_node N script.py` or with torchrun"
    if not any(name in environment for name in _TORCH_NAMES):
        for launcher, size, function in _OTHERS:
            if environment.get(size, "1") != "1":
                raise ValueError(
                    f"{launcher} has started this process as one of {environment[size]}, and torch's "
                    f"variables are not set: call colossalai.{function} instead of launch_from_torch"
                )
        return None
    return LaunchPlace(
        rank=_number(environment, "RANK", starter),
        world_size=_number(environment, "WORLD_SIZE", starter),
        host=_variable(environment, "MASTER_ADDR", starter),
        port=_number(environment, "MASTER_PORT", starter),
        local_rank=_number(environment, "LOCAL_RANK", starter),
    )


def slurm_place(
    host: str | None, port: int | None, *, environment: Mapping[str, str] = os.environ
) -> LaunchPlace:
    """Return the place from the variables of srun.

    The host defaults to MASTER_ADDR, else to the first node of the step, which has task 0; or, if its name is
    unknown here, to the address from which the step was started: with srun in a batch script that is the
    first node as well. The port defaults to MASTER_PORT, else to a number derived from job and step.

    Raises:
        ValueError: A variable is missing or not a number, or the process was not started by srun.
    """
    starter = "start the script with `srun python script.py`"
    rank = _number(environment, "SLURM_PROCID", starter)
    world_size = _number(environment, "SLURM_NPROCS", starter)
    if world_size > 1 and "SLURM_JOB_ID" in environment and "SLURM_STEP_NUM_TASKS" not in environment:
        raise ValueError(
            f"this process is the batch script's, not one of {world_size} tasks of a step: {starter}"
        )
    host = host or environment.get("MASTER_ADDR") or _slurm_host(environment)
    job = [environment.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID")]
    return LaunchPlace(
        rank=rank,
        world_size=world_size,
        host=host,
        port=_port(port, environment, job),
        local_rank=_number(environment, "SLURM_LOCALID", starter),
    )


def openmpi_place(
    host: str | None, port: int | None, *, environment: Mapping[str, str] = os.environ
) -> LaunchPlace:
    """Return the place from the variables of mpirun.

    The host defaults to MASTER_ADDR, else to this one if all ranks are on it, else to the host of mpirun: all
    ranks have mpirun's address, but not rank 0's, so rank 0 checks that it is on the same host. The port
    defaults to MASTER_PORT, else to a number derived from the job.

    Raises:
        ValueError: A variable is missing or not a number, or host or port are not given and cannot be found.
    """
    starter = "start the script with OpenMPI's `mpirun -np N python script.py`"
    rank = _number(environment, "OMPI_COMM_WORLD_RANK", starter)
    world_size = _number(environment, "OMPI_COMM_WORLD_SIZE", starter)
    host = host or environment.get("MASTER_ADDR")
    if not host:
        local_size = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", starter)
        host = LOOPBACK if local_size == world_size else _mpirun_host(environment, rank)
    return LaunchPlace(
        rank=rank,
        world_size=world_size,
        host=host,
        port=_port(port, environment, [environment.get("PMIX_NAMESPACE", "")]),
        local_rank=_number(environment, "OMPI_COMM_WORLD_LOCAL_RANK", starter),
    )


def _slurm_host(environment: Mapping[str, str]) -> str:
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return LOOPBACK
    names = expand_nodelist(environment.get("SLURM_STEP_NODELIST", ""))
    launcher = environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if names and (launcher is None or _is_known(names[0])):
        return names[0]
    if launcher is None:
        raise ValueError(
            f"neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR gives the nodes of the tasks: {_GIVE}"
        )
    return launcher


def _is_known(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _mpirun_host(environment: Mapping[str, str], rank: int) -> str:
    """Return an address of mpirun's host; OMPI_MCA_orte_hnp_uri is "number;tcp://address,address:port"."""
    _, _, places = environment.get("OMPI_MCA_orte_hnp_uri", "").partition(";tcp://")
    listed, _, port = places.partition(";")[0].rpartition(":")
    addresses = listed.split(",") if listed else []
    if not addresses:
        raise ValueError(f"this mpirun does not publish its address (OMPI_MCA_orte_hnp_uri): {_GIVE}")
    if rank == 0 and not any(_is_own(address) for address in addresses):
        raise ValueError(
            f"rank 0 runs on {socket.gethostname()} and mpirun on another host, at {listed}, so that the "
            f"other ranks cannot find rank 0: {_GIVE}"
        )
    if rank == 0 or len(addresses) == 1:
        return addresses[0]
    # Several networks: one of them connects this host to mpirun, which listens as long as the job runs.
    return next((address for address in addresses if _answers(address, int(port))), addresses[0])


def _is_own(address: str) -> bool:
    """Return whether this machine has an address: a socket can be bound to no other one."""
    with socket.socket() as trial:
        try:
            trial.bind((address, 0))
        except OSError:
            return False
    return True


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_ANSWER_S).close()
    except OSError:
        return False
    return True


def _port(given: int | None, environment: Mapping[str, str], job: Sequence[str]) -> int:
    """Return the port of a job: the same for all ranks, usually different for another job."""
    if given is not None:
        return given
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT", "set it to a free port, or use a launcher")
    return _FIRST_PORT + zlib.crc32("/".join(job).encode()) % _NUM_PORTS


def _variable(environment: Mapping[str, str], name: str, starter: str) -> str:
    if name not in environment:
        raise ValueError(f"the environment variable {name} is not set: {starter}, which sets it")
    return environment[name]


def _number(environment: Mapping[str, str], name: str, starter: str) -> int:
    value = _variable(environment, name, starter)
    if not value.isdecimal():
        raise ValueError(
            f"the environment variable {name} is {value!r}, not a number: {starter}, which sets it"
        )
    return int(value)
