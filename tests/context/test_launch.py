"""Launch: ranks meet, groups work, and what goes wrong is said in time."""

import os
import shlex
import socket
import time

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.communication import all_gather
from colossalai.context import (
    INITIALIZER_MAPPING,
    ConfigException,
    ParallelMode,
    ProcessGroupInitializer,
    set_mode,
)
from colossalai.core import global_context as gpc
from colossalai.registry import DIST_GROUP_INITIALIZER
from tests.ranks import run_ranks

M = ParallelMode


def sums_of_every_mode(parallel, modes):
    colossalai.launch_from_torch(config={"parallel": parallel}, verbose=False)
    found = {}
    for mode in modes:
        value = torch.tensor([float(gpc.get_global_rank())])
        dist.all_reduce(value, group=gpc.get_group(mode))
        found[mode] = (value.item(), float(sum(gpc.get_ranks_in_group(mode))))
        assert gpc.get_group(mode) is gpc.get_group(mode)
    gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "modes"),
    [
        ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, [M.DATA, M.PIPELINE, M.TENSOR, M.MODEL]),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, [M.PARALLEL_2P5D_XZ, M.PARALLEL_2P5D_ROW]),
        ({"tensor": {"size": 8, "mode": "3d"}}, [M.PARALLEL_3D_OUTPUT_X_WEIGHT, M.PARALLEL_3D_INPUT]),
    ],
)  # fmt: skip
def test_groups_communicate(parallel, modes):
    for found in run_ranks(sums_of_every_mode, 8, parallel, modes):
        assert all(got == want for got, want in found.values()), found


def only_half_of_the_ranks_use_a_group():
    colossalai.launch_from_torch(config={"parallel": {"pipeline": 2}}, verbose=False)
    if gpc.is_pipeline_first_stage():  # the others never ask for their group, and nobody waits for them
        value = torch.ones(1)
        dist.all_reduce(value, group=gpc.get_group(M.DATA))
        return value.item()
    return None


@pytest.mark.dist
def test_a_group_is_made_by_its_members_alone():
    assert run_ranks(only_half_of_the_ranks_use_a_group, 4) == [2.0, None, 2.0, None]


class PairsInitializer(ProcessGroupInitializer):
    """Makes its groups itself, as initializers of the documents' time do."""

    def init_parallel_groups(self):
        made = []
        for start in range(0, self.world_size, 2):
            ranks = [start, start + 1]
            group, cpu_group = dist.new_group(ranks), dist.new_group(ranks, backend="gloo")
            if self.rank in ranks:
                made.append((ranks.index(self.rank), 2, group, cpu_group, ranks, "pairs"))
        return made


def groups_of_the_users_own_making():
    DIST_GROUP_INITIALIZER.register_module(PairsInitializer)
    INITIALIZER_MAPPING["pairs"] = "PairsInitializer"
    colossalai.launch_from_torch(config={"parallel": {"tensor": {"size": 4, "mode": "pairs"}}}, verbose=False)
    value = torch.tensor([float(gpc.get_global_rank())])
    dist.all_reduce(value, group=gpc.get_group("pairs"))
    gathered = all_gather(value, 0, "pairs")
    assert gpc.axis("pairs").group is gpc.get_group("pairs")
    assert dist.get_process_group_ranks(gpc.get_cpu_group("pairs")) == gpc.get_ranks_in_group("pairs")
    gpc.destroy()
    return value.item(), gathered.tolist()


@pytest.mark.dist
def test_an_initializer_may_make_its_groups_itself():
    low, high = (1.0, [1.0, 1.0]), (5.0, [5.0, 5.0])
    assert run_ranks(groups_of_the_users_own_making, 4) == [low, low, high, high]


def second_launch():
    colossalai.launch_from_torch(config={"LR": 1}, verbose=False)
    with pytest.raises(RuntimeError, match="destroy"):
        colossalai.launch_from_torch(config={}, verbose=False)
    assert gpc.config.LR == 1
    gpc.destroy()
    assert not dist.is_initialized()
    colossalai.launch_from_torch(config={"LR": 2}, verbose=False)
    value = torch.ones(1)
    dist.all_reduce(value)
    return gpc.config.LR, value.item()


@pytest.mark.dist
def test_a_second_launch_needs_destroy():
    assert run_ranks(second_launch, 2) == [(2, 2.0)] * 2


def wrong_config():
    with pytest.raises(ConfigException, match="2 processes, but"):
        colossalai.launch_from_torch(config={"parallel": {"pipeline": 4}})
    return dist.is_initialized() or gpc.is_launched


@pytest.mark.dist
def test_a_wrong_config_makes_no_group():
    assert run_ranks(wrong_config, 2) == [False, False]


def random_numbers():
    colossalai.launch_from_torch(
        config={"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False, seed=7
    )
    drawn = {}
    for mode in (M.GLOBAL, M.DATA, M.TENSOR):
        set_mode(mode)
        drawn[mode] = torch.rand(3).tolist()
    return drawn


@pytest.mark.dist
def test_random_states_agree_where_slices_agree():
    drawn = run_ranks(random_numbers, 4)  # dp 2 x tp 2
    assert all(rank[M.GLOBAL] == drawn[0][M.GLOBAL] for rank in drawn)
    assert drawn[0][M.DATA] == drawn[1][M.DATA] != drawn[2][M.DATA] == drawn[3][M.DATA]
    assert len({tuple(rank[M.TENSOR]) for rank in drawn}) == 4


def absent_rank(wait):
    if os.environ["RANK"] == "1":
        time.sleep(wait)  # alive, but never launches
        return None
    with pytest.raises(ConnectionError) as caught:
        colossalai.launch_from_torch(config={}, timeout=1.0)
    return str(caught.value)


@pytest.mark.dist
def test_missing_ranks_are_named():
    message = run_ranks(absent_rank, 3, 2.5)[0]
    assert "2 of 3 ranks arrived; missing are ranks [1]" in message


@pytest.mark.unit
def test_a_master_that_does_not_answer_is_named_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # not listening
        port = silent.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(
            ConnectionError, match=f"rank 1 got no answer from rank 0 at 127.0.0.1:{port} within 1"
        ):
            colossalai.launch({}, rank=1, world_size=2, host="127.0.0.1", port=port, timeout=1.0)
    assert time.monotonic() - start < 10
    assert not gpc.is_launched


@pytest.mark.unit
def test_a_taken_port_names_its_holder():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"held by .*{os.getpid()}"):
            colossalai.launch({}, rank=0, world_size=1, host="127.0.0.1", port=port, timeout=2.0)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("call", "variable", "starter"),
    [
        (lambda: colossalai.launch_from_torch({}), "RANK", "colossalai run"),
        (lambda: colossalai.launch_from_slurm({}, "localhost", 29500), "SLURM_PROCID", "srun"),
        (lambda: colossalai.launch_from_openmpi({}, "localhost", 29500), "OMPI_COMM_WORLD_RANK", "mpirun"),
    ],
)
def test_a_missing_variable_is_named_with_its_launcher(monkeypatch, call, variable, starter):
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=f"{variable} is not set: start the script with .*{starter}"):
        call()


@pytest.mark.unit
def test_launchers_read_their_variables(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NPROCS", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    colossalai.launch_from_slurm({"A": 1}, "127.0.0.1", colossalai.testing.free_port(), verbose=False)
    try:
        assert gpc.get_world_size(M.GLOBAL) == 1
        assert gpc.config.A == 1
    finally:
        gpc.destroy()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2, "port": 29500}, "rank 2 of world_size 2"),
        ({"rank": 0, "world_size": 1, "port": 0}, "port 0 does not exist"),
        ({"rank": 0, "world_size": 1, "port": 29500, "timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        colossalai.launch({}, host="127.0.0.1", **arguments)


@pytest.mark.unit
def test_default_parser():
    parser = colossalai.get_default_parser()
    parser.add_argument("--mine", type=int)
    line = "--host h --port 1 --world_size 2 --rank 0 --config c.py --mine 3"
    args = parser.parse_args(shlex.split(line))
    assert (args.host, args.port, args.world_size, args.rank) == ("h", 1, 2, 0)
    assert (args.config, args.backend, args.mine, args.local_rank) == ("c.py", "nccl", 3, None)
