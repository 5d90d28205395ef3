"""Launch: from "who am I, where is rank 0" to a process group and a mesh, or to an error that helps."""

import argparse
import atexit
import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossalai.cluster._patient_store import agent_serves
from colossalai.cluster._ports import port_holder
from colossalai.cluster._store_server import (
    keep_gloo_here,
    let_gloo_choose,
    network_of_this_process,
    serve_store,
)
from colossalai.context._arguments import names_arguments
from colossalai.context._config import ConfigException
from colossalai.context._ending import before_end, fail_at_end, let_gloo_threads_rest, prepare_end
from colossalai.context._launchers import openmpi_place, slurm_place, torch_place
from colossalai.context._layout import parse_layout
from colossalai.context._parallel_context import global_context
from colossalai.context._parallel_mode import ParallelMode
from colossalai.context._random import get_seeds, seed_all_modes, seed_layout_modes
from colossalai.context._watching import start_watching
from colossalai.logging import get_dist_logger

ConfigLike = str | Path | Mapping[str, Any] | None

DEFAULT_TIMEOUT = 120.0
"""Seconds that a process waits for the others to arrive."""

_launches = itertools.count()


@names_arguments
def launch(
    config: ConfigLike,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Start this process's part of a job: check the config, meet the other processes, lay the mesh.

    Args:
        config: Path of a Python, YAML or JSON file, or a dict; hyper-parameters and feature keys side by
            side. What `colossalai run --set` says goes before it.
        rank: Global rank of this process.
        world_size: Number of processes.
        host: Name or address of the machine of rank 0.
        port: A free port on it.
        backend: Communication library. "nccl" on a machine without it means "gloo".
        local_rank: Rank among the processes of this machine; picks the device. Default: the environment's,
            else `rank`.
        seed: Seed of all random states; the same on every rank.
        verbose: Whether rank 0 logs what was launched.
        timeout: Seconds to wait for the other processes.

    Raises:
        ConfigException: The config is wrong; no process group has been made.
        RuntimeError: This process has launched already.
        ConnectionError: Rank 0 does not answer, or some ranks do not arrive, within `timeout`.
    """
    _check_arguments(rank, world_size, port, timeout)
    if global_context.is_launched or dist.is_initialized():
        raise RuntimeError(
            "this process has launched already: call colossalai.core.global_context.destroy() before a "
            "second launch"
        )
    device = _device(_local_rank(rank) if local_rank is None else local_rank)
    try:
        global_context.load_config(config)
        global_context.init_parallel_groups(rank=rank, world_size=world_size, device=device)
        store = _meet(host, port, rank=rank, world_size=world_size, timeout=timeout)
        chosen = _backend(backend, device, rank)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size)
        global_context.init_own_groups()
        start_watching(global_context.config, store, rank=rank, world_size=world_size, axis_of=_axis_of)
    except BaseException:
        global_context.destroy()
        raise
    if chosen == "gloo":
        atexit.unregister(_destroy_at_exit)
        atexit.register(_destroy_at_exit)
    seed_all_modes(seed, global_context.mesh, global_context.tensor_axes)
    if verbose:
        mesh = global_context.mesh
        get_dist_logger().info(f"launched {mesh} with {chosen} on {device.type}, seed {seed}", ranks=[0])


@names_arguments
def launch_from_torch(
    config: ConfigLike = None,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Launch a process that `colossalai run` or `torchrun` started; see `launch`."""
    place = torch_place()
    launch(config, **asdict(place), backend=backend, seed=seed, verbose=verbose, timeout=timeout)


@names_arguments
def launch_from_slurm(
    config: ConfigLike,
    host: str | None = None,
    port: int | None = None,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Launch a process that SLURM's `srun` started; see `launch`.

    `host` is the node of task 0. Left out, it is MASTER_ADDR or else what SLURM says; `port` is MASTER_PORT
    or else follows from the numbers of job and step.

    Raises:
        ValueError: The process was not started by srun.
    """
    place = slurm_place(host, port)
    launch(config, **asdict(place), backend=backend, seed=seed, verbose=verbose, timeout=timeout)


@names_arguments
def launch_from_openmpi(
    config: ConfigLike,
    host: str | None = None,
    port: int | None = None,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
) -> None:
    """Launch a process that OpenMPI's `mpirun` started; see `launch`.

    `host` is the node of rank 0. Left out, it is MASTER_ADDR or else the node of mpirun, if rank 0 runs
    there; `port` is MASTER_PORT or else follows from the number of the job.

    Raises:
        ValueError: The process was not started by mpirun, or rank 0 runs elsewhere than mpirun.
    """
    place = openmpi_place(host, port)
    launch(config, **asdict(place), backend=backend, seed=seed, verbose=verbose, timeout=timeout)


def relayout(parallel: Mapping[str, Any]) -> None:
    """Lay the mesh of a launched job anew, for a plugin that says the sizes after the launch.

    Layers that were built before keep the old one, so it is done before the model is built.

    Args:
        parallel: What `parallel` in a config would say.

    Raises:
        RuntimeError: Nothing has been launched.
        ConfigException: The sizes do not fit the number of processes, or the job was launched with others.
    """
    mesh, config = global_context.mesh, global_context.config
    written = config.get("parallel")
    layout = parse_layout(parallel, mesh.world_size)
    if parse_layout(written, mesh.world_size) == layout:
        return
    if written:
        raise ConfigException(
            f"the job was launched with parallel={dict(written)}, and the plugin says {dict(parallel)}: "
            "leave `parallel` out of the config, or make the two the same"
        )
    seed = get_seeds()[ParallelMode.GLOBAL]
    config["parallel"] = dict(parallel)
    global_context.init_parallel_groups(rank=mesh.rank, world_size=mesh.world_size)
    global_context.mesh.take_groups_of(mesh)
    global_context.init_own_groups()
    seed_layout_modes(seed, global_context.mesh, global_context.tensor_axes)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser with the arguments of `launch`; add your own to it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the config file")
    parser.add_argument("--host", type=str, help="name or address of the machine of rank 0")
    parser.add_argument("--port", type=int, help="a free port on it")
    parser.add_argument("--world_size", "--world-size", type=int, help="number of processes")
    parser.add_argument("--rank", type=int, help="global rank of this process")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="rank of this process on its machine")
    parser.add_argument(
        "--backend", type=str, default="nccl", help="communication library (default: %(default)s)"
    )
    return parser


def _destroy_at_exit() -> None:
    """End the job of a script that does not: gloo threads that outlive the interpreter abort the process.

    Not after an error: a thread may be waiting for another rank then, and would be waited for in turn.
    """
    if getattr(sys, "last_type", None) is None:
        try:
            prepare_end()
        except Exception as error:
            fail_at_end(error)
        global_context.destroy()
        let_gloo_threads_rest()


def _axis_of(ranks: tuple[int, ...]) -> str | None:
    """Return the axis along some ranks in the mesh of the moment: `relayout` may have laid another one."""
    return global_context.mesh.name_of(ranks) if global_context.is_launched else None


def _check_arguments(rank: int, world_size: int, port: int, timeout: float) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}: the rank must be from 0 to world_size - 1")
    if not 0 < port < 65536:
        raise ValueError(f"port {port} does not exist: choose one from 1024 to 65535")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}; it must be a positive number of seconds")


def _local_rank(rank: int) -> int:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return rank


def _device(local_rank: int) -> torch.device:
    """Return the device of a local rank and make it the current one; ranks share where there are too few."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    index = local_rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def _backend(requested: str, device: torch.device, rank: int) -> str:
    """Return the back end to use: one that is there, and that also carries tensors in host memory."""
    if requested != "nccl":
        return requested
    if device.type == "cpu" or not dist.is_nccl_available():
        if rank == 0:
            get_dist_logger().log_once("no NCCL on this machine: communicating with gloo", level="INFO")
        return "gloo"
    return f"cpu:gloo,{device.type}:nccl"


def _meet(host: str, port: int, *, rank: int, world_size: int, timeout: float) -> dist.Store:
    """Open the store at rank 0 and wait until every rank has arrived at it.

    Raises:
        ConnectionError: The store cannot be opened or reached, or ranks are missing; all within `timeout`.
    """
    where, limit = f"{host}:{port}", timedelta(seconds=timeout)
    try:
        if rank == 0 and not agent_serves(host, port):
            server = serve_store(host, port, timeout=limit)
        else:
            server = dist.TCPStore(host, port, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        raise ConnectionError(_why_no_store(where, port, rank, timeout, str(error))) from error
    # A store may outlive a launch, or a restart of the job: what an earlier one left in it must not be read.
    store = dist.PrefixStore(
        f"launch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_launches)}", server
    )
    store.set(f"arrived/{rank}", network_of_this_process())
    keys = [f"arrived/{other}" for other in range(world_size)]
    try:
        store.wait(keys, limit)
    except dist.DistError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise ConnectionError(
            f"waited {timeout:g} s at {where}: {world_size - len(missing)} of {world_size} ranks arrived; "
            f"missing are ranks {missing}; were they started, with the same host, port and world size?"
        ) from error
    if keep_gloo_here(store.multi_get(keys)):
        before_end(let_gloo_choose)
    return store


def _why_no_store(where: str, port: int, rank: int, timeout: float, error: str) -> str:
    if rank == 0 and ("EADDRINUSE" in error or "already in use" in error):
        holder = port_holder(port)
        taker = holder.describe() if holder is not None else "a process that this user cannot see"
        return f"rank 0 cannot listen at {where}: the port is held by {taker}; choose another port"
    reason = error.strip().splitlines()[0]
    return (
        f"rank {rank} got no answer from rank 0 at {where} within {timeout:g} s: is rank 0 running there, is "
        f"the name right, does a firewall stand between? ({reason})"
    )
