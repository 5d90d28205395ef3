"""Available memory of a rank: of its accelerator, or its share of the host's memory."""

import os

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Return the available bytes of this rank on its device.

    On an accelerator they include memory that torch has reserved and does not use. On a CPU the available
    memory is divided by the ranks of this host (`LOCAL_WORLD_SIZE`), which grow alike.
    """
    if device.type == "cpu":
        return int(psutil.virtual_memory().available) // ranks_of_host()
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free) + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def device_bytes(num_ranks: int) -> int:
    """Return the bytes of a rank's device on this machine: of an accelerator, or its part of host memory."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.get_memory_info()[1])
    return int(psutil.virtual_memory().total) // num_ranks


def ranks_of_host() -> int:
    """Return the number of ranks of the job on this host; 1 without a launcher."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1), 1)
