"""Config files in YAML and JSON, and the values of overrides on a command line.

What a config says must not depend on how it is written, so the readers leave out what would be a surprise:
a key that stands twice is an error in both, and 1e-3, which YAML 1.1 takes for a word, is a number.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_WORDS = {"null": None, "true": True, "false": False}
_OPENING = ("[", "{", "(", '"', "'")


def read_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        ValueError: It is no JSON, or an object has a key twice.
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
            return super().construct_mapping(node, deep)

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
        ValueError: It is empty, or begins like a literal and is none.
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
        ValueError: A key stands twice, or cannot be one.
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
