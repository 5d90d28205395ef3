"""The configuration: a dict with attribute access at every depth, from a Python file or from a dict."""

import inspect
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class ConfigException(ValueError):
    """A configuration that cannot work; the message says what is wrong and what would be right."""


class Config(dict[str, Any]):
    """A dict whose items are also attributes, at every depth: `config.parallel.tensor.size`.

    Hyper-parameters of the user's own and feature keys (`parallel`, `fp16`, ...) stand side by side. An item
    whose name is a method of `dict` (`items`, `keys`, ...) is reached by `config["items"]` only.

    Args:
        content: The items; nested dicts become `Config` too, also inside lists and tuples.
    """

    def __init__(self, content: Mapping[str, Any] | None = None, **items: Any) -> None:
        super().__init__()
        self.update({**(content or {}), **items})

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _attribute_access(value))

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}; it has {sorted(map(str, self))}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"the config has no {name!r}")
        del self[name]

    def __reduce__(self) -> tuple[type["Config"], tuple[dict[str, Any]]]:
        return Config, (dict(self),)

    def update(self, *args: Any, **items: Any) -> None:
        """Set several items, as `dict.update` does."""
        for key, value in dict(*args, **items).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the item, after setting it to `default` if it is not there."""
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> "Config":
        """Return a shallow copy, as `dict.copy` does."""
        return Config(self)

    @staticmethod
    def from_file(filename: str | Path) -> "Config":
        """Run a Python file and take its public names as the items.

        Modules, and functions and classes that the file only imports, are left out. The folder of the file is
        on the import path while it runs.

        Raises:
            ConfigException: The file does not exist, is not a `.py` file, or fails when it is run.
        """
        path = Path(filename)
        if path.suffix != ".py":
            raise ConfigException(
                f"config file {str(path)!r} is not a Python file: its name must end with .py"
            )
        if not path.is_file():
            raise ConfigException(f"config file {str(path)!r} does not exist (looked in {Path.cwd()})")
        folder = str(path.resolve().parent)
        sys.path.insert(0, folder)
        try:
            names = runpy.run_path(str(path), run_name=path.stem)
        except Exception as error:
            raise ConfigException(
                f"config file {str(path)!r} fails: {type(error).__name__}: {error}"
            ) from error
        finally:
            sys.path.remove(folder)
        return Config({k: v for k, v in names.items() if not k.startswith("_") and _is_content(v, path.stem)})


def load_config(config: str | Path | Mapping[str, Any] | None) -> Config:
    """Return the config that a path, a dict or nothing stands for."""
    if config is None:
        return Config()
    if isinstance(config, str | Path):
        return Config.from_file(config)
    if isinstance(config, Mapping):
        return Config(config)
    raise ConfigException(f"config is a {type(config).__name__}: give the path of a .py file, or a dict")


def _is_content(value: Any, module: str) -> bool:
    """A config item is anything but a module, and but a function or class imported from elsewhere."""
    if isinstance(value, ModuleType):
        return False
    is_definition = isinstance(value, type) or inspect.isroutine(value)
    return not is_definition or getattr(value, "__module__", None) == module


def _attribute_access(value: Any) -> Any:
    if isinstance(value, Config):
        return value
    if isinstance(value, dict):
        return Config(value)
    if type(value) in (list, tuple):
        return type(value)(_attribute_access(item) for item in value)
    return value
