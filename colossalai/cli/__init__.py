"""The command `colossalai`: `run` starts a job, `benchmark` compares tensor modes, `check` looks around.

And `notebook_launcher`, which is imported when it is first asked for.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name
from colossalai.cli._main import main as main

if TYPE_CHECKING:
    from colossalai.launcher import notebook_launcher as notebook_launcher


def __getattr__(name: str) -> Any:
    """Import what is not imported yet (PEP 562)."""
    return find_name(__name__, {"notebook_launcher": "colossalai.launcher._notebook"}, name)
