"""docs/multi_node.md: every command is run on real hosts and says what the page says; every failure is made.

The hosts let every key of root in that the tests have, so `ssh-copy-id` has nothing to add: no key of a test
gets into the home of this machine, which the hosts share.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.launcher.command import START_S, wait_until
from tests.launcher.hosts import openmpi
from tests.launcher.hosts.network import ROOT, Network
from tests.launcher.hosts.slurm import Slurm
from tests.launcher.preflight.test_preflight import hidden

PAGE = (ROOT / "docs" / "multi_node.md").read_text()
CONSOLE = re.compile(r"(?:<!-- break: (\w+) -->\n)?^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[1], found[2]) for found in CONSOLE.finditer(PAGE)]


def block(language: str) -> str:
    """Return the only block of a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return text


class Terminal:
    """A shell on host1, in a folder with the page's script."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.folder = folder / "work"
        self.home = folder / "home"
        self.spare = folder / "spare"  # for what stands in the place of something else
        for path in (self.folder, self.home / ".ssh", self.spare):
            path.mkdir(parents=True)
        (self.folder / "train.py").write_text(block("python"))
        (self.folder / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "250",
            **openmpi.SETTINGS,
        }

    def run(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        return self.network.run(host, ["sh", "-c", command], cwd=self.folder, env=self.env, timeout=START_S)

    def follow(self, text: str, *, fails: bool) -> None:
        """Run the commands of a block, and compare what they say; numbers may differ."""
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, promised = part.partition("\n")
            done = self.run("host1", command)
            said = _plain((done.stdout + done.stderr).replace(sys.executable, "python"), self.folder)
            for line in promised.splitlines():
                assert line == "..." or _plain(line, Path("/work"))[0] in said, (
                    f"{command}\n{said}\nwanted: {line}"
                )
            assert (done.returncode != 0) == fails, f"{command}: {done.returncode}\n{said}"


def _plain(text: str, folder: Path) -> list[str]:
    """Return lines without what differs from one time to another."""
    return [re.sub(r"\d+", "0", line.replace(str(folder), "/work")).rstrip() for line in text.splitlines()]


@contextmanager
def _taken_port(terminal: Terminal) -> Iterator[None]:
    holder = terminal.network.start(
        "host1",
        ["python", "-m", "http.server", "29500"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**terminal.env, "PYTHONUNBUFFERED": "1"},
    )
    assert holder.stdout is not None
    with holder.stdout:
        try:
            holder.stdout.readline()
            yield
        finally:
            holder.kill()
            holder.wait()


@contextmanager
def _loopback(terminal: Terminal) -> Iterator[None]:
    terminal.network.write_hosts("host1", {"host1": "127.0.1.1"})
    try:
        yield
    finally:
        terminal.network.write_hosts("host1")


@contextmanager
def _interface(terminal: Terminal) -> Iterator[None]:
    terminal.env["GLOO_SOCKET_IFNAME"] = "eth9"
    yield
    del terminal.env["GLOO_SOCKET_IFNAME"]


def _other_version(terminal: Terminal) -> AbstractContextManager[None]:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    (terminal.spare / "version.py").write_text("__version__ = '2.4.1'\n")
    return hidden(
        terminal.network, "host2", Path(spec.origin).with_name("version.py"), terminal.spare / "version.py"
    )


def _other_script(terminal: Terminal) -> AbstractContextManager[None]:
    (terminal.spare / "train.py").write_text("print('an older one')\n")
    return hidden(terminal.network, "host2", terminal.folder / "train.py", terminal.spare / "train.py")


BREAKS = {
    "port": _taken_port,
    "loopback": _loopback,
    "interface": _interface,
    "version": _other_version,
    "script": _other_script,
}


@pytest.fixture
def terminal(network: Network, tmp_path: Path) -> Terminal:
    return Terminal(network, tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize(("broken", "text"), [each for each in BLOCKS if each[0]], ids=lambda text: text[:9])
def test_a_failure_is_named(terminal: Terminal, broken: str, text: str):
    with BREAKS[broken](terminal):
        terminal.follow(text, fails=True)


@pytest.mark.cluster
def test_the_commands_do_what_the_page_says(terminal: Terminal):
    (terminal.folder / "hosts").unlink()
    for broken, text in BLOCKS:
        if broken is None and "mpirun" not in text and "srun" not in text:
            terminal.follow(text, fails=False)
    assert (terminal.home / ".ssh" / "id_ed25519.pub").exists()
    assert (terminal.folder / "model.safetensors").exists()


@pytest.mark.cluster
@pytest.mark.skipif(bool(openmpi.reason_to_skip()), reason=openmpi.reason_to_skip())
def test_the_line_of_openmpi(terminal: Terminal):
    (text,) = [text for _, text in BLOCKS if "mpirun" in text]
    terminal.follow(text, fails=False)


@pytest.mark.cluster
def test_the_line_of_slurm(terminal: Terminal, slurm: Slurm):
    (text,) = [text for _, text in BLOCKS if "srun" in text]
    terminal.env |= slurm.env
    terminal.follow(text, fails=False)


@pytest.mark.cluster
def test_the_batch_script(terminal: Terminal, slurm: Slurm):
    script = block("bash").replace("#SBATCH --gpus-per-node=8\n", "").replace("_node 8", "_node 1")
    (terminal.folder / "job.sh").write_text(script)
    terminal.env |= slurm.env
    done = terminal.run("host1", "sbatch --output log job.sh")
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not slurm.run(["squeue", "--noheader"]).stdout, 120)  # `sbatch --wait` looks rarely
    log = (terminal.folder / "log").read_text()
    assert "[host1:0] trained on 2 ranks" in log, log


@pytest.mark.cluster
def test_the_command_of_the_pods(terminal: Terminal):
    """Two hosts as the two pods, one process on each."""
    _, job = yaml.safe_load_all(block("yaml"))
    shell, flag, command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert (shell, flag) == ("sh", "-c")
    command = command.replace("--nproc_per_node=8", "--nproc_per_node=1")
    hosts = ("host1", "host2")
    address = terminal.network.address("host1")
    pods = []
    for index, host in enumerate(hosts):
        terminal.network.write_hosts(host, {"train-0.train": address})
        env = {**terminal.env, "JOB_COMPLETION_INDEX": str(index), "GLOO_SOCKET_IFNAME": "eth0"}
        pods.append(
            terminal.network.start(
                host,
                ["sh", "-c", command],
                cwd=terminal.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    said = [pod.communicate(timeout=START_S)[0].decode() for pod in pods]
    for host in hosts:
        terminal.network.write_hosts(host)
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    assert "trained on 2 ranks" in said[0]


@pytest.mark.unit
def test_the_manifest_fits_the_schema_of_kubernetes():
    validator = pytest.importorskip("kubernetes_validate", reason="not installed: kubernetes-validate")
    documents = list(yaml.safe_load_all(block("yaml")))
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    service, job = documents
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    job["spec"]["completionModes"] = "Indexed"
    with pytest.raises(validator.ValidationError):
        validator.validate(job, validator.latest_version(), strict=True)


@pytest.mark.unit
def test_the_page_has_five_failures():
    assert sorted(broken for broken, _ in BLOCKS if broken) == sorted(BREAKS)
