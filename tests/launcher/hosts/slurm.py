"""A real SLURM over the hosts of a test network: munged, slurmctld on host1, slurmd on host1 and host2."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from tests.launcher.hosts.network import Network

_START_S = 300.0
_CONFIG = """\
ClusterName=test
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName=host[1-2] CPUs=2 State=UNKNOWN
PartitionName=main Nodes=host[1-2] Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """The daemons; they end with the network's hosts."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.folder = network.folder / "slurm"
        for part in ("munge", "state", "spool.host1", "spool.host2"):
            (self.folder / part).mkdir(parents=True)
        self.network.folder.chmod(0o755)  # munged refuses a path that it cannot trust
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder))
        # A namespace's /sys has no control groups; with the plugin named, slurmd does not look for them.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._start("host1", ["munged", *files, f"--socket={munge / 'socket'}", "--force", "--num-threads=2"])
        conf = str(self.folder / "slurm.conf")
        self._start("host1", ["slurmctld", "-f", conf])
        for host in ("host1", "host2"):
            self._start(host, ["slurmd", "-f", conf])
        self._wait_until_idle()

    @property
    def env(self) -> dict[str, str]:
        """What a command of SLURM needs in its environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM on host1."""
        return self.network.run("host1", argv, env={**options.pop("env", {}), **self.env}, **options)

    def _start(self, host: str, argv: list[str]) -> None:
        done = self.network.run(host, argv)  # it goes into the background by itself
        if done.returncode != 0:
            raise RuntimeError(f"{argv[0]} does not start on {host}: {done.stderr}")

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + _START_S
        while self.run(["sinfo", "-h", "-o", "%D", "-t", "idle"]).stdout.strip() != "2":
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
                raise RuntimeError(f"SLURM does not start:\n{logs}")
            time.sleep(0.1)


def reason_to_skip() -> str:
    """Say why there can be no SLURM here; empty if there can."""
    tools = ("munged", "slurmctld", "slurmd", "srun", "salloc")
    missing = [
        tool for tool in tools if shutil.which(tool) is None and not os.path.exists(f"/usr/sbin/{tool}")
    ]
    return f"not installed: {', '.join(missing)} (Debian: munge, slurm-wlm)" if missing else ""
