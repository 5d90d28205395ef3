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
    from colossalai.cluster._plain_values import PlainCodec as PlainCodec
    from colossalai.cluster._plain_values import broadcast_value as broadcast_value
    from colossalai.cluster._plain_values import gather_bytes as gather_bytes
    from colossalai.cluster._plain_values import gather_values as gather_values
    from colossalai.cluster._ports import PortHolder as PortHolder
    from colossalai.cluster._ports import free_port as free_port
    from colossalai.cluster._ports import port_holder as port_holder
    from colossalai.cluster._ports import port_is_free as port_is_free
    from colossalai.cluster._preflight import PreflightReport as PreflightReport
    from colossalai.cluster._preflight import PreflightRequest as PreflightRequest
    from colossalai.cluster._preflight import preflight as preflight
    from colossalai.cluster._store_server import serve_store as serve_store
    from colossalai.cluster._watchdog_sections import meeting as meeting
    from colossalai.cluster._watchdog_sections import section as section
    from colossalai.cluster._watchdog_sections import still_moving as still_moving

_HOMES = {
    "DistCoordinator": "colossalai.cluster._dist_coordinator",
    "Finding": "colossalai.cluster._finding",
    "InstallationReport": "colossalai.cluster._doctor",
    "PlainCodec": "colossalai.cluster._plain_values",
    "PortHolder": "colossalai.cluster._ports",
    "PreflightReport": "colossalai.cluster._preflight",
    "PreflightRequest": "colossalai.cluster._preflight",
    "broadcast_value": "colossalai.cluster._plain_values",
    "examine_installation": "colossalai.cluster._doctor",
    "free_port": "colossalai.cluster._ports",
    "gather_bytes": "colossalai.cluster._plain_values",
    "gather_values": "colossalai.cluster._plain_values",
    "meeting": "colossalai.cluster._watchdog_sections",
    "port_holder": "colossalai.cluster._ports",
    "port_is_free": "colossalai.cluster._ports",
    "preflight": "colossalai.cluster._preflight",
    "priority_execution": "colossalai.cluster._dist_coordinator",
    "section": "colossalai.cluster._watchdog_sections",
    "serve_store": "colossalai.cluster._store_server",
    "still_moving": "colossalai.cluster._watchdog_sections",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, when it is first asked for (PEP 562)."""
    return find_name(__name__, _HOMES, name)
