"""Overrides: values of a config that are said on the command line, `colossalai run --set fp16.mode=bf16`.

They reach every rank in one environment variable, COLOSSALAI_CONFIG_SET, which holds the words as a shell
would write them: COLOSSALAI_CONFIG_SET="fp16.mode=bf16 clip_grad_norm=1.0". So they also work with torchrun,
srun and mpirun, and on several hosts. `launch` puts them over the config that it is given.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.context._check import nearest
from colossalai.context._config import Config, ConfigException, read_literal

OVERRIDES_VARIABLE = "COLOSSALAI_CONFIG_SET"
_HOW = "write KEY=VALUE or KEY.KEY=VALUE, such as fp16.mode=bf16"


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
        raise ConfigException(f"--set {word!r} is no override: {_HOW}")
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
