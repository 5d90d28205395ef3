"""From an entry of a config to an object."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from colossalai.registry import LAYERS, MODELS


def build_from_config(module: Callable[..., Any], config: Mapping[str, Any]) -> Any:
    """Call a class or function with the entries of a config as keyword arguments.

    Raises:
        ValueError: `module` cannot be called, or `config` is no mapping.
    """
    if not callable(module):
        raise ValueError(f"{module!r} cannot be called: pass a class")
    if not isinstance(config, Mapping):
        raise ValueError(f"the config is {config!r}; it must be a dict of keyword arguments")
    return module(**config)


def build_module(config: Mapping[str, Any]) -> nn.Module:
    """Build the layer or model that `dict(type=..., ...)` names; further entries are its arguments.

    Raises:
        ValueError: There is no type, no layer or model of that name, or it is no `nn.Module`.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise ValueError(f"{config!r} does not name what to build: write dict(type='Linear', ...)")
    name = config["type"]
    registry = MODELS if MODELS.has(name) and not LAYERS.has(name) else LAYERS
    arguments = {key: value for key, value in config.items() if key != "type"}
    built = build_from_config(registry.get_module(name), arguments)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{name!r} builds a {type(built).__name__}, not a torch.nn.Module")
    return built
