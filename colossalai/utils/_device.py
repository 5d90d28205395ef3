"""The device of this process, whatever its kind."""

import torch

from colossalai.context import global_context


def get_current_device() -> torch.device:
    """Return the device of this rank; before launch the current accelerator, else the CPU."""
    if global_context.is_launched:
        return global_context.device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait until the accelerator has done all it was given; at once where there is none."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give cached memory of the accelerator back; nothing where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        torch.get_device_module(accelerator).empty_cache()
