"""The configuration: a dict with attribute access at every depth, from a file or from a dict."""

import inspect
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from colossalai.context._config_formats import READERS


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
        """Read a YAML or JSON file, or run a Python file and take its public names as the items.

        Of a Python file, modules, and functions and classes that it only imports, are left out. Its folder is
        on the import path while it runs.

        Raises:
            ConfigException: The file does not exist, its name does not end with .py, .yaml, .yml or .json, or
                it cannot be read or run.
        """
        path = Path(filename)
        if path.suffix != ".py" and path.suffix not in READERS:
            raise ConfigException(
                f"config file {str(path)!r} is neither Python, YAML nor JSON: its name must end with .py, "
                ".yaml, .yml or .json"
            )
        if not path.is_file():
            raise ConfigException(f"config file {str(path)!r} does not exist (looked in {Path.cwd()})")
        if path.suffix in READERS:
            return _read(path)
        folder = str(path.resolve().parent)
        sys.path.insert(0, folder)
        try:
            names = runpy.run_path(str(path), run_name=path.stem)
        except Exception as error:
            where = _line_of(error, str(path))
            raise ConfigException(
                f"config file {str(path)!r} fails{where}: {type(error).__name__}: {error}"
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
    raise ConfigException(
        f"config is a {type(config).__name__}: give the path of a .py, .yaml or .json file, or a dict"
    )


def _read(path: Path) -> Config:
    try:
        content = READERS[path.suffix](path)
    except (ValueError, OSError) as error:
        raise ConfigException(f"config file {str(path)!r}: {error}") from error
    if content is None:  # of an empty YAML file
        return Config()
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigException(
            f"config file {str(path)!r} holds a {type(content).__name__}; it must hold names with values, "
            "such as gradient_accumulation and 2"
        )
    return Config(content)


def _line_of(error: Exception, filename: str) -> str:
    """Return " at line 3" if an error comes from a line of a file, or from what that line has called."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == filename]
    if isinstance(error, SyntaxError) and error.filename == filename:
        lines.append(error.lineno)
    return f" at line {lines[-1]}" if lines else ""


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
