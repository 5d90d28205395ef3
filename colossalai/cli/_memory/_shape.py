"""Shape of a model and its parameters, counted on the meta device without memory."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.model_zoo import TransformerConfig
from colossalai.model_zoo.bert import Bert, BertConfig
from colossalai.model_zoo.bert import _sizes as bert
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.gpt import _sizes as gpt
from colossalai.model_zoo.vit import ViT, ViTConfig
from colossalai.model_zoo.vit import _sizes as vit
from colossalai.nn.layer import VOCAB_PARALLEL_LIMIT
from colossalai.runtime import find_blocks

_MODELS: Mapping[str, tuple[type[nn.Module], TransformerConfig]] = {
    "gpt2-small": (GPT, gpt.GPT2_SMALL),
    "gpt2-medium": (GPT, gpt.GPT2_MEDIUM),
    "gpt2-large": (GPT, gpt.GPT2_LARGE),
    "gpt2-xl": (GPT, gpt.GPT2_XL),
    "gpt3": (GPT, gpt.GPT3),
    "bert-base": (Bert, bert.BERT_BASE),
    "bert-large": (Bert, bert.BERT_LARGE),
    "vit-lite": (ViT, vit.VIT_LITE),
    "vit-small": (ViT, vit.VIT_SMALL),
    "vit-base": (ViT, vit.VIT_BASE),
    "vit-large": (ViT, vit.VIT_LARGE),
    "vit-huge": (ViT, vit.VIT_HUGE),
}
MODEL_NAMES = tuple(_MODELS)
"""Names of the known models."""


@dataclass(frozen=True)
class ParamCount:
    """Numbers of parameters.

    Attributes:
        cut: Number of parameters that tensor parallelism shards.
        whole: Number of the other parameters.
        matrices: Number of parameters in tensors of two dimensions and more, sharded or not.
    """

    cut: int = 0
    whole: int = 0
    matrices: int = 0

    def __add__(self, other: "ParamCount") -> "ParamCount":
        return ParamCount(self.cut + other.cut, self.whole + other.whole, self.matrices + other.matrices)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Properties of a model that determine its memory.

    Attributes:
        name: Name of the model.
        hidden: Width of the residual stream.
        heads: Number of attention heads.
        inner: Width of the feed-forward layer.
        max_length: Longest sequence.
        has_fixed_length: Whether all sequences have this length (for images).
        num_outputs: Size of the vocabulary, or number of classes.
        has_dropout: Whether there is dropout in the blocks.
        has_attention_dropout: Whether there is dropout on attention weights.
        has_embedding_dropout: Whether there is dropout after the embedding.
        blocks: Parameters of each block.
        first: Parameters before the blocks.
        last: Parameters after the blocks.
        tied: Parameters before the blocks that are used again after them.
    """

    name: str
    hidden: int
    heads: int
    inner: int
    max_length: int
    has_fixed_length: bool
    num_outputs: int
    has_dropout: bool
    has_attention_dropout: bool
    has_embedding_dropout: bool
    blocks: tuple[ParamCount, ...]
    first: ParamCount
    last: ParamCount
    tied: ParamCount

    @property
    def num_params(self) -> int:
        """Number of parameters of the model."""
        total = sum(self.blocks, self.first + self.last)
        return total.cut + total.whole


def shape_of(model: str) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: One of `MODEL_NAMES`, or the path of a `config.json` of Hugging Face transformers.

    Raises:
        ValueError: `model` is neither a known name nor a file, or the file does not describe a transformer
            whose shape can be read.
    """
    name = model.lower().replace("_", "-")
    if name in _MODELS:
        kind, config = _MODELS[name]
        return _shape_of_own(name, kind, config)
    if not model.endswith(".json"):
        raise ValueError(
            f"there is no model {model!r}: choose one of {', '.join(MODEL_NAMES)}, or give the path of a "
            "config.json of Hugging Face transformers"
        )
    path = Path(model)
    if not path.is_file():
        raise ValueError(f"there is no file {model!r}")
    return _shape_of_theirs(path)


def build_model(model: str, *, num_blocks: int, attention: str) -> nn.Module:
    """Build a model for training with a number of blocks.

    Args:
        model: See `shape_of`.
        num_blocks: Number of blocks.
        attention: "sdpa" or "eager".

    Raises:
        ValueError: `model` is neither a known name nor the config of a model that can be built.
    """
    name = model.lower().replace("_", "-")
    if name in _MODELS:
        kind, config = _MODELS[name]
        # On a CPU only dropout on attention weights disables the fused attention.
        rate = 0.0 if attention == "sdpa" else config.attention_dropout or 0.1
        return kind(replace(config, num_layers=num_blocks, attention_dropout=rate))
    theirs, build = read_config(Path(model))
    theirs.num_hidden_layers = num_blocks
    theirs._attn_implementation = attention
    return build(theirs)


def _shape_of_own(name: str, kind: Any, config: TransformerConfig) -> ModelShape:
    with torch.device("meta"):
        module = kind(config)
    length, num_outputs = _ends_of(config)
    return ModelShape(
        name=name,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        inner=config.block.inner_size,
        max_length=length,
        has_fixed_length=isinstance(config, ViTConfig),
        num_outputs=num_outputs,
        has_dropout=config.dropout > 0,
        has_attention_dropout=config.attention_dropout > 0,
        has_embedding_dropout=config.embedding_dropout > 0,
        **count_parameters(module),
    )


def _ends_of(config: TransformerConfig) -> tuple[int, int]:
    """Return the length of the longest sequence, and the size of the vocabulary or the number of classes."""
    if isinstance(config, ViTConfig):
        return (config.image_size // config.patch_size) ** 2 + 1, config.num_classes
    assert isinstance(config, GPTConfig | BertConfig)
    return config.max_position_embeddings, config.vocab_size


def read_config(path: Path) -> tuple[Any, Callable[[Any], nn.Module]]:
    """Read a config of transformers; return it and a function that builds its model.

    Raises:
        ValueError: `path` is not such a config, or transformers is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError(
            "a config.json is read with transformers, which is not installed: pip install transformers"
        ) from error
    try:
        architectures = json.loads(path.read_text()).get("architectures") or []
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is not a config.json of Hugging Face transformers: {error}"
        ) from error
    kind = getattr(transformers, architectures[0], None) if architectures else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        kind = None
    return config, transformers.AutoModel.from_config if kind is None else kind


def _shape_of_theirs(path: Path) -> ModelShape:
    """Read a config of transformers and build its model on the meta device."""
    config, build = read_config(path)
    with torch.device("meta"):
        module = build(config)
    is_image = getattr(config, "image_size", None) is not None
    hidden = _read(config, path, "hidden_size")
    return ModelShape(
        name=type(module).__name__,
        hidden=hidden,
        heads=_read(config, path, "num_attention_heads"),
        inner=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden,
        max_length=(config.image_size // config.patch_size) ** 2 + 1
        if is_image
        else _read(config, path, "max_position_embeddings"),
        has_fixed_length=is_image,
        num_outputs=config.num_labels if is_image else _read(config, path, "vocab_size"),
        has_dropout=_rate(config, "hidden_dropout_prob", "resid_pdrop", "dropout") > 0,
        has_attention_dropout=_rate(config, "attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
        > 0,
        has_embedding_dropout=_rate(config, "hidden_dropout_prob", "embd_pdrop", "dropout") > 0,
        **count_parameters(module),
    )


def _read(config: Any, path: Path, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int):
        raise ValueError(f"{str(path)!r} has no {name}: it is no transformer whose memory can be reckoned")
    return value


def _rate(config: Any, *names: str) -> float:
    return next((value for name in names if isinstance(value := getattr(config, name, None), float)), 0.0)


def count_parameters(module: nn.Module) -> dict[str, Any]:
    """Count the parameters of each block, before and after the blocks, and the tied ones.

    Raises:
        ValueError: The model has no stack of blocks.
    """
    blocks = find_blocks(module)
    if not blocks:
        raise ValueError(f"{type(module).__name__} has no stack of blocks: its memory cannot be reckoned")
    place_of = {param: place for place, param in enumerate(module.parameters())}
    in_blocks = {param for block in blocks for param in block.parameters()}
    start = min(place_of[param] for param in in_blocks)
    outside = [param for param in place_of if param not in in_blocks]
    uses = [param for _, param in module.named_parameters(remove_duplicate=False)]
    return {
        "blocks": tuple(_count(list(block.parameters()), is_block=True) for block in blocks),
        "first": _count([param for param in outside if place_of[param] < start]),
        "last": _count([param for param in outside if place_of[param] >= start]),
        "tied": _count([param for param in outside if sum(other is param for other in uses) > 1]),
    }


def _count(params: list[nn.Parameter], *, is_block: bool = False) -> ParamCount:
    """Count parameters; tensor parallelism shards the matrices of blocks and large vocabularies."""
    matrices = [param for param in params if param.dim() >= 2]
    cut = [
        param for param in matrices if is_block or (param.dim() == 2 and len(param) > VOCAB_PARALLEL_LIMIT)
    ]
    num_cut = sum(param.numel() for param in cut)
    num_params = sum(param.numel() for param in params)
    return ParamCount(num_cut, num_params - num_cut, sum(param.numel() for param in matrices))
