"""Launch of a job: from the rank and the address of rank 0 to a process group and a mesh."""

import argparse
import atexit
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossalai._clock import Clock
from colossalai._lazy import JOB_PARTS, find_name
from colossalai.cluster import (
    LOOPBACK,
    StoreDeparture,
    free_port,
    holder_of,
    keep_gloo_here,
    let_gloo_choose,
    network_of_this_process,
    serve_store,
    wait_for_name,
    wait_for_server,
    within,
)
from colossalai.context._check import names_arguments
from colossalai.context._config import ConfigException
from colossalai.context._launch_arguments import (
    LaunchPlace,
    check_arguments,
    chosen_backend,
    device_of,
    local_rank_of,
    openmpi_place,
    slurm_place,
    torch_place,
)
from colossalai.context._layout import Layout
from colossalai.context._parallel_context import global_context
from colossalai.context._parallel_mode import ParallelMode
from colossalai.context._process import process
from colossalai.context._random import get_seeds, seed_all_modes, seed_layout_modes
from colossalai.context._supervision import (
    before_end,
    fail_at_end,
    interrupt_at_end,
    leave_store,
    let_gloo_threads_rest,
    prepare_end,
    start_watching,
)
from colossalai.logging import get_dist_logger
from colossalai.monitor import agent_serves

ConfigLike = str | Path | Mapping[str, Any] | None

DEFAULT_TIMEOUT = 120.0
"""Seconds that a process waits for the others to arrive, and rank 0, at its end, for them to leave."""

_LEAST_WAIT_S = 0.05  # enough to find an arrived value after the deadline


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
    matmul: str | None = None,
) -> None:
    """Start this process's part of a job: check the config, meet the other processes, lay the mesh.

    Args:
        config: Path of a Python, YAML or JSON file, or a dict, with hyper-parameters and feature keys.
            `colossalai run --set` overrides it.
        rank: Global rank of this process.
        world_size: Number of processes.
        host: Name or address of the machine of rank 0.
        port: A free port on it.
        backend: Communication library. "nccl" on a machine without it means "auto": ranks of one machine
            communicate through its memory, others over gloo. "shared_memory" requires the former.
        local_rank: Rank among the processes of this machine; selects the device. Default: the environment's,
            else `rank`.
        seed: Seed of all random states; the same on every rank.
        verbose: Whether rank 0 logs the mesh and the backend.
        timeout: Seconds to wait for the other processes; at the end, too, for the rank that has their store.
        matmul: Library for products of float32 matrices on CPU: "torch", "onednn", or "auto" for the faster
            one. Default: the config's, else "auto". `colossalai run --set` overrides both.

    Raises:
        ConfigException: `config` cannot be read, or has an invalid feature; no process group has been made.
        ValueError: Another argument is of the wrong type or out of range.
        RuntimeError: The process has been launched already.
        ConnectionError: Rank 0 does not answer, or some ranks do not arrive, within `timeout`.
    """
    check_arguments(
        rank=rank,
        world_size=world_size,
        host=host,
        port=port,
        backend=backend,
        local_rank=local_rank,
        seed=seed,
        timeout=timeout,
    )
    if global_context.is_launched or dist.is_initialized():
        raise RuntimeError(
            "this process has launched already: call colossalai.core.global_context.destroy() before a "
            "second launch"
        )
    device = device_of(local_rank_of(rank) if local_rank is None else local_rank)
    try:
        global_context.load_config(config, matmul=matmul)
        global_context.init_parallel_groups(rank=rank, world_size=world_size, device=device)
        store = _meet(host, port, rank=rank, world_size=world_size, timeout=timeout)
        talk = _connect(store, backend, device, rank=rank, world_size=world_size)
        global_context.init_own_groups()
        start_watching(
            global_context.config,
            store,
            rank=rank,
            world_size=world_size,
            axis_of=_axis_of,
            device=device,
            verbose=verbose,
        )
    except BaseException:
        global_context.destroy()
        raise
    seed_all_modes(seed, global_context.mesh, global_context.tensor_axes)
    if verbose:
        mesh = global_context.mesh
        # A plugin can change the layout later, so a mesh with all ranks along `dp` is not logged here.
        is_laid_out = mesh.axis_size("dp") < world_size
        what = mesh if is_laid_out else f"{world_size} rank{'s' if world_size > 1 else ''}"
        get_dist_logger().info(f"launched {what} with {talk} on {device.type}, seed {seed}", ranks=[0])


@names_arguments
def launch_from_torch(
    config: ConfigLike = None,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    matmul: str | None = None,
) -> None:
    """Launch a process that `colossalai run` or `torchrun` started; see `launch`.

    A process that no launcher has started is a job of one rank, and logs this.

    Raises:
        ValueError: A variable of a launcher is missing or not a number, or srun or mpirun has started this
            process as one of several.
    """
    place = torch_place()
    if place is None:
        get_dist_logger().info(
            "no launcher has started this process, so it runs alone; for N processes: "
            f"colossalai run --nproc_per_node N {Path(sys.argv[0]).name or 'script.py'}"
        )
        place = LaunchPlace(rank=0, world_size=1, local_rank=0, host=LOOPBACK, port=free_port())
    launch(
        config,
        **asdict(place),
        backend=backend,
        seed=seed,
        verbose=verbose,
        timeout=timeout,
        matmul=matmul,
    )


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
    matmul: str | None = None,
) -> None:
    """Launch a process that SLURM's `srun` started; see `launch`.

    `host` is the node of task 0. Default: MASTER_ADDR, else SLURM's first node. `port` defaults to
    MASTER_PORT, else to a number derived from job and step.

    Raises:
        ValueError: The process was not started by srun.
    """
    place = slurm_place(host, port)
    launch(
        config,
        **asdict(place),
        backend=backend,
        seed=seed,
        verbose=verbose,
        timeout=timeout,
        matmul=matmul,
    )


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
    matmul: str | None = None,
) -> None:
    """Launch a process that OpenMPI's `mpirun` started; see `launch`.

    `host` is the node of rank 0. Default: MASTER_ADDR, else the node of mpirun, if rank 0 runs there. `port`
    defaults to MASTER_PORT, else to a number derived from the job.

    Raises:
        ValueError: The process was not started by mpirun, or rank 0 and mpirun run on different hosts.
    """
    place = openmpi_place(host, port)
    launch(
        config,
        **asdict(place),
        backend=backend,
        seed=seed,
        verbose=verbose,
        timeout=timeout,
        matmul=matmul,
    )


def relayout(layout: Layout) -> None:
    """Lay the mesh of a launched job anew, for a plan whose sizes are given after the launch.

    Layers that were built before keep the old mesh, so this is done before the model is built; once, as
    groups and random states depend on it. The present layout is kept if it is the same.

    Args:
        layout: The extents; its data-parallel size can be left out.

    Raises:
        RuntimeError: The job has not been launched.
        ConfigException: `layout` does not fit the number of processes, or contradicts the job's layout.
    """
    mesh, config = global_context.mesh, global_context.config
    if layout.over(mesh.world_size) == global_context.layout:
        return
    if global_context.auto_plan is not None:
        raise ConfigException(
            f"the job was launched with a plan by `auto`, laid out as {global_context.layout.written()}, and "
            f"the plugin has {layout.written()}: leave `auto` out of the config, or make both agree"
        )
    if config.get("parallel"):
        raise ConfigException(
            f"the job was launched with parallel={dict(config['parallel'])}, or laid out so by a plugin, "
            f"and the plugin has {layout.written()}: leave `parallel` out of the config, or make both agree"
        )
    seed = get_seeds()[ParallelMode.GLOBAL]
    config["parallel"] = layout.written()
    global_context.init_parallel_groups(
        rank=mesh.rank, world_size=mesh.world_size, plain_layers=layout.plain_layers
    )
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

    It is skipped after an error: a thread could be waiting for another rank, and this process for the thread.
    """
    if getattr(sys, "last_type", None) is None:
        try:
            try:
                prepare_end()
            except Exception as error:
                fail_at_end(error)
            global_context.destroy()
        except KeyboardInterrupt:
            interrupt_at_end()
            global_context.destroy()  # the interrupted wait, for a save or other ranks, is not repeated
        let_gloo_threads_rest()


def _leave_at_exit() -> None:
    """Leave the store of a script that does not end its job."""
    try:
        leave_store()()
    except KeyboardInterrupt:
        interrupt_at_end()


def _connect(store: dist.Store, requested: str, device: torch.device, *, rank: int, world_size: int) -> str:
    """Make the default process group; return the medium of communication.

    Raises:
        ValueError: `requested` is shared memory, and the ranks share none, or compute on devices.
    """
    chosen = talk = chosen_backend(requested, device)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size)
    # A job over shared memory uses gloo where it has to.
    at_exit = _destroy_at_exit if chosen in ("gloo", "shared_memory") else _leave_at_exit
    atexit.unregister(at_exit)
    atexit.register(at_exit)
    if chosen == "shared_memory":
        talk = find_name("colossalai", JOB_PARTS, "transport_of")()
    if requested == "shared_memory" and talk != "shared memory":
        raise ValueError(
            "backend is 'shared_memory', and the ranks cannot all share memory: they are on "
            "several machines, or there is too little of it (COLOSSALAI_SHARED_MEMORY); use backend='auto'"
        )
    return talk


def _axis_of(ranks: tuple[int, ...]) -> str | None:
    """Return the axis along some ranks in the present mesh, which `relayout` can replace."""
    return global_context.mesh.name_of(ranks) if global_context.is_launched else None


def _meet(host: str, port: int, *, rank: int, world_size: int, timeout: float) -> dist.Store:
    """Open the store at rank 0 and wait until every rank has arrived at it.

    Raises:
        ConnectionError: The store cannot be opened or reached, or ranks are missing; all within `timeout`.
    """
    clock = process.clock
    where, deadline = f"{host}:{port}", clock.now() + timeout  # see [Note: one time limit]
    # A store can outlive a launch, or a restart of the job: keys of an earlier one must not be read.
    prefix = f"launch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{process.num_launches}"
    process.num_launches += 1
    keys = [f"arrived/{other}" for other in range(world_size)]
    while True:
        try:
            server = _store_at(host, port, rank=rank, deadline=deadline, clock=clock)
        except TimeoutError:
            silent = "the server there does not answer"
            raise ConnectionError(_why_no_store(where, port, rank, timeout, silent)) from None
        except (dist.DistError, ConnectionError) as error:
            raise ConnectionError(_why_no_store(where, port, rank, timeout, str(error))) from error
        server.set_timeout(timedelta(seconds=timeout))
        store = dist.PrefixStore(prefix, server)
        departure = None
        if not agent_serves(host, port):
            departure = StoreDeparture(store=store, rank=rank, world_size=world_size, timeout=timeout)
        try:
            if departure is not None:
                departure.announce()  # before the arrival: after all arrivals, each process can be found
            # Every rank sets its key and waits for the keys of all ranks.
            store.set(keys[rank], network_of_this_process())
            store.wait(keys, _until(deadline, clock))
            if keep_gloo_here(store.multi_get(keys)):
                before_end(let_gloo_choose)
            process.departure = departure
            return store
        except dist.DistNetworkError as error:
            # It was the store of an earlier launch, which rank 0 has closed; the next one will open.
            if rank == 0 or clock.now() >= deadline:
                raise ConnectionError(_why_no_store(where, port, rank, timeout, str(error))) from error
        except dist.DistError as error:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            arrived = f"{world_size - len(missing)} of {world_size} ranks arrived"
            raise ConnectionError(
                f"waited {timeout:g} s at {where}: {arrived}; missing are ranks {missing}; were they "
                "started, with the same host, port and world size?"
            ) from error


def _store_at(host: str, port: int, *, rank: int, deadline: float, clock: Clock) -> dist.TCPStore:
    """Open the store, at rank 0 unless the launcher has, or connect to it.

    Raises:
        ConnectionError: No server listens at the address by the deadline, or `host` is not known.
        TimeoutError: The server does not answer by the deadline.
        DistError: The store cannot be opened, or the server is not a store.
    """
    has_agent = agent_serves(host, port)
    if rank == 0 and not has_agent:
        wait_for_name(host, port, deadline=deadline, clock=clock)
        return within(
            deadline - clock.now(),
            lambda: serve_store(host, port, timeout=_until(deadline, clock)),
            clock=clock,
        )
    if not has_agent:
        wait_for_server(host, port, deadline=deadline, clock=clock)
    return within(
        deadline - clock.now(),
        lambda: dist.TCPStore(host, port, timeout=_until(deadline, clock), wait_for_workers=False),
        clock=clock,
    )


def _until(deadline: float, clock: Clock) -> timedelta:
    return timedelta(seconds=max(_LEAST_WAIT_S, deadline - clock.now()))


def _why_no_store(where: str, port: int, rank: int, timeout: float, error: str) -> str:
    if rank == 0 and ("EADDRINUSE" in error or "already in use" in error):
        return f"rank 0 cannot listen at {where}: {holder_of(port)}; choose another port"
    reason = error.strip().splitlines()[0]
    if rank == 0:
        question = "is that the name of this machine?"
        return f"rank 0 has no store at {where} within {timeout:g} s: {question} ({reason})"
    return (
        f"rank {rank} got no answer from rank 0 at {where} within {timeout:g} s: is rank 0 running there, is "
        f"the name right, does a firewall block it? ({reason})"
    )
