"""Starts and ends jobs: ranks on this machine, and agents over ssh on others.

Names are imported when they are first asked for: an agent listens to its controller before it imports torch.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name

if TYPE_CHECKING:
    from colossalai.launcher._agent import launch as launch
    from colossalai.launcher._job import Job as Job
    from colossalai.launcher._job import forwarded_environment as forwarded_environment
    from colossalai.launcher._notebook import notebook_launcher as notebook_launcher
    from colossalai.launcher._run import RunOptions as RunOptions
    from colossalai.launcher._run import find_hosts as find_hosts
    from colossalai.launcher._run import run as run

_HOMES = {
    "launch": "colossalai.launcher._agent",
    "Job": "colossalai.launcher._job",
    "forwarded_environment": "colossalai.launcher._job",
    "notebook_launcher": "colossalai.launcher._notebook",
    "find_hosts": "colossalai.launcher._run",
    "RunOptions": "colossalai.launcher._run",
    "run": "colossalai.launcher._run",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, when it is first asked for (PEP 562)."""
    return find_name(__name__, _HOMES, name)
