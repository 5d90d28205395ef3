"""The configuration: a dict with attribute access at every depth, from a file or from a dict.

Values of it may be said on the command line, `colossalai run --set fp16.mode=bf16`. Such overrides reach
every rank in one environment variable, COLOSSALAI_CONFIG_SET, which holds the words as a shell would write
them: COLOSSALAI_CONFIG_SET="fp16.mode=bf16 clip_grad_norm=1.0". So they also work with torchrun, srun and
mpirun, and on several hosts. `launch` puts them over the config that it is given.
"""

import ast
import difflib
import inspect
import json
import os
import re
import runpy
import shlex
import symtable
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import Any

OVERRIDES_VARIABLE = "COLOSSALAI_CONFIG_SET"
_HOW_TO_OVERRIDE = "write KEY=VALUE or KEY.KEY=VALUE, such as fp16.mode=bf16"

_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_WORDS = {"null": None, "true": True, "false": False}
_OPENING = ("[", "{", "(", '"', "'")


def nearest(name: Any, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that looks most like `name`, if any does."""
    matches = difflib.get_close_matches(str(name), [*known], n=1, cutoff=cutoff)
    return matches[0] if matches else None


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        ValueError: The file is no JSON, is nested too deeply, or has an object with a key twice.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is no JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds: plain values only, nothing in it is run.

    Raises:
        ValueError: PyYAML is not installed, the file is no YAML, or a mapping has a key twice.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "a YAML file needs the PyYAML package, which is not installed; run: pip install colossalai[yaml]"
        ) from error

    class Loader(yaml.SafeLoader):
        """Plain values; a key stands once."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _without_twins([(self.construct_object(key, deep=True), None) for key in own])
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "it" if mark is None else f"line {mark.line + 1}"
        raise ValueError(f"{where} is no YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


READERS: Mapping[str, Callable[[Path], Any]] = {".json": read_json, ".yaml": read_yaml, ".yml": read_yaml}
"""What reads a config file, by the end of its name."""


def read_literal(text: str) -> Any:
    """Return the value that a word of a command line stands for.

    A Python or JSON literal is that value (`1e-3`, `None`, `null`, `true`, `[1, 2]`, `{"size": 2}`); any
    other word is a string, so that `bf16` needs no quotes.

    Raises:
        ValueError: `text` is empty, or begins like a literal and is none.
    """
    text = text.strip()
    if not text:
        raise ValueError("nothing stands behind the '='; an empty string is written ''")
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        if text.startswith(_OPENING) or re.match(r"\w+\(", text):
            raise ValueError(f"{text!r} is neither a Python nor a JSON literal") from error
        return text


def _without_twins(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a dict.

    Raises:
        ValueError: A key stands twice, or is not hashable.
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        try:
            is_twin = key in found
        except TypeError as error:
            raise ValueError(f"{key!r} cannot be a key") from error
        if is_twin:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


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

        Of a Python file, what is assigned to a name is an item, functions and classes too
        (`model_class = opt_125M`). Of what it only imports, values are, and modules, functions and classes
        are not. Its folder is on the import path while it runs.

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
        assigned = _assigned_names(path)
        return Config(
            {
                name: value
                for name, value in names.items()
                if not name.startswith("_") and _is_content(value, path.stem, is_assigned=name in assigned)
            }
        )


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


def _assigned_names(path: Path) -> set[str]:
    """Return the names that the source of a file assigns or defines at its top level, whatever the value."""
    top = symtable.symtable(decode_source(path.read_bytes()), str(path), "exec")
    return {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}


def _is_content(value: Any, module: str, *, is_assigned: bool) -> bool:
    """A config item is anything but a module, and but a function or class that is only imported."""
    if isinstance(value, ModuleType):
        return False
    is_definition = isinstance(value, type) or inspect.isroutine(value)
    return is_assigned or not is_definition or getattr(value, "__module__", None) == module


def _attribute_access(value: Any) -> Any:
    if isinstance(value, Config):
        return value
    if isinstance(value, dict):
        return Config(value)
    if type(value) in (list, tuple):
        return type(value)(_attribute_access(item) for item in value)
    return value


@dataclass(frozen=True)
class Override:
    """One value, and the keys that lead to it."""

    path: tuple[str, ...]
    value: Any

    @property
    def name(self) -> str:
        """The keys as they are written."""
        return ".".join(self.path)


def parse_override(word: str) -> Override:
    """Return what "KEY.KEY=VALUE" says.

    Raises:
        ConfigException: `word` is not of the form KEY.KEY=VALUE, or its value cannot be read.
    """
    name, sign, text = word.partition("=")
    path = tuple(name.strip().split("."))
    if not sign or not all(key.isidentifier() for key in path):
        raise ConfigException(f"--set {word!r} is no override: {_HOW_TO_OVERRIDE}")
    try:
        return Override(path, read_literal(text))
    except ValueError as error:
        raise ConfigException(f"--set {word!r}: {error}") from error


def join_overrides(words: Sequence[str], *, environment: Mapping[str, str] = os.environ) -> str:
    """Return the variable's content: what it holds already, and then `words`, of which the last one wins.

    Raises:
        ConfigException: A word is no override.
    """
    for word in words:
        parse_override(word)
    return " ".join(filter(None, [environment.get(OVERRIDES_VARIABLE, ""), shlex.join(words)]))


def with_overrides(
    config: Config, known: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> Config:
    """Return a config with the overrides of the environment in it; the one given stays as it is.

    Args:
        config: The config.
        known: Top-level keys that may be set even where the config has them not: the features.
        environment: Where the variable is.

    Raises:
        ConfigException: An override cannot be read, or names a key that the config has not.
    """
    text = environment.get(OVERRIDES_VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigException(
            f"{OVERRIDES_VARIABLE} is {text!r}, which is no list of words: {error}"
        ) from error
    for word in words:
        override = parse_override(word)
        config = _replaced(config, override, override.path, open_ended=override.path[0] in known, known=known)
    return config


def _replaced(
    config: Mapping[str, Any],
    override: Override,
    path: Sequence[str],
    *,
    open_ended: bool,
    known: Sequence[str],
) -> Config:
    """Return a config in which the last of `path` has the value.

    Below a feature any key may be set: its own check knows which there are.
    """
    key, *rest = path
    if key not in config and not open_ended:
        raise ConfigException(_unknown(override, path, [*config, *(known if path == override.path else ())]))
    new: Any = override.value
    if rest:
        inner = config.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            depth = len(override.path) - len(rest)
            above = ".".join(override.path[:depth])
            raise ConfigException(
                f"--set {override.name}: {above} is {inner!r} in the config, which has no keys: set {above} "
                "itself"
            )
        new = _replaced(inner or {}, override, rest, open_ended=open_ended, known=known)
    return Config({**config, key: new})


def _unknown(override: Override, path: Sequence[str], there: Sequence[Any]) -> str:
    match = nearest(path[0], there)
    suggestion = f"did you mean {match!r}? " if match is not None else ""
    return (
        f"--set {override.name}: the config has no {path[0]!r}, and it is no feature; {suggestion}a key of "
        "your own can be set once the config has it"
    )
