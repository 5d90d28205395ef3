"""Cluster: this process's place among ranks, hosts and ports, and a check of the installation.

For users: `DistCoordinator`, `priority_execution`, `free_port` and `examine_installation`. For the package:
the rest; ranks exchange plain values instead of pickles, the store server is their rendezvous, a binding
assigns the cores of a machine to its ranks.

Names that need torch are imported at their first use: the launcher of ranks on other hosts runs without it.
"""

from typing import TYPE_CHECKING, Any

from colossalai._lazy import find_name
from colossalai.cluster._binding import Binding as Binding
from colossalai.cluster._binding import bind_ranks as bind_ranks
from colossalai.cluster._hosts import Host as Host
from colossalai.cluster._hosts import allocated_hosts as allocated_hosts
from colossalai.cluster._hosts import expand_nodelist as expand_nodelist
from colossalai.cluster._hosts import parse_hosts as parse_hosts
from colossalai.cluster._hosts import read_hostfile as read_hostfile
from colossalai.cluster._hosts import select_hosts as select_hosts
from colossalai.cluster._ports import GLOO as GLOO
from colossalai.cluster._ports import LOOPBACK as LOOPBACK
from colossalai.cluster._ports import NCCL as NCCL
from colossalai.cluster._ports import PortHolder as PortHolder
from colossalai.cluster._ports import chosen_interfaces as chosen_interfaces
from colossalai.cluster._ports import free_port as free_port
from colossalai.cluster._ports import holder_of as holder_of
from colossalai.cluster._ports import port_holder as port_holder
from colossalai.cluster._ports import port_is_free as port_is_free

if TYPE_CHECKING:
    from colossalai.cluster._dist_coordinator import DistCoordinator as DistCoordinator
    from colossalai.cluster._dist_coordinator import priority_execution as priority_execution
    from colossalai.cluster._doctor import InstallationReport as InstallationReport
    from colossalai.cluster._doctor import examine_installation as examine_installation
    from colossalai.cluster._plain_values import DTYPES as DTYPES
    from colossalai.cluster._plain_values import PlainCodec as PlainCodec
    from colossalai.cluster._plain_values import broadcast_value as broadcast_value
    from colossalai.cluster._plain_values import gather_bytes as gather_bytes
    from colossalai.cluster._plain_values import gather_values as gather_values
    from colossalai.cluster._store_departure import StoreDeparture as StoreDeparture
    from colossalai.cluster._store_server import keep_gloo_here as keep_gloo_here
    from colossalai.cluster._store_server import let_gloo_choose as let_gloo_choose
    from colossalai.cluster._store_server import network_of_this_process as network_of_this_process
    from colossalai.cluster._store_server import serve_store as serve_store
    from colossalai.cluster._store_server import wait_for_name as wait_for_name
    from colossalai.cluster._store_server import wait_for_server as wait_for_server
    from colossalai.cluster._store_server import within as within

_HOMES = {
    "DistCoordinator": "colossalai.cluster._dist_coordinator",
    "priority_execution": "colossalai.cluster._dist_coordinator",
    "InstallationReport": "colossalai.cluster._doctor",
    "examine_installation": "colossalai.cluster._doctor",
    "DTYPES": "colossalai.cluster._plain_values",
    "PlainCodec": "colossalai.cluster._plain_values",
    "broadcast_value": "colossalai.cluster._plain_values",
    "gather_bytes": "colossalai.cluster._plain_values",
    "gather_values": "colossalai.cluster._plain_values",
    "StoreDeparture": "colossalai.cluster._store_departure",
    "keep_gloo_here": "colossalai.cluster._store_server",
    "let_gloo_choose": "colossalai.cluster._store_server",
    "network_of_this_process": "colossalai.cluster._store_server",
    "serve_store": "colossalai.cluster._store_server",
    "wait_for_name": "colossalai.cluster._store_server",
    "wait_for_server": "colossalai.cluster._store_server",
    "within": "colossalai.cluster._store_server",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs torch, or a sub-module, at its first use (PEP 562)."""
    return find_name(__name__, _HOMES, name)
