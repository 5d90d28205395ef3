"""The machines a job runs on: who am I among the ranks, which port is free, does everything fit."""

from colossalai.cluster._dist_coordinator import DistCoordinator as DistCoordinator
from colossalai.cluster._dist_coordinator import priority_execution as priority_execution
from colossalai.cluster._doctor import InstallationReport as InstallationReport
from colossalai.cluster._doctor import examine_installation as examine_installation
from colossalai.cluster._ports import PortHolder as PortHolder
from colossalai.cluster._ports import free_port as free_port
from colossalai.cluster._ports import port_holder as port_holder
from colossalai.cluster._ports import port_is_free as port_is_free
