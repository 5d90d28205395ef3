"""Launch: ranks meet, groups work, and what goes wrong is said in time."""

import os
import re
import shlex
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.booster import Booster
from colossalai.cluster import serve_store, wait_for_server
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
from tests.harness.clocks import Clock, FakeClock, process
from tests.ranks import run_ranks
from tests.tiers import further

M = ParallelMode


def sums_of_every_mode(parallel, modes):
    colossalai.launch_from_torch(config={"parallel": parallel}, verbose=False)
    found = {}
    for mode in modes:
        value = torch.tensor([float(gpc.get_global_rank())])
        dist.all_reduce(value, group=gpc.get_group(mode))
        found[mode] = (value.item(), float(sum(gpc.get_ranks_in_group(mode))))
        assert gpc.get_group(mode) is gpc.get_group(mode)
    dist.barrier()  # rank 0 has the store in which the others may still be making a group
    gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "modes"),
    [
        ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, [M.DATA, M.PIPELINE, M.TENSOR, M.MODEL]),
        further(
            {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, [M.PARALLEL_2P5D_XZ, M.PARALLEL_2P5D_ROW]
        ),
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


def launches_in_a_row(count):
    for _ in range(count):  # rank 1 may find the store that rank 0 is about to end
        colossalai.launch_from_torch(config={}, verbose=False)
        gpc.destroy()
    return count


@pytest.mark.dist
def test_a_launch_does_not_join_the_store_of_the_one_before():
    assert run_ranks(launches_in_a_row, 2, 12) == [12] * 2


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


def absent_rank(folder):
    """Launch all but rank 1, by a clock that is almost at the limit when ranks 0 and 2 have arrived."""
    rank, host, port = int(os.environ["RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = serve_store(host, port) if rank == 0 else dist.TCPStore(host, port)
    store = dist.PrefixStore("launch/0/0", server)

    def now():
        if not store.check([f"arrived/{rank}"]):
            return 0.0
        store.wait(["arrived/2"], timedelta(seconds=600.0))  # rank 0 counts it
        return 599.5

    process.clock = Clock(now=now)
    message = None
    try:
        if rank != 1:  # which is alive, but never launches
            with pytest.raises(ConnectionError) as caught:
                colossalai.launch_from_torch(config={}, timeout=600.0)
            message = str(caught.value)
    finally:
        (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < 3:  # rank 0 has the store
        time.sleep(0.01)
    return message


@pytest.mark.dist
def test_missing_ranks_are_named(tmp_path):
    message = run_ranks(absent_rank, 3, tmp_path)[0]
    assert "2 of 3 ranks arrived; missing are ranks [1]" in message


LIMIT_S = 0.5  # of the launches that fail, by a clock of the test
ANSWER_S = 300.0  # for what answers, however busy the machine is


def wait_for_answer(event, seconds):
    return event.wait(ANSWER_S)


def reason_against(monkeypatch, host, port, *, rank=1, wait=wait_for_answer):
    """Launch; return how that fails, which must be when the time limit is over."""
    fake = FakeClock()
    monkeypatch.setattr(process, "clock", replace(fake.clock, wait=wait or fake.wait))
    with pytest.raises(ConnectionError) as caught:
        colossalai.launch({}, rank=rank, world_size=2, host=host, port=port, timeout=LIMIT_S)
    assert fake.seconds == pytest.approx(LIMIT_S)
    assert not gpc.is_launched
    return str(caught.value)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("host", "rank", "reason"),
    [
        ("127.0.0.1", 1, r"rank 1 got no answer .* within 0.5 s.*\(Connection refused\)"),
        further("no.such.host.invalid", 1, r"rank 1 got no answer .*'no.such.host.invalid' is not known"),
        ("no.such.host.invalid", 0, r"rank 0 has no store at no.such.host.invalid:.* is not known"),
    ],
)
def test_a_master_that_does_not_answer_is_named_in_time(capfd, monkeypatch, host, rank, reason):
    def lookup(name, *args, **kwargs):  # the name server of the machine has its own patience
        if name == "no.such.host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real_lookup(name, *args, **kwargs)

    real_lookup = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        message = reason_against(monkeypatch, host, server.getsockname()[1], rank=rank)
    assert re.fullmatch(f"{reason}.*", message)
    assert capfd.readouterr().err == ""  # torch's own reports of it are long


@pytest.mark.unit
@pytest.mark.parametrize(
    ("word", "reason"),
    [(b"", "it closes the connection"), (b"SSH-2.0-OpenSSH\r\n", "it is another program that listens")],
)
def test_a_server_that_closes_or_greets_is_no_store(word, reason):
    fake = FakeClock()
    clock = replace(fake.clock, wait=wait_for_answer)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet_and_close, args=(server, word)).start()
        port = server.getsockname()[1]
        with pytest.raises(ConnectionError, match=f"^{reason}$"):
            wait_for_server("127.0.0.1", port, deadline=LIMIT_S, first_word_s=ANSWER_S, clock=clock)
        server.shutdown(socket.SHUT_RDWR)
    assert fake.seconds == pytest.approx(LIMIT_S)


def greet_and_close(server, word):
    with suppress(OSError):  # it is closed
        while True:
            with server.accept()[0] as connection:
                connection.sendall(word)


@pytest.mark.unit
def test_a_master_that_says_nothing_is_named_in_time(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_ADDR2LINE", "1")  # the client ends sooner when the test has ended
    waits = []

    def wait(event, seconds):
        waits.append(seconds)
        if len(waits) == 1:  # for the address
            return wait_for_answer(event, seconds)
        process.clock.sleep(seconds)
        return False

    with socket.create_server(("127.0.0.1", 0)) as server:
        message = reason_against(monkeypatch, "127.0.0.1", server.getsockname()[1], wait=wait)
        assert message.endswith("(the server there does not answer)")
        for _ in range(2):  # the first look, and torch's client
            server.accept()[0].close()
    for thread in threading.enumerate():
        if thread.name == "colossalai-reach":
            thread.join(ANSWER_S)


@pytest.mark.unit
def test_a_name_server_that_does_not_answer_takes_no_longer_than_the_limit(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: over.wait(ANSWER_S))
    try:
        message = reason_against(monkeypatch, "host1", 29500, wait=None)
        assert "the name server does not say what 'host1' is" in message
    finally:
        over.set()


@pytest.mark.unit
def test_a_taken_port_names_its_holder():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = f"^rank 0 cannot listen at 127.0.0.1:{port}: port {port} is held by .*{os.getpid()}"
        with pytest.raises(ConnectionError, match=said):
            colossalai.launch({}, rank=0, world_size=1, host="127.0.0.1", port=port)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("call", "variable", "starter"),
    [
        (lambda: colossalai.launch_from_torch({}), "MASTER_ADDR", "colossalai run"),
        (lambda: colossalai.launch_from_slurm({}, "localhost", 29500), "SLURM_PROCID", "srun"),
        (lambda: colossalai.launch_from_openmpi({}, "localhost", 29500), "OMPI_COMM_WORLD_RANK", "mpirun"),
    ],
)
def test_a_missing_variable_is_named_with_its_launcher(monkeypatch, call, variable, starter):
    for name in ("RANK", "WORLD_SIZE"):  # half of what torch's launchers say
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match=f"{variable} is not set: start the script with .*{starter}"):
        call()


@pytest.mark.unit
def test_without_a_launcher_a_process_is_a_job_of_its_own(monkeypatch, capfd):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    try:
        colossalai.launch_from_torch({"gradient_accumulation": 2}, verbose=False)
        model = torch.nn.Linear(2, 1)
        engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
        assert "gradient_accumulation" in gpc.config
        assert engine.model is not None
        assert (gpc.get_world_size(M.GLOBAL), gpc.get_global_rank()) == (1, 0)
        gpc.destroy()
        colossalai.launch_from_torch(verbose=False)
        Booster().boost(torch.nn.Linear(2, 1))
    finally:
        gpc.destroy()
    said = [line for line in "".join(capfd.readouterr()).splitlines() if "no launcher" in line]
    assert len(said) == 2
    assert said[0].endswith("so it runs alone; for N processes: colossalai run --nproc_per_node N train.py")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SLURM_STEP_NUM_TASKS", "srun has started this process as one of 4, .*launch_from_slurm"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun has started this process as one of 4, .*launch_from_openmpi"),
    ],
)
def test_another_launchers_processes_do_not_run_alone(monkeypatch, variable, words):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ValueError, match=words):
        colossalai.launch_from_torch({})


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
        ({"timeout": "4"}, "timeout is '4'; it must be a positive number of seconds"),
        ({"port": "29998"}, "port is '29998', a str; it must be an int; write 29998"),
        ({"rank": 0.0}, "rank is 0.0, a float; it must be an int"),
        ({"world_size": None}, "world_size is None, a NoneType; it must be an int"),
        ({"local_rank": "0"}, "local_rank is '0', a str; it must be an int; write 0"),
        ({"local_rank": -1}, "local_rank is -1; it must be 0 or more"),
        ({"seed": "abc"}, "seed is 'abc', a str; it must be an int"),
        ({"seed": -1}, "seed is -1; it must be from 0"),
        ({"host": None}, "host is None; it must be the name or the address"),
        ({"backend": "foo"}, "backend is 'foo': torch has no such library; use one of auto"),
        ({"backend": "cpu:gloo,cuda:foo"}, "backend is 'cpu:gloo,cuda:foo': torch has no such"),
        ({"backend": None}, "backend is None: torch has no such"),
    ],
)
def test_wrong_arguments(arguments, message):
    right = {"rank": 0, "world_size": 1, "port": 29500, "host": "127.0.0.1"}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        colossalai.launch({}, **(right | arguments))


@pytest.mark.unit
def test_default_parser():
    parser = colossalai.get_default_parser()
    parser.add_argument("--mine", type=int)
    line = "--host h --port 1 --world_size 2 --rank 0 --config c.py --mine 3"
    args = parser.parse_args(shlex.split(line))
    assert (args.host, args.port, args.world_size, args.rank) == ("h", 1, 2, 0)
    assert (args.config, args.backend, args.mine, args.local_rank) == ("c.py", "nccl", 3, None)
