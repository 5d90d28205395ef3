"""The arguments of a launch: what is refused, and what follows from them: the device, the back end."""

import os
from numbers import Integral, Real

import torch
import torch.distributed as dist

from colossalai.logging import get_dist_logger


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
    """Refuse what `launch` cannot use.

    Raises:
        ValueError: An argument is not what it must be.
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
    """Require back ends that torch has here; "nccl" may be missing, gloo takes its place."""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    there = [name for name in known if name in ("nccl", "fake") or dist.is_backend_available(name)]
    parts = backend.split(",") if isinstance(backend, str) else [""]
    for part in parts:
        name = part.rpartition(":")[2].lower()
        if name not in there:
            why = "torch was built without it" if name in known else "torch knows no such library"
            raise ValueError(
                f"backend is {backend!r}: {why}; use one of {', '.join(there)}, or one for each kind of "
                "device: 'cpu:gloo,DEVICE:NAME'"
            )


def local_rank_of(rank: int) -> int:
    """Return the rank on this machine that a launcher has given, else the global one."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return rank


def device_of(local_rank: int) -> torch.device:
    """Return the device of a local rank and make it the current one; ranks share where there are too few."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def chosen_backend(requested: str, device: torch.device, rank: int) -> str:
    """Return the back end to use: one that is there, and that also carries tensors in host memory."""
    if requested != "nccl":
        return requested
    if device.type == "cpu" or not dist.is_nccl_available():
        if rank == 0:
            get_dist_logger().log_once("no NCCL on this machine: communicating with gloo", level="INFO")
        return "gloo"
    return f"cpu:gloo,{device.type}:nccl"
