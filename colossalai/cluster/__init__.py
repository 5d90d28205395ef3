"""The machines a job runs on: who am I among the ranks, which port is free, does everything fit.

Names are imported when they are first asked for: who starts ranks on other machines needs no torch itself.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name

if TYPE_CHECKING:
    from colossalai.cluster._dist_coordinator import DistCoordinator as DistCoordinator
    from colossalai.cluster._dist_coordinator import priority_execution as priority_execution
    from colossalai.cluster._doctor import InstallationReport as InstallationReport
    from colossalai.cluster._doctor import examine_installation as examine_installation
    from colossalai.cluster._finding import Finding as Finding
    from colossalai.cluster._ports import PortHolder as PortHolder
    from colossalai.cluster._ports import free_port as free_port
    from colossalai.cluster._ports import port_holder as port_holder
    from colossalai.cluster._ports import port_is_free as port_is_free
    from colossalai.cluster._preflight import PreflightReport as PreflightReport
    from colossalai.cluster._preflight import PreflightRequest as PreflightRequest
    from colossalai.cluster._preflight import preflight as preflight

_HOMES = {
    "DistCoordinator": "colossalai.cluster._dist_coordinator",
    "Finding": "colossalai.cluster._finding",
    "InstallationReport": "colossalai.cluster._doctor",
    "PortHolder": "colossalai.cluster._ports",
    "PreflightReport": "colossalai.cluster._preflight",
    "PreflightRequest": "colossalai.cluster._preflight",
    "examine_installation": "colossalai.cluster._doctor",
    "free_port": "colossalai.cluster._ports",
    "port_holder": "colossalai.cluster._ports",
    "port_is_free": "colossalai.cluster._ports",
    "preflight": "colossalai.cluster._preflight",
    "priority_execution": "colossalai.cluster._dist_coordinator",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, when it is first asked for (PEP 562)."""
    return find_name(__name__, _HOMES, name)
