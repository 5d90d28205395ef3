"""Launcher: starts the ranks of a job, here or over ssh on other hosts, and ends them all when one fails.

For users: `notebook_launcher`. For the package: all else; `colossalai run` is its command line.

| term | definition |
| --- | --- |
| controller | the process of `colossalai run` in a job on several hosts: it decides (`_controller.py`) |
| agent | the process that starts and watches the ranks of one host: torch's elastic agent (`_agent.py`) |
| host agent | the program around an agent that the controller starts over ssh (`_host_agent.py`) |
| worker | the process of one rank, and its setup before the script (`_worker.py`) |
| rendezvous | the store of the ranks, and this host's index in it |
| heartbeat | a periodic message of controller and agent, to detect a dead link (`_protocol.py`) |
| mark | the variable that all processes of a job on a host have in their environment (`_cleanup.py`) |
| sweep | the search for leftovers of a lost agent on its host, by the mark |
| probe | the program that answers the questions of the pre-flight checks on a host (`preflight/`) |

`launch` imports torch, so it is imported at its first use: an agent sends messages to its controller before.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name
from colossalai.launcher._environment import forwarded_environment as forwarded_environment
from colossalai.launcher._failure import refuse as refuse
from colossalai.launcher._job import Job as Job
from colossalai.launcher._notebook import notebook_launcher as notebook_launcher
from colossalai.launcher._run import RunOptions as RunOptions
from colossalai.launcher._run import find_hosts as find_hosts
from colossalai.launcher._run import run as run

if TYPE_CHECKING:
    from colossalai.launcher._agent import launch as launch


def __getattr__(name: str) -> Any:
    """Import `launch`, or a sub-module, at its first use (PEP 562)."""
    return find_name(__name__, {"launch": "colossalai.launcher._agent"}, name)
