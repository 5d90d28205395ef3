"""From the options of `colossalai run` to hosts, commands and variables; mistakes are said in plain words."""

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from colossalai.cli import main
from colossalai.cluster import Host
from colossalai.launcher._environment import forwarded_environment, withheld_names
from colossalai.launcher._job import ClusterJob, Job
from colossalai.launcher._run import RunOptions, find_hosts

pytestmark = pytest.mark.unit

ALLOCATION = {"SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.fixture(autouse=True)
def folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("raise AssertionError('started')")
    return tmp_path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["run", *args, "job.py"])


def dry_run(*args: str) -> dict[str, str]:
    """Return the commands by host."""
    result = invoke("--dry-run", *args)
    assert result.exit_code == 0, result.output
    stdin, commands = result.output.split("\n", 1)
    assert stdin.startswith("# over stdin: ")
    return dict(re.findall(r"# (.*)\n(.*)\n", commands))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--host", "a,b", "--hostfile", "f"), "use one of them"),
        (("--host", "a,localhost"), "'localhost' is another machine on each of the 2 nodes"),
        (("--host", "a,b", "--master_addr", "127.0.0.1"), "'127.0.0.1' is another machine on each"),
        (("--host", "a,b", "--exclude", "a,b"), "leaves no host"),
        (("--include", "a"), "--include a is about several machines; name them with --host or --hostfile"),
        (("--ssh-port", "22"), "--ssh-port 22 is about several machines"),
        (("--nnodes", "1:2"), "--nnodes 1:2 is about several machines"),
        (("--host", "a,b", "--nnodes", "1:3"), "--nnodes 1:3 does not fit the hosts: from 1 to 2"),
        (("--host", "a,b", "--nnodes", "few"), "--nnodes 'few' is neither a number nor MIN:MAX"),
        (("--host", "a:2", "--nproc_per_node", "3"), "--nproc_per_node 3 is more than the 2 slots of a"),
        (("--host", "a", "--max-restarts", "-1"), "--max-restarts -1 is negative"),
        (("--host", "a", "--timeout", "0"), "--timeout 0 leaves no time to start"),
        (("--set", "fp16.mode"), "--set 'fp16.mode' is not an override: write KEY=VALUE"),
        (("--env", "A-B=1"), "--env 'A-B=1' is not a variable; write NAME=VALUE"),
        (("--env", "NOT_SET_HERE"), "--env NOT_SET_HERE: it is not set here; write NOT_SET_HERE=VALUE"),
        (("--host", "a", "--extra_launch_args", "rdzv_backend=c10d"), "'rdzv_backend' is not known here"),
        (("--host", "a,b", "--extra_launch_args", "standalone"), "standalone is for one machine"),
        (("--hostfile", "nowhere"), "cannot read the host file 'nowhere'"),
    ],
)
def test_a_mistake_is_said_in_plain_words(args: tuple[str, ...], message: str):
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.output


def test_a_dry_run_has_a_command_for_each_host(tmp_path: Path):
    own = socket.gethostname()
    commands = dry_run("--host", f"a:3,b,{own}", "--max-restarts", "2", "--timeout", "30")
    assert list(commands) == ["a", "b", own]
    assert shlex.split(commands["a"])[:2] == ["ssh", "-T"]
    assert shlex.split(commands[own])[:2] == ["sh", "-c"]
    agent = shlex.split(shlex.split(shlex.split(commands["a"])[-1])[-1])
    assert agent[:3] == ["cd", str(tmp_path), "&&"]
    start = agent.index(sys.executable)
    assert agent[start : start + 4] == [sys.executable, "-P", "-m", "colossalai.launcher._host_agent"]
    rest = " ".join(agent[start + 6 :])
    assert rest == "--timeout 30 --attempt 0 --max-restarts 2 --nproc-per-node 3 -- job.py; exit $?"


@pytest.mark.parametrize(
    ("options", "words"), [((), []), (("--bind",), ["--bind"]), (("--no-bind",), ["--no-bind"])]
)
def test_all_hosts_are_told_whether_to_bind(options: tuple[str, ...], words: list[str]):
    for command in dry_run("--host", "a,b", *options).values():
        assert re.findall(r"--(?:no-)?bind", command) == words


def test_a_dry_run_on_this_machine_starts_nothing():
    result = invoke("--dry-run", "--nproc_per_node", "4")
    assert result.output == f"# on this machine, 4 times\n{sys.executable} job.py\n"


def test_arguments_of_torchs_launcher_are_options():
    plain = dry_run("--host", "a,b", "--nnodes", "1:2", "--nproc_per_node", "2", "--max-restarts", "3")
    extra = dry_run("--host", "a,b", "--extra_launch_args", "nnodes=1:2,--nproc-per-node=2,max_restarts=3")
    assert [re.sub(r"[0-9a-f]{12}", "ID", command) for command in plain.values()] == [
        re.sub(r"[0-9a-f]{12}", "ID", command) for command in extra.values()
    ]


def test_a_job_that_may_lose_a_machine_may_restart_once():
    assert "--max-restarts 1 " in dry_run("--host", "a,b", "--nnodes", "1:2")["a"]
    assert "--max-restarts" not in dry_run("--host", "a,b", "--nnodes", "2")["a"]


def test_the_hosts_of_an_allocation():
    options = RunOptions(target="job.py")
    assert find_hosts(options, {}) == ()
    assert find_hosts(options, ALLOCATION) == (Host("node1"), Host("node2"))
    assert find_hosts(options, {"SLURM_JOB_NODELIST": socket.gethostname()}) == ()
    assert find_hosts(RunOptions(target="job.py", exclude="node1"), ALLOCATION) == (Host("node2"),)
    assert find_hosts(RunOptions(target="job.py", host_list="a"), ALLOCATION) == (Host("a"),)
    with pytest.raises(ValueError, match="srun has started colossalai run several times"):
        find_hosts(options, {**ALLOCATION, "SLURM_STEP_NUM_TASKS": "2"})


def test_the_variables_that_go_along(monkeypatch: pytest.MonkeyPatch):
    caller = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": "/lib",
        "HF_HOME": "/cache",
        "HF_TOKEN": "a secret",
        "HOME": "/root",
        "COLOSSALAI_NODE": "of another job",
    }
    kept = {name: caller[name] for name in ("HF_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTHONPATH")}
    assert forwarded_environment(caller) == kept
    given = ["OMP_NUM_THREADS=8", "HF_TOKEN=given=by hand", "EMPTY=", "HOME"]
    expected = {
        **kept,
        "OMP_NUM_THREADS": "8",
        "HF_TOKEN": "given=by hand",
        "EMPTY": "",
        "HOME": "/root",
    }
    assert forwarded_environment(caller, given) == expected


def test_secrets_stay_on_this_machine_however_they_are_written():
    secrets = [
        *("HF_TOKEN", "HF_Token", "NCCL_AUTH_KEY", "COLOSSALAI_PASSWD", "COLOSSALAI_db_credential"),
        *("TORCH_SECRET", "TOKENIZERS_API_KEY", "TRITON_Passphrase", "UCX_authority"),
    ]
    harmless = ["NCCL_IB_PKEY", "NCCL_SOCKET_IFNAME", "PYTHONPATH", "TOKENIZERS_PARALLELISM"]
    caller = dict.fromkeys([*secrets, *harmless], "x")
    assert sorted(forwarded_environment(caller)) == harmless
    assert withheld_names(caller) == sorted(secrets)
    assert withheld_names(caller, ["HF_TOKEN"]) == sorted({*secrets} - {"HF_TOKEN"})
    assert forwarded_environment(caller, ["HF_TOKEN"])["HF_TOKEN"] == "x"


def test_a_dry_run_shows_the_variables_without_secrets():
    result = invoke("--dry-run", "--host", "a,b", "--env", "MY_TOKEN=of gold", "--env", "A=b c")
    assert re.search(r"# over stdin: .*MY_TOKEN=\.\.\. A='b c'\n", result.output)
    assert "of gold" not in result.output


VALUES = {
    "COLOSSALAI_A": "it's $HOME `id` \\",
    "COLOSSALAI_B": "two\nlines\n",
    "COLOSSALAI_C": "\udcff",
    "COLOSSALAI_D": "",
}


@pytest.mark.parametrize("what", ["agent", "sweep"])
def test_variables_come_over_stdin_and_stand_on_no_command_line(what: str):
    """The script on the node gets every byte of them, and what follows on stdin."""
    host = Host(socket.gethostname())  # no ssh: the command as the other machine's shell would have it
    cluster = ClusterJob(job=Job(target="job.py"), hosts=(host,), run_id="id", min_nodes=1, env=VALUES)
    command = cluster.agent_command(host) if what == "agent" else cluster.sweep_command(host)
    assert not any(value in shlex.join(command) for value in VALUES.values() if value)
    before, _, _ = command[-1].partition(sys.executable)
    shows = f"{shlex.quote(sys.executable)} -c {shlex.quote(SHOWS)}"
    done = subprocess.run(
        [*command[:-1], before + shows],
        input=cluster.variables(host, is_marked=what == "agent") + b"a beat",
        stdout=subprocess.PIPE,
        check=True,
    )
    mark = {"COLOSSALAI_NODE": cluster.mark(host)} if what == "agent" else {}
    assert ast.literal_eval(done.stdout.decode()) == [{**VALUES, **mark}, "a beat"]


SHOWS = (
    "import os, sys; "
    "print(ascii([{k: v for k, v in os.environ.items() if k.startswith('COLOSSALAI_')}, sys.stdin.read()]))"
)


def test_a_package_beside_the_caller_is_found_on_the_other_machines(monkeypatch: pytest.MonkeyPatch):
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.chdir(root)
    assert forwarded_environment({"PYTHONPATH": "/lib"})["PYTHONPATH"] == os.pathsep.join(["/lib", root])


def test_the_interface_that_was_found_is_set_unless_the_user_has_set_one():
    def command(env: dict[str, str]) -> str:
        cluster = ClusterJob(
            job=Job(target="job.py"),
            hosts=(Host("a"),),
            run_id="id",
            min_nodes=1,
            env=env,
            interfaces={"a": "eth7"},
        )
        return cluster.variables(cluster.hosts[0]).decode()

    assert "GLOO_SOCKET_IFNAME=eth7 NCCL_SOCKET_IFNAME=eth7" in command({})
    assert "GLOO_SOCKET_IFNAME=mine NCCL_SOCKET_IFNAME=eth7" in command({"GLOO_SOCKET_IFNAME": "mine"})


def test_overrides_of_the_config_go_to_every_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLOSSALAI_CONFIG_SET", "lr=1")
    result = invoke("--dry-run", "--host", "a,b", "--set", "fp16.mode=bf16", "--set", "name=x y")
    variables = shlex.split(result.output.splitlines()[0].removeprefix("# over stdin: "))
    assert "COLOSSALAI_CONFIG_SET=lr=1 fp16.mode=bf16 'name=x y'" in variables
