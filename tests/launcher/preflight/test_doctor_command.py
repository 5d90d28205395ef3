"""`colossalai check --doctor` on real hosts, and its options."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

from colossalai.cli import main
from tests.launcher.hosts.network import ROOT, Network


def doctor(network: Network, folder: Path, *args: str, **variables: str) -> tuple[int, str]:
    """Return exit code and output of the command on host1."""
    env: Mapping[str, str] = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", **variables}
    command = [sys.executable, "-m", "colossalai.cli", "check", "--doctor", *args]
    done = network.run("host1", command, cwd=folder, env=env)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.cluster
def test_good_hosts_add_a_vector_with_torch(network: Network, tmp_path: Path):
    (tmp_path / "hosts").write_text("host1 slots=2\nhost2 slots=2\nhost3\n")
    code, out = doctor(network, tmp_path, "--hostfile", "hosts", "--exclude", "host3", "--json")
    report = json.loads(out)
    assert (code, report["is_fit"]) == (0, True), out
    assert report["interfaces"] == {"host1": "eth0", "host2": "eth0"}
    sums = [each for each in report["findings"] if each["check"] == "all-reduce"]
    assert [each["host"] for each in sums] == ["host1", "host2"]
    assert all(each["ok"] and "4 MiB over eth0 in " in each["what"] for each in sums)


@pytest.mark.cluster
def test_what_is_wrong_is_a_row_and_a_line(network: Network, tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    args = ("--host", "host1,host2,host9", "--script", "train.py")
    code, out = doctor(network, tmp_path, *args, GLOO_SOCKET_IFNAME="eth9")
    assert code == 1
    rows = {" ".join(line.split()) for line in out.splitlines()}
    assert "directory host1, host2 ok " + str(tmp_path) in rows, out
    assert any(
        row.startswith("interface host1 FAILED GLOO_SOCKET_IFNAME=eth9: there is no such") for row in rows
    )
    assert "host9: ssh: this machine does not know the name host9" in out
    assert "all-reduce" not in out, "it is not tried where it cannot work"
    assert "A job can NOT be started here" in out


@pytest.mark.unit
@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "choose a check"),
        (("-i", "--doctor"), "choose a check"),
        (("-i", "--master_port", "0"), "master_port: these are options of colossalai check --doctor"),
        (("--doctor", "--host", "a", "--hostfile", "b"), "are alternatives"),
        (("--doctor", "--host", "a,,a"), "the host 'a' is named 2 times"),
        (("--doctor", "--exclude", "a"), "is about several machines"),
        (("--doctor", "--env", "x y=1"), "is not a variable"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], words: str):
    result = CliRunner().invoke(main, ["check", *args])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


@pytest.mark.unit
def test_without_hosts_it_is_this_machine(monkeypatch: pytest.MonkeyPatch):
    for variable in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(variable, raising=False)
    result = CliRunner().invoke(main, ["check", "--doctor", "--json"])
    report = json.loads(result.output)
    assert {each["host"] for each in report["findings"]} == {"localhost"}
    assert result.exit_code == (0 if report["is_fit"] else 1)
