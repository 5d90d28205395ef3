"""Models to serve by name: OPT and BLOOM in their published sizes, and other values of `model_class`.

OPT: table 1 of 2205.01068; 6B is the one of 6.7 billion parameters. BLOOM: table 3 of 2211.05100.
A function here returns a config of transformers. No memory is allocated, not even by `ResolvedModel.build`,
whose parameters are lazy.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.context import nearest
from colossalai.lazy import LazyInitContext

ModelClass = Callable[..., Any] | str | Path
"""Specification of a model: a function that returns a config or a model of transformers, the name of a
function below, or a `save_pretrained` folder."""


def opt_125M(**options: Any) -> Any:
    """Return the config of OPT of 125 million parameters; `options` replace single fields."""
    return _opt(num_layers=12, num_heads=12, hidden_size=768, options=options)


def opt_6B(**options: Any) -> Any:
    """Return the config of OPT of 6.7 billion parameters; `options` replace single fields."""
    return _opt(num_layers=32, num_heads=32, hidden_size=4096, options=options)


def opt_30B(**options: Any) -> Any:
    """Return the config of OPT of 30 billion parameters; `options` replace single fields."""
    return _opt(num_layers=48, num_heads=56, hidden_size=7168, options=options)


def opt_66B(**options: Any) -> Any:
    """Return the config of OPT of 66 billion parameters; `options` replace single fields."""
    return _opt(num_layers=64, num_heads=72, hidden_size=9216, options=options)


def opt_175B(**options: Any) -> Any:
    """Return the config of OPT of 175 billion parameters; `options` replace single fields."""
    return _opt(num_layers=96, num_heads=96, hidden_size=12288, options=options)


def bloom_560M(**options: Any) -> Any:
    """Return the config of BLOOM of 560 million parameters; `options` replace single fields."""
    return _bloom(num_layers=24, num_heads=16, hidden_size=1024, dtype="float16", options=options)


def bloom_7B(**options: Any) -> Any:
    """Return the config of BLOOM of 7.1 billion parameters; `options` replace single fields."""
    return _bloom(num_layers=30, num_heads=32, hidden_size=4096, dtype="float16", options=options)


def bloom_175B(**options: Any) -> Any:
    """Return the config of BLOOM of 176 billion parameters; `options` replace single fields."""
    return _bloom(num_layers=70, num_heads=112, hidden_size=14336, dtype="bfloat16", options=options)


def _opt(*, num_layers: int, num_heads: int, hidden_size: int, options: Mapping[str, Any]) -> Any:
    sizes = {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "hidden_size": hidden_size}
    sizes |= {"ffn_dim": 4 * hidden_size, "word_embed_proj_dim": hidden_size}
    sizes |= {"vocab_size": 50272, "max_position_embeddings": 2048}
    return _transformers().OPTConfig(**{**sizes, "dtype": "float16", "dropout": 0.1, **options})


def _bloom(
    *, num_layers: int, num_heads: int, hidden_size: int, dtype: str, options: Mapping[str, Any]
) -> Any:
    sizes = {"n_layer": num_layers, "n_head": num_heads, "hidden_size": hidden_size, "vocab_size": 250880}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    return _transformers().BloomConfig(**{**sizes, **tokens, "dtype": dtype, **options})


BUILT_IN: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (opt_125M, opt_6B, opt_30B, opt_66B, opt_175B, bloom_560M, bloom_7B, bloom_175B)
}
"""The functions of this module, by name."""


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """A model to serve, before it has memory.

    Attributes:
        name: The name of the function or the folder.
        config: The config of transformers.
        folder: Folder of the values and the tokenizer, for a `save_pretrained` folder.
        make: Returns the model; called in contexts that allocate no memory.
    """

    name: str
    config: Any
    folder: Path | None
    make: Callable[[torch.dtype | None], nn.Module]

    def build(self, *, dtype: torch.dtype | None = None, initialize: bool = False) -> nn.Module:
        """Build the model lazily: `colossalai.lazy.materialize` or `load_values` allocates its memory.

        Args:
            dtype: Dtype of the parameters. Default: the config's.
            initialize: Whether materialized parameters get the random values for training; otherwise values
                to be loaded stay uninitialized, and no random number is drawn.
        """
        with ExitStack() as contexts:
            contexts.enter_context(LazyInitContext())
            if not initialize:
                contexts.enter_context(_no_init_weights())
            model = self.make(dtype)
            tie_weights = getattr(model, "tie_weights", None)
            if tie_weights is not None:  # skipped by the contexts above, together with the initialization
                tie_weights()
        return model.eval()

    def build_shapes(self, *, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model on the meta device, to inspect its sizes; it cannot be materialized.

        Takes a tenth of a second for 175 billion parameters; `build` also records the initialization of each.

        Args:
            dtype: Dtype of the parameters. Default: the config's.
        """
        with torch.device("meta"), _no_init_weights():
            model = self.make(dtype)
            tie_weights = getattr(model, "tie_weights", None)
            if tie_weights is not None:
                tie_weights()
        return model.eval()


def resolve_model(model_class: ModelClass) -> ResolvedModel:
    """Resolve a `model_class`.

    Args:
        model_class: A function that returns a config or a model of transformers (called without arguments,
            in a context that allocates no memory), the name of a function of this module, or a folder with
            the config.json of a model of transformers.

    Raises:
        ValueError: `model_class` is none of these, or `transformers` is not installed.
    """
    if isinstance(model_class, str) and model_class in BUILT_IN:
        return _of_function(BUILT_IN[model_class])
    if isinstance(model_class, str | Path):
        return _of_folder(Path(model_class))
    if isinstance(model_class, type) and issubclass(model_class, nn.Module):
        raise ValueError(
            f"model_class is the class {model_class.__name__}, which has no sizes: give a function that "
            "returns its config or a model of it, or a folder of save_pretrained"
        )
    if callable(model_class):
        return _of_function(model_class)
    raise ValueError(
        f"model_class is a {type(model_class).__name__}, {model_class!r:.80}: give a function of "
        f"colossalai.inference.models or its name ({', '.join(BUILT_IN)}), or a folder of save_pretrained"
    )


def _of_function(function: Callable[..., Any]) -> ResolvedModel:
    name = getattr(function, "__name__", type(function).__name__)
    with LazyInitContext(), _no_init_weights():
        made = function()
    if isinstance(made, nn.Module):
        config = getattr(made, "config", None)
        if not isinstance(config, _transformers().PreTrainedConfig):
            raise ValueError(
                f"model_class {name} returns a {type(made).__name__} without a config of transformers: "
                "return a model of transformers, or its config"
            )
        return ResolvedModel(name=name, config=config, folder=None, make=_OfFunction(function))
    if not isinstance(made, _transformers().PreTrainedConfig):
        raise ValueError(
            f"model_class {name} returns a {type(made).__name__}; it must return a config of transformers or "
            "a model of it"
        )
    return ResolvedModel(name=name, config=made, folder=None, make=_OfConfig(made))


def base_of_adapters(folder: str | Path) -> str | None:
    """Return the folder of the base model of peft adapters; None for any other folder.

    Raises:
        ValueError: `folder` has adapters whose base model is not a local folder.
    """
    file = Path(folder, "adapter_config.json")
    if not file.is_file() or Path(folder, "config.json").is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{file} is not a config of adapters: {error}") from error
    if not isinstance(base, str) or not Path(base).is_dir():
        raise ValueError(
            f"{str(folder)!r} has adapters of the model {base!r} (base_model_name_or_path in {file.name}), "
            f"which is not a folder in {Path.cwd()}: give the model, and this folder as an adapter of it "
            f"(--lora name={folder}), or write where the model is into that file"
        )
    return base


def _of_folder(folder: Path) -> ResolvedModel:
    if not folder.is_dir():
        close = nearest(str(folder), BUILT_IN)
        suggestion = f"did you mean {close!r}? " if close else ""
        what = "is a file" if folder.is_file() else f"is no folder here (looked in {Path.cwd()})"
        raise ValueError(
            f"model_class {str(folder)!r} {what}; {suggestion}Give a folder of save_pretrained, or one of "
            f"{', '.join(BUILT_IN)}; files of weights alone are named by `checkpoint`"
        )
    if base_of_adapters(folder) is not None:
        raise ValueError(
            f"{str(folder)!r} has adapters, and not a model: give the model that they were trained on, and "
            f"this folder as an adapter of it (adapters={{'name': {str(folder)!r}}})"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model_class {str(folder)!r} has no config.json: give a folder of save_pretrained, or name the "
            "model by a function, and this folder as `checkpoint`"
        )
    try:
        config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / 'config.json'} is not a config of transformers: {error}") from error
    return ResolvedModel(name=folder.resolve().name, config=config, folder=folder, make=_OfConfig(config))


@dataclass(frozen=True)
class _OfConfig:
    """Builds the causal language model of a config."""

    config: Any

    def __call__(self, dtype: torch.dtype | None) -> nn.Module:
        try:
            model: nn.Module = _transformers().AutoModelForCausalLM.from_config(
                self.config, dtype=dtype or self.config.dtype
            )
        except ValueError as error:
            raise ValueError(
                f"{type(self.config).__name__} is the config of no causal language model of transformers: "
                f"{error}"
            ) from error
        return model


@dataclass(frozen=True)
class _OfFunction:
    """Builds a model by calling a function."""

    function: Callable[..., Any]

    def __call__(self, dtype: torch.dtype | None) -> nn.Module:
        model: nn.Module = self.function()
        return model if dtype is None else model.to(dtype)


def _no_init_weights() -> Any:
    """Return a context in which transformers and torch initialize no parameters."""
    _transformers()
    from transformers.initialization import no_init_weights

    return no_init_weights()


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            "models are served with transformers, which is not installed: pip install colossalai[hf]"
        ) from error
    return transformers
