"""Configuration: a dict with attribute access at every depth, from a file or from a dict.

Values can be set on the command line, `colossalai run --set fp16.mode=bf16`. Such overrides reach every rank
in one environment variable, COLOSSALAI_CONFIG_SET, as words in shell syntax:
COLOSSALAI_CONFIG_SET="fp16.mode=bf16 clip_grad_norm=1.0". So they also work with torchrun, srun and mpirun,
and on several hosts. `launch` applies them to the config that it is given.
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
    """Return the known name that is most similar to `name`, or None."""
    matches = difflib.get_close_matches(str(name), [*known], n=1, cutoff=cutoff)
    return matches[0] if matches else None


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        ValueError: `path` is not valid JSON, is nested too deeply, or has an object with a key twice.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_dict_without_duplicates)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_yaml(path: Path) -> Any:
    """Return the value in a YAML file of plain values; no code in it is run.

    Raises:
        ValueError: PyYAML is not installed, `path` is not valid YAML, or a mapping has a key twice.
    """
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "a YAML file needs the PyYAML package, which is not installed; run: pip install colossalai[yaml]"
        ) from error

    class Loader(yaml.SafeLoader):
        """Loader of plain values that refuses duplicate keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            _dict_without_duplicates([(self.construct_object(key, deep=True), None) for key in own])
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "it" if mark is None else f"line {mark.line + 1}"
        raise ValueError(f"{where} is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


READERS: Mapping[str, Callable[[Path], Any]] = {".json": read_json, ".yaml": read_yaml, ".yml": read_yaml}
"""Readers of config files, by file extension."""


def read_literal(text: str) -> Any:
    """Return the value of a word of a command line.

    A Python or JSON literal is that value (`1e-3`, `None`, `null`, `true`, `[1, 2]`, `{"size": 2}`); any
    other word is a string, so that `bf16` needs no quotes.

    Raises:
        ValueError: `text` is empty, or begins like a literal and is not one.
    """
    text = text.strip()
    if not text:
        raise ValueError("no value follows the '='; an empty string is written ''")
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


def _dict_without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a dict.

    Raises:
        ValueError: `pairs` have a key twice, or a key that is not hashable.
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        try:
            is_twin = key in found
        except TypeError as error:
            raise ValueError(f"{key!r} cannot be a key") from error
        if is_twin:
            raise ValueError(f"the key {key!r} occurs twice")
        found[key] = value
    return found


class ConfigException(ValueError):
    """A configuration that cannot work; the message names the mistake and a correction."""


class Config(dict[str, Any]):
    """A dict whose items are also attributes, at every depth: `config.parallel.tensor.size`.

    It holds the user's own hyper-parameters and feature keys (`parallel`, `fp16`, ...). An item
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
        """Return the item, after setting it to `default` if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> "Config":
        """Return a shallow copy, as `dict.copy` does."""
        return Config(self)

    @staticmethod
    def from_file(filename: str | Path) -> "Config":
        """Read a YAML or JSON file, or run a Python file and take its public names as the items.

        A name that a Python file assigns or defines is an item, functions and classes too
        (`model_class = opt_125M`). Imported values are items; imported modules, functions and classes are
        not. The file's folder is on the import path while it runs.

        Raises:
            ConfigException: `filename` does not exist, its name does not end with .py, .yaml, .yml or .json,
                or it cannot be read or run.
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
    """Return the config from a path or a dict; an empty one from None."""
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
    if content is None:  # an empty YAML file
        return Config()
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigException(
            f"config file {str(path)!r} holds a {type(content).__name__}; it must hold names with values, "
            "such as gradient_accumulation and 2"
        )
    return Config(content)


def _line_of(error: Exception, filename: str) -> str:
    """Return " at line 3" if an error was raised by a line of a file, or by a call in that line."""
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == filename]
    if isinstance(error, SyntaxError) and error.filename == filename:
        lines.append(error.lineno)
    return f" at line {lines[-1]}" if lines else ""


def _assigned_names(path: Path) -> set[str]:
    """Return the names that the source of a file assigns or defines at its top level."""
    top = symtable.symtable(decode_source(path.read_bytes()), str(path), "exec")
    return {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}


def _is_content(value: Any, module: str, *, is_assigned: bool) -> bool:
    """Return whether a value is a config item: not a module, and not an imported function or class."""
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
    """A value, and the path of keys to it."""

    path: tuple[str, ...]
    value: Any

    @property
    def name(self) -> str:
        """The keys, joined with dots."""
        return ".".join(self.path)


def parse_override(word: str) -> Override:
    """Return the override that "KEY.KEY=VALUE" defines.

    Raises:
        ConfigException: `word` is not of the form KEY.KEY=VALUE, or its value cannot be read.
    """
    name, sign, text = word.partition("=")
    path = tuple(name.strip().split("."))
    if not sign or not all(key.isidentifier() for key in path):
        raise ConfigException(f"--set {word!r} is not an override: {_HOW_TO_OVERRIDE}")
    try:
        return Override(path, read_literal(text))
    except ValueError as error:
        raise ConfigException(f"--set {word!r}: {error}") from error


def join_overrides(words: Sequence[str], *, environment: Mapping[str, str] = os.environ) -> str:
    """Return the content of the variable: its present words, and then `words`, of which the last one wins.

    Raises:
        ConfigException: `words` has a word that is not an override.
    """
    for word in words:
        parse_override(word)
    return " ".join(filter(None, [environment.get(OVERRIDES_VARIABLE, ""), shlex.join(words)]))


def with_overrides(
    config: Config, known: Sequence[str], *, environment: Mapping[str, str] = os.environ
) -> Config:
    """Return a config with the overrides of the environment; the given one is not changed.

    Args:
        config: The config.
        known: Top-level keys that can be set even if the config lacks them: the features.
        environment: The environment with the variable.

    Raises:
        ConfigException: An override cannot be read, or names a key that the config lacks.
    """
    text = environment.get(OVERRIDES_VARIABLE, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigException(
            f"{OVERRIDES_VARIABLE} is {text!r}, which is not a list of words: {error}"
        ) from error
    for word in words:
        override = parse_override(word)
        config = _replace_value(
            config, override, override.path, open_ended=override.path[0] in known, known=known
        )
    return config


def _replace_value(
    config: Mapping[str, Any],
    override: Override,
    path: Sequence[str],
    *,
    open_ended: bool,
    known: Sequence[str],
) -> Config:
    """Return a config in which the last key of `path` has the value.

    Below a feature any key can be set: the feature's own check refuses unknown ones.
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
        new = _replace_value(inner or {}, override, rest, open_ended=open_ended, known=known)
    return Config({**config, key: new})


def _unknown(override: Override, path: Sequence[str], there: Sequence[Any]) -> str:
    match = nearest(path[0], there)
    suggestion = f"did you mean {match!r}? " if match is not None else ""
    return (
        f"--set {override.name}: the config has no {path[0]!r}, and it is not a feature; {suggestion}a key "
        "of your own can be set once the config has it"
    )
