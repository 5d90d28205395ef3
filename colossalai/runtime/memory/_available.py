"""Memory that a rank may still take: of its accelerator, or its share of what the host has."""

import os

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may still take on its device.

    On an accelerator also what torch has reserved and does not use. On a CPU the memory that is available,
    divided by the ranks of this host (`LOCAL_WORLD_SIZE`), which grow alike.
    """
    if device.type == "cpu":
        return int(psutil.virtual_memory().available) // ranks_of_host()
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free) + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def device_bytes(num_ranks: int) -> int:
    """Return the bytes of the device of a rank here: of an accelerator, or its part of the host's memory."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.get_memory_info()[1])
    return int(psutil.virtual_memory().total) // num_ranks


def ranks_of_host() -> int:
    """Return how many ranks of the job share this host; 1 where no launcher says so."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1), 1)
