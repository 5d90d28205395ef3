"""Whether all machines can run a job, found before anything of it starts.

Names are imported when they are first asked for: the command line shows its help without them.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name

if TYPE_CHECKING:
    from colossalai.launcher.preflight._checks import PreflightReport as PreflightReport
    from colossalai.launcher.preflight._checks import PreflightRequest as PreflightRequest
    from colossalai.launcher.preflight._checks import preflight as preflight
    from colossalai.launcher.preflight._findings import Finding as Finding

_HOMES = {
    "Finding": "colossalai.launcher.preflight._findings",
    "PreflightReport": "colossalai.launcher.preflight._checks",
    "PreflightRequest": "colossalai.launcher.preflight._checks",
    "preflight": "colossalai.launcher.preflight._checks",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, when it is first asked for (PEP 562)."""
    return find_name(__name__, _HOMES, name)
