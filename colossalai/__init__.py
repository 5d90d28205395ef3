"""Colossal-AI: parallel training with an unchanged training loop.

`launch` (or `launch_from_torch`, `_slurm`, `_openmpi`) starts the job; then `initialize` with a config
returns an Engine, or `Booster` with a plugin returns the given components with its methods.

Names are imported at their first access, so that `colossalai --help` does not import torch.
"""

from typing import TYPE_CHECKING, Any

from colossalai import _aliases as _aliases
from colossalai._lazy import find_name
from colossalai._version import __version__ as __version__

if TYPE_CHECKING:
    from colossalai.booster import Booster as Booster
    from colossalai.context import get_default_parser as get_default_parser
    from colossalai.context import launch as launch
    from colossalai.context import launch_from_openmpi as launch_from_openmpi
    from colossalai.context import launch_from_slurm as launch_from_slurm
    from colossalai.context import launch_from_torch as launch_from_torch
    from colossalai.initialize import initialize as initialize
    from colossalai.launcher import notebook_launcher as notebook_launcher
    from colossalai.trainer import tracker as tracker

_HOMES = {
    "Booster": "colossalai.booster",
    "get_default_parser": "colossalai.context",
    "launch": "colossalai.context",
    "launch_from_openmpi": "colossalai.context",
    "launch_from_slurm": "colossalai.context",
    "launch_from_torch": "colossalai.context",
    "notebook_launcher": "colossalai.launcher",
    "tracker": "colossalai.trainer",
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a sub-module, at its first access (PEP 562)."""
    return find_name(__name__, _HOMES, name)
