"""Process groups and meshes of peers: gloo on CPU, the job's backend on other devices."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from colossalai.utils import get_current_device


def peer_group() -> dist.ProcessGroup:
    """Return a process group of all ranks for a peer: gloo on CPU, the job's own on devices."""
    is_on_cpu = get_current_device().type == "cpu"
    group = dist.new_group(backend="gloo") if is_on_cpu else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
    return group


def peer_mesh() -> DeviceMesh:
    """Return a mesh of all ranks for a peer."""
    return DeviceMesh.from_group(peer_group(), get_current_device().type)
