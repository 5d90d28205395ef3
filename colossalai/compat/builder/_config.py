"""From an entry of a config to an object."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from torch import nn

from colossalai.registry import LAYERS, MODELS, Registry


def build_from_config(module: Callable[..., Any], config: Mapping[str, Any]) -> Any:
    """Call a class or function with the entries of a config as keyword arguments.

    Raises:
        ValueError: `module` cannot be called, or `config` is not a mapping.
    """
    if not callable(module):
        raise ValueError(f"{module!r} cannot be called: pass a class")
    if not isinstance(config, Mapping):
        raise ValueError(f"the config is {config!r}; it must be a dict of keyword arguments")
    return module(**config)


def build_from_registry(config: Mapping[str, Any], registry: Registry) -> Any:
    """Build the object that `dict(type=..., ...)` names in a registry; further entries are its arguments.

    Args:
        config: The entry of a config.
        registry: The registry of the name, such as `colossalai.registry.LOSSES`.

    Raises:
        ValueError: `registry` is not a `Registry`, `config` names no type that is registered in it, or the
            type does not take the arguments.
    """
    if not isinstance(registry, Registry):
        raise ValueError(f"the registry is {registry!r}; it must be one such as colossalai.registry.LAYERS")
    if not isinstance(config, Mapping) or not isinstance(config.get("type"), str):
        raise ValueError(f"{config!r} does not name a class to build: write dict(type='Linear', ...)")
    arguments = {key: value for key, value in config.items() if key != "type"}
    module = registry.get_module(config["type"])
    try:
        signature(module).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{dict(config)} does not fit {config['type']}: {error}") from error
    except ValueError:  # a class without a signature, which raises by itself
        pass
    return build_from_config(module, arguments)


def build_module(config: Mapping[str, Any]) -> nn.Module:
    """Build the layer or model that `dict(type=..., ...)` names; further entries are its arguments.

    Raises:
        ValueError: `config` names no registered layer or model, the arguments do not fit its signature, or
            its result is not an `nn.Module`.
    """
    name = config.get("type") if isinstance(config, Mapping) else None
    in_models = isinstance(name, str) and MODELS.has(name) and not LAYERS.has(name)
    built = build_from_registry(config, MODELS if in_models else LAYERS)
    if not isinstance(built, nn.Module):
        raise ValueError(f"{name!r} builds a {type(built).__name__}, not a torch.nn.Module")
    return built
