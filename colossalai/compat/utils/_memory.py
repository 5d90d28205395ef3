"""Used and total memory of this process, on the accelerator or in the host."""

import gc
import logging

import torch

from colossalai.compat.utils._device import get_current_device
from colossalai.logging import DistributedLogger, get_dist_logger

_MB, _GB = 2**20, 2**30


def bytes_to_MB(num_bytes: float, decimal: int = 2) -> float:
    """Return bytes in MB of 1024 * 1024 bytes, rounded to so many decimals."""
    return round(num_bytes / _MB, decimal)


def bytes_to_GB(num_bytes: float, decimal: int = 2) -> float:
    """Return bytes in GB of 1024 * 1024 * 1024 bytes, rounded to so many decimals."""
    return round(num_bytes / _GB, decimal)


def report_memory_usage(
    message: str, logger: DistributedLogger | logging.Logger | None = None, report_cpu: bool = False
) -> None:
    """Log this rank's memory, and begin a new measurement of the accelerator's peaks; garbage goes first.

    Args:
        message: The beginning of the line: the moment.
        logger: The logger; default: the logger of the package.
        report_cpu: Include the host memory of the process; always included without an accelerator.
    """
    gc.collect()
    parts = []
    if torch.accelerator.is_available():
        parts.append(
            f"accelerator {bytes_to_MB(torch.accelerator.memory_allocated())} MB allocated, peak "
            f"{bytes_to_MB(torch.accelerator.max_memory_allocated())} MB, "
            f"{bytes_to_MB(torch.accelerator.memory_reserved())} MB reserved"
        )
        torch.accelerator.reset_peak_memory_stats()
    if report_cpu or not parts:
        parts.append(f"process {bytes_to_MB(_resident_bytes())} MB resident")
    (get_dist_logger() if logger is None else logger).info(f"{message}: {'; '.join(parts)}")


def colo_device_memory_used(device: torch.device | None = None) -> int:
    """Return the bytes that tensors of this process take on a device; in host memory, those of the process.

    Args:
        device: The device; default: that of this rank.
    """
    device = get_current_device() if device is None else device
    if device.type == "cpu":
        return _resident_bytes()
    return torch.accelerator.memory_allocated(device)


def colo_device_memory_capacity(device: torch.device | None = None) -> int:
    """Return the bytes of memory that a device has; of the host, those of the machine.

    Args:
        device: The device; default: that of this rank.
    """
    device = get_current_device() if device is None else device
    if device.type == "cpu":
        return colo_get_cpu_memory_capacity()
    return int(torch.accelerator.get_memory_info(device)[1])


def colo_get_cpu_memory_capacity() -> int:
    """Return the bytes of memory that the machine has."""
    import psutil

    return int(psutil.virtual_memory().total)


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Bound the part of the accelerator's memory that this process takes; no effect without an accelerator.

    Args:
        ratio: The part, above 0 and at most 1.

    Raises:
        ValueError: `ratio` is not above 0 and at most 1.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio!r}; it must be above 0 and at most 1")
    device = get_current_device()
    if device.type == "cpu":
        get_dist_logger().log_once(
            "colo_set_process_memory_fraction has no effect: this rank computes on the CPU", ranks=[0]
        )
        return
    torch.get_device_module(device).set_per_process_memory_fraction(ratio, device)


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
