"""The device of this process, of any kind."""

import torch

from colossalai.context import get_current_device as get_current_device


def synchronize() -> None:
    """Wait until the accelerator has done all it was given; at once where there is none."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Give cached memory of the accelerator back; nothing where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        torch.get_device_module(accelerator).empty_cache()
