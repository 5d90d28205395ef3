"""Serving config: the config file of a service as one frozen value with the documented names.

The file is Python (or YAML or JSON): `model_class = opt_125M`, `checkpoint = "..."`, `tp_init_size = 2`. One
error lists all its mistakes, before a process starts.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from colossalai.context import Config, ConfigException, nearest
from colossalai.inference._service import Service
from colossalai.inference.models import BUILT_IN, ModelClass, ResolvedModel, resolve_model
from colossalai.logging import get_dist_logger

LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_PORTS = (0, 65535)


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Config of a service: the model, the ranks and the server.

    Attributes:
        model_class: The model: a function of `colossalai.inference.models`, its name, a user's function that
            returns a config or a model of transformers, or a `save_pretrained` folder.
        model_type: "gpt" for any causal language model, or the `model_type` of the model's config, which is
            checked.
        host: Address of the ranks' rendezvous.
        port: Port of the ranks' rendezvous; 0 for any free one.
        half: Whether parameters have 16 bits: bfloat16 if that is the dtype in the model's config, else
            float16.
            False: float32. Default: the dtype in the model's config.
        checkpoint: The values: a folder or file of ours, of Hugging Face, or metaseq's `restored.pt`.
            Default: the folder `model_class`.
        backend: Communication backend of the ranks, as for `colossalai.launch`.
        tp_init_size: Number of tensor parallel ranks.
        pp_init_size: Number of pipeline stages.
        engine_server: Function that is called with this config and returns the service. Default: the
            package's.
        tokenizer_path: Folder of the tokenizer. Default: that of `model_class`, else of `checkpoint`.
        server_host: Address of the HTTP server.
        server_port: Port of the HTTP server; 0 for any free one.
        log_level: Lowest level of the server's log: one of `LOG_LEVELS`.
        allow_cors: Whether to accept requests from pages of other origins.
        executor_max_batch_size: Maximum number of concurrent requests.
        executor_max_queue_size: Maximum number of queued requests; 0 for no limit.
        cache_size: Capacity of the answer cache in requests; 0 to disable it.
        cache_list_size: Maximum number of cached answers of one request.
        fixed_cache_keys: Requests whose answers are pinned in the cache, as (prompt, max_tokens).
        timeout_keep_alive: Seconds until an idle connection is closed.

    Raises:
        ConfigException: A field has a wrong type or is out of range; the message lists all such fields.
    """

    model_class: ModelClass
    model_type: str = "gpt"
    host: str = "127.0.0.1"
    port: int = 0
    half: bool | None = None
    checkpoint: str | Path | None = None
    backend: str = "auto"
    tp_init_size: int = 1
    pp_init_size: int = 1
    engine_server: Callable[["ServingConfig"], Service] | None = None
    tokenizer_path: str | Path | None = None
    server_host: str = "127.0.0.1"
    server_port: int = 8020
    log_level: str = "info"
    allow_cors: bool = False
    executor_max_batch_size: int = 16
    executor_max_queue_size: int = 0
    cache_size: int = 0
    cache_list_size: int = 1
    fixed_cache_keys: tuple[tuple[str, int], ...] = ()
    timeout_keep_alive: float = 5

    def __post_init__(self) -> None:
        wrong = [text for field in dataclasses.fields(self) if (text := self._misfit(field.name))]
        _refuse(wrong)
        object.__setattr__(self, "fixed_cache_keys", tuple(map(tuple, self.fixed_cache_keys)))
        if self.fixed_cache_keys and not self.cache_size:
            get_dist_logger().warning("fixed_cache_keys have no effect: cache_size is 0", ranks=[0])

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a config file.

        Raises:
            ConfigException: `path` cannot be read or run, or has an invalid key or value.
        """
        try:
            return cls.from_config(Config.from_file(path))
        except ConfigException as error:
            name = repr(str(path))
            raise ConfigException(str(error) if name in str(error) else f"{name}: {error}") from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the config from the items of a mapping.

        Raises:
            ConfigException: `config` lacks `model_class`, or has an invalid key or value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        _refuse([*_unknown(config, known), *([] if "model_class" in config else [_MISSING_MODEL])])
        return cls(**config)

    def resolve(self) -> ResolvedModel:
        """Return the model to serve, without memory.

        Raises:
            ConfigException: `model_class` is not a model, is of another `model_type`, or has no values
                without a `checkpoint`.
        """
        try:
            model = resolve_model(self.model_class)
        except ValueError as error:
            raise ConfigException(str(error)) from error
        allowed = ("gpt", model.config.model_type)
        if self.model_type not in allowed:
            raise ConfigException(
                f"model_type is {self.model_type!r}, and {model.name} is a {allowed[1]!r}: leave it out, or "
                f"write one of {', '.join(map(repr, allowed))}"
            )
        if self.checkpoint is None and model.folder is None:
            raise ConfigException(
                f"model_class {model.name} has no values of its own: name the file or folder that has them "
                "as `checkpoint`"
            )
        return model

    def dtype_of(self, model: ResolvedModel) -> torch.dtype:
        """Return the dtype of a served model."""
        published = model.config.dtype or torch.float32
        assert isinstance(published, torch.dtype), "transformers reads its name"
        if self.half is None:
            return published
        if not self.half:
            return torch.float32
        return torch.bfloat16 if published == torch.bfloat16 else torch.float16

    def _misfit(self, name: str) -> str:
        """Return the error message of a field, "" for a valid one."""
        value, (is_fit, allowed) = getattr(self, name), _ALLOWED[name]
        return "" if is_fit(value) else f"{name} is {value!r:.80}; it must be {allowed}"


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ConfigException("; ".join(wrong))


_MISSING_MODEL = (
    f"model_class is missing: name a function of colossalai.inference.models ({', '.join(BUILT_IN)}), or a "
    "folder of save_pretrained"
)


def _unknown(config: Mapping[str, Any], known: list[str]) -> Iterator[str]:
    for key in config:
        if key not in known:
            near = nearest(key, known, cutoff=0.0)
            yield (
                f"{key!r} is no key of a service; the nearest is {near!r} (names of your own begin with an "
                "underscore)"
            )


_Allowed = tuple[Callable[[Any], bool], str]


def _whole(low: int, high: float = math.inf) -> _Allowed:
    span = f"from {low} to {high}" if high < math.inf else f"from {low}"
    return lambda value: type(value) is int and low <= value <= high, f"a whole number {span}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_path(value: Any) -> bool:
    return value is None or isinstance(value, Path) or _is_text(value)


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _are_keys(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_key, value))


def _is_key(value: Any) -> bool:
    has_two = isinstance(value, list | tuple) and len(value) == 2
    return has_two and isinstance(value[0], str) and type(value[1]) is int and value[1] > 0


_TEXT: _Allowed = (_is_text, "a text that is not empty")
_PATH: _Allowed = (_is_path, "a path, or None")
_FLAG: _Allowed = (lambda value: isinstance(value, bool), "True or False")

_ALLOWED: Mapping[str, _Allowed] = {
    "model_class": (
        lambda value: callable(value) or (value is not None and _is_path(value)),
        f"a function of colossalai.inference.models ({', '.join(BUILT_IN)}), its name, or a folder of "
        "save_pretrained",
    ),
    "model_type": _TEXT,
    "host": _TEXT,
    "port": _whole(*_PORTS),
    "half": (lambda value: value is None or isinstance(value, bool), "True, False or None"),
    "checkpoint": _PATH,
    "backend": _TEXT,
    "tp_init_size": _whole(1),
    "pp_init_size": _whole(1),
    "engine_server": (
        lambda value: value is None or callable(value),
        "a function of a ServingConfig, or None",
    ),
    "tokenizer_path": _PATH,
    "server_host": _TEXT,
    "server_port": _whole(*_PORTS),
    "log_level": (lambda value: value in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}"),
    "allow_cors": _FLAG,
    "executor_max_batch_size": _whole(1),
    "executor_max_queue_size": _whole(0),
    "cache_size": _whole(0),
    "cache_list_size": _whole(1),
    "fixed_cache_keys": (_are_keys, "pairs of a prompt and a number of tokens, as [('Hello', 64)]"),
    "timeout_keep_alive": (_is_seconds, "a number of seconds, 0 or more"),
}
