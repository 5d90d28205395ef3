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
    from colossalai.cluster._hosts import Host as Host
    from colossalai.cluster._hosts import allocated_hosts as allocated_hosts
    from colossalai.cluster._hosts import expand_nodelist as expand_nodelist
    from colossalai.cluster._hosts import parse_hosts as parse_hosts
    from colossalai.cluster._hosts import read_hostfile as read_hostfile
    from colossalai.cluster._hosts import select_hosts as select_hosts
    from colossalai.cluster._plain_values import PlainCodec as PlainCodec
    from colossalai.cluster._plain_values import broadcast_value as broadcast_value
    from colossalai.cluster._plain_values import gather_bytes as gather_bytes
    from colossalai.cluster._plain_values import gather_values as gather_values
    from colossalai.cluster._ports import PortHolder as PortHolder
    from colossalai.cluster._ports import free_port as free_port
    from colossalai.cluster._ports import holder_of as holder_of
    from colossalai.cluster._ports import port_holder as port_holder
    from colossalai.cluster._ports import port_is_free as port_is_free
    from colossalai.cluster._store_server import GLOO as GLOO
    from colossalai.cluster._store_server import NCCL as NCCL
    from colossalai.cluster._store_server import chosen_interfaces as chosen_interfaces
    from colossalai.cluster._store_server import keep_gloo_here as keep_gloo_here
    from colossalai.cluster._store_server import let_gloo_choose as let_gloo_choose
    from colossalai.cluster._store_server import network_of_this_process as network_of_this_process
    from colossalai.cluster._store_server import serve_store as serve_store
    from colossalai.cluster._store_server import wait_for_name as wait_for_name
    from colossalai.cluster._store_server import wait_for_server as wait_for_server
    from colossalai.cluster._store_server import within as within

_HOMES = {
    "Host": "colossalai.cluster._hosts",
    "allocated_hosts": "colossalai.cluster._hosts",
    "expand_nodelist": "colossalai.cluster._hosts",
    "parse_hosts": "colossalai.cluster._hosts",
    "read_hostfile": "colossalai.cluster._hosts",
    "select_hosts": "colossalai.cluster._hosts",
    "holder_of": "colossalai.cluster._ports",
    "GLOO": "colossalai.cluster._store_server",
    "NCCL": "colossalai.cluster._store_server",
    "chosen_interfaces": "colossalai.cluster._store_server",
    "keep_gloo_here": "colossalai.cluster._store_server",
    "let_gloo_choose": "colossalai.cluster._store_server",
    "network_of_this_process": "colossalai.cluster._store_server",
    "wait_for_name": "colossalai.cluster._store_server",
    "wait_for_server": "colossalai.cluster._store_server",
    "within": "colossalai.cluster._store_server",
    "DistCoordinator": "colossalai.cluster._dist_coordinator",
    "InstallationReport": "colossalai.cluster._doctor",
    "PlainCodec": "colossalai.cluster._plain_values",
    "PortHolder": "colossalai.cluster._ports",
    "broadcast_value": "colossalai.cluster._plain_values",
    "examine_installation": "colossalai.cluster._doctor",
    "free_port": "colossalai.cluster._ports",
    "gather_bytes": "colossalai.cluster._plain_values",
    "gather_values": "colossalai.cluster._plain_values",
    "port_holder": "colossalai.cluster._ports",
    "port_is_free": "colossalai.cluster._ports",
    "priority_execution": "colossalai.cluster._dist_coordinator",
    "serve_store": "colossalai.cluster._store_server",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, when it is first asked for (PEP 562)."""
    return find_name(__name__, _HOMES, name)
